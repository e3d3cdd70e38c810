"""Batches over any corpus: no window twice in an epoch, shards apart, and each batch a pure function of its step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blocktrain.errors import DataError
from blocktrain.training.data import Batches, heldout_windows

quick = settings(max_examples=60, deadline=None)
lengths = st.integers(2, 900)
positions_ = st.integers(1, 40)
seeds = st.integers(0, 2**63 - 1)


def numbered(length: int) -> np.ndarray:
    """Where the value says the place: windows can then be told apart (uint16 stands in for bytes)."""
    return np.arange(length, dtype=np.uint16)


def starts_of_epoch(batches: Batches, epoch: int) -> list[int]:
    """First places of this shard's windows in one epoch, read from batches of one window."""
    first = epoch * batches.windows_per_epoch
    return [int(batches.batch(step)[0, 0]) for step in range(first, first + batches.windows_per_epoch)]


@quick
@given(length=lengths, positions=positions_, seed=seeds, num_shards=st.integers(1, 5), epoch=st.integers(0, 3))
def test_no_window_repeats_inside_an_epoch_over_all_shards(length: int, positions: int, seed: int, num_shards: int, epoch: int) -> None:
    assume(length > positions)
    assume(max(1, (length - positions) // positions) >= num_shards)
    shards = [Batches(numbered(length), 1, positions, seed, shard, num_shards) for shard in range(num_shards)]
    starts = [start for batches in shards for start in starts_of_epoch(batches, epoch)]
    assert max(Counter(starts).values()) == 1
    assert len({start % positions for start in starts}) == 1  # one phase for all shards: windows never overlap by more than one byte
    assert max(starts) + positions < length
    assert len(starts) > max(1, (length - positions) // positions) - num_shards  # fewer than num_shards windows are left out


@quick
@given(length=lengths, positions=positions_, seed=seeds, batch_size=st.integers(1, 50), steps=st.lists(st.integers(0, 200), max_size=5))
def test_a_batch_depends_on_its_step_and_on_nothing_asked_before(length: int, positions: int, seed: int, batch_size: int, steps: list[int]) -> None:
    assume(length > positions)
    used = Batches(numbered(length), batch_size, positions, seed)
    for step in steps:
        batch = used.batch(step)
        assert batch.shape == (batch_size, positions + 1)
        assert (np.diff(batch.astype(int), axis=1) == 1).all()  # each row is one run of the corpus
        assert (batch == Batches(numbered(length), batch_size, positions, seed).batch(step)).all()


@quick
@given(length=lengths, positions=positions_, seed=seeds, batch_size=st.integers(1, 50))
def test_batches_of_any_size_follow_the_same_order(length: int, positions: int, seed: int, batch_size: int) -> None:
    assume(length > positions)
    one, many = (Batches(numbered(length), size, positions, seed) for size in (1, batch_size))
    for step in (0, 1, 7):
        rows = [one.batch(step * batch_size + row)[0] for row in range(batch_size)]
        assert (many.batch(step) == np.stack(rows)).all()
        assert many.epoch(step) == one.epoch(step * batch_size)


@quick
@given(length=lengths, positions=positions_, num_windows=st.integers(1, 60))
def test_heldout_windows_are_apart_even_and_reach_both_ends(length: int, positions: int, num_windows: int) -> None:
    assume(length > positions)
    windows = heldout_windows(numbered(length), positions, num_windows).astype(int)
    assert windows.shape == (min(num_windows, length // (positions + 1)), positions + 1)
    gaps = np.diff(windows[:, 0])
    assert (gaps > positions).all()
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1
    assert windows[0, 0] == 0
    assert len(gaps) == 0 or windows[-1, -1] == length - 1


def test_epochs_differ_in_order_and_in_phase() -> None:
    batches = Batches(numbered(4000), 1, 20, seed=3)
    epochs = [starts_of_epoch(batches, epoch) for epoch in range(6)]
    assert len({tuple(starts) for starts in epochs}) == 6
    assert len({starts[0] % 20 for starts in epochs}) > 1
    assert all(starts != sorted(starts) for starts in epochs)


def test_seeds_differ() -> None:
    assert starts_of_epoch(Batches(numbered(4000), 1, 20, seed=1), 0) != starts_of_epoch(Batches(numbered(4000), 1, 20, seed=2), 0)


def test_the_order_is_the_one_that_earlier_runs_had() -> None:
    """Philox, SeedSequence and a stable sort are promised to stay; a change here means that a resumed run reads other data."""
    data = np.arange(250, dtype=np.uint8)
    assert [int(row[0]) for row in Batches(data, 8, 16, seed=1234).batch(0)] == [26, 106, 218, 138, 122, 154, 186, 170]
    assert [int(row[0]) for row in Batches(data, 8, 16, seed=1234).batch(5)] == [16, 80, 171, 11, 75, 139, 155, 219]


def test_fewer_windows_than_the_batch_repeat_across_epochs_inside_it() -> None:
    batches = Batches(numbered(35), 10, 10, seed=0)
    assert batches.windows_per_epoch == 2
    assert batches.epoch(1) == 5
    starts = batches.batch(0)[:, 0].tolist()
    assert all(abs(starts[i] - starts[i + 1]) == 10 for i in range(0, 10, 2))  # each pair is one epoch: both windows once


def test_one_sequence_is_enough_and_one_byte_less_is_refused_with_both_sizes() -> None:
    assert (Batches(numbered(11), 3, 10, seed=0).batch(0) == np.arange(11)).all()
    for refused in (lambda: Batches(numbered(10), 3, 10, seed=0), lambda: heldout_windows(numbered(10), 10, 4)):
        with pytest.raises(DataError, match="10 bytes is shorter than one sequence of 11"):
            refused()


def test_more_shards_than_windows_are_refused_with_the_sizes() -> None:
    with pytest.raises(DataError, match="35 bytes has 2 windows of 11 bytes, too few for 3 shards"):
        Batches(numbered(35), 1, 10, seed=0, shard=0, num_shards=3)
