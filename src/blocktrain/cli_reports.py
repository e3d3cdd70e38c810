"""`report` and `reproduce` on the command line: a page about runs, and the experiments of the paper with a page about them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from blocktrain.cli_common import absolute_paths, existing_run, say, stop_on_signal
from blocktrain.cli_common import out as console
from blocktrain.config import DataConfig, make_config
from blocktrain.errors import ConfigError


def report(
    *runs: Annotated[Path, Parameter(help="Run folders; several are drawn side by side, under their folders' names.")],
    out: Annotated[Path | None, Parameter(help="The page; default: RUN/report.html, with several runs report.html here.")] = None,
    bench: Annotated[
        tuple[Path, ...], Parameter(negative=(), consume_multiple=True, help="Files with the output of `bench serving`, or its last line.")
    ] = (),
) -> int:
    """One HTML page with plots of runs and benches, and every number in tables. Needs the extra [report]; the page needs nothing.

    Evaluates each run first, which takes seconds to a minute.
    """
    for run in runs:
        existing_run(run)
    from blocktrain.report.page.report import write_report

    if not runs and not bench:
        raise ConfigError("RUN: needed, one or more run folders (or --bench FILE)")
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    write_report(target, runs, bench, say=say)
    print(target)
    return 0


def reproduce(
    out: Annotated[Path, Parameter(help="Folder of all runs and results (made if it is not there).")],
    /,
    *,
    scale: Annotated[
        Literal["smoke", "bench", "paper"], Parameter(help="smoke: minutes, its figures mean nothing; bench: hours; paper: a GPU.")
    ] = "bench",
    only: Annotated[str, Parameter(help="Experiments, with commas; default: all.")] = "",
    train: Annotated[Path | None, Parameter(help="Text to train on; goes with --heldout.")] = None,
    heldout: Annotated[Path | None, Parameter(help="Text to evaluate on; goes with --train.")] = None,
    data: Annotated[str | None, Parameter(help="Instead: wiki, python, wikitext-2, wikitext-103, or a path. Default: wiki.")] = None,
    seed: Annotated[int, Parameter(help="Of every run.")] = 0,
    steps: Annotated[
        int | None, Parameter(help="Length of every training on one machine, in updates, instead of the scale's. Runs of many workers keep theirs.")
    ] = None,
) -> int:
    """Every experiment of the paper (arXiv 2606.24722) at a chosen scale, one after another, and one table: OUT/table.md, table.json, report.html.

    The same command goes on from wherever it was stopped; what is finished is not run again. Exit code 1 if an experiment failed.
    """
    text = _text_of(train, heldout, data)
    if not 0 <= seed < 1 << 62:
        raise ConfigError(f"--seed: must be a number from 0 on, below 2^62, got {seed}")
    if steps is not None:
        make_config({"train": {"steps": steps}}, "--steps")
    from blocktrain.report.experiments.lab import Lab
    from blocktrain.report.experiments.reproduce import chosen
    from blocktrain.report.experiments.reproduce import reproduce as run_all
    from blocktrain.report.experiments.scale import scale_named
    from blocktrain.report.page.plots import require_matplotlib
    from blocktrain.training.data import load_corpus

    experiments = chosen(only)
    require_matplotlib()
    corpus = load_corpus(text.corpus, heldout=text.heldout, heldout_fraction=text.heldout_fraction)
    say(f"text: {corpus.source}; {len(corpus.train):,} training bytes, {len(corpus.heldout):,} held out")
    size = scale_named(scale) if steps is None else scale_named(scale).with_steps(steps)
    lab = Lab(out.absolute(), size, corpus, text, seed, say, stop_on_signal)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that processes that were started are ended in order
    try:
        outcome = run_all(lab, experiments)
    finally:
        signal.signal(signal.SIGTERM, before)
    _show_outcome(outcome, lab.scale.name)
    print(f"{lab.out / 'table.md'}\n{lab.out / 'table.json'}\n{lab.out / 'report.html'}")
    return 1 if outcome.failed else 0


def _text_of(train: Path | None, heldout: Path | None, data: str | None) -> DataConfig:
    """Which text; raises ConfigError naming the flag."""
    if (train is None) != (heldout is None):
        missing, given = ("--heldout", "--train") if heldout is None else ("--train", "--heldout")
        raise ConfigError(f"{missing}: needed with {given}, both are files of text")
    if train is not None and data is not None:
        raise ConfigError("--data: cannot be given with --train and --heldout")
    for flag, path in (("--train", train), ("--heldout", heldout)):
        if path is not None and not path.expanduser().exists():
            raise ConfigError(f"{flag}: {path}: no such file")
    fields: dict[str, Any] = {"corpus": str(train) if train else data or "wiki", "heldout": str(heldout) if heldout else ""}
    return make_config(absolute_paths({"data": fields}), "--data").data


def _show_outcome(outcome: Any, scale: str) -> None:
    from rich.table import Table

    from blocktrain.report.experiments.reproduce import COLUMNS, cells

    table = Table(title=f"The paper's experiments, scale {scale}", title_justify="left", show_lines=True)
    for column in COLUMNS:
        table.add_column(column)
    for row in cells(outcome):
        table.add_row(*row)
    console.print(table)
    say(outcome.warning)
