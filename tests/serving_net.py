"""A run with random weights behind a real socket, and the official client; a chain that is as slow, broken or wordy as a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import openai
import torch
from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.errors import ServingError
from blocktrain.serving.chain import ChainStatus, LocalChain, StageStatus, Step
from blocktrain.serving.compute import Settings
from blocktrain.serving.decoding import OwnDraft
from blocktrain.serving.engine import Engine
from blocktrain.serving.gateway import make_server
from blocktrain.web import bind
from tests.conftest import CLEAN, PAPER, tiny_config
from tests.integration.test_decoding import made_run

TIMEOUT_S = 30.0
WINDOWED = {**PAPER, "input": "upstream", "anchor_weight": 1.0, "window": 7}  # sweeps of up to 8 bytes


@dataclass
class Script:
    """A chain that says given bytes, each by its place in the whole text, and does to its callers what a test sets."""

    says: bytes = b"abcdefghij" * 1000
    config: RunConfig = field(default_factory=lambda: tiny_config(objective=WINDOWED, model={"positions": 64}))
    prompt: int = 1  # length of the prompt that the text comes after
    step_s: float = 0.0
    error: Exception | None = None
    error_at: int = 0  # step of a text at which it is raised
    missing: tuple[int, ...] = ()
    allow_missing: bool = False
    stalled_s: float = 0.0
    opened: int = 0
    closed: int = 0
    steps: int = 0

    def status(self) -> ChainStatus:
        stages = [StageStatus("10.0.0.7:7801", "a", (0, 2), "up"), StageStatus("10.0.0.8:7801", "b", (2, 3), "down", "connection refused")]
        stages = stages if self.missing else [replace(stage, state="up", reason="") for stage in stages]
        return ChainStatus(stages, list(self.missing), self.stalled_s)

    async def open(self, settings: Settings, enter: int = 0) -> ScriptText:
        if self.missing and (not self.allow_missing or len(self.missing) == self.config.model.blocks):
            raise ServingError(f"no stage holds block {self.missing[0]} now (10.0.0.8:7801: connection refused)")
        self.opened += 1
        return ScriptText(self)

    async def close(self) -> None: ...


class ScriptText:
    def __init__(self, script: Script) -> None:
        self.script, self.steps, self.open = script, 0, True
        self.missing = script.missing

    async def step(self, step: Step) -> Tensor:
        script = self.script
        script.steps += 1
        self.steps += 1
        await asyncio.sleep(script.step_s)
        if script.error and self.steps > script.error_at:
            raise script.error
        first = step.offset + step.keep + step.want + 1 - script.prompt  # of the bytes to say
        logits = torch.zeros(len(step.ids) - step.want, 256)
        for row in range(len(logits)):
            logits[row, script.says[(first + row) % len(script.says)]] = 20.0
        return logits

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.script.closed += self.open
        self.open = False


def local_engine(objective: dict[str, Any] = CLEAN, **options: Any) -> Engine:
    """All blocks of a tiny run with random weights, and its own draft."""
    run = made_run(objective, model={"positions": 64})
    return Engine(LocalChain(run), "tiny", OwnDraft(run), **options)


@dataclass
class Served:
    engine: Engine
    port: int
    key: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=TIMEOUT_S, **options)

    def http(self, **headers: str) -> httpx2.Client:
        headers = ({"authorization": f"Bearer {self.key}"} if self.key else {}) | headers
        return httpx2.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def post(self, body: Any, path: str = "/v1/completions") -> httpx2.Response:
        with self.http() as http:
            return http.post(path, json=body)


@contextlib.contextmanager
def serve(engine: Engine, key: str = "", *, buffer: int = 0) -> Iterator[Served]:
    """An engine over HTTP, in a thread, until the block ends. `buffer`: bytes that the system holds for a slow reader."""
    bound = bind("127.0.0.1", 0)
    if buffer:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    engine.cut_s = 0.2
    server = make_server(engine, [key] if key else [], timeout_graceful_shutdown=1)
    thread = threading.Thread(target=asyncio.run, args=(server.serve([bound]),), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Served(engine, bound.getsockname()[1], key)
    finally:
        server.should_exit = True
        thread.join(10)
        bound.close()


def wait_until(true: Any, timeout_s: float = 10.0) -> float:
    """Seconds until it is; fails after `timeout_s`."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < timeout_s, "it has not come to be"
        time.sleep(0.005)
    return time.monotonic() - began
