"""Shared fixtures: one thread (the machine's other core is for child processes), tiny runs, a small text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads; see blocktrain.__main__

import pytest
import torch

from blocktrain.config import RunConfig, make_config, merge_fields

torch.set_num_threads(1)

TINY: dict[str, Any] = {
    "model": {"blocks": 3, "layers_per_block": 1, "width": 32, "heads": 2, "positions": 32, "embed_dim": 16, "noise_dim": 8}
    | {"attention_ratio": 1.0, "mlp_ratio": 4.0},  # an ordinary layer, with the taps of the default
    "train": {"steps": 12, "batch_size": 4, "warmup_steps": 2, "checkpoint_every": 5, "log_every": 1, "device": "cpu"},
    "evaluate": {"windows": 8, "noise_draws": 8, "sigma_bins": 4},
}
PAPER = {"input": "independent", "span": 1, "denoise_weight": 1.0, "anchor_weight": 0.0, "start": "noise", "readout": "posterior"}
VOTES = {"input": "independent", "denoise_weight": 0.0, "anchor_weight": 1.0, "start": "zero"}
CLEAN = {"input": "upstream", "denoise_weight": 0.0, "anchor_weight": 1.0, "start": "zero"}


def tiny_config(**sections: Any) -> RunConfig:
    """A configuration small enough for milliseconds a step; sections override."""
    return make_config(merge_fields(TINY, sections), "test")


def write_text(path: Path, size: int = 40_000) -> Path:
    """A text with structure: arithmetic in words, so that a model has something to learn."""
    words = "zero one two three four five six seven eight nine".split()
    lines = (f"{words[i % 10]} and {words[i // 10 % 10]} make {words[(i + i // 10) % 10]}.\n" for i in range(size))
    text = ""
    for line in lines:
        text += line
        if len(text) >= size:
            break
    path.write_text(text)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")
