"""Which consecutive blocks a worker that asks is given: those that most need fresh work, as long a span as fits it and the run allows.

A block needs work the more, the fewer updates its round can expect (from live assignees, or already here), then the fewer tokens it has
counted. A span goes where the neediest block is; of spans that are equal in that, to where the least is expected in all, then to where the worker was
last (it holds the version before and can fetch the difference).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from blocktrain.swarm.closing import reason_to_end, time_left
from blocktrain.swarm.index import Index
from blocktrain.swarm.state import Block, State, Worker


@dataclass(frozen=True)
class Placement:
    """Blocks for a worker, the time it has, and which of their rounds will wait for it."""

    blocks: tuple[Block, ...]
    time_left_s: float
    awaited: tuple[bool, ...]


def unfit(state: State, capacity: int) -> str:
    """Why a worker of this capacity cannot take part; empty if it can."""
    least = min(state.rules.min_span, len(state.blocks))
    return "" if capacity >= least else f"the worker can hold {capacity} blocks, this run trains spans of at least {least}"


def place(index: Index, worker: Worker, now: float) -> Placement | None:
    """The best span for this worker now, or None where it has done its part or no round has time left for it."""
    blocks, rules = index.state.blocks, index.state.rules
    left = [time_left(rules, block, now) for block in blocks]
    done = [index.done(block) for block in blocks]
    expected = [len(block.pending) + len(index.waiting(block, now)) for block in blocks]
    candidates = _candidates(index, worker, now, left, done, expected)
    if not candidates:
        return None

    def rank(span: range) -> tuple[object, ...]:
        wanted = [(expected[i], blocks[i].tokens) for i in span if not done[i]]
        in_all = sum(expected[i] for i in span), sum(blocks[i].tokens for i in span)
        return min(wanted), len(span) - len(wanted), *in_all, tuple(span) != worker.last_blocks, span[0]

    best = min(candidates, key=rank)
    longest = max(left[i] for i in best)
    # A round that ends in less than half the time of the longest is not made to wait: its block takes the update late.
    waits = tuple(blocks[i].round is None or left[i] >= longest / 2 for i in best)
    return Placement(tuple(blocks[i] for i in best), min(left[i] for i, wait in zip(best, waits, strict=True) if wait), waits)


def _candidates(index: Index, worker: Worker, now: float, left: list[float], done: list[bool], expected: list[int]) -> list[range]:
    """Spans with a place for the worker, as long as it can hold; shorter ones where blocks that are done leave no place for those."""
    blocks, rules = index.state.blocks, index.state.rules
    most = rules.replicas or math.inf
    is_open = [e < most and not index.took_part(worker.name, b) and not reason_to_end(index, b, now) for b, e in zip(blocks, expected, strict=True)]
    longest = min(worker.capacity, rules.max_span, len(blocks))
    shortest = min(longest, rules.min_span) if any(done) else longest
    for length in range(longest, shortest - 1, -1):
        spans = [range(first, first + length) for first in range(len(blocks) - length + 1)]
        good = [s for s in spans if all(is_open[i] for i in s) and not all(done[i] for i in s) and max(left[i] for i in s) >= rules.min_work_s]
        if good:
            return good
    return []


def retry_s(index: Index, now: float) -> float:
    """How long a worker that found no place should wait before it asks again."""
    blocks, rules = index.state.blocks, index.state.rules
    soon = 1.0 if any(reason_to_end(index, block, now) for block in blocks) else math.inf
    ends = [time_left(rules, block, now) for block in blocks if block.round]
    return max(1.0, min(soon, rules.heartbeat_limit_s / 4, *ends))
