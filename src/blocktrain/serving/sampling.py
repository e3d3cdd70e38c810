"""One byte from logits, with noise that is a function of (seed, position) alone.

Gumbel-max: argmax_v (log p_v + g_v) is a draw from p where g is Gumbel noise. Since g at a position does not depend on who draws, two models with
similar distributions mostly pick the same byte from the same noise. That is what a draft is verified by: it is accepted while it equals the pick, so
the text is that of the full model to the byte, at any temperature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.errors import ConfigError
from blocktrain.model.transformer import VOCABULARY
from blocktrain.seeding import generator

MAX_BYTES = 1 << 24


@dataclass(frozen=True)
class Sampling:
    """How bytes are picked; raises ConfigError naming the first setting that is out of range."""

    temperature: float = 0.8  # 0 takes the most likely byte
    top_p: float = 1.0  # the smallest set of bytes with this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise ConfigError(f"temperature: must be between 0 and 100, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: must be above 0 and at most 1, got {self.top_p}")


def check_max_bytes(max_bytes: int) -> None:
    if not 1 <= max_bytes <= MAX_BYTES:
        raise ConfigError(f"max_bytes: must be between 1 and {MAX_BYTES}, got {max_bytes}")


def log_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What is drawn from, before noise: logits (V,) -> (V,) float64, up to a constant; -inf outside top_p. Temperature 0 counts as 1."""
    logits = logits.double()
    scaled = (logits - logits.max()) / (sampling.temperature or 1.0)
    if sampling.top_p < 1:
        probability, order = torch.softmax(scaled, 0).sort(descending=True, stable=True)
        outside = order[probability.cumsum(0) - probability >= sampling.top_p]
        scaled[outside] = -torch.inf
    return scaled


def pick(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The byte at `position` of the whole text, from logits (V,)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int((log_probabilities(logits, sampling) + gumbel(sampling.seed, position)).argmax())


def gumbel(seed: int, position: int) -> Tensor:
    """(V,) float64."""
    uniform = torch.rand(VOCABULARY, generator=generator(seed, "sample", position), dtype=torch.float64)
    return -torch.log(-torch.log(uniform.clamp(min=1e-300)))
