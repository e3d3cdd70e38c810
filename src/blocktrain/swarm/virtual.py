"""An asyncio event loop whose clock is made up: when nothing is ready it jumps to the next timer, so hours pass in the time that their work takes.

Everything happens in one thread and in one order, so the same program does the same things again: `asyncio.to_thread` and executors run their
function at once and in place, and there are no sockets, pipes or signals. A loop on which every task waits and no timer is set can never go on: it
raises Deadlock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits for another one, and no timer is set."""


class _Jump:
    """What the loop takes for its selector: instead of waiting for the outside, it moves the clock on."""

    def __init__(self, moved: Callable[[float], None]) -> None:
        self.now, self.moved = 0.0, moved

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"every task waits and no timer is set, {self.now:.3f} virtual seconds after the start")
        if timeout > 0:
            self.now += timeout
            self.moved(self.now)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop for one run of one program; see `run`."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Jump(self._moved)
        self._moved(0.0)

    def _moved(self, now: float) -> None:
        """A timer rings at its time and never before: whoever waits for a moment would set another timer of no length, for ever."""
        self._clock_resolution = math.ulp(now)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._selector.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs the function now; in virtual time it takes none."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            future.set_exception(error)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Nobody has to be woken: the loop never sleeps."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, in virtual time. Tasks that are left when `main` ends are cancelled."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        main.close()
        _end(loop)


def _end(loop: VirtualLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    try:
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
