"""Three kinds of swarm in the simulator: who takes part follows from machines, lines, absences and deadlines; nothing sets it.

Real training in virtual time. Every arm makes the same number of versions of every block. The learning rate does not fall, since arms with fewer
tokens would be left at a higher one. An arm is an ordinary run folder; it is simulated whole or again, since a simulation cannot go on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blocktrain.config import ORDINARY, RunConfig, merge_fields, parse_assignment
from blocktrain.report.experiments.lab import Lab
from blocktrain.report.experiments.result import Experiment, Result, Row
from blocktrain.report.experiments.scale import Fields
from blocktrain.serialization import write_bytes
from blocktrain.swarm.regimes import DROP_LATE, REGIMES, Regime
from blocktrain.swarm.simulator import Plan, simulate
from blocktrain.training.checkpoint import load_run
from blocktrain.training.data import Corpus
from blocktrain.training.evaluate import evaluate

PAPER_SAYS = {"lockstep": "participation 100 %", "soft": "participation 90 %", "wan": "participation 42 %"}
WORKERS = 6
SHAPE: Fields = {
    "model": {"blocks": 3, "layers_per_block": 1, "width": 64, "heads": 4, "positions": 128, "embed_dim": 64, "noise_dim": 16} | ORDINARY,
    "train": {"steps": 1 << 30, "batch_size": 8, "warmup_steps": 50, "cooldown": 0.0, "device": "cpu", "precision": "float32"},
    "round": {"inner_steps": 12},
}
Say = Callable[[str], None]


def regime_fields(regime: Regime, banked: bool, seed: int, windows: int) -> Fields:
    """Settings of an arm: the shape, the regime's rules, and what late work is worth."""
    fields = merge_fields(SHAPE, {"seed": seed, "evaluate": {"windows": windows}})
    for text in (*regime.settings(), *(() if banked else DROP_LATE)):
        fields = merge_fields(fields, parse_assignment(text))
    return fields


def simulate_arm(folder: Path, config: RunConfig, name: str, banked: bool, workers: int, rounds: int, corpus: Corpus, say: Say) -> dict[str, Any]:
    """Simulate an arm into a folder, or read its row where it is there; half a simulation is thrown away."""
    saved = folder / "row.json"
    if saved.exists():
        return json.loads(saved.read_text())
    if (folder / "checkpoints").is_dir():
        shutil.rmtree(folder)
    outcome = simulate(Plan(config, REGIMES[name], workers, config.seed, rounds), corpus, folder, _progress(folder.name, say))
    result = evaluate(load_run(folder, say), corpus, say)
    figures = outcome.to_json() | {"headline_ce": result.headline_ce, "rollout_ce": result.rollout_ce, "ngram_ce": result.ngram_ce}
    late = "banked" if banked else "dropped"
    row = {"regime": name, "late_work": late, "seed": config.seed, "parameters": result.parameters, **figures}
    write_bytes(saved, json.dumps(row).encode())
    return row


def _progress(name: str, say: Say) -> Say:
    """Every fifth version of block 0."""

    def tell(text: str) -> None:
        if text.startswith("block 0 is at version") and int(text.split()[5].rstrip(":")) % 5 == 0:
            say(f"{name}: {text.partition(':')[0]}")

    return tell


def moved(row: dict[str, Any]) -> dict[str, int]:
    """Bytes down and up."""
    return {way: sum(count for name, count in row["bytes"].items() if name.endswith(way)) for way in ("down", "up")}


# --- The experiment ---


def regime_configs(lab: Lab) -> dict[str, RunConfig]:
    """Late work banked, as is the default."""
    found = {name: regime_fields(regime, True, lab.seed, 64) for name, regime in REGIMES.items()}
    return {name: lab.checked(merge_fields(fields, lab.scale.swarm.simulated)) for name, fields in found.items()}


def key(lab: Lab) -> str:
    return lab.key(*regime_configs(lab).values(), more=[lab.scale.swarm.rounds, WORKERS])


def run(lab: Lab) -> Result:
    """Simulates each regime."""
    rows, figures, rounds = [], dict[str, Any](), lab.scale.swarm.rounds
    for name, config in regime_configs(lab).items():
        folder = lab.out / "regimes" / f"{name}-r{rounds}-{lab.key(config)[:8]}"
        told = simulate_arm(folder, config, name, True, WORKERS, rounds, lab.corpus, lab.say)
        bytes_moved = moved(told)
        line = (
            f"participation {told['participation']:.1%}, CE {told['headline_ce']:.3f}, {told['tokens']:,} bytes trained on, "
            f"{bytes_moved['down'] / 1e6:.1f} MB down, {bytes_moved['up'] / 1e6:.1f} MB up"
        )
        differs = f"{lab.differs(config=config)}; {WORKERS} simulated workers, {rounds} rounds in virtual time"
        rows.append(Row(f"regimes, {name}", PAPER_SAYS[name], line, differs))
        figures[name] = told
    return Result(rows, figures)


EXPERIMENT = Experiment("regimes", key, run)
