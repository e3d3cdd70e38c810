"""What one active worker holds against what the end-to-end stack would: parameters, gradients, moments, activations, in bytes.

Three holdings are counted for a run:

  worker   one span: its blocks and the interface in training, and, where blocks are chained, the frozen weights before it
  machine  this run on one machine: the same where blocks are trained one after another; every block with its gradients and moments, but one span's
           activations at a time, where they are interleaved
  full     the end-to-end Transformer of the same layers: everything at once

Parameter counts come from the real modules (on the meta device, so any shape can be asked for), and only what the loss reaches has a gradient and moments.
Activations come from `report/activations.py`. All of it is checked against real steps, and `measure_block_step` runs one in a fresh process.

Left out on purpose: the few numbers per tensor that optimizers count steps with, rotary tables, library workspaces, and `train.ema` (one more copy of the weights).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.table import Table

from blocktrain.config import ModelConfig, RunConfig, reference_config
from blocktrain.errors import ConfigError, MemoryLimitError
from blocktrain.model.layers import TransformerLayer
from blocktrain.model.transformer import DenoisingBlock, Interface, parameter_count
from blocktrain.report.activations import PRECISIONS, Precision, span_activations
from blocktrain.report.measure import available_memory, peak_memory
from blocktrain.training.hardware import choose_hardware
from blocktrain.training.objective import Span, spans_of

GIB = 2**30


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
        sums = [sum(getattr(part, key) for part in self.parts) for key in ("num_parameters", "parameters", "gradients", "moments")]
        return Part("total", *sums, sum(known) if known else None)

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "parts": [part.to_json() for part in self.parts], "total": self.total.to_json()}


@dataclass(frozen=True)
class Measured:
    """Peak resident bytes of real optimizer steps in fresh processes, over what the process held before the model was built."""

    worker: int
    full: int
    worker_over_accounting: float
    full_over_accounting: float
    worker_over_full: float


@dataclass(frozen=True)
class MemoryReport:
    """The accounting, the convention it follows, and what was measured."""

    worker: Holding
    machine: Holding | None  # None where only a parameter count is known
    full: Holding
    dtype: str
    optimizer: str
    convention: str
    measured: Measured | None = None

    @property
    def worker_over_full(self) -> float:
        return self.worker.total.total / self.full.total.total

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "optimizer": self.optimizer,
            "convention": self.convention,
            "worker": self.worker.to_json(),
            "machine": self.machine.to_json() if self.machine else None,
            "full": self.full.to_json(),
            "worker_over_full": self.worker_over_full,
            "measured": dataclasses.asdict(self.measured) if self.measured else None,
        }


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
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        layer = TransformerLayer(config.model)
        block = DenoisingBlock(config.model.model_copy(update={"layers_per_block": 1}))
    unreached = 0 if config.objective.noisy else layer.modulation.weight.numel()
    return Count(parameter_count(layer), sum(p.numel() for p in block.matrices()), parameter_count(layer) - unreached)


def count_interface(config: RunConfig, first: int = 0) -> Count:
    """The interface, trained from block `first` on. Which of its tables a loss reaches depends on the loss and on where its gradient ends."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        interface = Interface(config.model)
    mse = config.objective.loss == "embedding_mse"
    unreached = [interface.head, interface.targets] if mse else [interface.denoised]
    if config.objective.input == "upstream" and first:
        unreached.append(interface.tokens)
    if not config.objective.noisy:
        unreached += [interface.targets, interface.enter, interface.noise]
    total = parameter_count(interface)
    return Count(total, 0, total - sum(parameter_count(m) for m in unreached) - (0 if mse else interface.log_sharpness.numel()))


def count_blocks(config: RunConfig, blocks: range) -> Count:
    """Some consecutive blocks, each with its gain and, unless it is the last of the stack, its private layers."""
    last = config.model.blocks - 1 in blocks
    layers = len(blocks) * config.model.layers_per_block + (len(blocks) - last) * config.objective.private_layers
    layer, gains = count_layer(config), config.model.width * len(blocks)
    return Count(layers * layer.all + gains, layers * layer.matrices, layers * layer.reached + gains)


def _blocks_name(blocks: range) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}"


def count_trained(config: RunConfig, blocks: range, ends: int) -> Count:
    """Blocks in training, of which the last `ends` end a span: only through those do losses reach a block's gain and private layers."""
    objective, model = config.objective, config.model
    unheard = len(blocks) - ends
    count, layer = count_blocks(config, blocks), count_layer(config)
    skipped = unheard * objective.private_layers
    return Count(count.all, count.matrices - skipped * layer.matrices, count.reached - skipped * layer.reached - unheard * model.width)


def span_holding(config: RunConfig, span: Span, p: Precision, name: str) -> Holding:
    """The interface and the blocks of a span in training, and the frozen blocks in front of it where blocks are chained."""
    interface_bytes, block_bytes = span_activations(config, span, p)
    optimizer, blocks, before = config.train.optimizer, range(*span), range(span[0])
    parts = [count_interface(config, span[0]).part("interface", p, optimizer, interface_bytes)]
    if config.objective.input == "upstream" and before:
        parts.append(count_blocks(config, before).frozen(f"{_blocks_name(before)}, frozen", p))
    return Holding(name, (*parts, count_trained(config, blocks, 1).part(_blocks_name(blocks), p, optimizer, block_bytes)))


def machine_holding(config: RunConfig, p: Precision) -> Holding:
    """This run on one machine."""
    if config.train.order == "sequential":
        return dataclasses.replace(span_holding(config, largest_span(config, p), p, ""), name="this run, one block after another")
    spans, blocks = spans_of(config.model.blocks, config.objective.span), range(config.model.blocks)
    interface_bytes, block_bytes = max((span_activations(config, span, p) for span in spans), key=sum)
    parts = (
        count_interface(config).part("interface", p, config.train.optimizer, interface_bytes),
        count_trained(config, blocks, len(spans)).part(_blocks_name(blocks), p, config.train.optimizer, block_bytes),
    )
    return Holding("this run, every block at each step", parts)


def largest_span(config: RunConfig, p: Precision) -> Span:
    """The span whose worker holds most."""
    return max(spans_of(config.model.blocks, config.objective.span), key=lambda span: span_holding(config, span, p, "").total.total)


def precision_name(config: RunConfig) -> str:
    """The precision that the trainer would take here."""
    return "mixed" if choose_hardware(config.train.model_copy(update={"device": "auto"})).dtype == torch.bfloat16 else "float32"


def _precision(dtype: str) -> Precision:
    if dtype not in PRECISIONS:
        raise ConfigError(f"--dtype {dtype}: known: {', '.join(PRECISIONS)}")
    return PRECISIONS[dtype]


def memory_report(config: RunConfig, *, dtype: str | None = None, span: Span | None = None, measure: bool = False) -> MemoryReport:
    """Count what the worker of `span` (default: the one that holds most) and the end-to-end stack hold; with `measure` also run one step of both.

    `dtype` is a key of PRECISIONS, by default what the trainer would take on this machine. Raises MemoryLimitError if what is to be measured does not fit.
    """
    dtype = dtype or precision_name(config)
    p = _precision(dtype)
    span = span or largest_span(config, p)
    whole = reference_config(config)
    worker = span_holding(config, span, p, f"worker of {_blocks_name(range(*span))}")
    full = span_holding(whole, (0, config.model.blocks), p, "end-to-end stack")
    optimizer = "muon for matrices, adamw for the rest" if config.train.optimizer == "muon" else "adamw"
    report = MemoryReport(worker, machine_holding(config, p), full, dtype, optimizer, p.meaning)
    if not measure:
        return report
    if dtype != precision_name(config):
        raise ConfigError(f"--dtype {dtype}: only what the trainer does here ({precision_name(config)}) can be measured")
    peaks = measure_block_step(config, "block", span=span), measure_block_step(config, "end_to_end")
    measured = Measured(*peaks, peaks[0] / worker.total.total, peaks[1] / full.total.total, peaks[0] / peaks[1])
    return dataclasses.replace(report, measured=measured)


def shape_report(params: float, blocks: int, dtype: str = "float32", optimizer: str = "adamw") -> MemoryReport:
    """The accounting where only a number of parameters is known: evenly in blocks, no activations, all of them matrices to Muon."""
    p = _precision(dtype)
    if not (math.isfinite(params) and params >= 1):
        raise ConfigError(f"--params {params}: must be a number of parameters, for example --params 75.8e9")
    if not 1 <= blocks <= params:
        raise ConfigError(f"--blocks {blocks}: must be between 1 and --params")
    if optimizer not in ("adamw", "muon"):
        raise ConfigError(f"--optimizer {optimizer}: known: adamw, muon")
    moments = 2 if optimizer == "adamw" else 1

    def holding(name: str, part: str, count: int) -> Holding:
        return Holding(name, (Part(part, count, count * p.weights, count * p.gradients, count * moments * p.moments, None),))

    each = math.ceil(params / blocks)
    convention = f"{p.weights} B weight + {p.gradients} B gradient + {moments} x {p.moments} B moments per parameter; activations need a shape"
    return MemoryReport(
        holding("worker of one block", "block", each),
        None,
        holding("end-to-end stack", "all blocks", int(params)),
        dtype,
        optimizer,
        convention,
    )


def measure_block_step(config: RunConfig, kind: Literal["block", "end_to_end"], *, span: Span | None = None, steps: int = 2) -> int:
    """Peak resident bytes of optimizer steps in a fresh process, over what it held before the model was built.

    "block": the worker of `span` (default: the one that holds most) as `config` says; with `objective.input = independent` that is the interface and one block.
    "end_to_end": the whole stack of reference_config(config). The second step meets the moments that the first has made, as every later one does.
    Raises MemoryLimitError if the accounting exceeds the memory there is.
    """
    config = reference_config(config) if kind == "end_to_end" else config
    p = PRECISIONS[precision_name(config)]
    span = (0, config.model.blocks) if kind == "end_to_end" else span or largest_span(config, p)
    need, have = span_holding(config, span, p, "").total.total, available_memory(choose_hardware(config.train).device)
    if need > have:
        raise MemoryLimitError(
            f"{kind} step needs about {need} bytes ({need / GIB:.2f} GiB), this machine has {have} ({have / GIB:.2f} GiB) free; "
            "make model.width, train.batch_size or model.positions smaller"
        )
    first = 0 if config.objective.input == "upstream" else span[0]
    return peak_memory({"config": config.model_dump(mode="json"), "span": list(span), "held": list(range(first, span[1])), "steps": steps})


@dataclass(frozen=True)
class PaperFigure:
    """A figure of arXiv 2606.24722 and a shape of *ours* that gives it; the paper's own shapes are not known to us."""

    name: str
    paper_gib: float
    model: ModelConfig
    num_parameters: int
    bytes_per_parameter: int
    note: str

    @property
    def gib(self) -> float:
        return self.num_parameters * self.bytes_per_parameter / GIB

    @property
    def lowest_and_highest(self) -> tuple[int, int]:
        """The parameter counts that round to the paper's figure under this convention, as many decimals as it prints."""
        half = 0.5 * 10 ** -len(str(self.paper_gib).partition(".")[2])
        low, high = ((self.paper_gib + sign * half) * GIB / self.bytes_per_parameter for sign in (-1, 1))
        return math.ceil(low), math.floor(high)

    def to_json(self) -> dict[str, Any]:
        model = self.model.model_dump(mode="json")
        return {**dataclasses.asdict(self), "model": model, "gib": self.gib, "parameters_that_give_it": self.lowest_and_highest}


def paper_figures() -> list[PaperFigure]:
    """How "0.198 GiB active AdamW state" and "100.54 GiB full-stack AdamW state" can come about: *our* reconstruction.

    AdamW's state is its two moments; in float32 they take 8 B a parameter, so the figures stand for 26.5 to 26.6 million and 13.49 billion parameters. (If weights
    and gradients were counted in, 16 B, for half of that.) Their ratio is 507: one shape with equal blocks would have more than 500 of them, so they are taken to be
    two shapes. Both shapes below are round numbers of our own modules that hit within rounding, and nothing says that they are the paper's.
    """
    active = RunConfig(model=ModelConfig(width=1024, heads=16))
    full = RunConfig(model=ModelConfig(blocks=166, layers_per_block=4, width=1280, heads=20, noise_dim=128))
    note = "moments alone, float32"
    return [
        PaperFigure(
            "active AdamW state",
            0.198,
            active.model,
            count_interface(active).all + count_blocks(active, range(1)).all,
            8,
            f"{note}; interface and one block",
        ),
        PaperFigure(
            "full-stack AdamW state",
            100.54,
            full.model,
            count_interface(full).all + count_blocks(full, range(166)).all,
            8,
            f"{note}; interface and all blocks",
        ),
    ]


def _size(count: int | None) -> str:
    """Bytes for people."""
    if count is None:
        return "unknown"
    power = min(4, max(0, int(math.log(count, 1024)))) if count else 0
    return f"{count / 1024**power:,.{0 if power == 0 else 2}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def render(report: MemoryReport) -> Table:
    """The report as one table: a section for each holding, then the ratio, then what was measured."""
    table = Table(title=f"memory, {report.dtype}, {report.optimizer}", caption=report.convention)
    for column in ("", "parameters", "weights", "gradients", "moments", "activations", "total"):
        table.add_column(column, justify="left" if not column else "right")
    for holding in (report.worker, report.machine, report.full):
        if holding is None:
            continue
        table.add_row(holding.name, style="bold")
        for part in (*holding.parts, holding.total):
            sizes = (part.parameters, part.gradients, part.moments, part.activations, part.total)
            table.add_row(f"  {part.name}", f"{part.num_parameters:,}", *map(_size, sizes), end_section=part.name == "total")
    table.add_row("worker / end-to-end", *[""] * 5, f"{report.worker_over_full:.3f}", style="bold")
    if report.measured:
        m = report.measured
        table.add_row(f"measured peak: worker ({m.worker_over_accounting:.2f} of accounting)", *[""] * 5, _size(m.worker))
        table.add_row(f"measured peak: end-to-end ({m.full_over_accounting:.2f} of accounting)", *[""] * 5, _size(m.full))
        table.add_row("measured worker / end-to-end", *[""] * 5, f"{m.worker_over_full:.3f}", style="bold")
    return table
