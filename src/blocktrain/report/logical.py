"""A model of many parameters that is *logical*: every layer of a host is the same physical layer.

The arithmetic of a step is that of the whole model, layer after layer, and so is what goes over the wire and what is kept of a text; memory holds one
layer a host. What it says is random. A processor's cache that holds one layer would serve them all, which it could not in the real model: a layer
must be larger than the cache (`Sizes.bytes_per_host`). The tables are of bytes, so they are next to nothing here.

D width, L layers. A layer has 12 D^2 weights in its matrices, and C + 1 rows of 4 D that the noise level modulates it with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from blocktrain.config import ORDINARY, ModelConfig, RunConfig, make_config
from blocktrain.diffusion.noise import make_partition
from blocktrain.errors import ConfigError, MemoryLimitError
from blocktrain.model.transformer import BlockStack, parameter_count, shapes_only
from blocktrain.report.measure import available_memory
from blocktrain.training.checkpoint import LoadedRun
from blocktrain.training.hardware import choose_hardware

HEAD = 64  # channels of a head; widths are multiples of it
NOISE_DIM = 64
ASPECT = 100  # D / L of published models of this kind: 8,192 / 80, 12,288 / 96
POSITIONS = 256
GIB = 1 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def layer_parameters(width: int) -> int:
    return 12 * width**2 + (NOISE_DIM + 1) * 4 * width


def choose_shape(parameters: float, hosts: int) -> ModelConfig:
    """The shape whose layers split evenly over `hosts`, within 1 % of `parameters` where one is, and of the usual aspect.

    Raises ConfigError where the number is too small for one layer a host.
    """
    if not (math.isfinite(parameters) and parameters >= hosts * layer_parameters(2 * HEAD)):
        raise ConfigError(f"--logical-params: must be at least {hosts * layer_parameters(2 * HEAD):,} for {hosts} hosts, got {parameters:g}")

    def cost(shape: tuple[int, int]) -> float:
        width, layers = shape
        error = abs(math.log(layers * layer_parameters(width) / parameters))
        return 100 * max(0.0, error - 0.01) + abs(math.log(width / layers / ASPECT))

    most = int(parameters / layer_parameters(2 * HEAD))
    widths = {layers: round(math.sqrt(parameters / layers / 12) / HEAD) * HEAD for layers in range(hosts, min(most, 400 * hosts) + 1, hosts)}
    width, layers = min(((width, layers) for layers, width in widths.items() if width), key=lambda pair: cost(pair))
    return ModelConfig(
        blocks=hosts,
        layers_per_block=layers // hosts,
        width=width,
        heads=width // HEAD,
        positions=POSITIONS,
        **ORDINARY,
        embed_dim=128,
        noise_dim=NOISE_DIM,
    )


def logical_config(parameters: float, hosts: int, dtype: str, window: int) -> RunConfig:
    """Settings of a run of that shape which can sweep `window` + 1 bytes a traversal. Raises ConfigError."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: must be one of {', '.join(DTYPES)}, got {dtype}")
    objective = {"input": "upstream", "denoise_weight": 1.0, "anchor_weight": 1.0, "start": "zero", "window": window}
    model = choose_shape(parameters, hosts).model_dump()
    return make_config({"model": model, "objective": objective, "train": {"precision": dtype}}, "--logical-params")


@dataclass(frozen=True)
class Sizes:
    """What the shape has, and what of it is in memory."""

    parameters: int  # logical
    physical: int  # on each host
    bytes_per_parameter: int

    @property
    def bytes_per_host(self) -> int:
        return self.physical * self.bytes_per_parameter


def sizes_of(config: RunConfig) -> Sizes:
    """Counted on a stack without memory."""
    model = config.model
    with shapes_only():
        one = BlockStack(model.model_copy(update={"layers_per_block": 1}), seed=0, blocks=[0])
    layer = sum(p.numel() for p in one.block(0).layers.parameters())
    physical = parameter_count(one)
    itemsize = DTYPES[config.train.precision].itemsize
    return Sizes(physical + layer * (model.layers - 1) + model.width * (model.blocks - 1), physical, itemsize)


def require_memory(config: RunConfig, hosts_here: int) -> None:
    """Raises MemoryLimitError where so many hosts do not fit on this machine; a layer is made in float32 before it is converted."""
    sizes, have = sizes_of(config), available_memory(choose_hardware(config).device)
    need = hosts_here * (sizes.bytes_per_host + GIB // 2) + sizes.physical * 4
    if need > have:
        raise MemoryLimitError(
            f"--logical-params: one layer for each of {hosts_here} hosts needs about {need / GIB:.1f} GiB, {have / GIB:.1f} GiB are free; "
            "give fewer parameters, or --dtype bfloat16"
        )


def logical_run(config: RunConfig, blocks: range) -> LoadedRun:
    """A run whose `blocks` are here, every layer of them the same module."""
    model = config.model
    stack = BlockStack(model.model_copy(update={"layers_per_block": 1}), seed=config.seed, blocks=blocks[:1])
    block = stack.block(blocks[0])
    block.layers = nn.ModuleList([block.layers[0]] * model.layers_per_block)
    block.config = stack.config = model
    for b in blocks[1:]:
        stack.blocks[str(b)] = block
    stack = stack.to(DTYPES[config.train.precision]).eval().requires_grad_(False)
    partition = make_partition(config.noise, model.blocks)
    return LoadedRun(Path("logical"), config, config, None, stack, partition)  # type: ignore[arg-type]
