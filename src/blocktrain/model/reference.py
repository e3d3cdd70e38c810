"""The yardstick: an interpolated byte n-gram model, what counting alone predicts on the same bytes.

A neural model that loses to it has learned nothing that needs a neural model. Its scale is that of the training loss, nats a
byte over positions 1…T of a window, with the same bytes in view and no others.

Witten-Bell smoothing, method C of Witten and Bell, "The zero-frequency problem" (IEEE Trans. Inf. Theory 37(4), 1991), in the
interpolated form of Chen and Goodman (TR-10-98, Harvard, 1998, section 2.5). With c_k the last k - 1 bytes of the context,
N(c) how often c was followed by any byte, U(c) by how many different ones, and N(c b) by b:

    p_k(b | c_k) = (N(c_k b) + U(c_k) p_{k-1}(b | c_{k-1})) / (N(c_k) + U(c_k)),    p_0(b) = 1 / 256.

A context that was never seen has N = U = 0 and leaves p_{k-1} as it is. Every p is positive and every row sums to one.

Grams are packed into 64-bit codes, first byte highest, and sorted once at the longest order: the sorted codes of each shorter
order are then prefixes of these. So a gram is counted only where one of the longest order begins, which leaves out the last
order - 1 bytes of the text. Memory while fitting is about 12 bytes a byte of text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blocktrain.errors import DataError

MAX_ORDER = 8  # bytes in a 64-bit code
BYTE_BITS = np.uint64(8)


@dataclass(frozen=True, eq=False)
class Level:
    """Counts of the grams of one length k and of their contexts, k - 1 bytes long; codes are sorted."""

    grams: np.ndarray  # (num_grams,) uint64
    gram_counts: np.ndarray  # (num_grams,) N(c b)
    contexts: np.ndarray  # (num_contexts,) uint64
    context_counts: np.ndarray  # (num_contexts,) N(c)
    context_followers: np.ndarray  # (num_contexts,) U(c)

    def interpolate(self, codes: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """p_k of the grams `codes`, given p_{k-1} of the same bytes; any shape."""
        contexts = codes >> BYTE_BITS
        joint = _look_up(self.grams, self.gram_counts, codes)
        total = _look_up(self.contexts, self.context_counts, contexts)
        followers = _look_up(self.contexts, self.context_followers, contexts)
        seen = total > 0
        return np.where(seen, (joint + followers * lower) / np.where(seen, total + followers, 1), lower)


class NGramModel:
    """Interpolated Witten-Bell model of bytes; `order` 5 predicts from the last four bytes."""

    def __init__(self, levels: list[Level], train_bytes: int) -> None:
        self.levels = levels  # of grams of 1, 2, … order bytes
        self.train_bytes = train_bytes

    @property
    def order(self) -> int:
        return len(self.levels)

    @classmethod
    def fit(cls, data: np.ndarray, order: int = 5, max_bytes: int = 64 << 20) -> NGramModel:
        """Count the first `max_bytes` of `data`, (num_bytes,) uint8."""
        assert 1 <= order <= MAX_ORDER
        text = np.asarray(data[:max_bytes])
        if not len(text):
            raise DataError("an n-gram model cannot be fitted to an empty text; give a corpus that holds some")
        order = min(order, len(text))
        codes, counts = _sorted_counts(_pack(text, order))
        levels = []
        for _ in range(order):
            contexts, starts = _runs(codes >> BYTE_BITS)
            followers = np.diff(starts, append=len(codes))
            levels.append(Level(codes, counts, contexts, np.add.reduceat(counts, starts), followers))
            codes, counts = contexts, levels[-1].context_counts
        return cls(levels[::-1], len(text))

    def cross_entropy(self, windows: np.ndarray) -> float:
        """Mean nats a byte over positions 1…T of (N, T + 1) uint8, each given the bytes before it in its window."""
        num_windows, length = windows.shape
        assert min(num_windows, length - 1) > 0
        p = np.full((num_windows, length), 1 / 256)  # (N, T + 1)
        codes = np.zeros((num_windows, length), dtype=np.uint64)
        for k, level in enumerate(self.levels, start=1):
            # Column t gains its byte t - k + 1; columns t < k - 1 have no so long a context and keep what they have.
            codes[:, k - 1 :] |= windows[:, : length - k + 1].astype(np.uint64) << np.uint64(8 * (k - 1))
            p[:, k - 1 :] = level.interpolate(codes[:, k - 1 :], p[:, k - 1 :])
        return float(-np.log(p[:, 1:]).mean())

    def log_probs(self, context: bytes) -> np.ndarray:
        """Natural logarithm of the probability of each next byte after `context`: (256,)."""
        p = np.full(256, 1 / 256)
        for k, level in enumerate(self.levels[: len(context) + 1], start=1):
            code = int.from_bytes(context[len(context) - (k - 1) :], "big") << 8
            p = level.interpolate(np.uint64(code) + np.arange(256, dtype=np.uint64), p)
        return np.log(p)


def _pack(text: np.ndarray, order: int) -> np.ndarray:
    """The code of every gram of `order` bytes: (num_bytes - order + 1,) uint64."""
    num_grams = len(text) - order + 1
    codes = np.zeros(num_grams, dtype=np.uint64)
    for j in range(order):
        codes <<= BYTE_BITS
        codes |= text[j : j + num_grams]
    return codes


def _sorted_counts(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Different codes in order, and how often each occurs; sorts in place."""
    codes.sort()
    different, starts = _runs(codes)
    return different, np.diff(starts, append=len(codes))


def _runs(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of equal codes start: the code of each run, and its offset."""
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    return ordered[starts], starts


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 where it is not among the sorted keys."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
