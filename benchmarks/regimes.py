"""One run under three regimes, late work banked or dropped, at equal rounds: one row an arm, then one JSON line.

    python benchmarks/regimes.py OUT [--train FILE --heldout FILE] [--rounds 30] [--workers 6] [--seeds 0] [--regimes lockstep,soft,wan]

Every arm makes the same number of versions of every block, with the same model, seed, machines' seed and rates; the regime decides what arrives in
time, and the arm what late updates are worth. The learning rate does not fall, since arms with fewer tokens would be left at a higher one. Real
training in virtual time: arms are ordinary run folders under OUT. An arm that is there already is read and not simulated again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads; see blocktrain.__main__

from blocktrain.config import RunConfig, make_config, merge_fields, parse_assignment
from blocktrain.swarm.regimes import DROP_LATE, REGIMES, Regime
from blocktrain.swarm.simulator import Plan, simulate
from blocktrain.training.checkpoint import load_run
from blocktrain.training.data import Corpus, load_corpus
from blocktrain.training.evaluate import evaluate

SMALL: dict[str, Any] = {
    "model": {"blocks": 3, "layers_per_block": 1, "width": 64, "heads": 4, "positions": 128, "embed_dim": 64, "noise_dim": 16},
    "train": {"steps": 1 << 30, "batch_size": 8, "warmup_steps": 50, "cooldown": 0.0, "device": "cpu", "precision": "float32"},
    "round": {"inner_steps": 12},
}


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def arm_config(regime: Regime, banked: bool, seed: int, options: argparse.Namespace) -> RunConfig:
    fields = merge_fields(SMALL, {"seed": seed, "evaluate": {"windows": options.windows}})
    for text in (*regime.settings(), *(() if banked else DROP_LATE), *options.set):
        fields = merge_fields(fields, parse_assignment(text))
    return make_config(fields, regime.name)


def run_arm(name: str, banked: bool, seed: int, corpus: Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """Simulate an arm, or read what is there of it."""
    regime, late = REGIMES[name], "banked" if banked else "dropped"
    config = arm_config(regime, banked, seed, options)
    folder = options.out / f"{name}-{late}-s{seed}-w{options.workers}-r{options.rounds}-{config.digest[:8]}"
    saved = folder / "row.json"
    if saved.exists():
        return json.loads(saved.read_text())
    outcome = simulate(Plan(config, regime, options.workers, seed, options.rounds), corpus, folder, progress(folder.name))
    result = evaluate(load_run(folder, say), corpus, say)
    figures = outcome.to_json() | {"headline_ce": result.headline_ce, "rollout_ce": result.rollout_ce, "ngram_ce": result.ngram_ce}
    row = {"regime": name, "late_work": late, "seed": seed, "parameters": result.parameters, **figures}
    saved.write_text(json.dumps(row))
    return row


def progress(name: str) -> Any:
    began = time.monotonic()

    def tell(text: str) -> None:
        if text.startswith("block 0 is at version") and int(text.split()[5].rstrip(":")) % 5 == 0:
            say(f"{name}: {text.partition(':')[0]}, {time.monotonic() - began:.0f} s")

    return tell


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| regime | late work | seed | participation | late | dropped | tokens counted | bytes down | bytes up | virtual time | headline CE |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for r in rows:
        moved = {way: sum(count for name, count in r["bytes"].items() if name.endswith(way)) for way in ("down", "up")}
        cells = [r["regime"], r["late_work"], r["seed"], f"{r['participation']:.1%}", r["late"], r["dropped"], f"{r['tokens']:,}"]
        cells += [f"{moved['down'] / 1e6:.1f} MB", f"{moved['up'] / 1e6:.1f} MB", f"{r['virtual_s']:,.0f} s", f"{r['headline_ce']:.4f}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", default="wiki", help="corpus name or path")
    parser.add_argument("--heldout", default="", help="path of the held-out text; empty takes the tail")
    parser.add_argument("--rounds", type=int, default=30, help="versions of each block")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--regimes", default=",".join(REGIMES))
    parser.add_argument("--set", action="append", default=[], help="section.field=value, for every arm")
    options = parser.parse_args()
    if unknown := set(options.regimes.split(",")) - REGIMES.keys():
        parser.error(f"--regimes: no regime {', '.join(sorted(unknown))}; known: {', '.join(REGIMES)}")
    corpus = load_corpus(options.train, heldout=options.heldout)
    rows: list[dict[str, Any]] = []
    for seed in map(int, options.seeds.split(",")):
        for name in options.regimes.split(","):
            for banked in (True, False):
                same = not banked and not rows[-1]["late"] + rows[-1]["dropped"]  # nothing came late: nothing else would have happened
                rows.append({**rows[-1], "late_work": "dropped"} if same else run_arm(name, banked, seed, corpus, options))
                print_table(rows[-1:])
    print()
    print_table(rows)
    print(json.dumps({"benchmark": "regimes", "rounds": options.rounds, "workers": options.workers, "rows": rows}))


if __name__ == "__main__":
    main()
