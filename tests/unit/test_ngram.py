"""The n-gram model agrees with its formula written out slowly, and orders texts as it should."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from blocktrain.errors import DataError
from blocktrain.model.reference import NGramModel


def slow_probability(text: bytes, order: int, context: bytes, byte: int) -> float:
    """Witten-Bell by dictionaries, for one byte; a gram counts where one of the longest order begins."""
    starts = range(len(text) - order + 1)
    p = 1 / 256
    for k in range(1, min(order, len(context) + 1) + 1):
        c = context[len(context) - (k - 1) :]
        followers = Counter(text[s + k - 1] for s in starts if text[s : s + k - 1] == c)
        if followers:
            p = (followers[byte] + len(followers) * p) / (followers.total() + len(followers))
    return p


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    rng = np.random.default_rng(0)
    words = [b"the ", b"cat ", b"sat ", b"on ", b"mat. ", b"\xff\x00"]
    return np.frombuffer(b"".join(words[i] for i in rng.integers(0, len(words), 200)), dtype=np.uint8)


@pytest.mark.parametrize("order", [1, 2, 5, 8])
def test_agrees_with_the_formula_written_out(text: np.ndarray, order: int) -> None:
    model = NGramModel.fit(text, order=order)
    for context in (b"", b"the ", b"\x00\x00the cat ", b"\xff" * 9):
        slow = [slow_probability(text.tobytes(), order, context, byte) for byte in range(256)]
        assert np.exp(model.log_probs(context)) == pytest.approx(slow, rel=1e-12)


@pytest.mark.parametrize("context", [b"", b"t", b"at", b"the c", b"never seen", b"\xff", b"\x00\x00\x00\x00"])
def test_probabilities_are_positive_and_sum_to_one(text: np.ndarray, context: bytes) -> None:
    log_probs = NGramModel.fit(text).log_probs(context)
    assert np.isfinite(log_probs).all()
    assert np.exp(log_probs).sum() == pytest.approx(1, abs=1e-12)


def test_cross_entropy_sees_only_the_bytes_before_in_the_same_window(text: np.ndarray) -> None:
    model = NGramModel.fit(text, order=4)
    windows = np.stack([text[5:17], text[100:112], np.arange(12, dtype=np.uint8)])  # (3, T + 1)
    losses = [-model.log_probs(row[:t].tobytes())[row[t]] for row in windows for t in range(1, 12)]
    assert model.cross_entropy(windows) == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)


def test_longer_contexts_predict_structured_text_better(text: np.ndarray) -> None:
    windows = text[: len(text) // 16 * 16].reshape(-1, 16)
    losses = [NGramModel.fit(text, order=order).cross_entropy(windows) for order in (1, 2, 3, 5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0] < 0.8 * math.log(256)


def test_no_order_beats_ln_256_on_random_bytes() -> None:
    train, heldout = np.random.default_rng(1).integers(0, 256, (2, 100_000), dtype=np.uint8)
    windows = heldout[:25_600].reshape(100, 256)
    losses = [NGramModel.fit(train, order=order).cross_entropy(windows) for order in (1, 2, 3, 5)]
    assert losses[0] == pytest.approx(math.log(256), abs=0.005)  # 100 000 bytes tell the 256 frequencies well
    assert losses == sorted(losses)  # each longer context is noise that costs a little more


def test_only_max_bytes_are_counted_and_recorded(text: np.ndarray) -> None:
    model = NGramModel.fit(text, max_bytes=100)
    assert model.train_bytes == 100
    assert (model.log_probs(b"the ") == NGramModel.fit(text[:100]).log_probs(b"the ")).all()


@pytest.mark.parametrize("raw", [b"a", b"ab", b"aaaa"])
def test_a_text_shorter_than_the_order_lowers_the_order(raw: bytes) -> None:
    model = NGramModel.fit(np.frombuffer(raw, dtype=np.uint8))
    assert model.order == len(raw)
    assert np.exp(model.log_probs(raw)).sum() == pytest.approx(1)


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        NGramModel.fit(np.empty(0, dtype=np.uint8))


def test_the_text_that_is_counted_stays_as_it_was(text: np.ndarray) -> None:
    before = text.copy()
    NGramModel.fit(text)
    assert (text == before).all()
