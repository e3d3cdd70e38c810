"""What an experiment is and what comes of it: rows of the one table, figures behind them, and what the page is to draw.

A result is kept as OUT/NAME.json with the key that says what it was made from. A result whose key or format is another is not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blocktrain.report.experiments.lab import Lab
from blocktrain.serialization import write_bytes

FORMAT = 1  # of what is kept; raise it when an experiment tells something else from the same runs


@dataclass(frozen=True)
class Row:
    """One line of the table. `paper` is the paper's figure, `differs` what keeps the two from being compared."""

    experiment: str
    paper: str
    ours: str
    differs: str


@dataclass(frozen=True)
class Result:
    """`runs` and `benches` are paths below OUT that the page draws; `evaluations` are those of runs, by path."""

    rows: Sequence[Row]
    figures: dict[str, Any]
    runs: Sequence[str] = ()
    benches: Sequence[str] = ()
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """`key` is cheap and says what the result depends on; `run` takes its time."""

    name: str
    key: Callable[[Lab], str]
    run: Callable[[Lab], Result]


def saved_result(path: Path, key: str) -> Result | None:
    """The result that was kept, if it is of the same settings and text."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if (kept["key"], kept["format"]) != (key, FORMAT):
            return None
        told = kept["result"]
        return Result([Row(**row) for row in told["rows"]], told["figures"], tuple(told["runs"]), tuple(told["benches"]), dict(told["evaluations"]))
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not ours
        return None


def save_result(path: Path, key: str, result: Result) -> None:
    write_bytes(path, json.dumps({"key": key, "format": FORMAT, "result": asdict(result)}, indent=1).encode())
