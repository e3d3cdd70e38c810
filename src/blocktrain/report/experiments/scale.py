"""How large everything is: `smoke` to see that it runs, `bench` for hours of CPU, `paper` for a GPU.

The recipes that are compared stand here too: the paper's, our default, and what it becomes where blocks learn from their common vote.
At `paper` the paper's recipe keeps the optimizer and the ordinary layers of its preset, so its reference is another than that of our default; at the
other scales both have one optimizer, one layer and one reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from blocktrain.config import ORDINARY, PRESETS, merge_fields, preset_fields
from blocktrain.errors import ConfigError

Fields = dict[str, Any]

PAPER: Fields = {"input": "independent", "span": 1, "denoise_weight": 1.0, "anchor_weight": 0.0, "start": "noise", "readout": "posterior"}
DEFAULT: Fields = {"input": "independent", "span": 1, "denoise_weight": 0.0, "anchor_weight": 1.0, "start": "zero", "combine": "mean"}
COMMON: Fields = {"objective": {"vote_weight": 0.8, "vote_from": 0.5}, "model": {"block_heads": True}}  # over the default: with a common vote
WINDOW: Fields = {**PAPER, "input": "upstream", "anchor_weight": 1.0, "weighting": "none", "start": "zero"}  # that sweeps as the paper does

# The shape of the runs of many workers on one machine's cores: three small blocks, and rates that suit two replicas (docs/experiments.md).
SMALL: Fields = {"blocks": 3, "layers_per_block": 2, "width": 64, "heads": 2, "positions": 128, "embed_dim": 64}
NESTEROV: Fields = {"train": {"lr": 0.015, "muon_lr": 0.03}, "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.5}}
TINY: Fields = {"blocks": 2, "layers_per_block": 2, "width": 32, "heads": 2, "positions": 64, "embed_dim": 32, "noise_dim": 16}


@dataclass(frozen=True)
class SwarmScale:
    """Runs of many workers: real ones over HTTP, and simulated ones."""

    model: Fields
    steps: int  # of a worker's batch, for each block
    inner_steps: int
    batch_size: int = 8
    settings: Fields = field(default_factory=lambda: NESTEROV)
    rounds: int = 30  # of each simulated regime
    simulated: Fields = field(default_factory=dict)  # over the regimes' own shape


@dataclass(frozen=True)
class ServingScale:
    """What is generated over links with delay."""

    window: int
    prompts: int
    prompt_bytes: int
    max_bytes: int
    rtt_ms: float = 100.0
    repeats: int = 20


@dataclass(frozen=True)
class Scale:
    """Sizes of every experiment. `fields` are settings of a run over the defaults; `recipe` is what the paper's recipe adds."""

    name: str
    warning: str  # said wherever figures are shown
    fields: Fields
    swarm: SwarmScale
    serving: ServingScale
    recipe: Fields = field(default_factory=dict)
    measured: bool = True  # whether memory is measured by real steps

    def with_steps(self, steps: int) -> Scale:
        """The same with another length of every training on one machine; runs of many workers keep theirs."""
        return replace(self, fields=merge_fields(self.fields, {"train": {"steps": steps}}))

    def run_fields(self, objective: Fields, seed: int) -> Fields:
        """Settings of a run of this scale with an objective."""
        own = merge_fields(self.fields, {"seed": seed, "objective": objective})
        return merge_fields(own, self.recipe) if objective["input"] == "independent" and objective["denoise_weight"] else own


def _paper_fields() -> tuple[Fields, Fields]:
    """(what every run of the paper's scale has, what only the paper's recipe has): preset `paper`, its optimizer and layer apart."""
    preset = preset_fields("paper")
    own = ("optimizer", "lr", "weight_decay")
    train = {key: value for key, value in preset["train"].items() if key not in own}
    ordinary = {key: preset["model"][key] for key in ("layers_per_block", "heads", *ORDINARY)}
    halves = {"layers_per_block": 2 * ordinary["layers_per_block"], "heads": ordinary["heads"] // 2}  # the same weights in layers of our default
    model = {key: value for key, value in preset["model"].items() if key not in ordinary} | halves
    fields = {"model": model, "noise": preset["noise"], "train": train, "evaluate": {"windows": 256}}
    return fields, {"model": ordinary, "train": {key: preset["train"][key] for key in own}}


def _scales() -> dict[str, Scale]:
    paper, recipe = _paper_fields()
    smoke = {
        "model": TINY,
        "train": {"steps": 24, "batch_size": 4, "warmup_steps": 4, "checkpoint_every": 12, "log_every": 2},
        "evaluate": {"windows": 8, "noise_draws": 4, "sigma_bins": 4},
    }
    tiny = {**TINY, "layers_per_block": 1}
    return {
        "smoke": Scale(
            "smoke",
            "Scale smoke: a model that has learnt nothing, to see that everything runs. The figures mean nothing.",
            smoke,
            SwarmScale(tiny, steps=12, inner_steps=3, batch_size=4, rounds=3, simulated={"model": tiny, "evaluate": {"windows": 8}}),
            ServingScale(window=16, prompts=2, prompt_bytes=16, max_bytes=16, repeats=6),
            measured=False,
        ),
        "bench": Scale(
            "bench",
            "Scale bench: far smaller than the paper's runs, on other text; figures compare with each other, not with the paper's.",
            merge_fields(PRESETS["bench"], {"evaluate": {"windows": 64}}),
            SwarmScale(SMALL, steps=1200, inner_steps=25),
            ServingScale(window=64, prompts=4, prompt_bytes=64, max_bytes=64),
        ),
        "paper": Scale(
            "paper",
            "Scale paper: the paper's recipe as far as it is known to us; runs of many workers stay small, since they share one machine.",
            paper,
            SwarmScale(SMALL, steps=1200, inner_steps=25),
            ServingScale(window=64, prompts=8, prompt_bytes=64, max_bytes=128, repeats=60),
            recipe,
        ),
    }


SCALES = _scales()


def scale_named(name: str) -> Scale:
    """Raises ConfigError where there is none of that name."""
    if name not in SCALES:
        raise ConfigError(f"--scale: no scale {name!r}; known: {', '.join(SCALES)}")
    return SCALES[name]
