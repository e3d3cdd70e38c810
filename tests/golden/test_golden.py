"""Numbers that must not move unless someone means it: boundaries, first weights, first losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.config import NoiseConfig
from blocktrain.diffusion.noise import make_partition
from blocktrain.model.transformer import BlockStack, parameter_count
from blocktrain.seeding import fold
from blocktrain.serialization import tensor_digest
from blocktrain.training.data import load_corpus
from blocktrain.training.hardware import Hardware
from blocktrain.training.objective import SpanBatches, spans_of
from blocktrain.training.trainer import BlockTrainer, training_flops, worker_flops
from tests.conftest import CLEAN, PAPER, tiny_config


def test_boundaries_of_the_papers_range():
    assert make_partition(NoiseConfig(), 3).boundaries == pytest.approx([10.0, 2.07110, 1.34363, 1.0], abs=1e-4)


def test_folded_seeds():
    assert fold(0, "block", 1) == fold(0, "block", 1)
    assert len({fold(0, "block", 1), fold(0, "block", "1"), fold(0, "block1"), fold(1, "block", 1), fold(0, "block", 11)}) == 5
    assert fold(0, "step", 0) == 5247807831875117505


def test_digest_covers_name_dtype_shape_and_values_and_not_the_layout():
    a = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    base = tensor_digest({"x": a})
    assert base == tensor_digest({"x": a.T.contiguous().T})
    others = [{"y": a}, {"x": a.double()}, {"x": a.reshape(3, 2)}, {"x": a + 1}, {"x": a, "y": a}]
    assert len({base, *(tensor_digest(other) for other in others)}) == 6


NO_TAPS = {"short_conv": 0}
LOSSES: dict[str, tuple[dict[str, Any], list[float]]] = {  # the default has taps
    "default": ({}, [2.4730, 2.4682]),
    "clean": (CLEAN, [2.5584, 2.6635]),
    "spans": ({**CLEAN, "span": 2}, [2.5279, 2.5616]),
    "paper": (PAPER, [3.3919, 3.2058]),
    "upstream noisy with anchor": ({**PAPER, "input": "upstream", "anchor_weight": 1.0}, [3.5352, 3.4474]),
    "mse": ({**PAPER, "loss": "embedding_mse"}, [5.2930, 5.2461]),
}


def first_losses(objective: dict[str, Any], text: Path) -> list[float]:
    """Plain CE of the first and the last span at the twelfth step."""
    config = tiny_config(objective=objective, model=NO_TAPS if objective else {})
    stack = BlockStack.of(config)
    trainer = BlockTrainer(
        stack, config, make_partition(config.noise, 3), spans_of(3, config.objective.span), Hardware(torch.device("cpu"), torch.float32)
    )
    batches = SpanBatches(load_corpus(str(text)).train, config)
    for step in range(12):
        figures = trainer.step(batches.batch(trainer.spans, step), step)
    return [figures.ce[0], figures.ce[-1]]


@pytest.mark.parametrize("kind", LOSSES)
def test_first_losses(kind: str, text: Path):
    objective, expected = LOSSES[kind]
    assert first_losses(objective, text) == pytest.approx(expected, abs=5e-3)


def test_parameters_and_flops_of_a_known_shape():
    """Counted by hand for B 3 x 1 layer, D 32, feed-forward 128, T 32, E 16, C 8."""
    config = tiny_config(objective=CLEAN, model=NO_TAPS)
    layer, interface = 4 * 32 * 32 + 2 * 32 * 128 + 4 * 32, 257 * 32 + 32 * 256
    assert parameter_count(BlockStack.of(config)) == 3 * (layer + 32) + interface
    layer, interface = layer + 8 * 4 * 32, interface + 256 * 16 + 16 * 32 + (8 + 1) * 8 + 32 * 16 + 1
    noisy = tiny_config(objective=PAPER, model=NO_TAPS)
    assert parameter_count(BlockStack.of(noisy)) == 3 * (layer + 32) + interface
    forward = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 2 * 32 * 32
    head = 2 * 32 * 256
    tokens = 10 * config.tokens_per_step
    assert training_flops(config, spans_of(3, 1), 10) == tokens * 3 * 3 * (forward + head)
    assert training_flops(config, spans_of(3, 3), 10) == tokens * 3 * (3 * forward + head)
    assert training_flops(config, [(2, 3)], 10) == tokens * (3 * (forward + head) + 2 * forward)  # two frozen blocks in front
    frozen = (0 + 1 + 2) * forward  # blocks that separate workers run for themselves
    assert worker_flops(config, spans_of(3, 1), 10) == tokens * (3 * 3 * (forward + head) + frozen)
    alone = tiny_config(objective={**CLEAN, "input": "independent"}, model=NO_TAPS)
    by_itself = tokens * 3 * 3 * (forward + head)
    assert worker_flops(alone, spans_of(3, 1), 10) == training_flops(alone, spans_of(3, 1), 10) == by_itself
    vote = {**CLEAN, "input": "independent", "vote_weight": 1.0}
    common = tiny_config(objective=vote, model=NO_TAPS)
    assert training_flops(common, spans_of(3, 1), 10) == by_itself + tokens * 3 * head  # what was said is read twice
    assert worker_flops(common, spans_of(3, 1), 10) == 2 * by_itself  # frozen copies of all
    late = tiny_config(objective={**vote, "vote_from": 0.5}, model=NO_TAPS, train={"steps": 16})
    assert worker_flops(late, spans_of(3, 1), 10) == by_itself + by_itself / 5, "two of ten steps come after half of sixteen"
