"""EDM preconditioning and weight (Karras et al. 2022, arXiv 2206.00364, table 1), one function a formula.

D(z; s) = c_skip(s) z + c_out(s) F(c_in(s) z; c_noise(s)). With cross entropy the network's logits are used as they are (no c_skip, c_out);
with embedding MSE they make the denoised embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor


def c_skip(sigma: Tensor, sigma_data: float) -> Tensor:
    return sigma_data**2 / (sigma**2 + sigma_data**2)


def c_out(sigma: Tensor, sigma_data: float) -> Tensor:
    return sigma * sigma_data / (sigma**2 + sigma_data**2).sqrt()


def c_in(sigma: Tensor, sigma_data: float) -> Tensor:
    return 1 / (sigma**2 + sigma_data**2).sqrt()


def c_noise(sigma: Tensor) -> Tensor:
    return torch.log(sigma) / 4


def edm_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """1 / c_out^2 = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2, elementwise."""
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2
