"""Who holds what of a run, in bytes: parameters, gradients, optimizer moments, and the activations of `report/activations.py`.

Three holdings are counted:

  worker   one span: its blocks and the interface in training, and, where blocks are chained, the frozen weights before it, or, where they learn
           from their common vote, frozen weights of everything
  machine  the run on one machine: the same where blocks are trained one after another; where they are interleaved, every block with its
           gradients and moments, but one span's activations at a time; those of all blocks where they learn from their common vote
  full     the end-to-end Transformer of the same layers: the worker of one span over everything, under `reference_config`

Parameter counts come from the real modules (on the meta device, so any shape can be asked for), and only what a loss reaches has a gradient and
moments. All of it is checked against real steps.

Left out on purpose: the numbers with which optimizers count steps, rotary tables, library workspaces, what lives for an instant inside an
operation or an optimizer, and `train.ema` (one more copy of the weights).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from blocktrain.config import RunConfig
from blocktrain.model.transformer import VOCABULARY, DenoisingBlock, Interface, parameter_count, shapes_only
from blocktrain.report.activations import FLOAT32, Precision, span_activations
from blocktrain.training.objective import Span, spans_of


@dataclass(frozen=True)
class Part:
    """One row: a piece of the model and the bytes it takes. `activations` is None where the shape is not known."""

    name: str
    num_parameters: int
    parameters: int
    gradients: int
    moments: int
    activations: int | None

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.moments + (self.activations or 0)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "total": self.total}


@dataclass(frozen=True)
class Holding:
    """Who holds which parts."""

    name: str
    parts: tuple[Part, ...]

    @property
    def total(self) -> Part:
        known = [part.activations for part in self.parts if part.activations is not None]
        return Part(
            "total",
            num_parameters=sum(part.num_parameters for part in self.parts),
            parameters=sum(part.parameters for part in self.parts),
            gradients=sum(part.gradients for part in self.parts),
            moments=sum(part.moments for part in self.parts),
            activations=sum(known) if known else None,
        )

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "parts": [part.to_json() for part in self.parts], "total": self.total.to_json()}


@dataclass(frozen=True)
class Count:
    """Parameters of a piece: all, those that Muon may train, and those that the loss reaches."""

    all: int
    matrices: int
    reached: int

    def part(self, name: str, p: Precision, optimizer: str, activations: int) -> Part:
        """This piece in training: Muon has one moment per number of a matrix, AdamW two per number."""
        moments = 2 * self.reached - (self.matrices if optimizer == "muon" else 0)
        return Part(name, self.all, self.all * p.weights, self.reached * p.gradients, moments * p.moments, activations)

    def frozen(self, name: str, p: Precision) -> Part:
        return Part(name, self.all, self.all * p.weights, 0, 0, 0)


def count_layer(config: RunConfig) -> Count:
    """One transformer layer. Without a noise level the modulation is its bias alone."""
    with shapes_only():
        block = DenoisingBlock(config.model.model_copy(update={"layers_per_block": 1}), noisy=config.objective.noisy)
    layer = parameter_count(block.layers)
    return Count(layer, sum(p.numel() for p in block.matrices()), layer)


def count_interface(config: RunConfig, first: int = 0) -> Count:
    """The interface, trained from block `first` on. Which of its tables a loss reaches depends on the loss and on where its gradient ends."""
    with shapes_only():
        interface = Interface(config.model, config.objective.noisy)
    mse = config.objective.loss == "embedding_mse"
    unreached: list[nn.Module] = [interface.head, interface.targets] if mse else [interface.denoised]
    if config.objective.input == "upstream" and first:
        unreached.append(interface.tokens)
    total = parameter_count(interface)
    sharpness = 0 if mse or not config.objective.noisy else interface.log_sharpness.numel()
    return Count(total, 0, total - sum(parameter_count(m) for m in unreached) - sharpness)


def count_blocks(config: RunConfig, blocks: range) -> Count:
    """Some consecutive blocks, each with its gain and, where it has them, its head and (not the last of the stack) its private layers."""
    last = config.model.blocks - 1 in blocks
    layers = len(blocks) * config.model.layers_per_block + (len(blocks) - last) * config.objective.private_layers
    layer, gains = count_layer(config), read_out_weights(config) * len(blocks)
    return Count(layers * layer.all + gains, layers * layer.matrices, layers * layer.reached + gains)


def read_out_weights(config: RunConfig) -> int:
    """Parameters of a block that only its own read-out passes: the gain, and its head if it has one."""
    return config.model.width * (1 + VOCABULARY * config.model.block_heads)


def blocks_name(blocks: range) -> str:
    """`block 2`, or `blocks 2-4`, for people."""
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}"


def count_trained(config: RunConfig, blocks: range, ends: int) -> Count:
    """Blocks in training, of which the last `ends` end a span: only through those do losses reach a block's gain and private layers."""
    objective = config.objective
    unheard = len(blocks) - ends
    count, layer = count_blocks(config, blocks), count_layer(config)
    skipped = unheard * objective.private_layers
    return Count(count.all, count.matrices - skipped * layer.matrices, count.reached - skipped * layer.reached - unheard * read_out_weights(config))


def span_holding(config: RunConfig, span: Span, p: Precision, name: str) -> Holding:
    """The interface and the blocks of a span in training, and what its worker holds frozen."""
    interface_bytes, block_bytes = span_activations(config, span, p)
    optimizer, blocks, before = config.train.optimizer, range(*span), range(span[0])
    parts = [count_interface(config, span[0]).part("interface", p, optimizer, interface_bytes)]
    if config.objective.input == "upstream" and before:
        parts.append(count_blocks(config, before).frozen(f"{blocks_name(before)}, frozen", p))
    if config.objective.vote_weight:
        voters = range(config.model.blocks)
        parts += [count_interface(config).frozen("interface, frozen", p), count_blocks(config, voters).frozen(f"{blocks_name(voters)}, frozen", p)]
    return Holding(name, (*parts, count_trained(config, blocks, 1).part(blocks_name(blocks), p, optimizer, block_bytes)))


def machine_holding(config: RunConfig, p: Precision) -> Holding:
    """This run on one machine."""
    if config.train.order == "sequential":
        return dataclasses.replace(span_holding(config, largest_span(config, p), p, ""), name="this run, one block after another")
    spans, blocks = spans_of(config.model.blocks, config.objective.span), range(config.model.blocks)
    interface_bytes, block_bytes = max((span_activations(config, span, p) for span in spans), key=sum)
    if config.objective.vote_weight and config.train.samples != "own":  # all blocks speak before one learns
        votes = config.train.batch_size * config.model.positions * VOCABULARY * FLOAT32
        interface_bytes, block_bytes = interface_bytes + (len(spans) - 1) * votes, len(spans) * block_bytes
    parts = (
        count_interface(config).part("interface", p, config.train.optimizer, interface_bytes),
        count_trained(config, blocks, len(spans)).part(blocks_name(blocks), p, config.train.optimizer, block_bytes),
    )
    return Holding("this run, every block at each step", parts)


MUCH_TEXT = 10  # bytes trained on for each parameter; see docs/experiments.md, "members that know of each other"


def advice(config: RunConfig) -> list[str]:
    """What is known to do better than these settings, in a sentence each with its figure's place."""
    model = config.model
    if model.blocks == 1 or not (config.objective.alone and config.objective.votes) or config.objective.vote_weight:
        return []
    text = config.train.steps * config.tokens_per_step / (count_interface(config).all + count_blocks(config, range(model.blocks)).all)
    if text < MUCH_TEXT or config.train.order == "sequential":
        return []
    return [
        f"{text:.0f} bytes of text for each parameter: blocks that vote and know nothing of each other fall behind end-to-end training there; "
        "--set objective.vote_weight=0.8 --set objective.vote_from=0.5 --set model.block_heads=true comes close to it (docs/concepts.md)"
    ]


def largest_span(config: RunConfig, p: Precision) -> Span:
    """The span whose worker holds most: later ones have more frozen weights before them, only the very last has no private layers."""
    spans = spans_of(config.model.blocks, config.objective.span)
    return max({spans[0], *spans[-2:]}, key=lambda span: (span_holding(config, span, p, "").total.total, -span[0]))
