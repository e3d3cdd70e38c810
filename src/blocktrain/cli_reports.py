"""`report` and `reproduce` on the command line: a page about runs, and the experiments of the paper with a page about them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from blocktrain.cli_common import existing_run, say


def report(
    *runs: Annotated[Path, Parameter(help="Run folders; several are drawn side by side, under their folders' names.")],
    out: Annotated[Path | None, Parameter(help="The page; default: RUN/report.html, with several runs report.html here.")] = None,
    bench: Annotated[
        tuple[Path, ...], Parameter(negative=(), help="File with the output of `bench serving` or its last line. May be given again.")
    ] = (),
) -> int:
    """One HTML page with plots of runs and benches, and every number in tables. Needs the extra [report]; the page needs nothing.

    Evaluates each run first, which takes seconds to a minute.
    """
    for run in runs:
        existing_run(run)
    from blocktrain.errors import ConfigError
    from blocktrain.report.page.report import write_report

    if not runs and not bench:
        raise ConfigError("RUN: needed, one or more run folders (or --bench FILE)")
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    write_report(target, runs, bench, say=say)
    print(target)
    return 0
