"""Six workers, two replicas a block, over loopback HTTP, against one machine that trains the same blocks on the same tokens.

    python benchmarks/six_workers.py OUT --train TRAIN --heldout HELDOUT [--shape small|bench] [--codecs fp32,bf16,int8]

Real processes: one coordinator, six workers of one thread each. All arms take the same shape, seed and samples (a block's steps are leased
exactly once); `--set section.field=value` changes all of them, `--swarm-set` only the workers. One machine is trained twice: with the batch that
a round of two replicas has together and half as many steps, as data-parallel training would be, and with the workers' batch and all their steps
one after another. For each codec (up and down alike) the table gives the headline CE, its difference to the first arm with the standard error of
the paired windows, the participation, and the bytes of the ledger. Then one JSON line. What is there already in OUT is not trained again.

`blocktrain reproduce OUT --only six-workers` runs one codec of it; the processes are those of src/blocktrain/report/experiments/swarm_processes.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blocktrain.errors import BlockTrainError
from blocktrain.report.experiments.lab import paired
from blocktrain.report.experiments.scale import SMALL
from blocktrain.report.experiments.six_workers import REPLICAS
from blocktrain.report.experiments.swarm_processes import ROUNDS, assignments, flags, start, summary, train_swarm
from blocktrain.training.checkpoint import load_run
from blocktrain.training.data import heldout_windows, load_corpus
from blocktrain.training.evaluate import Evaluator

BENCH = {"blocks": 3, "layers_per_block": 4, "width": 128, "heads": 2, "positions": 256, "embed_dim": 128}
SHAPES = {"small": (SMALL, 1200), "bench": (BENCH, 2400)}  # model, steps of a worker's batch of 8 for each block
BATCH, WORKERS = 8, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--inner-steps", type=int, default=25)
    parser.add_argument("--codecs", default="fp32,bf16,int8")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--swarm-set", action="append", default=[])
    given = parser.parse_args()
    shape, steps = SHAPES[given.shape]
    given.steps = given.steps or steps
    base = [*assignments({"model": shape}), f"data.heldout={json.dumps(str(Path(given.heldout).resolve()))}", *given.set]
    arms = [one_machine(given, base, given.steps // REPLICAS, BATCH * REPLICAS), one_machine(given, base, given.steps, BATCH)]
    settings = [*base, f"train.steps={given.steps}", f"train.batch_size={BATCH}", *given.swarm_set]
    arms += [swarm(given, settings, codec) for codec in given.codecs.split(",") if codec]
    show(arms, given)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def one_machine(given: argparse.Namespace, base: list[str], steps: int, batch: int) -> dict[str, Any]:
    run = given.out / f"one-machine-batch-{batch}"
    if not (run / "evaluation.json").exists():
        say(f"one machine: {steps} steps of batch {batch}")
        settings = [*base, f"train.steps={steps}", f"train.batch_size={batch}"]
        process = start("train", str(run), "--data", given.train, "--json", *flags(settings), stdout=subprocess.DEVNULL)
        if process.wait():
            sys.exit("one machine: training failed")
    return {"arm": f"one machine, {steps} x batch {batch}", **evaluated(run)}


def swarm(given: argparse.Namespace, base: list[str], codec: str) -> dict[str, Any]:
    run = given.out / f"six-{codec}"
    settings = [*base, *ROUNDS, f"round.inner_steps={given.inner_steps}", f"outer.up_codec={codec}", f"outer.down_codec={codec}"]
    figures = train_swarm(run, given.train, settings, WORKERS, say)
    return {"arm": f"six workers, {codec}", **evaluated(run), **summary(figures)}


def evaluated(run: Path) -> dict[str, Any]:
    """Headline CE on 64 windows, and the CE of each window for paired comparisons."""
    loaded = load_run(run, say)
    data = loaded.config.data
    corpus = load_corpus(data.corpus, heldout=data.heldout)
    windows = heldout_windows(corpus.heldout, loaded.config.model.positions, 64)
    ce = Evaluator(loaded, windows).rollout().mean(0)  # (blocks, windows)
    rollout = ce.mean(1).tolist()
    return {"rollout_ce": rollout, "headline_ce": rollout[-1], "windows": ce[-1].tolist(), "bytes_seen": loaded.progress.bytes_seen}


def show(arms: list[dict[str, Any]], given: argparse.Namespace) -> None:
    table = Table(
        title=f"Six workers: {given.shape}, {given.steps} x batch {BATCH}, {given.inner_steps} inner steps",
        title_justify="left",
    )
    for name in ("arm", "rollout CE", "headline CE", "to the first", "participation", "updates up MB", "weights down MB", "all MB", "seconds"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for arm in arms:
        mean, error = paired(arm["windows"], arms[0]["windows"])
        arm |= {"difference": mean, "standard_error": error}
        mb = [f"{arm[key] / 1e6:.2f}" if key in arm else "-" for key in ("bytes_updates", "bytes_weights")]
        total = f"{(arm['up'] + arm['down']) / 1e6:.2f}" if "up" in arm else "-"
        share = f"{arm['participation']:.0%}" if "participation" in arm else "-"
        took = f"{arm['seconds']:.0f}" if "seconds" in arm else "-"
        rollout = " ".join(f"{ce:.4f}" for ce in arm["rollout_ce"])
        table.add_row(
            arm["arm"], rollout, f"{arm['headline_ce']:.4f}", f"{mean:+.4f} ± {error:.4f}" if arm is not arms[0] else "", share, *mb, total, took
        )
    Console(width=170).print(table)
    print(json.dumps([{key: value for key, value in arm.items() if key != "windows"} for arm in arms]))


if __name__ == "__main__":
    try:
        main()
    except BlockTrainError as problem:
        sys.exit(str(problem))
