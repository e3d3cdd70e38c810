"""The chain of a run's blocks as whoever generates text sees it, wherever the blocks are.

`Chain.open` gives a `Text`; each `Text.step` is one traversal of the blocks. `LocalChain` holds all blocks in this process, `pipeline.RemoteChain`
has them behind stages. The same steps give the same logits to the bit through either.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.errors import ServingError
from blocktrain.serving.compute import BlockRunner, Job, Result, Settings, TextMemory
from blocktrain.training.checkpoint import LoadedRun

STOPPING = "the host of the blocks is stopping"


@dataclass
class Step:
    """New positions of a text: `keep` … `keep + T` of the window that is remembered, which begins at `offset` of the whole text."""

    keep: int
    offset: int
    ids: Sequence[int]  # (T,)
    want: int = 0  # logits from this new position on
    enter: int = 0  # first block; those before it were run by the caller
    state: Tensor | None = None  # (T, D) float32 where enter > 0 and blocks are chained
    z: Tensor | None = None  # (T, E) float32 where enter > 0 and a noisy target takes part
    votes: Tensor | None = None  # (T - want, V) int32 where enter > 0 and all blocks vote


def rows_replaced(old: Tensor | None, keep: int, new: Tensor | None) -> Tensor | None:
    """What is remembered (T, n) after a step: `old` rows before `keep`, then `new`."""
    if new is None or old is None or keep == 0:
        return new
    return torch.cat((old[:keep], new))


class Text(Protocol):
    """One text being extended."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Blocks that were left out since no stage has them."""
        ...

    async def step(self, step: Step) -> Tensor:
        """One traversal -> logits (T - want, V) float32. Raises ServingError when it cannot be done."""
        ...

    async def close(self) -> None:
        """Nothing is remembered of it any more, anywhere. May be called twice."""
        ...


@dataclass(frozen=True)
class StageStatus:
    """What is known of one host of blocks."""

    address: str  # "" is this process
    node: str  # the stage's own name; one stage known by two addresses is one
    blocks: tuple[int, int]  # first and one after the last
    state: Literal["up", "loading", "down", "failed"]
    reason: str = ""  # why it is not up
    texts: int = 0  # remembered there at the moment


@dataclass(frozen=True)
class ChainStatus:
    """Whether the blocks can answer."""

    stages: list[StageStatus]
    missing: list[int]  # blocks that no stage which is up holds
    stalled_s: float  # since when the oldest step that is running has been at it; 0 where none runs


class Chain(Protocol):
    """All blocks of a run, in order."""

    @property
    def config(self) -> RunConfig: ...

    def status(self) -> ChainStatus: ...

    async def open(self, settings: Settings, enter: int = 0) -> Text:
        """A text whose steps enter at block `enter`."""
        ...

    async def close(self) -> None: ...


class Batcher:
    """One thread that runs what is waiting, all of it together: jobs that come in while it works are the next batch."""

    def __init__(self, runner: BlockRunner) -> None:
        self.runner = runner
        self._waiting: list[tuple[Job, asyncio.Future[Result], asyncio.AbstractEventLoop]] = []
        self._something = threading.Condition()
        self._closed = False
        self.busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="blocks", daemon=True)
        self._thread.start()

    async def run(self, job: Job) -> Result:
        """Raises what the runner raises, and ServingError once this is closed.

        If the caller is cancelled the job does not run, or where it runs already its result is dropped.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._something:
            if self._closed:
                raise ServingError(STOPPING)
            self._waiting.append((job, future, loop))
            self._something.notify()
        return await future

    def close(self) -> None:
        with self._something:
            self._closed = True
            self._something.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)

    def _work(self) -> None:
        while True:
            with self._something:
                while not self._waiting and not self._closed:
                    self._something.wait()
                if self._closed:
                    batch, self._waiting = self._waiting, []
                    for _, future, loop in batch:
                        _deliver(loop, future, ServingError(STOPPING))
                    return
                batch, self._waiting = self._waiting, []
            batch = [entry for entry in batch if not entry[1].cancelled()]
            self.busy_since = time.monotonic()
            results = self._run([job for job, _, _ in batch])
            self.busy_since = None
            for (_, future, loop), result in zip(batch, results, strict=True):
                _deliver(loop, future, result)

    def _run(self, jobs: Sequence[Job]) -> list[Result | BaseException]:
        """What each job gives. One that fails is nobody else's loss: they run again, each alone."""
        try:
            return list(self.runner.run(jobs))
        except BaseException as error:  # it belongs to whoever asked, not to this thread
            if len(jobs) == 1:
                return [error]
            return [self._run([job])[0] for job in jobs]


def _deliver(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Result], result: Result | BaseException) -> None:
    def settle() -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
        loop.call_soon_threadsafe(settle)


class LocalChain:
    """All blocks in this process."""

    def __init__(self, run: LoadedRun) -> None:
        self.batcher = Batcher(BlockRunner(run))
        self.config = run.config

    def status(self) -> ChainStatus:
        since, blocks = self.batcher.busy_since, self.config.model.blocks
        return ChainStatus([StageStatus("", "local", (0, blocks), "up")], [], 0.0 if since is None else time.monotonic() - since)

    async def open(self, settings: Settings, enter: int = 0) -> LocalText:
        return LocalText(self.batcher, settings)

    async def close(self) -> None:
        await asyncio.to_thread(self.batcher.close)


class LocalText:
    missing = ()

    def __init__(self, batcher: Batcher, settings: Settings) -> None:
        self.batcher, self.settings = batcher, settings
        self.memory = TextMemory()

    async def step(self, step: Step) -> Tensor:
        job = Job(self.memory, self.settings, step.keep, step.offset, step.ids, step.enter, step.state, step.z, step.votes, step.want)
        result = await self.batcher.run(job)
        assert result.logits is not None
        return result.logits

    async def close(self) -> None:
        self.memory = TextMemory()
