"""One run seed, many independent draws: a seed is folded with what the draw is for.

Every random number of a run comes from a generator made here for (seed, purpose, step, ...). Nothing carries generator state from step to
step, so a run that was killed and resumed draws what the unbroken run draws.
"""

from __future__ import annotations

import hashlib

import torch


def fold(seed: int, *labels: int | str) -> int:
    """A 63-bit seed from a run seed and labels; different labels give unrelated seeds."""
    text = "\0".join([str(seed), *(f"{type(label).__name__}:{label}" for label in labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *labels: int | str) -> torch.Generator:
    """A CPU generator for one purpose; draws are made on the CPU so that every device sees the same numbers."""
    return torch.Generator().manual_seed(fold(seed, *labels))
