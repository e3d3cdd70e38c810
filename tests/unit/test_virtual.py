"""The event loop with a made-up clock: hours in no time, one order, and no silence when nothing can go on."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from blocktrain.swarm.virtual import Deadlock, run


async def _sleepers(log: list[tuple[float, str]]) -> None:
    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        log.append((round(asyncio.get_running_loop().time(), 6), name))

    await asyncio.gather(*(sleeper(name, seconds) for name, seconds in (("week", 7 * 86400), ("hour", 3600), ("b", 0.1), ("a", 0.1), ("now", 0))))


def test_time_jumps_from_timer_to_timer_in_one_order():
    logs: list[list[tuple[float, str]]] = [[], []]
    began = time.monotonic()
    for log in logs:
        run(_sleepers(log))
    assert time.monotonic() - began < 5
    assert logs[0] == logs[1] == [(0.0, "now"), (0.1, "b"), (0.1, "a"), (3600.0, "hour"), (604800.0, "week")]


def test_timers_far_from_zero_still_ring():
    async def main() -> float:
        for _ in range(3):
            await asyncio.sleep(3e8 + 0.1)
        for _ in range(100):
            await asyncio.sleep(0.001)
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(9e8 + 0.4, abs=1e-3)


def test_a_timer_never_rings_early_so_nobody_waits_for_a_moment_for_ever():
    async def main() -> int:
        loop, dice, turns = asyncio.get_running_loop(), random.Random(1), 0
        for _ in range(2000):
            moment = loop.time() + dice.choice((1e-9, 1e-6, 0.1, 10.0, 1e5)) * dice.random()
            while (left := moment - loop.time()) > 0:
                await asyncio.sleep(left)
                turns += 1
        return turns

    assert run(main()) < 4000


def test_timeouts_are_virtual_too():
    async def main() -> str:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 1e5)
        except TimeoutError:
            return f"{asyncio.get_running_loop().time():.0f}"
        return ""

    assert run(main()) == "100000"


def test_threads_run_in_place_and_take_no_time():
    async def main() -> list[int]:
        seen: list[int] = []

        async def work(number: int) -> None:
            await asyncio.to_thread(seen.append, number)

        await asyncio.gather(*map(work, range(5)))
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(_fail)
        assert asyncio.get_running_loop().time() == 0
        return seen

    assert run(main()) == list(range(5))


def _fail() -> None:
    raise ValueError("no")


def test_a_deadlock_is_an_error_that_says_when():
    async def main() -> None:
        await asyncio.sleep(12)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"12\.000 virtual seconds"):
        run(main())


def test_tasks_left_over_are_cancelled_and_may_clean_up():
    log: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            await asyncio.sleep(1)
            log.append("clean")

    async def main() -> str:
        task = asyncio.ensure_future(background())
        await asyncio.sleep(1)
        assert not task.done()
        return "done"

    assert run(main()) == "done"
    assert log == ["clean"]
