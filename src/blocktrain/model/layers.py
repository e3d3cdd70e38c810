"""One causal transformer layer.

N batch, T positions, D width, H heads of K channels, C noise-level embedding width.

Notable: RMSNorm without a gain of its own, because the noise-level modulation (adaLN) carries one gain and one shift per channel and sub-layer;
rotary positions; queries and keys normalised per head; ReLU^2 or SwiGLU feed-forward; what a sub-layer reads may be mixed with that of a few earlier
positions (a depthwise short convolution, as in "Physics of Language Models: Part 4.1", Allen-Zhu 2025); projections into the residual stream start
at zero, so a fresh layer is the identity. Left out: biases in matrices, dropout (one pass over the text), output gates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import ModelConfig
from blocktrain.model.memory import LayerTile


def rotary_table(positions: int, width: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE (Su et al. 2021, base 10,000), each (positions, width / 2) float32."""
    frequency = 10000.0 ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by its position's angle: x (N, H, T, K), cos and sin (T, K / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions and normalised queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.attention_width, bias=False)
        self.key = nn.Linear(config.width, config.attention_width, bias=False)
        self.value = nn.Linear(config.width, config.attention_width, bias=False)
        self.out = nn.Linear(config.attention_width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, tile: LayerTile | None = None) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (layer(x).view(n, t, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))  # (N, H, T, K)
        q, k = rotate(rms_norm(q), cos, sin), rotate(rms_norm(k), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if tile is None else tile.attend(q, k, v)
        return self.out(y.transpose(1, 2).reshape(n, t, -1))


class FeedForward(nn.Module):
    """relu(x W)^2 W' or the gated silu(x G) * (x W) W'."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_hidden, bias=False)
        self.gate = nn.Linear(config.width, config.mlp_hidden, bias=False) if config.mlp == "swiglu" else None
        self.down = nn.Linear(config.mlp_hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x)).square() if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden)


class _Mix(torch.autograd.Function):
    """h_t + sum over k of taps_k * h_(t - k). Written out, since autograd would keep a shifted copy of h for each tap."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(h, taps)
        out = h.clone()
        for k, tap in enumerate(taps, 1):
            out[:, k:] += h[:, :-k] * tap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (h, taps) = grads, ctx.saved_tensors
        back, by_tap = grad.clone(), torch.zeros_like(taps)
        for k, tap in enumerate(taps, 1):
            back[:, :-k] += grad[:, k:] * tap
            by_tap[k - 1] = (grad[:, k:] * h[:, :-k]).sum((0, 1))
        return back, by_tap


class ShortConvolution(nn.Module):
    """Each channel of a position, and some of it of each of the K positions before it; (K, D) taps that start at zero."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(config.short_conv, config.width))

    def forward(self, h: Tensor, tile: LayerTile | None, site: int) -> Tensor:
        """h (N, T, D) -> (N, T, D). With a tile, `site` tells the convolutions of a layer apart."""
        if tile is None:
            taps = self.taps[: h.size(1) - 1]  # those beyond the first position have nothing to mix in
            return _Mix.apply(h, taps) if len(taps) else h  # type: ignore[return-value]
        past = tile.past(site, h, len(self.taps))
        for k, tap in enumerate(self.taps, 1):
            h = h + past[k - 1] * tap
        return h


def leave_out(module: nn.Module, *names: str) -> None:
    """Take weights away that a run has no use for (default: all of the module's own). They were drawn, so what is drawn after them stays the same."""
    gone = names or tuple(name for name, _ in module.named_parameters(recurse=False))
    for name in gone:
        module.register_parameter(name, None)
    module.left_out = gone  # type: ignore[assignment]


def left_out(module: nn.Module) -> set[str]:
    """Names of all weights that were taken away inside a module; files from before they could be may hold them."""
    return {f"{place}.{name}".lstrip(".") for place, inside in module.named_modules() for name in getattr(inside, "left_out", ())}


class TransformerLayer(nn.Module):
    """x + attention, x + feed-forward, each behind a norm that the noise level modulates; without `noisy` by gains and shifts that are fixed."""

    def __init__(self, config: ModelConfig, noisy: bool = True) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.modulation = nn.Linear(config.noise_dim, 4 * config.width)
        self.convolutions = nn.ModuleList(ShortConvolution(config) for _ in range(2 if config.short_conv else 0))
        self.reset_parameters()
        if not noisy:
            leave_out(self.modulation, "weight")

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight", "modulation.weight", "modulation.bias", "taps")):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.size(1) ** -0.5)

    def forward(self, x: Tensor, noise: Tensor | None, cos: Tensor, sin: Tensor, tile: LayerTile | None = None) -> Tensor:
        """x (N, T, D), noise (N, 1 or T, C) or None where no noise level takes part -> (N, T, D)."""
        modulation = self.modulation.bias if noise is None else self.modulation(noise)
        scale_a, shift_a, scale_f, shift_f = modulation.chunk(4, dim=-1)
        x = x + self.attention(self._mixed(rms_norm(x) * (1 + scale_a) + shift_a, tile, 0), cos, sin, tile)
        return x + self.feed_forward(self._mixed(rms_norm(x) * (1 + scale_f) + shift_f, tile, 1))

    def _mixed(self, h: Tensor, tile: LayerTile | None, site: int) -> Tensor:
        return self.convolutions[site](h, tile, site) if self.convolutions else h
