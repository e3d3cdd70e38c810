"""Which steps of the data are taken: sets of whole numbers as sorted, disjoint ranges (first, one past the last).

A block's batches are a function of (run seed, step), and batches of different steps share no sample inside an epoch. So a block that
never takes a step twice never sees a sample twice in an epoch, whoever trains it.
"""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union, in canonical form."""
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if first == stop:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((first, stop))
    return tuple(merged)


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    """The difference; both in canonical form."""
    kept: list[tuple[int, int]] = []
    for first, stop in ranges:
        for away, back in removed:
            if away < stop and back > first:
                kept.append((first, max(first, away)))
                first = max(first, min(back, stop))
        kept.append((first, stop))
    return united(kept)


def first_free(taken: Ranges, count: int) -> Ranges:
    """The lowest `count` numbers from 0 on that are not taken."""
    free: list[tuple[int, int]] = []
    reached = 0
    for first, stop in taken:
        part = min(first - reached, count)
        free.append((reached, reached + part))
        count, reached = count - part, stop
    return united([*free, (reached, reached + count)])


def count_of(ranges: Ranges) -> int:
    return sum(stop - first for first, stop in ranges)


def beyond(ranges: Ranges, count: int) -> Ranges:
    """What is left of the ranges after their lowest `count` numbers."""
    rest: list[tuple[int, int]] = []
    for first, stop in ranges:
        skipped = min(count, stop - first)
        count -= skipped
        rest.append((first + skipped, stop))
    return united(rest)
