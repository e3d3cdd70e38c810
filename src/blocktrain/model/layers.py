"""One causal transformer layer.

N batch, T positions, D width, H heads of K channels, C noise-level embedding width.

Notable: RMSNorm without a gain of its own, because the noise-level modulation (adaLN) carries one gain and one shift per channel and sub-layer;
rotary positions; queries and keys normalised per head; ReLU^2 or SwiGLU feed-forward; what a sub-layer reads may be mixed with that of a few earlier
positions (a depthwise short convolution, as in "Physics of Language Models: Part 4.1", Allen-Zhu 2025); projections into the residual stream start
at zero, so a fresh layer is the identity. Left out: biases in matrices, dropout (one pass over the text), output gates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import ModelConfig
from blocktrain.model.fused import gate_project, heads_project, norm_rotate, project, rms_norm, square_project
from blocktrain.model.memory import LayerTile


def rotary_table(positions: int, width: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE (Su et al. 2021, base 10,000), each (positions, width / 2) float32."""
    frequency = 10000.0 ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions and normalised queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.attention_width, bias=False)
        self.key = nn.Linear(config.width, config.attention_width, bias=False)
        self.value = nn.Linear(config.width, config.attention_width, bias=False)
        self.out = nn.Linear(config.attention_width, config.width, bias=False)

    @property
    def entries(self) -> tuple[Tensor, ...]:
        """The matrices that read the stream."""
        return self.query.weight, self.key.weight, self.value.weight

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, tile: LayerTile | None = None) -> Tensor:
        """What the entries gave, (N, T, H K) each -> (N, T, D)."""
        n, t = q.shape[:2]
        q, k, v = (x.view(n, t, self.heads, -1).transpose(1, 2) for x in (q, k, v))  # (N, H, T, K)
        q, k = norm_rotate(q, cos, sin), norm_rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if tile is None else tile.attend(q, k, v)
        return heads_project(y, self.out.weight)


class FeedForward(nn.Module):
    """relu(x W)^2 W' or the gated silu(x G) * (x W) W'."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_hidden, bias=False)
        self.gate = nn.Linear(config.width, config.mlp_hidden, bias=False) if config.mlp == "swiglu" else None
        self.down = nn.Linear(config.mlp_hidden, config.width, bias=False)

    @property
    def entries(self) -> tuple[Tensor, ...]:
        """The matrices that read the stream."""
        return (self.up.weight,) if self.gate is None else (self.gate.weight, self.up.weight)

    def forward(self, *entered: Tensor) -> Tensor:
        """What the entries gave, (N, T, F) each -> (N, T, D)."""
        if self.gate is None:
            (up,) = entered
            return square_project(up, self.down.weight)
        gate, up = entered
        return gate_project(gate, up, self.down.weight)


class ShortConvolution(nn.Module):
    """Each channel of a position, and some of it of each of the K positions before it; (K, D) taps that start at zero."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(config.short_conv, config.width))

    def forward(self, h: Tensor, tile: LayerTile, site: int) -> Tensor:
        """h (1, R, D) of a tile -> (1, R, D). `site` tells the convolutions of a layer apart."""
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
        x = x + self.attention(*self._entered(x, 1 + scale_a, shift_a, self.attention.entries, tile, 0), cos, sin, tile)
        return x + self.feed_forward(*self._entered(x, 1 + scale_f, shift_f, self.feed_forward.entries, tile, 1))

    @property
    def _taps(self) -> list[Tensor] | list[None]:
        """Of both sub-layers."""
        return [convolution.taps for convolution in self.convolutions if isinstance(convolution, ShortConvolution)] or [None, None]

    def _entered(self, x: Tensor, gain: Tensor, shift: Tensor, matrices: tuple[Tensor, ...], tile: LayerTile | None, site: int) -> tuple[Tensor, ...]:
        """The stream as a sub-layer reads it, times the matrices that read it."""
        if tile is None:
            return project(x, gain, shift, self._taps[site], *matrices)
        read = rms_norm(x) * gain + shift
        if self.convolutions:
            read = self.convolutions[site](read, tile, site)
        return tuple(F.linear(read, matrix) for matrix in matrices)
