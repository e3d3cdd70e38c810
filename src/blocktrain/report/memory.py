"""What one active worker holds against what the end-to-end stack would: the report, the measurement beside it, and two figures of the paper.

The counting is in `report/accounting.py` (parameters, gradients, moments) and `report/activations.py`; real steps are measured by
`report/measure.py`. Here they meet: `memory_report` for a run, `shape_report` where only a number of parameters is known, `render` for people.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from blocktrain.config import ORDINARY, ModelConfig, ObjectiveConfig, RunConfig, reference_config
from blocktrain.errors import ConfigError, MemoryLimitError
from blocktrain.report.accounting import (
    Holding,
    Part,
    blocks_name,
    count_blocks,
    count_interface,
    largest_span,
    machine_holding,
    span_holding,
)
from blocktrain.report.activations import PRECISIONS, Precision
from blocktrain.report.measure import Allocator, available_memory, peak_memory
from blocktrain.training.hardware import choose_hardware
from blocktrain.training.objective import Span

GIB = 2**30


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


def precision_name(config: RunConfig) -> str:
    """The precision that the trainer would take here; a device that this machine lacks counts as `auto`."""
    try:
        hardware = choose_hardware(config)
    except ConfigError:
        hardware = choose_hardware(config.model_copy(update={"train": config.train.model_copy(update={"device": "auto"})}))
    return "mixed" if hardware.dtype == torch.bfloat16 else "float32"


def _precision(dtype: str) -> Precision:
    if dtype not in PRECISIONS:
        raise ConfigError(f"--dtype {dtype}: known: {', '.join(PRECISIONS)}")
    return PRECISIONS[dtype]


def memory_report(config: RunConfig, *, dtype: str | None = None, span: Span | None = None, measure: bool = False) -> MemoryReport:
    """Count what the worker of `span` (default: the one that holds most) and the end-to-end stack hold; with `measure` also run steps of both.

    `dtype` is a key of PRECISIONS, by default what the trainer would take on this machine. Raises MemoryLimitError if what is to be measured
    does not fit.
    """
    dtype = dtype or precision_name(config)
    p = _precision(dtype)
    span = span or largest_span(config, p)
    whole = reference_config(config)
    worker = span_holding(config, span, p, f"worker of {blocks_name(range(*span))}")
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


def require_memory(config: RunConfig) -> None:
    """Raises MemoryLimitError with need and have where training this run cannot fit on this machine."""
    hardware = choose_hardware(config)
    p = PRECISIONS["mixed" if hardware.dtype == torch.bfloat16 else "float32"]
    need, have = machine_holding(config, p).total.total, available_memory(hardware.device)
    if need > have:
        raise MemoryLimitError(
            f"training needs about {_size(need)}, this machine has {_size(have)} free; make train.batch_size, model.width or model.positions "
            "smaller, or train one block after another with --set train.order=sequential"
        )


def worker_capacity(config: RunConfig, budget: int | None = None) -> int:
    """Consecutive blocks, up to `round.max_span`, that a worker of `budget` bytes (default: what is free here) can train together; 0 if none."""
    hardware = choose_hardware(config)
    p = PRECISIONS["mixed" if hardware.dtype == torch.bfloat16 else "float32"]
    have = available_memory(hardware.device) if budget is None else budget
    longest = 0
    for length in range(1, min(config.round.max_span, config.model.blocks) + 1):
        spans = {(first, first + length) for first in range(config.model.blocks - length + 1)}
        if max(span_holding(config, span, p, "").total.total for span in {min(spans), max(spans)}) > have:
            break
        longest = length
    return longest


def worker_memory(config: RunConfig | None) -> tuple[int, int]:
    """(bytes that a worker of the largest block of a run needs, 0 without one; bytes that are free on its device)."""
    hardware = choose_hardware(config or RunConfig())
    free = available_memory(hardware.device)
    if config is None:
        return 0, free
    p = PRECISIONS["mixed" if hardware.dtype == torch.bfloat16 else "float32"]
    length = min(config.round.min_span, config.model.blocks)
    spans = {(0, length), (config.model.blocks - length, config.model.blocks)}
    return max(span_holding(config, span, p, "").total.total for span in spans), free


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


def measure_block_step(
    config: RunConfig, kind: Literal["block", "end_to_end"], *, span: Span | None = None, steps: int = 2, allocator: Allocator = "returning"
) -> int:
    """Peak resident bytes of optimizer steps in a fresh process, over what it held before the model was built.

    "block": the worker of `span` (default: the one that holds most) as `config` says; with `objective.input = independent` that is the interface
    and one block. "end_to_end": the whole stack of reference_config(config). The second step meets the moments that the first has made, as
    every later one does. Raises MemoryLimitError if the accounting exceeds the memory there is.
    """
    config = reference_config(config) if kind == "end_to_end" else config
    p = PRECISIONS[precision_name(config)]
    span = (0, config.model.blocks) if kind == "end_to_end" else span or largest_span(config, p)
    need, have = span_holding(config, span, p, "").total.total, available_memory(choose_hardware(config).device)
    if need > have:
        raise MemoryLimitError(
            f"{kind} step needs about {need} bytes ({need / GIB:.2f} GiB), this machine has {have} ({have / GIB:.2f} GiB) free; "
            "make model.width, train.batch_size or model.positions smaller"
        )
    first = 0 if config.objective.input == "upstream" else span[0]
    job = {"config": config.model_dump(mode="json"), "span": list(span), "held": list(range(first, span[1])), "steps": steps}
    return peak_memory(job, allocator)


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

    AdamW's state is its two moments; in float32 they take 8 B a parameter, so the figures stand for 26.51 to 26.64 million and for
    13.494 billion parameters. (With weights and gradients counted in, 16 B, for half of that.) Their ratio is 508: one shape of equal blocks
    would have more than 500 of them, so they are taken to be two shapes. Both shapes below are round ones of our own modules that hit within
    rounding; nothing says that they are the paper's.
    """
    noisy = ObjectiveConfig(denoise_weight=1.0)
    active = RunConfig(model=ModelConfig(layers_per_block=2, width=1024, heads=16, **ORDINARY), objective=noisy)
    full = RunConfig(model=ModelConfig(blocks=166, layers_per_block=4, width=1280, heads=20, noise_dim=128, **ORDINARY), objective=noisy)
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


SMALL_PEAK = 64 << 20  # bytes: below, tens of MB that kernels keep weigh as much as the step (docs/experiments.md)


def render(report: MemoryReport) -> Group:
    """One narrow table for each holding, then the ratio, then what was measured."""
    lines: list[RenderableType] = [f"memory of {report.optimizer}, {report.dtype}: {report.convention}"]
    for holding in (report.worker, report.machine, report.full):
        if holding is not None:
            lines.append(_holding_table(holding))
    lines.append(f"worker / end-to-end: {report.worker_over_full:.3f}")
    if report.measured:
        m = report.measured
        lines.append(f"measured peak, worker: {_size(m.worker)}, {m.worker_over_accounting:.2f} of its accounting")
        lines.append(f"measured peak, end-to-end: {_size(m.full)}, {m.full_over_accounting:.2f} of its accounting")
        lines.append(f"measured worker / end-to-end: {m.worker_over_full:.3f}")
        if m.worker < SMALL_PEAK:
            lines.append("so small a step is no test of the accounting: kernels keep some tens of MB on CPUs, whatever the shape")
    return Group(*lines)


def _holding_table(holding: Holding) -> Table:
    table = Table(title=holding.name, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0))
    for column in ("", "parameters", "weights", "gradients", "moments", "activations", "total"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for part in (*holding.parts, holding.total):
        sizes = (part.parameters, part.gradients, part.moments, part.activations, part.total)
        table.add_row(part.name, f"{part.num_parameters:,}", *map(_size, sizes), style="bold" if part.name == "total" else "")
    return table
