"""Exact generation equals scoring, repeats by seed, and always gives valid UTF-8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.diffusion.noise import make_partition
from blocktrain.errors import ConfigError
from blocktrain.model.transformer import BlockStack
from blocktrain.training.checkpoint import LoadedRun
from blocktrain.training.composition import Composer
from blocktrain.training.generate import Stream, generate_ids, pick, to_text
from tests.conftest import CLEAN, PAPER, tiny_config


def made_run(objective: dict[str, Any]) -> LoadedRun:
    """A run with random weights everywhere."""
    config = tiny_config(objective=objective)
    stack = BlockStack(config.model, seed=0, private_layers=config.objective.private_layers)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in stack.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=g))
    return LoadedRun(Path("."), config, config, None, stack.eval().requires_grad_(False), make_partition(config.noise, 3))  # type: ignore[arg-type]


OBJECTIVES = [CLEAN, PAPER, {**PAPER, "start": "zero", "readout": "evidence_free"}, {**PAPER, "input": "upstream"}, {**CLEAN, "private_layers": 1}]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_byte_by_byte_gives_the_logits_of_one_pass_over_the_text(objective: dict[str, Any]):
    run = made_run(objective)
    text = list(b"the quick brown fox jumps over")
    stream = Stream(run)
    one_by_one = [stream.feed([byte]) for byte in text]
    composer = Composer(run.stack, run.config, run.partition)
    with torch.no_grad():
        *_, whole = composer.sweep(torch.tensor([text]), composer.start((1, len(text)), run.config.seed))
    assert torch.allclose(torch.stack(one_by_one), whole[0].float(), atol=1e-3)


@pytest.mark.parametrize("objective", OBJECTIVES[:2])
def test_a_seed_fixes_the_text_and_a_long_stream_goes_on(objective: dict[str, Any]):
    run = made_run(objective)
    a, b, c = (bytes(generate_ids(run, b"once", 100, 1.0, 1.0, seed)) for seed in (3, 3, 4))
    assert a == b != c
    assert len(a) == 100  # three times the 32 positions of the model


def test_prompts_longer_than_the_model_and_empty_ones_work():
    run = made_run(CLEAN)
    assert len(list(generate_ids(run, b"x" * 1000, 5, 0.0, 1.0, 0))) == 5
    assert len(list(generate_ids(run, b"", 5, 0.0, 1.0, 0))) == 5


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float):
    logits = torch.randn(256, generator=torch.Generator().manual_seed(0))
    assert all(pick(logits, temperature, 1.0, 0, position) == int(logits.argmax()) for position in range(50))


def test_samples_follow_the_distribution_and_top_p_cuts_its_tail():
    logits = torch.full((256,), -torch.inf)
    logits[:4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    drawn = torch.tensor([pick(logits, 1.0, 1.0, 1, position) for position in range(4000)]).bincount(minlength=256) / 4000
    assert torch.allclose(drawn[:4], torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03)
    assert {pick(logits, 1.0, 0.7, 1, position) for position in range(300)} == {0, 1}
    assert {pick(logits, 1.0, 1e-9, 1, position) for position in range(50)} == {0}


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (list("a😀é".encode()), "a😀é"),
        (list("😀".encode())[:2], "\ufffd"),
        ([0xFF, 0x41, 0xC3], "\ufffdA\ufffd"),
        ([], ""),
    ],
)
def test_whatever_the_bytes_the_text_is_valid(ids: list[int], text: str):
    pieces = list(to_text(ids))
    assert "".join(pieces) == text
    assert all(piece for piece in pieces)


@pytest.mark.parametrize(
    ("temperature", "top_p", "max_bytes", "word"),
    [
        (float("nan"), 1.0, 5, "temperature"),
        (-1.0, 1.0, 5, "temperature"),
        (1.0, 0.0, 5, "top-p"),
        (1.0, float("nan"), 5, "top-p"),
        (1.0, 1.0, 0, "max-bytes"),
    ],
)
def test_bad_sampling_settings_are_named(temperature: float, top_p: float, max_bytes: int, word: str):
    with pytest.raises(ConfigError, match=word):
        list(generate_ids(made_run(CLEAN), b"x", max_bytes, temperature, top_p, 0))
