"""Hostile requests by the ten thousand at the API of a real process: no 5xx, no growth, no stream left, and an honest client served meanwhile.

BLOCKTRAIN_HOSTILE says how many.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.abuse.bodies import any_bytes, mutated, truncated
from tests.abuse.test_hostile_bytes import read, send

COUNT = int(os.environ.get("BLOCKTRAIN_HOSTILE", "6000"))
ROOT = Path(__file__).parents[2]
GROWTH = 30e6
HONEST = {"model": "tiny", "prompt": "once upon", "max_tokens": 5, "temperature": 0, "seed": 1}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": HONEST
    | {"top_p": 0.5, "n": 1, "stop": ["x"], "logprobs": 1, "stream": True, "stream_options": {"include_usage": True}, "mode": "exact"},
    "/v1/chat/completions": {
        "model": "blocktrain",
        "messages": [{"role": "user", "content": "x"}],
        "max_completion_tokens": 2,
        "logprobs": True,
        "top_logprobs": 20,
        "mode": "speculative",
        "draft_bytes": 2,
        "wire": "int8",
    },
}
JUNK = [None, True, -1, 0, 1.5, 1e308, 10**400, "", "x" * 3000, "\x00", "\ud800", [], {}, [[[]]], {"a": {"b": []}}, "../../etc", "NaN", 1 << 63]
JUNK += [float("nan"), float("inf"), [256] * 300, [0.5], ["a", "b"], 5e-324, "😀" * 100, [None], "\r\n", {"role": "user"}, (1 << 15) + 1]
NAMES = ["__proto__", "logit_bias", "tools", "response_format", "x" * 300, "\ud800", "n", "\r\nx: y", "seed", "window", "suffix"]


@dataclass
class Target:
    """The process under attack, and what an honest client sees of it."""

    process: subprocess.Popen[str]
    port: int
    over: threading.Event = field(default_factory=threading.Event)
    texts: collections.Counter[str] = field(default_factory=collections.Counter)
    slowest_s: float = 0.0

    def rss(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def ask_honestly(self) -> None:
        """Again and again; whoever finds no place may ask again."""
        with self.http() as http:
            while not self.over.wait(0.05):
                began = time.monotonic()
                while (answer := http.post("/v1/completions", json=HONEST)).status_code == 429:
                    time.sleep(0.02)
                self.texts[answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text] += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "tests.abuse.api_target"], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        yield Target(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


# --- Bodies ---


def wrong_types(dice: random.Random, message: dict[str, Any]) -> bytes:
    message = dict(message)
    for name in dice.sample(list(message), dice.randint(1, 3)):
        message[name] = dice.choice(JUNK)
    if dice.random() < 0.3:
        message[dice.choice(NAMES)] = dice.choice(JUNK)
    for name in ("max_tokens", "max_completion_tokens"):  # null is what an honest client may send, and a long text what it may want
        if name in message and message[name] is None:
            message[name] = 2
    return json.dumps(message).encode()


def without_some(dice: random.Random, message: dict[str, Any]) -> bytes:
    message = dict(message)
    for name in dice.sample([name for name in message if not name.startswith("max")], dice.randint(1, 3)):
        del message[name]
    return json.dumps(message).encode()


def deep(dice: random.Random, _: dict[str, Any]) -> bytes:
    return dice.choice([b"[", b'{"model":', b'{"messages":[']) * dice.choice([50, 5000])


def many(dice: random.Random, message: dict[str, Any]) -> bytes:
    name, value = dice.choice(
        [("logit_bias", {str(i): 1 for i in range(2000)}), ("stop", ["x"] * 2000), ("prompt", [-1] * 5000), ("messages", [[]] * 2000)]
    )
    return json.dumps(message | {name: value}).encode()


BODIES: list[Callable[[random.Random, dict[str, Any]], bytes]] = [
    any_bytes,
    truncated,
    mutated,
    mutated,
    wrong_types,
    wrong_types,
    wrong_types,
    without_some,
    deep,
    many,
]
WEIGHTS = [2, 2, 4, 4, 4, 4, 4, 1, 1, 1]


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


def make_request(dice: random.Random) -> bytes:
    """One whole request that gets an answer."""
    path = dice.choice(list(GOOD))
    if dice.random() < 0.1:
        odd = [
            "/v1/models/" + "%2e" * 50,
            "/static/../chat.js",
            "/v1/models/%ff%00",
            "/v1/cluster?x=" + "y" * 500,
            "/v1/x",
            "/health",
            "//",
            "/v1/completions",
        ]
        return request(dice.choice(["GET", "PUT", "DELETE", "OPTIONS"]), dice.choice(odd), b"{}")
    kind = dice.choice(["application/json"] * 9 + ["text/plain", "application/json; charset=utf-16", "x" * 3000, "application/x-www-form-urlencoded"])
    body = dice.choices(BODIES, WEIGHTS)[0](dice, GOOD[path])
    return request("POST", path, body, f"content-type: {kind}", *(["authorization: Bearer x"] if dice.random() < 0.2 else []))


def make_ending(dice: random.Random) -> bytes:
    """Bytes after which the connection is broken off."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    good = json.dumps(HONEST | {"stream": True, "max_tokens": dice.choice([3, 3000])}).encode()
    return dice.choice(
        [
            head + b"content-length: %d\r\n\r\n" % len(good) + good,  # a stream that nobody will read
            head + b"content-length: %d\r\n\r\n" % len(good) + good[:-5],
            dice.randbytes(dice.randrange(1, 500)),
            head + b"content-length: 999999999999\r\n\r\n" + bytes(1000),
            head + b"content-length: -5\r\n\r\n{}",
            head + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
            head + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n{}",
            head + b"transfer-encoding: chunked\r\n\r\n" + b"5\r\n12345\r\n" * dice.randrange(100),
            head + b"transfer-encoding: chunked\r\n\r\nffffffffffff\r\n" + bytes(500),
            head + b"transfer-encoding: chunked\r\n\r\n" + (b"40000\r\n" + bytes(0x40000) + b"\r\n") * 6,
            head + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 200_000,
            head + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\n\x1f\x8b\x08",
            head + b"".join(b"h%d: %s\r\n" % (i, b"x" * 50) for i in range(dice.choice([500, 3000]))) + b"\r\n",
            b"GET /" + b"a" * 100_000,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            head + b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00" + dice.randbytes(300),
        ]
    )


async def attack(port: int, count: int, seed: int, codes: collections.Counter[int]) -> None:
    """Connections one after another, each with a batch of requests at once and an ending; the answers are counted."""
    dice, left = random.Random(seed), count
    while left > 0:
        batch = [make_request(dice) for _ in range(min(left - 1, dice.randint(20, 60)))]
        left -= len(batch) + 1
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
            try:
                await asyncio.gather(send(writer, batch), read(reader, len(batch), codes))
                writer.write(make_ending(dice))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await writer.drain()
                        await read(reader, 1, codes)
            finally:
                writer.transport.abort()


def test_tens_of_thousands_of_hostile_requests(target: Target):
    codes: collections.Counter[int] = collections.Counter()

    async def all_of(count: int, seed: int) -> None:
        async with asyncio.timeout(900):
            await asyncio.gather(*(attack(target.port, count // 6, seed + i, codes) for i in range(6)))

    honest = threading.Thread(target=target.ask_honestly, daemon=True)
    honest.start()
    asyncio.run(all_of(COUNT // 10, 100))
    before, began = target.rss(), time.monotonic()
    asyncio.run(all_of(COUNT - COUNT // 10, 200))
    grown = target.rss() - before
    target.over.set()
    honest.join(60)
    used = psutil.Process(target.process.pid).cpu_times().user
    print(f"{time.monotonic() - began:.0f} s, {dict(codes)}, grown by {grown / 1e6:.1f} MB, CPU {used:.0f} s there, {time.process_time():.0f} s here")
    print(f"honest: {target.texts.total()} answers, the slowest after {target.slowest_s:.1f} s")
    assert target.process.poll() is None
    assert not {code for code in codes if code >= 500}, codes
    assert sum(codes.values()) > COUNT / 2 and codes[400] > COUNT / 4
    assert len(target.texts) == 1, "every honest answer is the same"
    assert target.slowest_s < 20
    assert grown < GROWTH
    with target.http() as http:
        deadline = time.monotonic() + 10
        while http.get("/v1/cluster").json()["streams"]:
            assert time.monotonic() < deadline, "a stream is left over"
            time.sleep(0.05)
        assert http.get("/health").status_code == 200
