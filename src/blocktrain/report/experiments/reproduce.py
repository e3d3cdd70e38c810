"""Every experiment, one after another, and the one table at the end.

A finished experiment has OUT/NAME.json and is read, not run again; one that was killed goes on where its run folders stand. One that fails says so in
a line, the others go on, and the next call tries it again.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.report.experiments import fixed_depth, long_run, memory, objectives, regimes, serving, six_workers
from blocktrain.report.experiments.lab import Lab
from blocktrain.report.experiments.result import Experiment, Result, Row, save_result, saved_result
from blocktrain.report.page.plots import require_matplotlib
from blocktrain.report.page.report import Front, write_report
from blocktrain.report.page.sections import Table
from blocktrain.serialization import write_bytes

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        long_run.EXPERIMENT,
        memory.EXPERIMENT,
        six_workers.SIX_WORKERS,
        fixed_depth.EXPERIMENT,
        objectives.SIGMA_RANGE,
        objectives.MSE_LOSS,
        regimes.EXPERIMENT,
        six_workers.TRANSPORT,
        serving.EXPERIMENT,
    )
}
COLUMNS = ("experiment", "the paper's figure", "ours", "what differs")


@dataclass(frozen=True)
class Outcome:
    """What all experiments gave; `failed` has a sentence for each that did not."""

    warning: str
    rows: list[Row]
    failed: dict[str, str]


def chosen(only: str) -> list[Experiment]:
    """Those named with commas, all if none is, in their order; raises ConfigError for a name that is none."""
    names = [name.strip() for name in only.split(",")] if only else []
    if "" in names:
        raise ConfigError(f"--only: {only!r} has an empty name; known: {', '.join(EXPERIMENTS)}")
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise ConfigError(f"--only: no experiment {unknown[0]!r}; known: {', '.join(EXPERIMENTS)}")
    return [experiment for experiment in EXPERIMENTS.values() if not names or experiment.name in names]


def reproduce(lab: Lab, experiments: Sequence[Experiment]) -> Outcome:
    """Run what is not there yet, then write OUT/table.md, OUT/table.json and OUT/report.html.

    Raises ConfigError where OUT cannot be used or another process is at work in it, KeyboardInterrupt when stopped.
    """
    require_matplotlib()  # before hours of work
    keys = {experiment.name: experiment.key(lab) for experiment in experiments}  # checks every setting
    try:
        if lab.out.exists() and not lab.out.is_dir():
            raise ConfigError(f"{lab.out}: is a file, results need a folder")
        if (lab.out / "run.toml").exists():
            raise ConfigError(f"{lab.out}: is the folder of a run; name another one for the experiments")
        lab.out.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lab.out / ".lock", timeout=0):
            _claim(lab)
            return _reproduce(lab, experiments, keys)
    except filelock.Timeout:
        raise ConfigError(f"{lab.out}: another process is reproducing there; wait for it, or name another folder") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or lab.out}: cannot be written ({error.strerror})") from None


def _claim(lab: Lab) -> None:
    """One folder has one scale, seed, length and text, or its runs would be trained on with others. Raises ConfigError naming what differs."""
    path = lab.out / "identity.json"
    now = {"scale": lab.scale.name, "seed": lab.seed, "steps": lab.default_config().train.steps}
    now |= {"training text": lab.corpus.train_digest[:16], "held-out text": lab.corpus.heldout_digest[:16]}
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        kept = {}
    for name, value in now.items():
        if isinstance(kept, dict) and kept.get(name, value) != value:
            raise ConfigError(f"{lab.out}: holds experiments of {name} {kept[name]}, now it is {value}; name another folder")
    write_bytes(path, json.dumps(now).encode())


def _reproduce(lab: Lab, experiments: Sequence[Experiment], keys: dict[str, str]) -> Outcome:
    results, failed = dict[str, Result](), dict[str, str]()
    for experiment in experiments:
        try:
            results[experiment.name] = _result_of(lab, experiment, keys[experiment.name])
        except (BlockTrainError, OSError) as error:
            failed[experiment.name] = str(error)
        except Exception as error:  # our own mistake: hours of the other experiments are not lost by it
            path = lab.out / f"{experiment.name}-traceback.txt"
            path.write_text(traceback.format_exc())
            failed[experiment.name] = f"{type(error).__name__}: {' '.join(str(error).split())} (see {path})"
        if experiment.name in failed:
            lab.say(f"{experiment.name}: failed: {failed[experiment.name]}")
    rows = [row for result in results.values() for row in result.rows]
    rows += [Row(name, "–", f"failed: {reason}", "–") for name, reason in failed.items()]
    outcome = Outcome(lab.scale.warning, rows, failed)
    _write(lab, outcome, results)
    return outcome


def _result_of(lab: Lab, experiment: Experiment, key: str) -> Result:
    path = lab.out / f"{experiment.name}.json"
    kept = saved_result(path, key)
    if kept is not None:
        lab.say(f"{experiment.name}: finished before, taken from {path}")
        return kept
    lab.say(f"{experiment.name}: begins")
    began = time.monotonic()
    result = experiment.run(lab)
    save_result(path, key, result)
    lab.say(f"{experiment.name}: finished after {time.monotonic() - began:.0f} s")
    return result


def _write(lab: Lab, outcome: Outcome, results: dict[str, Result]) -> None:
    """The table in two forms, and the page."""
    table = {"scale": lab.scale.name, "warning": outcome.warning, "seed": lab.seed, "rows": [asdict(row) for row in outcome.rows]}
    write_bytes(lab.out / "table.json", json.dumps(table, indent=1).encode())
    write_bytes(lab.out / "table.md", markdown(outcome).encode())
    runs = list(dict.fromkeys(lab.out / run for result in results.values() for run in result.runs))
    benches = [lab.out / bench for result in results.values() for bench in result.benches]
    evaluations: dict[Path, dict[str, Any]] = {lab.out / run: told for result in results.values() for run, told in result.evaluations.items()}
    front = Front(f"BlockTrain: the paper's experiments, scale {lab.scale.name}", outcome.warning, Table(COLUMNS, cells(outcome), words=len(COLUMNS)))
    try:
        write_report(lab.out / "report.html", runs, benches, say=lab.say, front=front, evaluations=evaluations)
    except BlockTrainError as error:
        outcome.failed["report"] = str(error)
    except (TypeError, ValueError, KeyError) as error:  # a kept result that somebody has changed
        outcome.failed["report"] = f"a kept result has not its form ({type(error).__name__}: {error}); remove {lab.out}/*.json to do them anew"
    if "report" in outcome.failed:
        lab.say(f"report: {outcome.failed['report']}")


def cells(outcome: Outcome) -> list[tuple[str, str, str, str]]:
    """The table's rows."""
    return [(row.experiment, row.paper, row.ours, row.differs) for row in outcome.rows]


def markdown(outcome: Outcome) -> str:
    """The table for people who read files."""
    lines = [outcome.warning, "", f"| {' | '.join(COLUMNS)} |", "| --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |" for row in cells(outcome)]
    return "\n".join(lines) + "\n"
