"""One run under three regimes, late work banked or dropped, at equal rounds: one row an arm, then one JSON line.

    python benchmarks/regimes.py OUT [--train FILE --heldout FILE] [--rounds 30] [--workers 6] [--seeds 0] [--regimes lockstep,soft,wan]

Every arm makes the same number of versions of every block, with the same model, seed, machines' seed and rates; the regime decides what arrives in
time, and the arm what late updates are worth. The learning rate does not fall, since arms with fewer tokens would be left at a higher one. Real
training in virtual time: arms are ordinary run folders under OUT. An arm that is there already is read and not simulated again.

`blocktrain reproduce OUT --only regimes` runs the three with late work banked; both are src/blocktrain/report/experiments/regimes.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads; see blocktrain.__main__

from blocktrain.config import make_config, merge_fields, parse_assignment
from blocktrain.report.experiments.regimes import moved, regime_fields, simulate_arm
from blocktrain.swarm.regimes import REGIMES
from blocktrain.training.data import Corpus, load_corpus


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def run_arm(name: str, banked: bool, seed: int, corpus: Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """Simulate an arm, or read what is there of it."""
    fields = regime_fields(REGIMES[name], banked, seed, options.windows)
    for text in options.set:
        fields = merge_fields(fields, parse_assignment(text))
    config = make_config(fields, name)
    late = "banked" if banked else "dropped"
    folder = options.out / f"{name}-{late}-s{seed}-w{options.workers}-r{options.rounds}-{config.digest[:8]}"
    return simulate_arm(folder, config, name, banked, options.workers, options.rounds, corpus, say)


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| regime | late work | seed | participation | late | dropped | tokens counted | bytes down | bytes up | virtual time | headline CE |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for r in rows:
        cells = [r["regime"], r["late_work"], r["seed"], f"{r['participation']:.1%}", r["late"], r["dropped"], f"{r['tokens']:,}"]
        cells += [f"{moved(r)['down'] / 1e6:.1f} MB", f"{moved(r)['up'] / 1e6:.1f} MB", f"{r['virtual_s']:,.0f} s", f"{r['headline_ce']:.4f}"]
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
