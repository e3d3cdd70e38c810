"""The interface that all blocks share, a block of layers, and the stack of both.

N batch, T positions, D width, E target-embedding width, V vocabulary (256 bytes), C noise-level embedding width.

A `DenoisingBlock` is the unit that is trained, versioned, averaged and served. It never looks at another block: what it needs of the one before
it comes in as a state (N, T, D). A `BlockStack` may hold any subset of the blocks (a worker or a stage holds one). Weights are drawn block by
block from (seed, block), so whoever makes block 2 makes the same block 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from blocktrain.config import ModelConfig, RunConfig
from blocktrain.model.fused import head_loss, project, rms_norm
from blocktrain.model.layers import TransformerLayer, leave_out, rotary_table
from blocktrain.model.memory import BlockMemory, BlockTile, LayerTile
from blocktrain.seeding import fold

VOCABULARY = 256  # bytes
MASK_ID = 256  # context id of a masked position; never a target


class NoiseEmbedding(nn.Module):
    """c_noise -> C: sines and cosines of the level, then one linear layer and SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frequency: Tensor
        self.register_buffer("frequency", torch.logspace(0, 5, width // 2, base=2.0), persistent=False)
        self.mix = nn.Linear(width, width)

    def forward(self, level: Tensor) -> Tensor:
        """level (...) -> (..., C)."""
        angle = level[..., None] * self.frequency
        return F.silu(self.mix(torch.cat((angle.cos(), angle.sin()), dim=-1)))


class Interface(nn.Module):
    """Token embedding and head; and with `noisy` the target embedding, the entry of the noisy target and the noise-level embedding."""

    def __init__(self, config: ModelConfig, noisy: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY + 1, config.width)
        self.targets = nn.Embedding(VOCABULARY, config.embed_dim)
        self.enter = nn.Linear(config.embed_dim, config.width, bias=False)
        self.noise = NoiseEmbedding(config.noise_dim)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        # Only the embedding_mse objective uses these two: the denoised embedding, and the sharpness with which it is read as logits.
        self.denoised = nn.Linear(config.width, config.embed_dim, bias=False)
        self.log_sharpness = nn.Parameter(torch.zeros(()))
        self.reset_parameters()
        if not noisy:
            for unused in (self.targets, self.enter, self.noise.mix, self.denoised):
                leave_out(unused)
            leave_out(self, "log_sharpness")
        if config.block_heads:
            leave_out(self.head)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.targets.weight)
        nn.init.normal_(self.enter.weight, std=self.enter.weight.size(1) ** -0.5)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.denoised.weight)

    def target_embeddings(self) -> Tensor:
        """(V, E), unit L2 norm; the only form in which targets are noised, scored and averaged."""
        return F.normalize(self.targets.weight.float(), dim=-1)


class DenoisingBlock(nn.Module):
    """A run of consecutive layers, the gain in front of its read-out, and what may be its own: a head, decoder layers that are not handed on."""

    def __init__(self, config: ModelConfig, private_layers: int = 0, noisy: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config, noisy) for _ in range(config.layers_per_block))
        self.private = nn.ModuleList(TransformerLayer(config, noisy) for _ in range(private_layers))
        self.out_gain = nn.Parameter(torch.ones(config.width))
        self.head = nn.Linear(config.width, VOCABULARY, bias=False) if config.block_heads else None
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
        self.config = config
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rotary_table(config.positions, config.head_width)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, state: Tensor, noise: Tensor | None, tile: BlockTile | None = None) -> Tensor:
        """state (N, T, D) in, state (N, T, D) out: what the next block is handed. With a tile, (1, TILE, D) rows of texts that are remembered."""
        return self._run(self.layers, state, noise, tile, tile and tile.layers)

    def read(self, head: nn.Linear, state: Tensor, noise: Tensor | None, tile: BlockTile | None = None) -> Tensor:
        """What a head says of the block's own state (N, T, D), through its private layers and normalised: (N, T, rows of the head).

        The block's own head where it has one, whatever is given.
        """
        state, head = self._run(self.private, state, noise, tile, tile and tile.private), head if self.head is None else self.head
        if tile is None:
            return project(state, self.out_gain, None, None, head.weight)[0]
        return head(rms_norm(state) * self.out_gain)

    def loss(
        self, head: nn.Linear, state: Tensor, noise: Tensor | None, y: Tensor, weight: Tensor, others: Tensor | None = None, vote_weight: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """The weighted cross entropy of what `read` gives, without ever holding all of it: see `head_loss`."""
        head = head if self.head is None else self.head
        return head_loss(self._run(self.private, state, noise, None, None), self.out_gain, head.weight, y, weight, others, vote_weight)

    def _run(
        self, layers: Iterable[nn.Module], x: Tensor, noise: Tensor | None, tile: BlockTile | None, attention: Sequence[LayerTile] | None
    ) -> Tensor:
        places = slice(x.size(1)) if tile is None else tile.positions
        cos, sin = self.cos[places], self.sin[places]
        for i, layer in enumerate(layers):
            x = layer(x, noise, cos, sin, attention[i] if attention else None)
        return x

    def matrices(self) -> list[nn.Parameter]:
        """The hidden matrices, which Muon trains; everything else is AdamW's."""
        layers = (*self.layers, *self.private)
        return [p for layer in layers for name, p in layer.named_parameters() if name.startswith(("attention.", "feed_forward."))]


class BlockStack(nn.Module):
    """The interface and some or all blocks of a run. Without `noisy` it has no weights that only a noisy target would use."""

    def __init__(self, config: ModelConfig, *, seed: int, private_layers: int = 0, blocks: Iterable[int] | None = None, noisy: bool = True) -> None:
        super().__init__()
        self.config = config
        self.private_layers = private_layers
        self.noisy = noisy
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(fold(seed, "interface"))
            self.interface = Interface(config, noisy)
            held = range(config.blocks) if blocks is None else blocks
            self.blocks = nn.ModuleDict({str(b): self._make_block(b, seed) for b in held})

    @classmethod
    def of(cls, config: RunConfig, blocks: Iterable[int] | None = None) -> BlockStack:
        """The stack of a run as it was drawn, or some blocks of it."""
        objective = config.objective
        return cls(config.model, seed=config.seed, private_layers=objective.private_layers, blocks=blocks, noisy=objective.noisy)

    def _make_block(self, index: int, seed: int) -> DenoisingBlock:
        torch.manual_seed(fold(seed, "block", index))
        last = index == self.config.blocks - 1
        return DenoisingBlock(self.config, 0 if last else self.private_layers, self.noisy)

    def block(self, index: int) -> DenoisingBlock:
        block = self.blocks[str(index)]
        assert isinstance(block, DenoisingBlock)
        return block

    @property
    def held(self) -> list[int]:
        """Indices of the blocks that are here, rising."""
        return sorted(int(name) for name in self.blocks)

    def memory(self, index: int) -> BlockMemory:
        """An empty memory of one text for a block."""
        return BlockMemory(self.config, len(self.block(index).private))


class _NoDraws(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules made inside have shapes and no numbers.

    Draws are left out, since on the meta device torch would make them by reference code that takes seconds to import.
    """
    with torch.device("meta"), _NoDraws(), torch.random.fork_rng(devices=[]):
        yield


def layer_flops(config: ModelConfig) -> int:
    """Forward floating-point operations of one layer per token: 2 per weight of a matrix and per tap, causal attention over T / 2 keys on average."""
    return 2 * config.layer_matrices + 2 * config.attention_width * config.positions + 2 * 2 * config.short_conv * config.width


def parameter_count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
