"""The page: sections of runs and benches, rendered into one file that needs nothing else.

Everything that comes from a run is put in by a template that escapes it; only the drawings, which hold no name of a folder, go in as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from blocktrain import __version__
from blocktrain.errors import ConfigError
from blocktrain.report.page.bench_file import read_bench
from blocktrain.report.page.plots import COLOURS, draw, require_matplotlib
from blocktrain.report.page.run_figures import read_run
from blocktrain.report.page.sections import Section, Table, sections_of
from blocktrain.serialization import write_bytes

FILES = Path(__file__).parent / "files"
OPEN_ROWS = 12  # a longer table is folded
Say = Callable[[str], None]


@dataclass(frozen=True)
class Front:
    """What stands above the sections: a title, a sentence, and perhaps a table."""

    title: str
    lead: str
    table: Table | None = None


def write_report(
    out: Path,
    runs: Sequence[Path],
    benches: Sequence[Path] = (),
    *,
    say: Say = lambda _: None,
    front: Front | None = None,
    evaluations: Mapping[Path, Mapping[str, Any]] | None = None,
) -> None:
    """Read runs and bench files, evaluate those runs that `evaluations` lacks, and write the page to `out`, whole or not at all.

    Raises ConfigError naming the folder or file that is none, cannot be read, or cannot be written.
    """
    require_matplotlib()
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder; name a file, for example {out / 'report.html'}")
    results = list(zip(labels_of(benches), map(read_bench, benches), strict=True))
    for run in runs:
        if not (run / "run.toml").is_file():  # all of them before the first is evaluated
            raise ConfigError(f"{run}: not a run folder (no run.toml); make one with `blocktrain train {run}`")
    known = evaluations or {}
    figures = [read_run(run, label, say, known.get(run)) for run, label in zip(runs, labels_of(runs), strict=True)]
    names = ", ".join(run.label for run in figures)
    html = render(front or Front(f"BlockTrain: {names}", "Cross entropy (CE) is in nats per byte; lower is better."), sections_of(figures, results))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(out, html.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from None


def render(front: Front, sections: Sequence[Section]) -> str:
    """The whole page as text."""
    environment = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    drawn = [[draw(figure.plot, f"s{s}f{f}") for f, figure in enumerate(section.figures)] for s, section in enumerate(sections)]
    css = (FILES / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        front=front, sections=sections, drawn=drawn, css=css, colours=COLOURS, open_rows=OPEN_ROWS, version=__version__
    )


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Last parts of the paths, with as many parts before them as it takes to tell them apart."""
    resolved = [path.resolve() for path in paths]
    parts = 1
    while True:
        labels = ["/".join(path.parts[-parts:]) for path in resolved]
        if len(set(labels)) == len(set(resolved)):
            return labels
        parts += 1
