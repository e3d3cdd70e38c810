"""Six workers, two replicas a block, over loopback HTTP, against one machine that trains the same blocks on the same tokens.

    python benchmarks/six_workers.py OUT --train TRAIN --heldout HELDOUT [--shape small|bench] [--codecs fp32,bf16,int8]

Real processes: one coordinator, six workers of one thread each. All arms take the same shape, seed and samples (a block's steps are leased
exactly once); `--set section.field=value` changes all of them, `--swarm-set` only the workers. One machine is trained twice: with the batch that
a round of two replicas has together and half as many steps, as data-parallel training would be, and with the workers' batch and all their steps
one after another. For each codec (up and down alike) the table gives the headline CE, its difference to the first arm with the standard error of
the paired windows, the participation, and the bytes of the ledger. Then one JSON line. What is there already in OUT is not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blocktrain.training.checkpoint import load_run
from blocktrain.training.data import heldout_windows, load_corpus
from blocktrain.training.evaluate import Evaluator

SHAPES = {  # settings, steps of a worker's batch of 8 for each block
    "small": (["model.blocks=3", "model.layers_per_block=1", "model.width=64", "model.heads=2", "model.positions=128", "model.embed_dim=64"], 1200),
    "bench": (["model.blocks=3", "model.layers_per_block=2", "model.width=128", "model.heads=4", "model.positions=256", "model.embed_dim=128"], 2400),
}
BATCH, REPLICAS = 8, 2
ROUNDS = ["round.replicas=2", "round.quorum=2", "round.deadline=fixed", "round.deadline_s=3600", "round.heartbeat_limit_s=120"]
WORKERS = 6


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
    base = [*shape, f"data.heldout={json.dumps(str(Path(given.heldout).resolve()))}", *given.set]
    arms = [one_machine(given, base, given.steps // REPLICAS, BATCH * REPLICAS), one_machine(given, base, given.steps, BATCH)]
    settings = [*base, f"train.steps={given.steps}", f"train.batch_size={BATCH}", *given.swarm_set]
    arms += [swarm(given, settings, codec) for codec in given.codecs.split(",") if codec]
    show(arms, given)


def flags(settings: list[str]) -> list[str]:
    return [f"--set={one}" for one in settings]


def blocktrain(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": options.pop("threads", "2"), "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen([sys.executable, "-m", "blocktrain", *arguments], text=True, env=environment, **options)


def one_machine(given: argparse.Namespace, base: list[str], steps: int, batch: int) -> dict[str, Any]:
    run = given.out / f"one-machine-batch-{batch}"
    if not (run / "evaluation.json").exists():
        print(f"one machine: {steps} steps of batch {batch}", file=sys.stderr)
        settings = [*base, f"train.steps={steps}", f"train.batch_size={batch}"]
        process = blocktrain("train", str(run), "--data", given.train, "--json", *flags(settings), stdout=subprocess.DEVNULL)
        if process.wait():
            sys.exit("one machine: training failed")
    return {"arm": f"one machine, {steps} x batch {batch}", **evaluated(run)}


def swarm(given: argparse.Namespace, base: list[str], codec: str) -> dict[str, Any]:
    run = given.out / f"six-{codec}"
    if not (run / "status.json").exists():
        train_swarm(run, given, [*base, *ROUNDS, f"round.inner_steps={given.inner_steps}", f"outer.up_codec={codec}", f"outer.down_codec={codec}"])
    figures = json.loads((run / "status.json").read_text())
    return {"arm": f"six workers, {codec}", **evaluated(run), **summary(figures)}


def train_swarm(run: Path, given: argparse.Namespace, settings: list[str]) -> None:
    print(f"{run.name}: six workers", file=sys.stderr)
    run.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    command = ["coordinator", str(run), "--listen", "127.0.0.1:0", "--no-evaluate", "--json", "--data", given.train]
    coordinator = blocktrain(*command, *flags(settings), threads="1", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert coordinator.stdout is not None
    line = coordinator.stdout.readline().split()[-1]
    logs = [open(given.out / f"{run.name}-worker-{i}.log", "w") for i in range(WORKERS)]  # noqa: SIM115
    folders = [given.out / "workers" / f"{run.name}-{i}" for i in range(WORKERS)]
    workers = [
        blocktrain("worker", line, "--name", f"w{i}", "--folder", str(folders[i]), "--threads", "1", threads="1", stderr=logs[i])
        for i in range(WORKERS)
    ]
    figures = json.loads(coordinator.stdout.read().strip().splitlines()[-1])
    codes = [worker.wait(timeout=120) for worker in workers]
    if coordinator.wait() or any(codes):
        sys.exit(f"{run.name}: exit codes {coordinator.returncode}, {codes}; see {logs[0].name}")
    figures["seconds"] = time.monotonic() - began
    (run / "status.json").write_text(json.dumps(figures))


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    blocks = figures["blocks"]
    kinds = figures["bytes"]["by_kind"]
    return {
        "participation": sum(b["participation"] for b in blocks) / len(blocks),
        "versions": [b["version"] for b in blocks],
        "down": figures["bytes"]["down"],
        "up": figures["bytes"]["up"],
        **{f"bytes_{kind}": kinds[kind] for kind in kinds},
        "seconds": figures["seconds"],
        "updates": figures["updates"],
    }


def evaluated(run: Path) -> dict[str, Any]:
    """Headline CE on 64 windows, and the CE of each window for paired comparisons."""
    loaded = load_run(run, lambda note: print(note, file=sys.stderr))
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
        pairs = [a - b for a, b in zip(arm["windows"], arms[0]["windows"], strict=True)]
        mean = sum(pairs) / len(pairs)
        error = math.sqrt(sum((p - mean) ** 2 for p in pairs) / (len(pairs) - 1) / len(pairs))
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
    main()
