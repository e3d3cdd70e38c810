"""Train one arm after another at equal bytes and compare held-out cross entropy: one row an arm, then one JSON line.

    python benchmarks/quality.py OUT [--train FILE --heldout FILE] [--steps 1200] [--seeds 0] [--arms reference,paper,...]

Every arm shares model shape, optimizer, schedule, batches and seed; only the objective differs. Runs are ordinary run folders under OUT, so a killed
benchmark goes on where it was, and any arm can be looked at with `blocktrain evaluate`. Figures are nats per byte; FLOPs count prefix passes; the
gap has the standard error of the paired difference over held-out windows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads; see blocktrain.__main__

from blocktrain.config import RunConfig, make_config, merge_fields, preset_fields
from blocktrain.training.checkpoint import load_run
from blocktrain.training.data import Corpus, load_corpus
from blocktrain.training.evaluate import Evaluation, evaluate
from blocktrain.training.run import StepReport, TrainingRun

PAPER = {"input": "independent", "span": 1, "denoise_weight": 1.0, "anchor_weight": 0.0, "start": "noise", "readout": "posterior"}
CLEAN = {"input": "upstream", "span": 1, "denoise_weight": 0.0, "anchor_weight": 1.0, "start": "zero"}

# name -> (meaning, settings over the bench preset)
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("end-to-end Transformer", {"objective": {**CLEAN, "span": 3}}),
    "upstream-1": ("detached state handed on, span 1", {"objective": CLEAN}),
    "paper": ("paper's recipe, sigma [1, 10]", {"objective": PAPER}),
    "upstream-2": ("detached state handed on, spans of two blocks", {"objective": {**CLEAN, "span": 2}}),
    "paper-0-2": ("paper's recipe, sigma [0, 2]", {"objective": PAPER, "noise": {"sigma_min": 0.0, "sigma_max": 2.0}}),
    "paper-mse": ("paper's recipe, embedding MSE", {"objective": {**PAPER, "loss": "embedding_mse"}}),
    "upstream-noisy": ("state handed on, noisy target too", {"objective": {**PAPER, "input": "upstream"}}),
    "upstream-noisy-anchor": (
        "state handed on, noisy target and clean anchor",
        {"objective": {**PAPER, "input": "upstream", "anchor_weight": 1.0, "start": "zero"}},
    ),
    "paper-anchor": (
        "independent with clean anchor, zero start",
        {"objective": {**PAPER, "anchor_weight": 1.0, "start": "zero", "readout": "evidence_free"}},
    ),
    "reference-adamw": ("end-to-end Transformer, AdamW", {"objective": {**CLEAN, "span": 3}, "train": {"optimizer": "adamw", "lr": 2e-3}}),
    "paper-adamw": ("paper's recipe, AdamW", {"objective": PAPER, "train": {"optimizer": "adamw", "lr": 2e-3}}),
    "private-1": ("state handed on, one private layer in blocks 0 and 1", {"objective": {**CLEAN, "private_layers": 1}}),
}
# Arms that start from noise are read in these ways too; nothing is trained again.
READINGS = {
    "zero start": {"start": "zero"},
    "evidence-free": {"readout": "evidence_free"},
    "both": {"start": "zero", "readout": "evidence_free"},
}


def arm_config(name: str, seed: int, options: argparse.Namespace) -> RunConfig:
    fields = merge_fields(preset_fields("bench"), ARMS[name][1])
    fields = merge_fields(
        fields, {"seed": seed, "train": {"steps": options.steps, "checkpoint_every": 200}, "evaluate": {"windows": options.windows}}
    )
    return make_config(fields, name)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def progress(name: str) -> Any:
    def report(step: StepReport) -> None:
        if step.updates % 100 == 0:
            say(f"{name}: step {step.updates}/{step.total_updates}, CE {[round(v, 3) for v in step.figures.ce]}, {step.tokens_per_s:,.0f} bytes/s")

    return report


def run_arm(out: Path, name: str, seed: int, corpus: Corpus, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train (or go on with) one arm and score it; one row for each way of reading it."""
    folder = out / f"{name}-s{seed}-{options.steps}"
    saved = folder / "rows.json"
    config = arm_config(name, seed, options)
    made_from = [config.digest, options.windows, corpus.train_digest, corpus.heldout_digest]
    kept = json.loads(saved.read_text()) if saved.exists() else None
    if isinstance(kept, dict) and kept["made_from"] == made_from:
        return kept["rows"]
    training = TrainingRun(folder, config, corpus, report=progress(folder.name), say=say)
    training.train()
    loaded = load_run(folder, say)
    rows = [row(name, ARMS[name][0], evaluate(loaded, corpus, say), training.seconds)]
    if config.objective.start == "noise":
        for reading, objective in READINGS.items():
            changed = config.model_copy(update={"objective": config.objective.model_copy(update=objective)})
            if config.objective.loss == "embedding_mse" and "readout" in objective:
                continue
            result = evaluate(dataclasses.replace(loaded, config=changed), corpus, say)
            rows.append(row(name, f"... read with {reading}", result, training.seconds))
    saved.write_text(json.dumps({"made_from": made_from, "rows": rows}))
    return rows


def row(arm: str, meaning: str, result: Evaluation, seconds: float) -> dict[str, Any]:
    figures = result.to_json()
    keys = ["headline_ce", "rollout_ce", "rollout_std", "oracle_ce", "sigma_bins", "best_single_block_ce", "composition_gain"]
    keys += ["ngram_ce", "bytes_seen", "training_flops", "parameters", "seed"]
    chosen = {key: figures[key] for key in keys}
    return {"arm": arm, "meaning": meaning, "seconds": round(seconds), "by_window": result.headline_by_window, **chosen}


def paired_gap(row: dict[str, Any], base: dict[str, Any]) -> str:
    """Difference of headline CE and its standard error over the held-out windows, which both arms were scored on."""
    differences = [a - b for a, b in zip(row["by_window"], base["by_window"], strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return f"{statistics.fmean(differences):+.4f} ± {error:.4f}"


def numbers(values: list[float | None] | None) -> str:
    return "-" if values is None else ", ".join("-" if v is None else f"{v:.3f}" for v in values)


def print_table(rows: list[dict[str, Any]]) -> None:
    references = {(r["arm"], r["seed"]): r for r in rows if r["arm"].startswith("reference")}
    print("| arm | seed | FLOPs | oracle CE | rollout CE after each block | headline | gain | gap |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for r in rows:
        base = references.get(("reference-adamw" if r["arm"].endswith("-adamw") else "reference", r["seed"]))  # tuned alike
        gap = paired_gap(r, base) if base else "-"
        cost = f"{r['training_flops'] / base['training_flops']:.2f}" if base else f"{r['training_flops']:.3g}"
        gain = "-" if r["composition_gain"] is None else f"{r['composition_gain']:+.3f}"
        cells = [r["meaning"], r["seed"], cost, numbers(r["oracle_ce"]), numbers(r["rollout_ce"]), f"{r['headline_ce']:.4f}"]
        print("| " + " | ".join(map(str, [*cells, gain, gap])) + " |", flush=True)
    if rows:
        print(f"\norder-5 n-gram {rows[0]['ngram_ce']:.4f}; {rows[0]['bytes_seen']:,} bytes seen; {rows[0]['parameters']:,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", default="wiki", help="corpus name or path")
    parser.add_argument("--heldout", default="", help="path of the held-out text; empty takes the tail")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--arms", default="reference,upstream-1,paper,upstream-2,paper-0-2,paper-mse")
    options = parser.parse_args()
    unknown = set(options.arms.split(",")) - ARMS.keys()
    if unknown:
        parser.error(f"--arms: no arm {', '.join(sorted(unknown))}; known: {', '.join(ARMS)}")
    corpus = load_corpus(options.train, heldout=options.heldout)
    rows: list[dict[str, Any]] = []
    for seed in map(int, options.seeds.split(",")):
        for name in options.arms.split(","):
            rows += run_arm(options.out, name, seed, corpus, options)
            print_table(rows)
    print(json.dumps({"benchmark": "quality", "steps": options.steps, "windows": options.windows, "rows": [{**r, "by_window": None} for r in rows]}))


if __name__ == "__main__":
    main()
