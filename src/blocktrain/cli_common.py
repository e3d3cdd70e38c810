"""What the commands share: consoles, common parameters, and how the settings of a run are found."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from blocktrain.config import RunConfig, load_config, make_config, merge_fields, parse_assignment, preset_fields, read_toml
from blocktrain.errors import ConfigError

STOPPED = 130  # exit code after Ctrl-C

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, width=None if sys.stdout and sys.stdout.isatty() else 120)

Run = Annotated[Path, Parameter(help="Run folder.")]
Settings = Annotated[
    tuple[str, ...],
    Parameter("--set", help="Change a setting: section.field=value. May be given again.", negative=(), consume_multiple=False),
]
Json = Annotated[bool, Parameter("--json", negative=(), help="Print one JSON object instead of tables.")]


def say(message: str) -> None:
    """A note to a person."""
    err.print(message, markup=False)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """A list that fills when SIGINT or SIGTERM comes; a second signal ends the process at once."""
    stopped: list[int] = []

    def handle(number: int, _: object) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)
        say("stopping after this step ...")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def existing_run(run: Path) -> Path:
    path = run / "run.toml"
    if not path.is_file():
        raise ConfigError(f"{run}: not a run folder (no run.toml); make one with `blocktrain train {run}`")
    return path


def run_settings(run: Path, preset: str | None, config: Path | None, data: str | None, sets: tuple[str, ...]) -> RunConfig:
    """The settings of a run: RUN/run.toml where it is there, else preset and --config; then --data and --set."""
    existing = run / "run.toml"
    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run}: is a file, a run needs a folder")
    _require_utf8("RUN", str(run))
    start = preset_fields(preset or "default")
    source = f"preset {preset or 'default'}"
    if config is not None:
        start, source = merge_fields(start, read_toml(config)), str(config)
    over: dict[str, Any] = {"data": {"corpus": data}} if data is not None else {}
    for text in sets:
        over = merge_fields(over, parse_assignment(text))
    if not existing.is_file():
        _require_empty(run)
        return make_config(absolute_paths(merge_fields(start, over)), f"{source} with --set" if sets else source)
    have = load_config(existing).model_dump()
    settings = make_config(absolute_paths(merge_fields(have, over)), f"{existing} with --set" if sets else str(existing))
    if preset is not None or config is not None:
        wanted = make_config(merge_fields(start, over), source)
        _refuse_contradiction(existing, settings, wanted, "--config" if config else "--preset")
    return settings


def _require_empty(run: Path) -> None:
    """A new run does not move into a folder that holds something else."""
    if (run / "checkpoints").is_dir():
        raise ConfigError(f"{run}: has checkpoints but no run.toml; put it back (each progress.json holds the settings) or use a new folder")
    others = [path.name for path in run.iterdir() if not path.name.startswith(".")] if run.is_dir() else []
    if others:
        raise ConfigError(f"{run.absolute()}: holds other files ({min(others)}) and no run.toml; name a new folder for the run")


def _refuse_contradiction(existing: Path, have: RunConfig, wanted: RunConfig, flag: str) -> None:
    """The same command twice goes on; a preset or file that says something else than run.toml is refused, naming the setting."""
    for name, section in wanted:
        for key, value in section if name not in ("data", "seed", "round", "limits") else ():
            there = getattr(getattr(have, name), key)
            if there != value:
                found = f"{name}.{key} is {there} there and {value} here"
                raise ConfigError(
                    f"{flag}: {existing} is already there and differs ({found}); leave {flag} out to go on with it, or use a new folder"
                )


def absolute_paths(fields: dict[str, Any]) -> dict[str, Any]:
    """A corpus given as a path is kept absolute, so that the run can be gone on with from another folder."""
    from blocktrain.training.data import NAMES

    data = dict(fields.get("data", {})) if isinstance(fields.get("data", {}), dict) else {}
    for key in ("corpus", "heldout"):
        value = data.get(key)
        if isinstance(value, str) and value and value not in NAMES and Path(value).expanduser().exists():
            data[key] = str(Path(value).expanduser().absolute())
            _require_utf8(f"data.{key}", data[key])
    return merge_fields(fields, {"data": data}) if data else fields


def _require_utf8(name: str, path: str) -> None:
    """run.toml is UTF-8, and so must be every path that goes into it or that a library opens."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: the path {path!r} is not valid UTF-8; rename or link it") from None
