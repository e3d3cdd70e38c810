"""Generations at once, over one chain of blocks: who is let in, what is left when somebody goes, and whether the blocks can answer.

There are `max_streams` places. Who finds none free is refused at once and may ask again: a queue would only hide that more is asked than can be done.
Each generation runs in a task of its own; when its reader goes away the task is cancelled, and its text is closed at whatever await it is. Nothing
here knows HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TypeVar

from blocktrain.errors import BusyError, ConfigError, ServingError
from blocktrain.serving.chain import Chain, ChainStatus
from blocktrain.serving.compute import Wire
from blocktrain.serving.decoding import Counts, Draft, Mode, Piece, Plan, check_sweep, generate
from blocktrain.serving.metrics import Figures

STALL_S = 30.0  # a step that takes longer is not slow, it hangs
CUT_S = 2.5  # what is running when the server stops may go on for so long
STOPPING = "the server is stopping"

T = TypeVar("T")


class _End:
    """A stream has ended well."""


class Engine:
    """A run's chain of blocks, shared by all who ask for text."""

    def __init__(
        self,
        chain: Chain,
        run_name: str,
        draft: Draft | None = None,
        *,
        mode: Mode = "exact",
        wire: Wire = "bfloat16",
        max_streams: int = 8,
        allow_missing: bool = False,
        stall_s: float = STALL_S,
    ) -> None:
        """`mode` and `wire` are what a request gets that names none. Raises ConfigError where the run does not allow them."""
        self.chain, self.run_name, self.draft = chain, run_name, draft
        self.mode: Mode = mode
        self.wire: Wire = wire
        self.max_streams, self.allow_missing, self.stall_s = max_streams, allow_missing, stall_s
        self.figures = Figures()
        self.figures.max_streams.set(max_streams)
        self.streams = 0
        self.stopping, self.cut_s = False, CUT_S
        self._tasks: set[asyncio.Task[None]] = set()
        if max_streams < 1:
            raise ConfigError(f"--max-streams: must be at least 1, got {max_streams}")
        if mode not in self.modes:
            raise ConfigError(f"--mode {mode}: this run and its draft allow {', '.join(self.modes)}")

    # --- What it can do ---

    @property
    def positions(self) -> int:
        return self.chain.config.model.positions

    @property
    def modes(self) -> list[Mode]:
        drafted: list[Mode] = ["speculative"] if self.draft is not None else []
        swept: list[Mode] = ["sweep"] if self.chain.config.objective.window else []
        return ["exact", *drafted, *swept]

    def check(self, plan: Plan) -> None:
        """Raises ConfigError that names the field, before a place is taken."""
        if plan.mode not in self.modes:
            needs = "a draft" if plan.mode == "speculative" else "a run that was trained with objective.window"
            raise ConfigError(f"mode: {plan.mode} needs {needs}; this server answers in {' or '.join(self.modes)}")
        if plan.mode == "sweep" and plan.window is not None:
            check_sweep(self.chain.config, plan.window)

    def trouble(self, status: ChainStatus | None = None) -> str:
        """Why the blocks cannot answer now; empty while they can."""
        status = status or self.chain.status()
        if self.stopping:
            return STOPPING
        if status.missing and not (self.allow_missing and len(status.missing) < self.chain.config.model.blocks):
            return _missing(status)
        if status.stalled_s > self.stall_s:
            return f"a step has been running for {status.stalled_s:.0f} s; the limit is {self.stall_s:.0f} s"
        return ""

    # --- Generations ---

    @contextlib.contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Room for `count` generations while the block runs. Raises BusyError where there is not enough, ServingError while it stops."""
        if self.stopping:
            raise ServingError(STOPPING)
        if count > self.max_streams:
            raise ConfigError(f"n: this server generates at most {self.max_streams} texts at once, got {count}")
        if self.streams + count > self.max_streams:
            raise BusyError(f"{self.streams} of {self.max_streams} texts are being generated; ask again in a moment")
        self._take(count)
        try:
            yield
        finally:
            self._take(-count)

    def _take(self, count: int) -> None:
        self.streams += count
        self.figures.streams.set(self.streams)

    async def pieces(self, plan: Plan, prompt: bytes, counts: Counts) -> AsyncGenerator[Piece, None]:
        """`decoding.generate`, counted. Raises ServingError where the chain cannot answer, ConfigError like `check`."""
        self.check(plan)
        try:
            async with contextlib.aclosing(generate(self.chain, plan, prompt, self.draft, counts)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    yield piece
        finally:
            self.figures.count(counts)

    async def together(self, streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """What several streams give, as it comes. Each waits while nobody takes what it has; closing this ends and awaits them all."""
        queue: asyncio.Queue[T | _End | Exception] = asyncio.Queue(1)
        tasks = [asyncio.create_task(self._feed(stream, queue)) for stream in streams]
        self._tasks.update(tasks)
        left = len(tasks)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, _End):
                    left -= 1
                else:
                    yield item
        finally:
            self._tasks.difference_update(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _feed(self, stream: AsyncGenerator[T, None], queue: asyncio.Queue[T | _End | Exception]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await queue.put(item)
            await queue.put(_End())
        except asyncio.CancelledError:
            if asyncio.current_task() not in self._tasks:  # its reader has gone
                raise
            await queue.put(ServingError(STOPPING))
        except Exception as error:  # it belongs to the reader
            await queue.put(error)

    # --- The end ---

    def stop(self) -> None:
        """Take nothing new; what runs ends with ServingError after `cut_s` seconds."""
        self.stopping = True
        asyncio.get_running_loop().call_later(self.cut_s, self._cut)

    def _cut(self) -> None:
        for task in self._tasks:
            task.cancel()


def _missing(status: ChainStatus) -> str:
    """Which blocks, and what is known of the stages that are not up."""
    blocks = ", ".join(map(str, status.missing))
    down = "; ".join(f"{stage.address} is {stage.state}: {stage.reason}" for stage in status.stages if stage.state != "up")
    return f"block{'s' * (len(status.missing) > 1)} {blocks} missing: no stage that is up holds {'them' if len(status.missing) > 1 else 'it'}" + (
        f" ({down})" if down else ""
    )
