"""The parts of a model that are versioned and travel: the shared interface and each block, with their tensors' shapes and first values.

Only what learns is sent in an update. Which tensors learn follows from the objective (a run without a noisy target never moves the noise
embedding): it is found by one backward pass through a stack of the same structure and the smallest width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from blocktrain.config import RunConfig, make_config, merge_fields
from blocktrain.diffusion.noise import make_partition
from blocktrain.model.transformer import BlockStack, Interface, shapes_only
from blocktrain.seeding import generator
from blocktrain.swarm.protocol import part_of
from blocktrain.training.objective import SpanObjective, make_views

Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
INTERFACE = "interface"


@dataclass(frozen=True)
class Layout:
    """What a run's parts hold. A stand-in for a model may have any tensors: nothing above this knows what they are."""

    blocks: int
    entries: Mapping[str, Entries]  # part -> every tensor of its file
    trainable: Mapping[str, tuple[str, ...]]  # part -> tensors that an update changes, sorted
    initial: Callable[[str], Iterator[tuple[str, Tensor]]]  # the first version of a part, in the order of names
    interface_travels: bool
    starts: int = 1  # blocks at which a span may begin
    only_first: frozenset[str] = frozenset()  # tensors of the interface that only spans from block 0 on move

    def parts_of(self, first: int, stop: int) -> list[str]:
        """Parts that an update of blocks first .. stop - 1 changes."""
        return [*([INTERFACE] if self.interface_travels else []), *(part_of(b) for b in range(first, stop))]

    def part_shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        """Of the tensors that learn, by their names in the part."""
        return {name: self.entries[part][name][1] for name in self.trainable[part]}

    def moved_by(self, first: int, part: str) -> tuple[str, ...]:
        """Tensors of a part that spans from block `first` on move: where blocks are chained, the token embedding only hears of block 0."""
        names = self.trainable[part]
        return names if part != INTERFACE or first == 0 else tuple(name for name in names if name not in self.only_first)

    def num_starts(self, name: str) -> int:
        """At how many blocks spans may begin that move this tensor of the interface."""
        return 1 if name in self.only_first else self.starts

    def update_shapes(self, first: int, stop: int) -> dict[str, tuple[int, ...]]:
        """Of an update of blocks first .. stop - 1, by their names in the update."""
        return {f"{part}/{name}": self.entries[part][name][1] for part in self.parts_of(first, stop) for name in self.moved_by(first, part)}

    @property
    def digest(self) -> str:
        plain = {
            part: {n: [str(d), list(s), n in self.trainable[part]] for n, (d, s) in sorted(e.items())} for part, e in sorted(self.entries.items())
        }
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def layout_of(config: RunConfig) -> Layout:
    """The parts of a run's model."""
    entries: dict[str, Entries] = {}
    trainable: dict[str, tuple[str, ...]] = {}
    learns = _learning(config)
    with shapes_only():
        stack = BlockStack.of(config)
    for part, module in [(INTERFACE, stack.interface), *((part_of(b), stack.block(b)) for b in range(config.model.blocks))]:
        entries[part] = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in module.state_dict().items()}
        role = part if part == INTERFACE else "last" if part == part_of(config.model.blocks - 1) else "block"
        trainable[part] = tuple(sorted(name for name in entries[part] if name in learns[role]))
    only_first = learns[INTERFACE] - learns["interface of later blocks"] if config.model.blocks > 1 else frozenset()
    starts = config.model.blocks - config.round.min_span + 1
    travels = config.outer.interface == "averaged"
    return Layout(config.model.blocks, entries, trainable, lambda part: _initial(config, part), travels, starts, only_first)


def _initial(config: RunConfig, part: str) -> Iterator[tuple[str, Tensor]]:
    held = [] if part == INTERFACE else [int(part.removeprefix("block-"))]
    stack = BlockStack.of(config, held)
    module = stack.interface if part == INTERFACE else stack.block(held[0])
    if part == INTERFACE and config.outer.interface == "frozen":
        _draw_readouts(stack.interface, config.seed)
    yield from sorted(module.state_dict().items())


def _draw_readouts(interface: Interface, seed: int) -> None:
    """Readouts start at zero and learn first; where they never learn, no gradient would ever pass through them to a block."""
    for name, readout in (("head", interface.head), ("denoised", interface.denoised)):
        for weight in readout.parameters():  # none where the run does without
            with torch.no_grad():
                weight.copy_(torch.randn(weight.shape, generator=generator(seed, "frozen", name)) * weight.size(1) ** -0.5)


def _learning(config: RunConfig) -> dict[str, frozenset[str]]:
    """Names of the tensors that get a gradient, by role: interface, interface of later blocks, block, last."""
    text = config.model_copy(update={"evaluate": type(config.evaluate)()}).model_dump_json()
    return _learning_of(text)


@cache
def _learning_of(config_json: str) -> dict[str, frozenset[str]]:
    full = RunConfig.model_validate_json(config_json)
    blocks = min(full.model.blocks, 2)
    small = {"blocks": blocks, "width": 8, "heads": 1, "attention_ratio": 1.0, "positions": 4, "embed_dim": 4, "noise_dim": 2}
    less = {"model": small, "noise": {"partition": "lognormal"}, "objective": {"span": 1, "window": 0}, "round": {"min_span": 1, "max_span": 1}}
    config = make_config(merge_fields(full.model_dump(), less), "layout")
    stack = BlockStack.of(config)
    ids = torch.arange(5)[None]
    views = make_views(config, make_partition(config.noise, blocks), ids[:, :-1], ids[:, 1:], 0)
    found: dict[str, frozenset[str]] = {}
    for b in range(blocks):
        stack.interface.zero_grad(set_to_none=True)
        SpanObjective(stack, config, views).loss((b, b + 1)).loss.backward()
        found["interface of later blocks" if b else INTERFACE] = _with_gradient(stack.interface)
    found[INTERFACE] |= found.get("interface of later blocks", frozenset())
    return found | {"block": _with_gradient(stack.block(0)), "last": _with_gradient(stack.block(blocks - 1))}


def _with_gradient(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in module.named_parameters() if parameter.grad is not None)
