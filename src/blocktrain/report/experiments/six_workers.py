"""Two workers a block over loopback HTTP against one machine that takes the same samples, in the same global batches as a round of two replicas.

And what that cost in bytes: `transport` reads the ledger of the same run. Over a public network only the coordinator's address would differ, and
what is sent would be the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blocktrain.config import RunConfig, merge_fields
from blocktrain.report.experiments.lab import Lab, gap_text, paired
from blocktrain.report.experiments.result import Experiment, Result, Row
from blocktrain.report.experiments.scale import Fields
from blocktrain.report.experiments.swarm_processes import ROUNDS, assignments, summary, train_swarm
from blocktrain.training.checkpoint import load_run

PAPER_SAYS = "CE 1.385 against 1.359: +0.026"
PAPER_BYTES = "10.23 GB on one node; 15.22 GB in 12 rounds over public addresses, CE 5.580 to 1.811"
REPLICAS = 2
WINDOWS = 64
SWARM, MACHINE = "six-workers/workers", "six-workers/one-machine"


def one_machine_config(lab: Lab) -> RunConfig:
    """Half as many steps of twice the batch, with the rates that suit one machine."""
    swarm = lab.scale.swarm
    train = {"steps": swarm.steps // REPLICAS, "batch_size": swarm.batch_size * REPLICAS, "warmup_steps": _warmup(lab) // REPLICAS}
    return lab.checked({"seed": lab.seed, "model": swarm.model, "train": train})


def swarm_fields(lab: Lab) -> Fields:
    """Settings of the workers' run."""
    swarm = lab.scale.swarm
    train = {"steps": swarm.steps, "batch_size": swarm.batch_size, "warmup_steps": _warmup(lab)}
    fields = {"model": swarm.model, "train": train, "round": {"inner_steps": swarm.inner_steps}}
    return merge_fields(fields, swarm.settings)


def _warmup(lab: Lab) -> int:
    return min(50, lab.scale.swarm.steps // 4)


def key(lab: Lab) -> str:
    return lab.key(one_machine_config(lab), lab.checked(swarm_fields(lab)), more=[lab.seed, ROUNDS])


def trained_swarm(lab: Lab) -> tuple[Path, dict[str, Any]]:
    """The workers' run and its status; trained once."""
    text = {"data": {"heldout": lab.data.heldout, "heldout_fraction": lab.data.heldout_fraction}}
    settings = [*assignments(merge_fields(swarm_fields(lab), text)), *ROUNDS, f"seed={lab.seed}"]
    return lab.out / SWARM, train_swarm(lab.out / SWARM, lab.data.corpus, settings, num_workers(lab), lab.say)


def six_workers(lab: Lab) -> Result:
    """Trains one machine, then the workers, and compares them on the same windows."""
    machine = load_run(lab.train(MACHINE, one_machine_config(lab)), lab.say)
    folder, status = trained_swarm(lab)
    workers = load_run(folder, lab.say)
    ours, theirs = lab.headline_windows(workers, WINDOWS), lab.headline_windows(machine, WINDOWS)
    ce, alone = sum(ours) / len(ours), sum(theirs) / len(theirs)
    told = summary(status)
    line = f"CE {ce:.3f} against {alone:.3f}: {gap_text(ours, theirs)}; participation {told['participation']:.0%}"
    differs = f"{lab.differs(config=workers.config)}; {workers.progress.bytes_seen:,} bytes a block, {num_workers(lab)} workers over loopback HTTP"
    difference, error = paired(ours, theirs)
    figures = {"headline_ce": ce, "one_machine_ce": alone, "difference": difference, "standard_error": error, **told}
    return Result([Row("six-workers", PAPER_SAYS, line, differs)], figures, (SWARM,))


def num_workers(lab: Lab) -> int:
    return REPLICAS * lab.scale.swarm.model["blocks"]


def transport(lab: Lab) -> Result:
    """Reads the ledger of the workers' run."""
    folder, status = trained_swarm(lab)
    told, config = summary(status), load_run(folder, lab.say).config
    first, last = (sum(b["losses"][i][2] for b in status["blocks"]) / len(status["blocks"]) for i in (0, -1))
    total = told["up"] + told["down"]
    line = (
        f"{total / 1e6:.2f} MB in {max(told['versions'])} rounds (up {told['up'] / 1e6:.2f}, down {told['down'] / 1e6:.2f}; updates "
        f"{told['bytes_updates'] / 1e6:.2f}, weights {told['bytes_weights'] / 1e6:.2f}, text {told['bytes_text'] / 1e6:.2f}), "
        f"training CE {first:.3f} to {last:.3f}"
    )
    differs = (
        f"{lab.differs(config=config)}; {num_workers(lab)} workers over loopback HTTP, {config.outer.up_codec} updates, every byte in the ledger"
    )
    return Result([Row("transport", PAPER_BYTES, line, differs)], {**told, "first_ce": first, "last_ce": last, "total": total}, (SWARM,))


SIX_WORKERS = Experiment("six-workers", key, six_workers)
TRANSPORT = Experiment("transport", key, transport)
