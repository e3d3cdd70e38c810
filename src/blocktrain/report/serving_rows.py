"""One way of generating, timed: what a row of the serving bench is made of.

`Watched` wraps any chain and notes each traversal: its wall time, and what each stage said it waited and computed. What is left of the wall time is
network and framing. A ring of n stages has n + 1 ways: to the first, between them, and from the last straight back. Where no block waits for another
all stages are asked at once, so there are two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.report.netlink import Link
from blocktrain.serving.chain import Chain, ChainStatus, Step, Text
from blocktrain.serving.compute import Settings
from blocktrain.serving.decoding import Counts, Draft, Plan, generate

MS = 1e-3


@dataclass(frozen=True)
class Traversal:
    """One traversal: wall seconds, and (seconds waited, seconds computed) of each stage, empty where the chain does not say."""

    wall_s: float
    hops: list[tuple[float, float]]
    parallel: bool = False  # all stages at once, not one after another

    @property
    def network_s(self) -> float:
        return self.wall_s - (max if self.parallel else sum)(map(sum, self.hops))

    @property
    def ways(self) -> int:
        return 2 if self.parallel else len(self.hops) + 1


class WatchedText:
    def __init__(self, text: Text, seen: list[Traversal], parallel: bool) -> None:
        self.text, self.seen, self.parallel = text, seen, parallel

    @property
    def missing(self) -> tuple[int, ...]:
        return self.text.missing

    async def step(self, step: Step) -> Tensor:
        began = time.perf_counter()
        logits = await self.text.step(step)
        wall_s = time.perf_counter() - began
        hops = [(waited * 1e-6, computed * 1e-6) for _, waited, computed in getattr(self.text, "hops", [])]
        self.seen.append(Traversal(wall_s, hops, self.parallel and bool(hops)))
        return logits

    async def close(self) -> None:
        await self.text.close()


class Watched:
    """A chain whose traversals are noted in `seen`."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.seen: list[Traversal] = []

    @property
    def config(self) -> RunConfig:
        return self.chain.config

    def status(self) -> ChainStatus:
        return self.chain.status()

    async def open(self, settings: Settings, enter: int = 0) -> WatchedText:
        return WatchedText(await self.chain.open(settings, enter), self.seen, self.config.objective.parallel)

    async def close(self) -> None:
        await self.chain.close()


@dataclass
class System:
    """One way of generating: a chain, the links its traffic takes, and a plan whose seed is set for each prompt."""

    name: str
    chain: Chain
    plan: Plan
    draft: Draft | None = None
    links: Sequence[Link] = ()


@dataclass
class Sample:
    """One generation."""

    text: bytes
    counts: Counts
    wire: int  # bytes on all links, both directions
    seen: list[Traversal] = field(default_factory=list)

    @property
    def bytes_per_s(self) -> float:
        return self.counts.bytes / self.counts.seconds


async def run_once(system: System, prompt: bytes, seed: int) -> Sample:
    """Generate after a prompt and note everything."""
    before, watched, counts, text = traffic(system.links), Watched(system.chain), Counts(), b""
    plan = replace(system.plan, sampling=replace(system.plan.sampling, seed=seed))
    async for piece in generate(watched, plan, prompt, system.draft, counts):
        text += bytes(piece.ids)
    return Sample(text, counts, traffic(system.links) - before, watched.seen)


def traffic(links: Sequence[Link]) -> int:
    return sum(link.traffic().bytes for link in links)


def figures(name: str, samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, Any]:
    """A row: totals of counts, medians over prompts of rates, the ratio by prompt to the baseline on the same link."""
    traversals, drafted = sum(s.counts.traversals for s in samples), sum(s.counts.drafted for s in samples)
    seen = [traversal for s in samples for traversal in s.seen]
    legs = fmean(t.ways for t in seen)
    told = any(t.hops for t in seen)
    return {
        "name": name,
        "bytes_per_traversal": sum(s.counts.bytes for s in samples) / traversals,
        "bytes_per_s": median(s.bytes_per_s for s in samples),
        "ratio": median(own.bytes_per_s / base.bytes_per_s for own, base in zip(samples, baseline, strict=True)),
        "wire_bytes_per_traversal": sum(s.wire for s in samples) / traversals,
        "acceptance": sum(s.counts.accepted for s in samples) / drafted if drafted else None,
        "first_bytes_ms": median(s.counts.prompt_s for s in samples) / MS,
        "traversal_ms": median(t.wall_s for t in seen) / MS,
        "client_ms": (sum(s.counts.seconds for s in samples) - sum(t.wall_s for t in seen)) / traversals / MS,
        "compute_ms_per_stage": median(fmean(c for _, c in t.hops) for t in seen if t.hops) / MS if told else None,
        "queue_ms_per_stage": median(fmean(w for w, _ in t.hops) for t in seen if t.hops) / MS if told else None,
        "network_ms_per_way": median(t.network_s for t in seen) / legs / MS if told else None,
    }


async def streams_ratio(system: System, prompts: Sequence[bytes], streams: int) -> dict[str, float]:
    """Bytes per second of many texts at once over those of one at a time, the same texts."""

    async def timed(groups: Sequence[Sequence[int]]) -> float:
        began, size = time.perf_counter(), 0
        for group in groups:
            samples = await asyncio.gather(*(run_once(system, prompts[i % len(prompts)], i) for i in group))
            size += sum(len(s.text) for s in samples)
        return size / (time.perf_counter() - began)

    one, many = await timed([[i] for i in range(streams)]), await timed([range(streams)])
    return {"streams": streams, "one_bytes_per_s": one, "many_bytes_per_s": many, "ratio": many / one}
