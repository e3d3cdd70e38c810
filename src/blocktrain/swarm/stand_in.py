"""Engines of simulated workers: the real one at a made-up pace, and a stand-in that trains nothing, for thousands of workers.

Both take virtual time and no other: a worker of speed s needs `pace.seconds_per_step / s` for a step, now and then held up by something else on its
machine. The real engine trains exactly the steps that its time allowed, once that time has passed, so a worker that vanishes costs no arithmetic.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blocktrain.codecs import encode_update
from blocktrain.config import RunConfig
from blocktrain.seeding import generator
from blocktrain.streams import BytesSource
from blocktrain.swarm.engine import TrainingEngine
from blocktrain.swarm.parts import INTERFACE, Entries, Layout
from blocktrain.swarm.protocol import Metrics, RunInfo, Work, part_of
from blocktrain.swarm.worker import Link, Trained

STAND_IN_VALUES = 8  # of a part of a stand-in
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass
class Pace:
    """How fast one machine is, and how often it is held up."""

    seconds_per_step: float
    hold_ups: float = 0.0  # share of assignments during which something else takes the machine
    hold_up_s: float = 0.0  # mean length; none is shorter than half of it
    dice: random.Random = dataclasses.field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._turn = self.dice.random()

    def _held_up(self) -> bool:
        """Now and then, as evenly as can be: a short run is then like a long one."""
        self._turn = (self._turn + GOLDEN) % 1.0
        return self._turn < self.hold_ups

    async def steps(self, work: Work, seconds: float, stopped: Callable[[], bool]) -> int:
        """Live through the time of an assignment; returns how many steps were possible. As anywhere, steps can be foreseen and hold-ups cannot."""
        leased = sum(stop - first for first, stop in work.steps)
        done = 0 if stopped() else max(0, min(leased, math.floor(seconds / self.seconds_per_step + 1e-9)))
        held_up = self.hold_up_s * (0.5 + self.dice.expovariate(2.0)) if done and self._held_up() else 0.0
        await asyncio.sleep(done * self.seconds_per_step + held_up)
        return done


class PacedEngine(TrainingEngine):
    """Trains with torch, in virtual time."""

    def __init__(self, folder: Path, pace: Pace, say: Callable[[str], None] = lambda _: None, capacity: int = 1) -> None:
        super().__init__(folder, lambda _: capacity, device="cpu", say=say)
        self.pace = pace

    async def train(self, work: Work, seconds: float, stopped: Callable[[], bool]) -> Trained | None:
        if (done := self._handed_in_before(work)) is not None:
            return done
        began = asyncio.get_running_loop().time()
        left = iter(range(await self.pace.steps(work, seconds, stopped)))
        trained = self._train(work, math.inf, lambda: next(left, None) is None)
        if trained is None:
            return None
        took = asyncio.get_running_loop().time() - began
        tokens = trained.num_samples * self.config.model.positions
        metrics = trained.metrics.model_copy(update={"seconds": took, "tokens_per_s": tokens / took if took else None})
        return dataclasses.replace(trained, metrics=metrics)


def stand_in_layout(config: RunConfig) -> Layout:
    """Parts of a few numbers each, in place of a model's."""
    entries: dict[str, Entries] = {
        part: {"w": (torch.float32, (STAND_IN_VALUES,))} for part in (INTERFACE, *(part_of(b) for b in range(config.model.blocks)))
    }

    def initial(_: str) -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.zeros(STAND_IN_VALUES)

    return Layout(config.model.blocks, entries, {part: ("w",) for part in entries}, initial, config.outer.interface == "averaged")


class StandInEngine:
    """Hands in numbers drawn for the assignment: different for each, the same whoever draws them."""

    def __init__(self, layout: Layout, pace: Pace, batch_size: int, capacity: int = 1) -> None:
        self.layout, self.pace, self.batch_size, self.capacity = layout, pace, batch_size, capacity
        self._held: set[str] = set()

    def configure(self, info: RunInfo) -> int:
        return self.capacity

    async def prepare(self, info: RunInfo, link: Link) -> None:
        """There is no text."""

    async def fetch(self, work: Work, link: Link) -> None:
        wanted = [part.full for part in work.parts]
        for blob in wanted:
            if blob.sha256 not in self._held:
                await link.fetch(blob, None)
        self._held = {blob.sha256 for blob in wanted}

    async def train(self, work: Work, seconds: float, stopped: Callable[[], bool]) -> Trained | None:
        done = await self.pace.steps(work, seconds, stopped)
        if not done:
            return None
        shapes = self.layout.update_shapes(work.first, work.stop)
        dice = generator(int(work.key), "stand-in")
        data = encode_update(((name, torch.randn(shape, generator=dice)) for name, shape in sorted(shapes.items())), work.codec).data
        return Trained(BytesSource(data), hashlib.sha256(data).hexdigest(), done * self.batch_size, Metrics())

    def settled(self, work: Work, accepted: bool) -> None:
        """Nothing was kept."""
