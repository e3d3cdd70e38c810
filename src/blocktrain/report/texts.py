"""Held-out text as prompts and windows, and figures of how varied a text is.

distinct-n is the share of different grams of n bytes among all grams of n bytes of a text; entropy is of its byte counts, in bits. A text that
repeats itself has both low, noise has both high, so they are read beside those of held-out text of the same length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from blocktrain.errors import ConfigError
from blocktrain.training.checkpoint import LoadedRun
from blocktrain.training.data import Corpus, heldout_windows, load_corpus

GRAMS = (1, 2, 3)


def distinct(text: bytes, n: int) -> float:
    """Share of different n-grams; 0 for a text shorter than n."""
    grams = [text[i : i + n] for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def byte_entropy(text: bytes) -> float:
    """Bits."""
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())


def variety(texts: Sequence[bytes]) -> dict[str, float]:
    """Means over texts, which should be of one length: both figures depend on it."""
    return {f"distinct_{n}": fmean(distinct(text, n) for text in texts) for n in GRAMS} | {"entropy": fmean(map(byte_entropy, texts))}


def corpus_of(run: LoadedRun) -> Corpus:
    """The texts of a run; raises ConfigError where the held-out one is not that which it was trained beside."""
    data = run.config.data
    corpus = load_corpus(data.corpus, heldout=data.heldout, heldout_fraction=data.heldout_fraction)
    if corpus.heldout_digest != run.progress.heldout_digest:
        raise ConfigError(f"data.corpus: the held-out text of {data.corpus!r} is not the one this run was trained beside")
    return corpus


def heldout_of(run: LoadedRun) -> np.ndarray:
    """The held-out text a run was trained beside, (num_bytes,) uint8; raises ConfigError where the corpus is another now."""
    return corpus_of(run).heldout


def prompts_of(heldout: np.ndarray, count: int, size: int, after: int) -> list[tuple[bytes, bytes]]:
    """`count` prompts of `size` bytes spread over the text, each with the `after` bytes that really follow."""
    windows = heldout_windows(heldout, size + after - 1, count)
    if len(windows) < count:
        raise ConfigError(f"--prompts: the held-out text holds {len(windows)} of {size + after} bytes, got {count}")
    return [(bytes(window[:size]), bytes(window[size:])) for window in windows]


def goals_table(goals: Sequence[dict[str, Any]]) -> Table:
    """Each figure beside its goal."""
    table = Table("figure", "value", "goal", "met", title="goals")
    for goal in goals:
        table.add_row(goal["name"], f"{goal['value']:.3f}", f"{goal['sign']} {goal['goal']}", "yes" if goal["met"] else "[red]no[/red]")
    return table
