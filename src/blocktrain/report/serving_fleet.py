"""Stages in processes of their own, each behind a link: what the serving bench generates with.

Stage i listens on a port of its own, and everyone who dials it (the client, the stage before it) dials its link. So every way of the ring has the
link's delay, and a stage's traffic in and out shares the link's bandwidth. `direct` is a second client that dials without the links.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.config import RunConfig
from blocktrain.errors import ConfigError, ServingError
from blocktrain.report.netlink import Link, Links
from blocktrain.serving.pipeline import Expected, RemoteChain

READY_S = 180.0


def split(blocks: int, hosts: int) -> list[range]:
    """Consecutive blocks for each host, as even as can be, more for the first ones. Raises ConfigError."""
    if not 1 <= hosts <= blocks:
        raise ConfigError(f"--hosts: must be between 1 and the run's {blocks} blocks, got {hosts}")
    ends = [-(-blocks * i // hosts) for i in range(hosts + 1)]
    return [range(first, stop) for first, stop in zip(ends, ends[1:], strict=False)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


Command = Callable[[range, int], list[str]]  # blocks and port -> arguments after `python`


def stage_command(run: Path) -> Command:
    """`blocktrain stage` of a run folder."""
    return lambda blocks, port: ["-m", "blocktrain", "stage", str(run), "--block", f"{blocks[0]}-{blocks[-1]}", "--listen", f"127.0.0.1:{port}"]


@dataclass
class Host:
    """One stage process and the link in front of it."""

    command: list[str]
    port: int
    link: Link
    threads: int
    process: subprocess.Popen[bytes] | None = None
    said: Path = field(default_factory=lambda: Path(tempfile.mkstemp(prefix="blocktrain-stage-")[1]))

    @property
    def direct(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        with open(self.said, "wb") as file:
            self.process = subprocess.Popen([sys.executable, *self.command], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env)

    def kill(self) -> None:
        """As a power cut does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.kill()
        self.said.unlink(missing_ok=True)

    def last_words(self) -> str:
        lines = self.said.read_text(errors="replace").strip().splitlines() if self.said.exists() else []
        return lines[-1] if lines else "nothing"


class Fleet:
    """The stages of one run, and clients of them."""

    def __init__(self, expected: Expected, command: Command, spans: Sequence[range], links: Links, threads: int | None = None) -> None:
        self.expected = expected
        threads = threads or max(1, (os.cpu_count() or 1) // len(spans))  # of each process
        ports = [free_port() for _ in spans]
        opened = [links.open(("127.0.0.1", port)) for port in ports]
        self.hosts = [Host(command(span, port), port, link, threads) for span, port, link in zip(spans, ports, opened, strict=True)]
        self._chains: list[RemoteChain] = []

    @property
    def config(self) -> RunConfig:
        return self.expected.config

    @property
    def links(self) -> list[Link]:
        return [host.link for host in self.hosts]

    def start(self) -> None:
        for host in self.hosts:
            host.start()

    async def connect(self, direct: bool = False) -> RemoteChain:
        """A client once every block is there; raises ServingError with what a stage that ended said."""
        chain = RemoteChain(self.expected, [host.direct if direct else host.link.address for host in self.hosts])
        chain.step_limit_s = 3600.0  # a large shape on a small machine is slow, not stuck
        self._chains.append(chain)
        end = time.monotonic() + READY_S
        while chain.missing():
            ended = [host.last_words() for host in self.hosts if host.process is None or host.process.poll() is not None]
            if ended or time.monotonic() > end:
                raise ServingError(f"{chain.why_not()}; stages that ended: {'; '.join(ended) or 'none'}")
            await asyncio.sleep(0.05)
        await chain.ready()
        return chain

    def change(self, rtt_ms: float, mbit_s: float) -> None:
        for link in self.links:
            link.change(rtt_ms=rtt_ms, mbit_s=mbit_s)

    async def close(self) -> None:
        for chain in self._chains:
            await chain.close()
        for host in self.hosts:
            host.end()
