"""The Euler sweep of the probability-flow ODE over any denoiser, and the evidence a noisy state carries.

dz/dsigma = (z - D(z; sigma)) / sigma, so one Euler step is z_next = D + (sigma_next / sigma) (z - D). (The DiffusionBlocks paper prints the sign
the other way round; the closed-form Gaussian test tells which is right.) The step is taken on the *denoised embedding*, never on a hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def euler_step(z: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """One Euler step from sigma down to sigma_next; shapes of z and denoised agree."""
    return denoised + (sigma_next / sigma) * (z - denoised)


def euler_sweep(denoise: Callable[[int, Tensor, float], Tensor], z: Tensor, sigmas: Sequence[float]) -> Iterator[Tensor]:
    """Yield the denoised estimate of each step. `denoise(i, z, sigma_i)` is called at sigmas[0..n-1]; the last entry is only where z ends.

    The last denoised estimate is the answer: nothing is evaluated at sigmas[-1], which may be 0.
    """
    for i, (sigma, sigma_next) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        denoised = denoise(i, z, sigma)
        yield denoised
        z = euler_step(z, denoised, sigma, sigma_next)


def evidence(z: Tensor, embeddings: Tensor, sigma: Tensor | float) -> Tensor:
    """log N(z; e_v, sigma^2) up to a constant of z: <z, e_v> / sigma^2 - |e_v|^2 / (2 sigma^2).

    z (..., E), embeddings (V, E), sigma broadcastable to (..., 1) -> (..., V) nats. Posterior logits are log p(v | x) plus this.
    """
    inner = z @ embeddings.T - 0.5 * embeddings.square().sum(-1)
    return inner / (sigma * sigma)


def expected_embedding(logits: Tensor, embeddings: Tensor) -> Tensor:
    """The posterior mean sum_v p_v e_v: logits (..., V), embeddings (V, E) -> (..., E)."""
    return torch.softmax(logits, dim=-1) @ embeddings
