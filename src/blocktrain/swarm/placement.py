"""Which consecutive blocks a worker that asks is given: those that most need fresh work, as long a span as fits it and the run allows.

A block needs work the more, the fewer updates its round can expect (from live assignees, or already here), then the fewer tokens it has
counted. A span goes where the neediest block is; of spans that are equal in that, to where the least is expected in all, then to where the worker was
last (it holds the version before and can fetch the difference).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from blocktrain.swarm.closing import begins_from, decide_block, done, time_left, waiting_for
from blocktrain.swarm.state import Assignment, Block, State, Worker


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


def place(state: State, worker: Worker, now: float) -> Placement | None:
    """The best span for this worker now, or None where it has done its part or no round has time left for it."""
    candidates = list(_candidates(state, worker, now))
    if not candidates:
        return None
    is_done = {block.index: done(state, block) for block in state.blocks}
    need = {block.index: (_expected(state, block, now), block.tokens) for block in state.blocks}

    def rank(blocks: tuple[Block, ...]) -> tuple[object, ...]:
        needs = [need[block.index] for block in blocks]
        elsewhere = tuple(block.index for block in blocks) != worker.last_blocks
        wanted = [need[block.index] for block in blocks if not is_done[block.index]]
        return min(wanted), len(needs) - len(wanted), sum(expected for expected, _ in needs), sum(tokens for _, tokens in needs), elsewhere, blocks[0].index

    best = min(candidates, key=rank)
    left = [time_left(state.rules, block, now) for block in best]
    # A round that ends in less than half the time of the longest is not made to wait: its block takes the update late.
    waits = tuple(block.round is None or seconds >= max(left) / 2 for block, seconds in zip(best, left, strict=True))
    return Placement(best, min(seconds for seconds, wait in zip(left, waits, strict=True) if wait), waits)


def _candidates(state: State, worker: Worker, now: float) -> Iterator[tuple[Block, ...]]:
    mine = [a for a in state.assignments.values() if a.worker == worker.name]
    is_open = [not _took_part(mine, block) and decide_block(state, block, now).action == "wait" for block in state.blocks]
    is_done = [done(state, block) for block in state.blocks]
    longest = min(worker.capacity, state.rules.max_span, len(state.blocks))
    shortest = min(longest, state.rules.min_span) if any(is_done) else longest
    for length in range(longest, shortest - 1, -1):
        found = False
        for first in range(len(state.blocks) - length + 1):
            here = slice(first, first + length)
            left = max(time_left(state.rules, block, now) for block in state.blocks[here])
            if all(is_open[here]) and not all(is_done[here]) and left >= state.rules.min_work_s:
                found = True
                yield state.blocks[here]
        if found:
            return


def _took_part(mine: list[Assignment], block: Block) -> bool:
    """Whether the worker's update for this round of the block is accepted or on its way: one update a round."""
    since = block.round.first if block.round else "none"  # an upload that outlasted its round is not on its way to the next
    return any(begins_from(a, block) and (a.answer.accepted if a.answer else a.key >= since) for a in mine)


def retry_s(state: State, now: float) -> float:
    """How long a worker that found no place should wait before it asks again."""
    soon = 1.0 if any(decide_block(state, block, now).action != "wait" for block in state.blocks) else math.inf
    ends = [time_left(state.rules, block, now) for block in state.blocks if block.round]
    return max(1.0, min(soon, state.rules.heartbeat_limit_s / 4, *ends))


def _expected(state: State, block: Block, now: float) -> int:
    return len(block.pending) + len(waiting_for(state, block, now))
