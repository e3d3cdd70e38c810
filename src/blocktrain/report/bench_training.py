"""`blocktrain bench training`: does the block machinery cost speed, and does a block save the memory it promises?

Speed: tokens per second of `BlockTrainer` over a plain PyTorch loop around the same modules, optimizers and loss, in the same process, in
alternating bursts (trainer, plain, plain, trainer, ...), so that whatever else the machine does meets both. The figure is the median of the
ratios of neighbours. Two objectives: end-to-end (the same arithmetic, so the rest is overhead) and `upstream` with spans of one block (which also
has a head per block: `flops_ratio` says what arithmetic alone would allow).

Memory: peak of real steps in fresh processes, a block of an `independent` sequential run against its accounting and against the end-to-end step.
Once with an allocator that gives freed tensors back (what tensors take), once with the allocator as it is; see `report/measure.py`.

Every figure stands beside its goal and whether it was met.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from blocktrain.config import RunConfig, make_config, reference_config
from blocktrain.diffusion.noise import make_partition
from blocktrain.model.transformer import VOCABULARY, BlockStack
from blocktrain.report.accounting import span_holding
from blocktrain.report.activations import PRECISIONS
from blocktrain.report.memory import GIB, measure_block_step, precision_name
from blocktrain.seeding import generator
from blocktrain.training.hardware import Hardware, choose_hardware
from blocktrain.training.objective import spans_of
from blocktrain.training.optim import make_optimizers, schedule, set_rate
from blocktrain.training.trainer import BlockTrainer, training_flops

Step = Callable[[Tensor, int], object]


@dataclass(frozen=True)
class Goal:
    """A figure, its goal, and whether it was met."""

    name: str
    value: float
    sign: str  # ">=" or "<="
    goal: float

    @property
    def met(self) -> bool:
        return {">=": operator.ge, "<=": operator.le}[self.sign](self.value, self.goal)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def speed_config(quick: bool) -> RunConfig:
    """The bench shape: D 128, 2 heads of 32, 12 layers, T 256, batch 16."""
    model = {"blocks": 3, "layers_per_block": 4, "width": 128, "heads": 2, "positions": 128 if quick else 256}
    objective = {"input": "upstream", "span": 1, "denoise_weight": 0.0, "anchor_weight": 1.0, "start": "zero"}
    return make_config({"model": model, "objective": objective, "train": {"batch_size": 8 if quick else 16}})


def memory_config(quick: bool) -> RunConfig:
    """Four independent blocks, one after another, of a size beside which an interpreter is nothing: about 1 GB end to end."""
    model = {"blocks": 4, "layers_per_block": 4, "width": 256 if quick else 512, "heads": 4, "positions": 256}
    objective = {"input": "independent", "span": 1, "denoise_weight": 1.0, "anchor_weight": 0.0, "start": "noise"}
    return make_config({"model": model, "objective": objective, "train": {"batch_size": 8, "order": "sequential"}})


class PlainLoop:
    """What one would write without this project: the whole stack forward, one loss, backward, clip, step."""

    def __init__(self, config: RunConfig, hardware: Hardware) -> None:
        self.config, self.hardware = config, hardware
        self.stack = BlockStack.of(config).to(hardware.device)
        self.blocks = [self.stack.block(b) for b in range(config.model.blocks)]
        self.optimizers = make_optimizers(self.stack, config.train, range(config.model.blocks), True)

    def step(self, batch: Tensor, step: int) -> float:
        ids = batch.to(self.hardware.device)
        x, y = ids[:, :-1], ids[:, 1:]
        with self.hardware.autocast():
            state = self.stack.interface.tokens(x)  # (N, T, D)
            for block in self.blocks:
                for layer in block.layers:
                    state = layer(state, None, block.cos, block.sin)
            logits = self.blocks[-1].read(self.stack.interface.head, state, None)  # (N, T, V)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        loss.backward()
        if self.config.train.clip_norm:
            nn.utils.clip_grad_norm_(self.stack.parameters(), self.config.train.clip_norm)
        set_rate(self.optimizers, schedule(step, self.config.train))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def make_trainer(config: RunConfig, hardware: Hardware) -> BlockTrainer:
    stack = BlockStack.of(config).to(hardware.device)
    partition = make_partition(config.noise, config.model.blocks)
    return BlockTrainer(stack, config, partition, spans_of(config.model.blocks, config.objective.span), hardware)


def _burst(run: Step, batches: list[Tensor], first: int) -> float:
    """Seconds that a burst of steps takes."""
    began = time.perf_counter()
    for i, batch in enumerate(batches):
        run(batch, first + i)  # ends with a number on the host, so nothing is left queued
    return time.perf_counter() - began


def compare(ours: Step, plain: Step, batches: list[Tensor], pairs: int) -> dict[str, Any]:
    """Alternate bursts of both; tokens per second and the ratio of each pair of neighbours. The first pair warms up and does not count."""
    tokens = sum(batch.size(0) * (batch.size(1) - 1) for batch in batches)
    times = []
    for pair in range(pairs + 1):
        order = (ours, plain) if pair % 2 == 0 else (plain, ours)  # neither is always first
        seconds = [_burst(run, batches, pair * len(batches)) for run in order]
        times.append(seconds if pair % 2 == 0 else seconds[::-1])
    ratios = [b / a for a, b in times[1:]]
    return {
        "trainer_tokens_per_s": tokens / statistics.median(a for a, _ in times[1:]),
        "plain_tokens_per_s": tokens / statistics.median(b for _, b in times[1:]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "pairs": pairs,
    }


def bench_speed(config: RunConfig, pairs: int, burst: int) -> dict[str, Any]:
    """Both objectives against the plain loop of the same layers."""
    hardware, whole = choose_hardware(config), reference_config(config)
    shape = (config.train.batch_size, config.model.positions + 1)
    batches = [torch.randint(VOCABULARY, shape, generator=generator(config.seed, "bench", i)) for i in range(burst)]
    plain = PlainLoop(config, hardware).step
    flops = [training_flops(c, spans_of(c.model.blocks, c.objective.span), 1) for c in (whole, config)]
    return {
        "device": str(hardware),
        "threads": torch.get_num_threads(),
        "end_to_end": {**compare(make_trainer(whole, hardware).step, plain, batches, pairs), "flops_ratio": 1.0},
        "upstream": {**compare(make_trainer(config, hardware).step, plain, batches, pairs), "flops_ratio": flops[0] / flops[1]},
    }


def bench_memory(config: RunConfig) -> dict[str, Any]:
    """Peaks of the worker of one block and of the end-to-end step, in bytes, beside their accounting."""
    p, span, blocks = PRECISIONS[precision_name(config)], (0, 1), config.model.blocks
    counted = span_holding(config, span, p, ""), span_holding(reference_config(config), (0, blocks), p, "")
    block, whole = measure_block_step(config, "block", span=span), measure_block_step(config, "end_to_end")
    interface = [holding.part("interface").total for holding in counted]
    allowed = interface[0] + 1.2 / blocks * (whole - interface[1])
    return {
        "block_accounted": counted[0].total.total,
        "block_peak": block,
        "block_peak_default_allocator": measure_block_step(config, "block", span=span, allocator="default"),
        "end_to_end_accounted": counted[1].total.total,
        "end_to_end_peak": whole,
        "allowed_by_end_to_end": round(allowed),
        "interface_accounted": interface[0],
    }


def bench_training(*, quick: bool = False, pairs: int | None = None, burst: int = 2, memory: bool = True) -> dict[str, Any]:
    """All figures and their goals, as one JSON line's worth."""
    speed = bench_speed(speed_config(quick), pairs or (4 if quick else 8), burst)
    goals = [Goal(f"tokens/s over plain loop, {name}", speed[name]["ratio"], ">=", 0.95) for name in ("end_to_end", "upstream")]
    result: dict[str, Any] = {"bench": "training", "quick": quick, "speed": speed, "memory": None}
    if memory:
        m = result["memory"] = bench_memory(memory_config(quick))
        goals.append(Goal("block step, peak over accounting", m["block_peak"] / m["block_accounted"], "<=", 1.15))
        goals.append(Goal("the same, allocator as it is", m["block_peak_default_allocator"] / m["block_accounted"], "<=", 1.15))
        goals.append(Goal("block step over 1.2 / B of the end-to-end step + interface", m["block_peak"] / m["allowed_by_end_to_end"], "<=", 1.0))
    return {**result, "goals": [goal.to_json() for goal in goals]}


def render(result: dict[str, Any]) -> list[Table]:
    """Speed, memory, and the goals."""
    speed = Table(
        "objective", "trainer tokens/s", "plain tokens/s", "ratio", "min", "max", "FLOPs allow", title=f"speed, {result['speed']['device']}"
    )
    for name in ("end_to_end", "upstream"):
        s = result["speed"][name]
        rates = [f"{s[key]:,.0f}" for key in ("trainer_tokens_per_s", "plain_tokens_per_s")]
        speed.add_row(name, *rates, *(f"{s[key]:.3f}" for key in ("ratio", "ratio_min", "ratio_max", "flops_ratio")))
    tables = [speed]
    if result["memory"]:
        table = Table("peak memory of a step", "GiB", title="memory")
        for name, value in result["memory"].items():
            table.add_row(name.replace("_", " "), f"{value / GIB:.3f}")
        tables.append(table)
    goals = Table("figure", "value", "goal", "met", title="goals")
    for goal in result["goals"]:
        goals.add_row(goal["name"], f"{goal['value']:.3f}", f"{goal['sign']} {goal['goal']}", "yes" if goal["met"] else "[red]no[/red]")
    return [*tables, goals]
