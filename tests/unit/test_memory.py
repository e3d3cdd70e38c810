"""The accounting of `report/memory.py` against real modules, real backward passes and real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from blocktrain.config import RunConfig, make_config, merge_fields, reference_config
from blocktrain.diffusion.noise import make_partition
from blocktrain.errors import ConfigError, MemoryLimitError
from blocktrain.model.transformer import BlockStack, parameter_count
from blocktrain.report import bench_training, memory
from blocktrain.report.accounting import MUCH_TEXT, advice, machine_holding, span_holding
from blocktrain.report.activations import PRECISIONS, span_activations
from blocktrain.report.measure import available_memory
from blocktrain.report.memory import measure_block_step, memory_report, paper_figures, render, shape_report
from blocktrain.training.hardware import Hardware, choose_hardware
from blocktrain.training.objective import Span, SpanObjective, make_views, spans_of
from blocktrain.training.trainer import BlockTrainer

SMALL = {"blocks": 3, "layers_per_block": 2, "width": 48, "heads": 2, "positions": 40, "embed_dim": 24, "noise_dim": 16}
NO_NOISE = {"denoise_weight": 0.0, "anchor_weight": 1.0, "start": "zero"}
NOISE = {"denoise_weight": 1.0, "anchor_weight": 0.0, "start": "noise"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "independent": {**NOISE, "input": "independent"},
    "independent with anchor": {**NOISE, "input": "independent", "anchor_weight": 0.5},
    "embedding mse": {**NOISE, "input": "independent", "loss": "embedding_mse"},
    "upstream with noise": {**NOISE, "input": "upstream"},
    "upstream without noise": {"input": "upstream", **NO_NOISE},
    "span 2": {"input": "upstream", "span": 2, **NO_NOISE},
    "span 2 with noise and private layers": {**NOISE, "input": "upstream", "span": 2, "private_layers": 1},
    "private layers": {"input": "upstream", "private_layers": 2, **NO_NOISE},
    "end to end": {"input": "upstream", "span": 3, **NO_NOISE},
    "common vote": {"input": "independent", "vote_weight": 0.5, **NO_NOISE},
}
WITH_A_HEAD = [name for name in OBJECTIVES if name != "embedding mse"]


def small_config(objective: dict[str, Any], optimizer: str = "muon", batch: int = 3, **model: Any) -> RunConfig:
    return make_config({"model": SMALL | model, "objective": objective, "train": {"batch_size": batch, "optimizer": optimizer}})


def small_batch(config: RunConfig) -> Tensor:
    return torch.randint(256, (config.train.batch_size, config.model.positions + 1), generator=torch.Generator().manual_seed(1))


def make_trainer(config: RunConfig, spans: list[Span]) -> BlockTrainer:
    peers = BlockStack.of(config).requires_grad_(False) if config.objective.vote_weight and len(spans) == 1 else None
    stack = BlockStack.of(config, range(*spans[0]) if peers else None)
    hardware = Hardware(torch.device("cpu"), torch.float32)
    return BlockTrainer(stack, config, make_partition(config.noise, config.model.blocks), spans, hardware, peers=peers)


def really_saved(config: RunConfig, span: Span, dtype: torch.dtype) -> int:
    """Bytes of the distinct storages that autograd keeps for one step of a span, without parameters, buffers and byte ids."""
    trainer, ids = make_trainer(config, [span]), small_batch(config)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    weights = [t for stack in (trainer.stack, trainer.peers) if stack for t in (*stack.parameters(), *stack.buffers())]
    known = {t.untyped_storage().data_ptr() for t in (*weights, x, y)}
    kept: dict[int, Tensor] = {}  # holding the tensors keeps their addresses apart

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    objective = SpanObjective(
        trainer.stack, config, make_views(config, trainer.partition, x, y, seed=1), vote_weight=config.objective.vote_weight, peers=trainer.peers
    )
    autocast = torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        objective.loss(span)
    held = [tensor for rest in objective._rest if rest for tensor in rest.values()]
    kept |= {tensor.untyped_storage().data_ptr(): tensor for tensor in held}  # the vote without the block: no backward pass reads it
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in known)


@pytest.mark.parametrize("precision", ["float32", "mixed"])
@pytest.mark.parametrize("mlp", ["relu2", "swiglu"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_activation_formula_is_what_autograd_keeps(name: str, mlp: str, precision: str) -> None:
    config = small_config(OBJECTIVES[name], mlp=mlp)
    span = (config.model.blocks - config.objective.span - (name == "private layers"), config.model.blocks - (name == "private layers"))
    real = really_saved(config, span, torch.float32 if precision == "float32" else torch.bfloat16)
    assert sum(span_activations(config, span, PRECISIONS[precision])) == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    "shape",
    [
        {"width": 96, "heads": 6},
        {"positions": 96},
        {"layers_per_block": 5},
        {"embed_dim": 96, "mlp_ratio": 2.0},
        {"short_conv": 3},
        {"block_heads": True},
        {"heads": 3, "attention_ratio": 0.625},
    ],
)
def test_the_activation_formula_holds_at_other_shapes(shape: dict[str, Any]) -> None:
    config = small_config(OBJECTIVES["independent"], batch=5, **shape)
    real = really_saved(config, (1, 2), torch.float32)
    assert sum(span_activations(config, (1, 2), PRECISIONS["float32"])) == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(
    ("name", "block_heads"), [(name, own) for name in OBJECTIVES for own in (False, True) if not (own and name == "embedding mse")]
)
def test_parameters_gradients_and_moments_are_exact(name: str, optimizer: str, block_heads: bool) -> None:
    config = small_config(OBJECTIVES[name], optimizer, block_heads=block_heads)
    for spans in ([spans_of(3, config.objective.span)[-1]], spans_of(3, config.objective.span)):
        trainer = make_trainer(config, spans)
        trainer.gradients(small_batch(config), 0)
        held = [trainer.stack.interface, *(trainer.stack.block(b) for b in trainer.trained)]
        gradients = sum(p.grad.nbytes for m in held for p in m.parameters() if p.grad is not None)
        trainer.step(small_batch(config), 0)
        moments = sum(t.nbytes for o in trainer.optimizers for state in o.state.values() for t in state.values() if t.dim() or t.numel() > 1)
        scalars = sum(8 for o in trainer.optimizers for p in o.state if p.dim() == 0)  # the sharpness has moments without a dimension
        holding = machine_holding(config, PRECISIONS["float32"]) if len(spans) > 1 else span_holding(config, spans[0], PRECISIONS["float32"], "")
        total = holding.total
        upstream = config.objective.input == "upstream"
        counted = parameter_count(trainer.stack) if upstream or len(spans) > 1 else sum(parameter_count(m) for m in held)
        counted += parameter_count(trainer.peers) if trainer.peers else 0
        assert total.num_parameters == counted
        assert total.parameters == 4 * counted
        assert (total.gradients, total.moments) == (gradients, moments + scalars)


def test_a_worker_of_chained_blocks_holds_frozen_weights_and_nothing_else_of_them() -> None:
    config = small_config(OBJECTIVES["upstream without noise"])
    frozen = span_holding(config, (2, 3), PRECISIONS["float32"], "").part("blocks 0-1, frozen")
    stack = BlockStack.of(config, [0, 1])
    assert frozen.parameters == 4 * sum(parameter_count(stack.block(b)) for b in (0, 1))
    assert (frozen.gradients, frozen.moments, frozen.activations) == (0, 0, 0)


def test_one_of_b_blocks_costs_a_bth_of_the_stack_and_the_interface() -> None:
    config = make_config(
        {"model": {"blocks": 8, "width": 1024, "heads": 16}, "objective": OBJECTIVES["independent"], "train": {"order": "sequential"}}
    )
    report = memory_report(config, dtype="float32")
    worker, full = report.worker.total.total, report.full.total.total
    assert report.worker_over_full == worker / full
    blocks = full - report.full.part("interface").total
    assert worker - report.worker.part("interface").total == pytest.approx(blocks / 8, rel=0.05)
    assert report.machine is not None
    assert report.machine.total == report.worker.total


def test_interleaved_training_on_one_machine_keeps_moments_of_all_blocks_and_activations_of_one() -> None:
    config = small_config(OBJECTIVES["independent"])
    report = memory_report(config, dtype="float32")
    assert report.machine is not None
    machine, worker = report.machine.total, report.worker.total
    assert machine.activations == worker.activations
    assert report.machine.part("blocks 0-2").moments == 3 * report.worker.part("block 0").moments
    sequential = config.model_copy(update={"train": config.train.model_copy(update={"order": "sequential"})})
    alone = memory_report(sequential, dtype="float32").machine
    assert alone is not None
    assert alone.total == worker


def test_half_precision_halves_what_it_says_and_keeps_float32_moments() -> None:
    config = small_config(OBJECTIVES["independent"])
    single, half = (memory_report(config, dtype=dtype).worker.total for dtype in ("float32", "float16"))
    assert (half.parameters, half.gradients, half.moments) == (single.parameters // 2, single.gradients // 2, single.moments)
    assert half.activations is not None
    assert single.activations is not None
    assert half.activations < 0.6 * single.activations


def test_a_shape_too_large_for_any_machine_is_counted() -> None:
    config = make_config({"model": {"blocks": 8, "layers_per_block": 24, "width": 8192, "heads": 32}, "train": {"batch_size": 1}})
    report = memory_report(config, dtype="mixed")
    assert report.full.total.num_parameters == pytest.approx(75.8e9, rel=0.07)
    assert report.worker.total.total < report.full.total.total


def test_a_bare_parameter_count_is_cut_evenly() -> None:
    report = shape_report(75.8e9, 8, "float16")
    block, full = report.worker.total, report.full.total
    assert (block.num_parameters, full.num_parameters) == (9_475_000_000, 75_800_000_000)
    assert (full.parameters, full.gradients, full.moments) == (151_600_000_000, 151_600_000_000, 606_400_000_000)
    assert report.worker_over_full == 1 / 8
    assert report.to_json()["worker"]["total"]["activations"] is None
    assert shape_report(75.8e9, 8, "float32", "muon").full.total.moments == 4 * 75_800_000_000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1), "--params"),
        ((float("nan"), 1), "--params"),
        ((1e9, 0), "--blocks"),
        ((1e9, 8, "int3"), "--dtype"),
        ((1e9, 8, "float32", "sgd"), "--optimizer"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused_by_name(arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape_report(*arguments)


def test_our_reconstruction_gives_the_figures_of_the_paper() -> None:
    active, full = paper_figures()
    assert f"{active.gib:.3f}" == "0.198"
    assert f"{full.gib:.2f}" == "100.54"
    for figure in (active, full):
        low, high = figure.lowest_and_highest
        assert low <= figure.num_parameters <= high
    with torch.device("meta"):
        stack = BlockStack(active.model, seed=0, blocks=[0])
    assert parameter_count(stack) == active.num_parameters


def test_the_report_is_json_and_a_table() -> None:
    report = memory_report(small_config(OBJECTIVES["private layers"]), dtype="float32")
    fields = json.loads(json.dumps(report.to_json()))
    parts = fields["worker"]["parts"]
    assert fields["worker"]["total"]["total"] == sum(part["total"] for part in parts)
    console = Console(file=io.StringIO(), width=160)
    console.print(render(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "worker of block" in text
    assert "frozen" in text


@pytest.mark.parametrize(("peak", "told"), [(30 << 20, True), (300 << 20, False)])
def test_a_measured_step_too_small_to_say_much_says_so(peak: int, told: bool) -> None:
    report = memory_report(small_config(OBJECTIVES["independent"]))
    console = Console(file=io.StringIO(), width=160)
    console.print(render(dataclasses.replace(report, measured=memory.Measured(peak, 2 * peak, 3.0, 2.0, 0.5))))
    assert ("no test of the accounting" in console.file.getvalue()) == told  # type: ignore[attr-defined]


def test_a_step_that_does_not_fit_is_refused_with_need_and_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: 1000)
    monkeypatch.setattr(memory, "peak_memory", lambda job: pytest.fail("must not be started"))
    config = small_config(OBJECTIVES["independent"])
    need = memory_report(config, dtype=memory.precision_name(config)).worker.total.total
    with pytest.raises(MemoryLimitError, match=rf"needs about {need} bytes .* has 1000 "):
        measure_block_step(config, "block")


def test_a_real_step_takes_about_what_was_counted() -> None:
    """A block of some 80 MB; the benchmark's goal at a larger shape is 1.15. In float32: bfloat16 kernels keep some 25 MB whatever the shape."""
    config = small_config(OBJECTIVES["independent"], "adamw", batch=8, width=256, heads=4, positions=256, layers_per_block=4)
    config = config.model_copy(update={"train": config.train.model_copy(update={"precision": "float32"})})
    assert available_memory(torch.device("cpu")) > 2**20
    counted = span_holding(config, (0, 1), PRECISIONS[memory.precision_name(config)], "").total.total
    assert 0.7 < measure_block_step(config, "block") / counted < 1.3  # the stack would be at 3


def test_narrow_layers_on_a_cpu_are_trained_in_float32_whatever_units_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sooner, and the precision of a small preset does not depend on the processor."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for there in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda there=there: there)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda there=there: there)
        for width, dtype in ((128, torch.float32), (256, torch.bfloat16 if there else torch.float32)):
            assert choose_hardware(make_config({"model": {"width": width}})).dtype == dtype
            asked = make_config({"model": {"width": width}, "train": {"precision": "bfloat16"}})
            assert choose_hardware(asked).dtype == torch.bfloat16


def test_the_plain_loop_of_the_benchmark_takes_the_steps_of_the_end_to_end_reference() -> None:
    """Otherwise the ratio of their speeds would compare two different things."""
    config = make_config({"model": SMALL, "train": {"batch_size": 3, "clip_norm": 0.0}})
    hardware = Hardware(torch.device("cpu"), torch.float32)
    plain, ours = bench_training.PlainLoop(config, hardware), bench_training.make_trainer(reference_config(config), hardware)
    for step in range(3):
        batch = torch.randint(256, (3, 41), generator=torch.Generator().manual_seed(step))
        assert plain.step(batch, step) == pytest.approx(ours.step(batch, step).loss[0], rel=1e-4)


def test_a_goal_that_is_missed_says_so() -> None:
    assert not bench_training.Goal("speed", 0.94, ">=", 0.95).met
    assert bench_training.Goal("memory", 1.15, "<=", 1.15).to_json()["met"]


def test_where_much_text_is_read_for_each_parameter_the_common_vote_is_advised() -> None:
    alone = small_config({"input": "independent", **NO_NOISE})
    parameters = parameter_count(BlockStack.of(alone))

    def advised(times: float, **sections: Any) -> list[str]:
        steps = max(1, round(times * parameters / alone.tokens_per_step))
        return advice(make_config(merge_fields(alone.model_dump(), {"train": {"steps": steps}, **sections})))

    assert not advised(0.9 * MUCH_TEXT)
    (told,) = advised(1.1 * MUCH_TEXT)
    assert told.startswith(f"{1.1 * MUCH_TEXT:.0f} bytes of text for each parameter") and "--set objective.vote_weight=0.8" in told
    for other in ({"input": "upstream"}, {"vote_weight": 1.0}, {"denoise_weight": 1.0}, {"combine": "last"}):
        assert not advised(2 * MUCH_TEXT, objective=other)
    assert not advised(2 * MUCH_TEXT, model={"blocks": 1})
