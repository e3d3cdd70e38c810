"""Which steps of the data are taken: sets of whole numbers as sorted, disjoint ranges (first, one past the last).

A block's batches are a function of (run seed, step), and batches of different steps share no sample inside an epoch. So a block that
never takes a step twice never sees a sample twice in an epoch, whoever trains it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

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


def joined(ranges: Ranges, added: Ranges) -> Ranges:
    """The union; both in canonical form. Only what lies near the added ranges is looked at."""
    for first, stop in added:
        low = bisect_left(ranges, first, key=_stop)
        high = bisect_right(ranges, stop, key=_first)
        if low < high:
            first, stop = min(first, ranges[low][0]), max(stop, ranges[high - 1][1])
        ranges = (*ranges[:low], (first, stop), *ranges[high:])
    return ranges


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    """The difference; both in canonical form. Only what lies near the removed ranges is looked at."""
    for away, back in removed:
        low = bisect_right(ranges, away, key=_stop)
        high = bisect_left(ranges, back, key=_first)
        if low < high:
            parts = (ranges[low][0], away), (back, ranges[high - 1][1])
            ranges = (*ranges[:low], *(part for part in parts if part[0] < part[1]), *ranges[high:])
    return ranges


def first_free(taken: Sequence[Ranges], count: int) -> Ranges:
    """The lowest `count` numbers from 0 on that none of the sets holds."""
    free: list[tuple[int, int]] = []
    reached = 0
    while count > 0:
        places = [bisect_right(ranges, reached, key=_stop) for ranges in taken]
        ahead = [ranges[place] for ranges, place in zip(taken, places, strict=True) if place < len(ranges)]
        inside = [stop for first, stop in ahead if first <= reached]
        if inside:
            reached = max(inside)
            continue
        part = min([count, *(first - reached for first, _ in ahead)])
        free.append((reached, reached + part))
        count, reached = count - part, reached + part
    return tuple(free)


def _first(interval: tuple[int, int]) -> int:
    return interval[0]


def _stop(interval: tuple[int, int]) -> int:
    return interval[1]


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
