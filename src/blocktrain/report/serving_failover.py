"""A stage that serves a block is killed while a text goes through it; another has the same block. Does the text show it, and how long is the pause?

One block has two stages. Each time a text is generated again, and at a random moment of a random step the stage that its way leads through is killed
as a power cut would; then it is started again. The stall is the longest pause between two bytes beyond the median one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from blocktrain.errors import BlockTrainError
from blocktrain.report.netlink import Links
from blocktrain.report.serving_fleet import READY_S, Fleet, Host, split, stage_command
from blocktrain.serving.decoding import Plan, generate
from blocktrain.serving.host import expected_of
from blocktrain.serving.pipeline import RemoteChain
from blocktrain.serving.sampling import Sampling

RTT_MS = 20.0  # so that a kill often meets a step under way
TEXT_BYTES = 16


@dataclass
class Disturbed:
    """One text during which a stage was killed, or none was."""

    text: bytes
    gaps: list[float]  # seconds between bytes

    @property
    def stall_s(self) -> float:
        return max(self.gaps) - median(self.gaps)


def serving(chain: RemoteChain, fleet: Fleet, candidates: list[Host]) -> Host:
    """The host among `candidates` that the open text goes through; the first where none is on its way just now."""
    addresses = {hop.link.address for text in chain.texts.values() for hop in text.route or ()}
    return next((host for host in candidates if host.link.address in addresses), candidates[0])


async def generated(
    chain: RemoteChain, prompt: bytes, at: int | None = None, kill: Callable[[], None] | None = None, later_s: float = 0.0
) -> Disturbed:
    """A text; `kill` is called `later_s` after byte `at`."""
    data, gaps, last = b"", [], time.perf_counter()
    async for piece in generate(chain, Plan("exact", Sampling(seed=1), TEXT_BYTES), prompt):
        now = time.perf_counter()
        gaps.append(now - last)
        data, last = data + bytes(piece.ids), now
        if len(data) == at and kill:
            asyncio.get_running_loop().call_later(later_s, kill)
    return Disturbed(data, gaps[1:])


async def bench_failovers(
    run: Path, hosts: int, links: Links, times: int, prompt: bytes, say: Callable[[str], None], seed: int = 0
) -> dict[str, Any]:
    """Raises ServingError where the stages do not come up."""
    expected = expected_of(run, say)
    spans = split(expected.config.model.blocks, hosts)
    doubled = len(spans) // 2
    fleet, draw = Fleet(expected, stage_command(run), [*spans, spans[doubled]], links), random.Random(seed)
    candidates, found = [fleet.hosts[doubled], fleet.hosts[-1]], []
    fleet.change(RTT_MS, 0.0)
    fleet.start()
    try:
        chain = await fleet.connect()
        await _all_up(chain, fleet)
        await generated(chain, prompt)  # warms up
        calm = await generated(chain, prompt)
        for number in range(times):
            at, later_s = draw.randrange(1, TEXT_BYTES - 1), draw.uniform(0, median(calm.gaps))
            killed: list[Host] = []

            def kill(killed: list[Host] = killed) -> None:
                killed.append(serving(chain, fleet, candidates))
                killed[0].kill()

            found.append(await generated(chain, prompt, at, kill, later_s))
            for host in killed:
                host.start()
            await _all_up(chain, fleet)
            if number % 10 == 9:
                say(f"{number + 1} stages were killed")
    finally:
        await fleet.close()
    stalls = [each.stall_s for each in found]
    return {
        "times": times,
        "identical_share": sum(each.text == calm.text for each in found) / times,
        "stall_median_s": median(stalls),
        "stall_max_s": max(stalls),
        "calm_step_ms": median(calm.gaps) * 1e3,
    }


async def _all_up(chain: RemoteChain, fleet: Fleet) -> None:
    end = time.monotonic() + READY_S
    while len(chain.live()) < len(fleet.hosts):
        if time.monotonic() > end:
            raise BlockTrainError(f"bench serving: not all stages came up within {READY_S:.0f} s ({'; '.join(h.last_words() for h in fleet.hosts)})")
        await asyncio.sleep(0.05)
