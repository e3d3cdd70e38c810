"""Real stages for tests: a run folder with random weights, stage processes forked from the forge, and clients in the test's own process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from blocktrain.config import to_toml
from blocktrain.serving.chain import LocalChain
from blocktrain.serving.compute import Settings
from blocktrain.serving.decoding import Counts, Draft, OwnDraft, Plan, generate
from blocktrain.serving.sampling import Sampling
from blocktrain.training.checkpoint import Progress, block_file, load_run, save_checkpoint
from tests.conftest import PAPER
from tests.faults.swarm import Process, forge, free_port
from tests.integration.test_decoding import made_run

LIMIT_S = 60.0
WINDOWED = {**PAPER, "input": "upstream", "anchor_weight": 1.0, "window": 4}  # states and noisy targets travel, and it can sweep
SAMPLING = Sampling(1.0, seed=3)
PROMPT = b"so it goes"


def quiet(_: str) -> None:
    pass


def make_run(folder: Path, updates: int = 1, shift: float = 0.0, **sections: Any) -> Path:
    """A run folder whose checkpoint holds random weights, `shift` more of them all."""
    run = made_run(sections.pop("objective", WINDOWED), **sections)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(to_toml(run.config))
    config = run.config
    progress = Progress(
        updates=updates,
        phase=0,
        step=updates,
        finished=True,
        bytes_seen=1,
        training_flops=1.0,
        seconds=1.0,
        fitted=None,
        config=config.model_dump_json(),
        config_digest=config.digest,
        train_digest="",
        heldout_digest="",
        files={},
    )
    modules = {"interface.safetensors": run.stack.interface, **{block_file(b): run.stack.block(b) for b in range(config.model.blocks)}}
    parts = {name: {k: v + shift for k, v in module.state_dict().items()} for name, module in modules.items()}
    save_checkpoint(folder, progress, parts)
    return folder


@dataclass
class StageProcess:
    """One stage on its own port; it can be started again there."""

    run: Path
    block: str
    log: Path
    port: int = field(default_factory=free_port)
    host: str = "127.0.0.1"
    more: tuple[str, ...] = ()
    patch: str = ""
    process: Process | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> StageProcess:
        self.log.unlink(missing_ok=True)  # of the one before
        arguments = ["stage", str(self.run), "--listen", self.address, *(("--block", self.block) if self.block else ()), *self.more]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = Process(forge().start(arguments, str(self.log), environment, self.patch), self.log)
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.kill(number)

    def end(self) -> int:
        """Kill it and wait until it is gone."""
        self.kill(signal.SIGCONT)
        self.kill()
        assert self.process is not None
        return self.process.end(LIMIT_S)

    def wait_up(self, limit_s: float = LIMIT_S) -> StageProcess:
        end = time.monotonic() + limit_s
        while "address: " not in self.output:
            assert self.process is not None and self.process.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.02)
        return self


class Stages:
    """Stages of one run; `with` ends them all."""

    def __init__(self, folder: Path, run: Path, *blocks: str, more: tuple[str, ...] = ()) -> None:
        self.folder, self.run, self.all = folder, run, list[StageProcess]()
        for block in blocks:
            self.add(block, more=more)

    def add(self, block: str, run: Path | None = None, **fields: Any) -> StageProcess:
        stage = StageProcess(run or self.run, block, self.folder / f"stage-{len(self.all)}.log", **fields)
        self.all.append(stage.start())
        return stage

    def __enter__(self) -> Stages:
        try:
            for stage in self.all:
                stage.wait_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for stage in self.all:
            stage.kill(signal.SIGCONT)
            stage.kill()
        for stage in self.all:
            stage.end()

    def __getitem__(self, index: int) -> StageProcess:
        return self.all[index]

    @property
    def addresses(self) -> list[str]:
        return [stage.address for stage in self.all]

    def revive(self) -> None:
        """Every stage runs and is not stopped, as at the start."""
        for stage in self.all:
            stage.kill(signal.SIGCONT)
            if stage.process is None or stage.process.poll() is not None:
                stage.start()
        for stage in self.all:
            stage.wait_up()

    @asynccontextmanager
    async def client(self, *addresses: str, ready_s: float = 30.0, **fields: Any) -> AsyncIterator[Any]:
        """A RemoteChain that is ready; of all stages where none is named."""
        from blocktrain.serving.host import expected_of
        from blocktrain.serving.pipeline import RemoteChain

        chain = RemoteChain(fields.pop("expected", None) or expected_of(self.run, quiet), addresses or self.addresses, **fields)
        try:
            await chain.ready(ready_s)
            yield chain
        finally:
            await chain.close()


@dataclass
class Told:
    """A generation: its bytes, the seconds between pieces, and its counts."""

    data: bytes = b""
    gaps: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    @property
    def stall_s(self) -> float:
        return max(self.gaps) - sorted(self.gaps)[len(self.gaps) // 2]


async def tell(
    chain: Any, plan: Plan, prompt: bytes = PROMPT, draft: Draft | None = None, at: int = -1, do: Callable[[], Any] = lambda: None
) -> Told:
    """A text; after `at` bytes of it something is done."""
    told, last, done = Told(), time.monotonic(), False
    async for piece in generate(chain, plan, prompt, draft, told.counts):
        told.data += bytes(piece.ids)
        now = time.monotonic()
        told.gaps.append(now - last)
        if not done and 0 <= at <= len(told.data):
            done = True
            do()
            now = time.monotonic()
        last = now
    return told


def plan_of(mode: str = "exact", wire: str = "bfloat16", max_bytes: int = 48, seed: int = 3) -> Plan:
    return Plan(mode, Sampling(1.0, seed=seed), max_bytes, Settings(wire))  # type: ignore[arg-type]


@cache
def golden(run: Path, plan: Plan, prompt: bytes = PROMPT) -> bytes:
    """What the run gives in one process."""

    def make() -> bytes:
        chain = LocalChain(load_run(run, quiet))
        return asyncio.run(tell(chain, plan, prompt, own_draft(run) if plan.mode == "speculative" else None)).data

    with ThreadPoolExecutor(1) as pool:  # a loop may be running in this thread
        return pool.submit(make).result()


def own_draft(run: Path) -> OwnDraft:
    return OwnDraft(load_run(run, quiet, range(1)))


async def until(condition: Callable[[], Any], what: str, limit_s: float = 20.0) -> float:
    """Seconds until something is so."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, what
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def texts_at(address: str) -> int:
    """How many texts a stage says are open."""
    from blocktrain.serving.line import Secrets
    from blocktrain.serving.link import greet

    channel = Secrets().channel(address, 1 << 20)
    try:
        return (await greet(address, channel, Secrets())).texts
    finally:
        await channel.close()


async def until_free(addresses: list[str], limit_s: float = 20.0) -> float:
    """Seconds until no stage remembers a text."""
    began = time.monotonic()
    while any([await texts_at(address) for address in addresses]):
        assert time.monotonic() - began < limit_s, "texts are still open"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


# --- What a process takes ---


def memory_of(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def cpu_of(pid: int) -> float:
    """Seconds of processor time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- A way that can be broken ---


class Way:
    """A proxy in front of an address, in the test's own loop: it can swallow everything, or forget in silence what was idle for a while."""

    def __init__(self, target: str, idle_s: float | None = None) -> None:
        self.target, self.idle_s = target, idle_s
        self.hole: set[str] = set()  # directions in which nothing comes through: "there", "back"
        self.spared = 0  # so many of the first connections are not affected
        self.accepted = 0
        self.dropped = 0  # connections that were idle for too long
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Way:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        host, _, port = self.target.rpartition(":")
        onward, number, self.accepted = None, self.accepted, self.accepted + 1
        try:
            there, onward = await asyncio.open_connection(host, int(port))
            last = [time.monotonic()]
            await asyncio.gather(self._pump(reader, onward, last, "there", number), self._pump(there, writer, last, "back", number))
        except OSError:
            pass
        except asyncio.CancelledError:
            if self._server is not None and self._server.is_serving():
                raise
        finally:
            for each in (writer, onward):
                if each is not None:
                    each.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: list[float], way: str, number: int) -> None:
        while data := await reader.read(1 << 16):
            idle, last[0] = time.monotonic() - last[0], time.monotonic()
            if self.idle_s is not None and idle > self.idle_s:
                self.dropped += 1
                await asyncio.Event().wait()  # forgotten: nothing comes through any more, in silence
            while way in self.hole and number >= self.spared:
                await asyncio.sleep(0.02)
            writer.write(data)
            await writer.drain()
        writer.transport.abort()
