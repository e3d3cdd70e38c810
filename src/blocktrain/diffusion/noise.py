"""The sigma density, its cut into one range per block, and draws from a range.

Density (EDM, arXiv 2206.00364): ln(sigma) ~ N(P_mean, P_std^2), here truncated to [sigma_min, sigma_max]. Cut (DiffusionBlocks,
arXiv 2506.14202): boundaries of equal probability, sigma(q) = exp(P_mean + P_std * Phi^-1(q)). Block 0 is the first of a sweep and has the
*highest* noise; ranges fall from sigma_max to sigma_min. A block trains on its range widened by `overlap` of its log-width on both sides,
so that it has seen what its neighbour hands on.

The `information` cut gives every block an equal fall of cross entropy instead, from a table of CE per sigma bin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from blocktrain.config import NoiseConfig

# Nothing is drawn below this: ln(sigma) must stay finite when sigma_min = 0.
SIGMA_FLOOR = 1e-4


@dataclass(frozen=True)
class SigmaDensity:
    """Log-normal density of sigma, truncated to [sigma_min, sigma_max]."""

    P_mean: float
    P_std: float
    sigma_min: float
    sigma_max: float

    def cdf(self, sigma: float) -> float:
        """Probability below `sigma` under the untruncated log-normal."""
        return NormalDist(self.P_mean, self.P_std).cdf(math.log(sigma)) if sigma > 0 else 0.0

    def quantile(self, u: Tensor, low: float, high: float) -> Tensor:
        """Map uniforms in [0, 1) to sigmas of the density restricted to [low, high]; shape kept."""
        low, high = max(low, SIGMA_FLOOR), max(high, SIGMA_FLOOR)
        q = self.cdf(low) + u.double() * (self.cdf(high) - self.cdf(low))
        sigma = torch.exp(self.P_mean + self.P_std * torch.special.ndtri(q))
        return sigma.clamp(low, high).to(u.dtype)

    def boundaries(self, blocks: int) -> list[float]:
        """The B+1 falling boundaries of equal probability, sigma_max first."""
        top, bottom = self.cdf(self.sigma_max), self.cdf(self.sigma_min)
        inner = [NormalDist(self.P_mean, self.P_std).inv_cdf(top + (bottom - top) * b / blocks) for b in range(1, blocks)]
        return [self.sigma_max, *(math.exp(x) for x in inner), self.sigma_min]


@dataclass(frozen=True)
class Partition:
    """One falling range of sigma per block."""

    density: SigmaDensity
    boundaries: tuple[float, ...]  # B + 1, falling
    overlap: float

    @property
    def blocks(self) -> int:
        return len(self.boundaries) - 1

    def core_range(self, block: int) -> tuple[float, float]:
        """(low, high) of a block without overlap."""
        return self.boundaries[block + 1], self.boundaries[block]

    def training_range(self, block: int) -> tuple[float, float]:
        """(low, high) that a block trains on: its core widened in ln(sigma), kept inside the whole range."""
        low, high = self.core_range(block)
        floor = max(low, SIGMA_FLOOR)
        widen = math.exp(self.overlap * (math.log(high) - math.log(floor)))
        return max(low / widen, self.boundaries[-1]), min(high * widen, self.boundaries[0])

    def draw(self, block: int, count: int, generator: torch.Generator) -> Tensor:
        """`count` sigmas of a block's training range, float32 on the CPU; stratified, so that a small batch covers the range."""
        low, high = self.training_range(block)
        strata = torch.randperm(count, generator=generator)
        u = (strata + torch.rand(count, generator=generator)) / count
        return self.density.quantile(u.clamp(max=1 - 1e-7), low, high)


def make_density(noise: NoiseConfig) -> SigmaDensity:
    return SigmaDensity(noise.P_mean, noise.P_std, noise.sigma_min, noise.sigma_max)


def make_partition(noise: NoiseConfig, blocks: int, fitted: Sequence[float] | None = None) -> Partition:
    """The partition of a run; `fitted` are the boundaries of an `information` cut once there are any."""
    density = make_density(noise)
    if fitted is not None:
        cuts = list(fitted)
    elif isinstance(noise.partition, list):
        cuts = noise.partition
    else:
        cuts = density.boundaries(blocks)
    return Partition(density, tuple(cuts), noise.overlap)


def log_bins(noise: NoiseConfig, count: int) -> list[float]:
    """`count` + 1 rising edges, evenly spaced in ln(sigma)."""
    low, high = math.log(max(noise.sigma_min, SIGMA_FLOOR)), math.log(noise.sigma_max)
    return [math.exp(low + (high - low) * i / count) for i in range(count + 1)]


def information_boundaries(edges: Sequence[float], ce: Sequence[float], noise: NoiseConfig, blocks: int) -> list[float]:
    """The B+1 falling boundaries between which CE falls by equal amounts.

    `edges` are n+1 rising bin edges, `ce` the cross entropy (nats) logged in each bin. CE is made monotone in sigma (running maximum from low
    noise), so a noisy table still gives rising quantiles; where CE does not change at all, the cut falls back to equal log-widths.
    """
    centres = [0.5 * (math.log(a) + math.log(b)) for a, b in zip(edges, edges[1:], strict=False)]
    rising: list[float] = []
    for value in ce:
        rising.append(max(value, rising[-1]) if rising else value)
    # A small slope in ln(sigma) keeps the inverse unique on flat stretches.
    total = max(rising[-1] - rising[0], 1e-9)
    slope = 1e-3 * total / (centres[-1] - centres[0])
    level = [value + slope * (centre - centres[0]) for value, centre in zip(rising, centres, strict=True)]
    cuts = []
    for b in range(1, blocks):
        wanted = level[-1] - (level[-1] - level[0]) * b / blocks
        i = next(i for i in range(1, len(level)) if level[i] >= wanted)
        share = (wanted - level[i - 1]) / (level[i] - level[i - 1])
        cuts.append(math.exp(centres[i - 1] + share * (centres[i] - centres[i - 1])))
    return [noise.sigma_max, *cuts, noise.sigma_min]
