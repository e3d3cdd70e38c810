"""Train one arm after another and compare held-out cross entropy with the end-to-end Transformer's: tables, then one JSON line.

    python benchmarks/quality.py OUT [--train FILE --heldout FILE] [--size bench|paper] [--equal bytes|flops] [--seeds 0,1,2]
        [--arms reference,paper,runs/mine/run.toml,...] [--set section.field=value] [--append docs/experiments.md]

An arm is a name below, or a run.toml; all share seeds, batches and, unless they set it, model shape, optimizer and schedule. `reference` is
always the end-to-end Transformer of the arms' layers. With --equal bytes every block of an arm takes --steps steps; with --equal flops an arm takes
as many as the reference's FLOPs pay for, its schedule stretched to fit. FLOPs are counted twice: as one machine computes them, where a
block's forward pass serves the blocks after it too, and as separate workers do, each running the frozen blocks it needs itself; --accounting says
which of them --equal flops is of.

Runs are ordinary run folders under OUT, so a killed benchmark goes on where it was, and any arm can be looked at with `blocktrain evaluate`.
Figures are nats per byte. The gap of a seed is a paired difference over held-out windows; over several seeds, its mean has the standard error
of the seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads; see blocktrain.__main__

from blocktrain.config import RunConfig, make_config, merge_fields, parse_assignment, preset_fields, read_toml, reference_config
from blocktrain.errors import BlockTrainError
from blocktrain.report.experiments.scale import DEFAULT as VOTES
from blocktrain.report.experiments.scale import PAPER
from blocktrain.training.checkpoint import load_run
from blocktrain.training.data import Corpus, load_corpus
from blocktrain.training.evaluate import Evaluation, evaluate
from blocktrain.training.objective import spans_of
from blocktrain.training.run import StepReport, TrainingRun
from blocktrain.training.trainer import training_flops, worker_flops

CLEAN = {"input": "upstream", "span": 1, "denoise_weight": 0.0, "anchor_weight": 1.0, "start": "zero"}


def common_vote(share: float, begin: float) -> dict[str, Any]:
    return {"objective": {**VOTES, "vote_weight": share, "vote_from": begin}, "model": {"block_heads": True}}


# name -> (meaning, settings over the bench preset)
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("end-to-end Transformer", {"objective": CLEAN}),
    "upstream-1": ("detached state handed on, span 1", {"objective": CLEAN}),
    "votes": ("independent, clean, mean of the blocks", {"objective": VOTES}),
    "votes-shared": ("the same, all blocks on the same batches", {"objective": VOTES, "train": {"samples": "shared"}}),
    "votes-common": ("the same, a head each, 0.8 of the loss is the vote's", common_vote(0.8, 0.0)),
    "votes-late": ("the same, a head each, from half of the steps on 0.8 of the loss is the vote's", common_vote(0.8, 0.5)),
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
    "reference-adamw": ("end-to-end Transformer, AdamW", {"objective": CLEAN, "train": {"optimizer": "adamw", "lr": 2e-3}}),
    "paper-adamw": ("paper's recipe, AdamW", {"objective": PAPER, "train": {"optimizer": "adamw", "lr": 2e-3}}),
    "private-1": ("state handed on, one private layer in blocks 0 and 1", {"objective": {**CLEAN, "private_layers": 1}}),
}
REFERENCES = ("reference", "reference-adamw")
SIZES: dict[str, dict[str, Any]] = {
    "bench": {},  # 3 blocks x 4 layers of half the inner width, D 128: minutes an arm on two cores
    "paper": {"model": {"layers_per_block": 8, "width": 256, "heads": 4, "embed_dim": 256}},  # hours on two cores
}
# Arms that start from noise are read in these ways too; nothing is trained again.
READINGS = {
    "zero start": {"start": "zero"},
    "evidence-free": {"readout": "evidence_free"},
    "both": {"start": "zero", "readout": "evidence_free"},
    "both, mean of the blocks": {"start": "zero", "readout": "evidence_free", "combine": "mean"},
}


def arm_fields(name: str) -> tuple[str, dict[str, Any]]:
    """(meaning, settings) of an arm: one of ARMS, or what a run.toml says."""
    if not name.endswith(".toml"):
        return ARMS[name]
    fields = read_toml(Path(name))
    return name, {key: fields[key] for key in ("model", "noise", "objective", "train") if key in fields}


def arm_config(name: str, seed: int, options: argparse.Namespace) -> RunConfig:
    """The settings of an arm; its steps are those of --equal."""
    fields = merge_fields(preset_fields("bench"), SIZES[options.size])
    for text in options.set:
        fields = merge_fields(fields, parse_assignment(text))
    data = {"corpus": options.train, "heldout": options.heldout}
    common = {"seed": seed, "data": data, "train": {"steps": options.steps, "checkpoint_every": 200}, "evaluate": {"windows": options.windows}}
    config = make_config(merge_fields(merge_fields(fields, arm_fields(name)[1]), common), name)
    if name in REFERENCES or options.equal == "bytes":
        return reference_config(config) if name in REFERENCES else config
    its, mine = flops_of(reference_config(config), options.accounting), flops_of(config, options.accounting)
    steps = max(1, round(options.steps * its / mine))
    return make_config(merge_fields(config.model_dump(), {"train": {"steps": steps}}), name)


def flops_of(config: RunConfig, accounting: str) -> int:
    """Of all steps of every block."""
    count = worker_flops if accounting == "workers" else training_flops
    return count(config, spans_of(config.model.blocks, config.objective.span), config.train.steps)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def progress(name: str) -> Any:
    def report(step: StepReport) -> None:
        if step.updates % 100 == 0:
            say(f"{name}: step {step.updates}/{step.total_updates}, CE {[round(v, 3) for v in step.figures.ce]}, {step.tokens_per_s:,.0f} bytes/s")

    return report


def run_arm(out: Path, name: str, seed: int, corpus: Corpus, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train (or go on with) one arm and score it; one row for each way of reading it."""
    config = arm_config(name, seed, options)
    folder = out / f"{name.replace('/', '_').removesuffix('.toml')}-s{seed}-{config.train.steps}-{config.digest[:6]}"
    saved = folder / "rows.json"
    made_from = [config.digest, options.windows, corpus.train_digest, corpus.heldout_digest]
    kept = json.loads(saved.read_text()) if saved.exists() else None
    if isinstance(kept, dict) and kept["made_from"] == made_from:
        return kept["rows"]
    training = TrainingRun(folder, config, corpus, report=progress(folder.name), say=say)
    training.train()
    loaded = load_run(folder, say)
    meaning = arm_fields(name)[0]
    rows = [row(name, meaning, config, evaluate(loaded, corpus, say), training.seconds)]
    if config.objective.start == "noise":
        for reading, objective in READINGS.items():
            changed = config.model_copy(update={"objective": config.objective.model_copy(update=objective)})
            if config.objective.loss == "embedding_mse" and "readout" in objective:
                continue
            result = evaluate(dataclasses.replace(loaded, config=changed), corpus, say)
            rows.append(row(name, f"{meaning} ... read with {reading}", config, result, training.seconds))
    saved.write_text(json.dumps({"made_from": made_from, "rows": rows}))
    return rows


def row(arm: str, meaning: str, config: RunConfig, result: Evaluation, seconds: float) -> dict[str, Any]:
    figures = result.to_json()
    keys = ["headline_ce", "rollout_ce", "rollout_std", "oracle_ce", "sigma_bins", "best_single_block_ce", "composition_gain"]
    keys += ["ngram_ce", "bytes_seen", "parameters", "seed"]
    flops = {kind: flops_of(config, kind) for kind in ("machine", "workers")}
    shown = {
        "arm": arm,
        "meaning": meaning,
        "seconds": round(seconds),
        "steps": config.train.steps,
        "flops": flops,
        "by_window": result.headline_by_window,
    }
    return shown | {key: figures[key] for key in keys}


def paired_gap(row: dict[str, Any], base: dict[str, Any]) -> tuple[float, float]:
    """Difference of headline CE and its standard error over the held-out windows, which both arms were scored on."""
    differences = [a - b for a, b in zip(row["by_window"], base["by_window"], strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return statistics.fmean(differences), error


def numbers(values: Sequence[float | None] | None) -> str:
    return "-" if values is None else ", ".join("-" if v is None else f"{v:.3f}" for v in values)


def base_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The end-to-end arm of the same seed, tuned alike."""
    name = "reference-adamw" if row["arm"].endswith("-adamw") else "reference"
    return next((r for r in rows if r["arm"] == name and r["seed"] == row["seed"]), None)


def arm_line(group: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """One arm over its seeds, as a row of a Markdown table."""
    first, bases = group[0], [base_of(r, rows) for r in group]
    pairs = [(paired_gap(r, base), base) for r, base in zip(group, bases, strict=True) if base]
    cost = ", ".join(f"{first['flops'][kind] / pairs[0][1]['flops']['machine']:.2f}" for kind in ("machine", "workers")) if pairs else "-"
    gaps = [gap for (gap, _), _ in pairs]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else pairs[0][0][1] if pairs else 0.0
    gap = f"{statistics.fmean(gaps):+.4f} ± {error:.4f}" if gaps else "-"
    gains = [r["composition_gain"] for r in group if r["composition_gain"] is not None]
    rollout = [None if None in column else statistics.fmean(column) for column in zip(*(r["rollout_ce"] for r in group), strict=True)]
    cells = [first["meaning"], ", ".join(str(r["seed"]) for r in group), first["steps"], cost, numbers(first["oracle_ce"]), numbers(rollout)]
    cells += [f"{statistics.fmean(r['headline_ce'] for r in group):.4f}", f"{statistics.fmean(gains):+.3f}" if gains else "-", gap]
    return "| " + " | ".join(map(str, cells)) + " |"


def table(rows: list[dict[str, Any]]) -> str:
    """All arms, in the order in which they were asked for."""
    lines = ["| arm | seeds | steps | FLOPs: one machine, workers | oracle CE | rollout CE after each block | headline | gain | gap |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        groups.setdefault(r["meaning"], []).append(r)
    lines += [arm_line(group, rows) for group in groups.values()]
    if rows:
        lines += ["", f"order-5 n-gram {rows[0]['ngram_ce']:.4f}; {rows[0]['parameters']:,} parameters; {len(rows[0]['by_window'])} held-out windows"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", default="wiki", help="corpus name or path")
    parser.add_argument("--heldout", default="", help="path of the held-out text; empty takes the tail")
    parser.add_argument("--size", choices=SIZES, default="bench")
    parser.add_argument("--equal", choices=("bytes", "flops"), default="bytes")
    parser.add_argument("--accounting", choices=("machine", "workers"), default="machine", help="which FLOPs --equal flops is of")
    parser.add_argument("--steps", type=int, default=1200, help="of the reference, and with --equal bytes of every arm")
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--arms", default="reference,votes,upstream-1,paper")
    parser.add_argument("--set", action="append", default=[], help="of every arm, for example model.blocks=2")
    parser.add_argument("--append", type=Path, help="a Markdown file that the table is added to, with the date and the command")
    options = parser.parse_args()
    names = options.arms.split(",")
    unknown = {name for name in names if not name.endswith(".toml")} - ARMS.keys()
    if unknown:
        parser.error(f"--arms: no arm {', '.join(sorted(unknown))}; known: {', '.join(ARMS)}, or the path of a run.toml")
    rows: list[dict[str, Any]] = []
    try:
        corpus = load_corpus(options.train, heldout=options.heldout)
        for seed in map(int, options.seeds.split(",")):
            for name in names:
                rows += run_arm(options.out, name, seed, corpus, options)
                print(table(rows), flush=True)
    except BlockTrainError as error:
        parser.error(str(error))
    if options.append:
        command = f"python benchmarks/quality.py {shlex.join(sys.argv[1:])}"
        with open(options.append, "a") as file:
            file.write(f"\n## {datetime.date.today()}: {options.equal} equal\n\n`{command}`\n\n{table(rows)}\n")
    print(json.dumps({"benchmark": "quality", "windows": options.windows, "rows": [{**r, "by_window": None} for r in rows]}))


if __name__ == "__main__":
    main()
