"""Fixed depth: the same L layers cut into many small blocks, ..., one block of L. How many layers must a block have?

At one block nothing is composed: our default is then end-to-end training, the paper's recipe one denoiser. The reference is that of the long run, the
same layers cut as the preset has them; the cut decides only where gains stand.
"""

from __future__ import annotations

from typing import Any

from blocktrain.config import ModelConfig, RunConfig, reference_config
from blocktrain.report.experiments.lab import Lab, ce_list, gap_text, plain
from blocktrain.report.experiments.result import Experiment, Result, Row
from blocktrain.report.experiments.scale import DEFAULT, PAPER, Fields

PAPER_SAYS = "about four layers a block are enough"
RECIPES: dict[str, tuple[str, Fields]] = {"default": ("our default", DEFAULT), "paper": ("the paper's recipe", PAPER)}


def cuts(model: ModelConfig) -> list[int]:
    """Numbers of blocks, the most first: every divisor of L that leaves a block the weights of an ordinary layer."""
    least = max(1, round(1 / model.attention_ratio))
    return [blocks for blocks in range(model.layers // least, 0, -1) if model.layers % blocks == 0]


def arms(lab: Lab) -> dict[str, dict[int, RunConfig]]:
    """recipe -> blocks -> settings."""
    whole = {recipe: lab.config(objective).model for recipe, (_, objective) in RECIPES.items()}
    return {
        recipe: {b: lab.config(objective, {"model": {"blocks": b, "layers_per_block": whole[recipe].layers // b}}) for b in cuts(whole[recipe])}
        for recipe, (_, objective) in RECIPES.items()
    }


def key(lab: Lab) -> str:
    return lab.key(*(config for found in arms(lab).values() for config in found.values()))


def run(lab: Lab) -> Result:
    """Trains whatever cuts the long run has not."""
    references = {"default": lab.evaluate(lab.reference_run()), "paper": lab.evaluate(lab.paper_reference_run())}
    rows, figures = [], dict[str, dict[str, Any]]()
    for recipe, found in arms(lab).items():
        for blocks, config in found.items():
            told = lab.evaluate(_trained(lab, recipe, blocks, config))
            gap = gap_text(told.headline_by_window, references[recipe].headline_by_window)
            each = config.model.layers_per_block
            name = f"fixed-depth, {RECIPES[recipe][0]}, {each} layer{'s' * (each > 1)} a block"
            line = f"CE {told.headline_ce:.3f}, gap {gap}; after each of {blocks}: {ce_list(told.rollout_ce)}"
            rows.append(Row(name, PAPER_SAYS, line, lab.differs(told, config)))
            figures.setdefault(recipe, {})[str(blocks)] = plain(told) | {"gap": gap}
    return Result(rows, figures)


def _trained(lab: Lab, recipe: str, blocks: int, config: RunConfig) -> Any:
    """The cut of the preset is that of the long run; our default in one block is nothing but end-to-end."""
    homes = {lab.default_config().digest: lab.default_run, lab.paper_config().digest: lab.paper_run}
    assert reference_config(config).objective.span == blocks
    if config.digest in homes:
        return homes[config.digest]()
    return lab.train(f"fixed-depth/{recipe}-{blocks}-blocks", config)


EXPERIMENT = Experiment("fixed-depth", key, run)
