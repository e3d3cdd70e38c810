"""A worker process: its folder, its key, and the worker itself."""

from __future__ import annotations

import os
import platform
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from blocktrain.config import RunConfig
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.swarm import identity
from blocktrain.swarm.engine import TrainingEngine
from blocktrain.swarm.link import HttpLink
from blocktrain.swarm.protocol import parse_join_line
from blocktrain.swarm.worker import Worker

SLOTS = 256  # workers of one run on one machine


@dataclass
class Running:
    """A worker about to run, and the lock that keeps its folder its own."""

    worker: Worker
    lock: Any


def launch(
    text: str,
    capacity_of: Callable[[RunConfig], int],
    *,
    name: str | None = None,
    folder: Path | None = None,
    span: int | None = None,
    device: str | None = None,
    takeover: bool = False,
    patience_s: float = 3600.0,
    say: Callable[[str], None] = lambda _: None,
    report: Callable[[Any], None] = lambda _: None,
) -> Running:
    """A worker for a join line; `capacity_of` says how many blocks of a run fit this machine.

    Raises ConfigError or CheckpointError where the line, the name or the folder will not do.
    """
    line = parse_join_line(text)
    wanted = clean_name(name or socket.gethostname() or platform.node())
    place, lock = own_folder(folder, line.run_id, wanted)
    key = identity.worker_key(place / "key.pem")
    chosen = wanted if folder or place.name == wanted else place.name
    process = f"{os.getpid()}-{secrets.token_hex(4)}"
    link = HttpLink(line, chosen, key, process=process, say=say, patience_s=patience_s)
    engine = TrainingEngine(place, capacity_of, device=device, report=report, say=say)
    return Running(Worker(link, engine, say=say, takeover=takeover, max_span=span), lock)


def clean_name(name: str) -> str:
    """A name as the coordinator takes it."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:40].strip(".-")
    if not cleaned:
        raise ConfigError(f"--name {name!r}: needs a letter or digit")
    return cleaned


def own_folder(folder: Path | None, run_id: str, name: str) -> tuple[Path, Any]:
    """The folder given, or the first of NAME, NAME-2, ... in the user's cache that no other process holds: several workers may share a machine."""
    if folder is not None:
        lock = _locked(folder)
        if lock is None:
            raise CheckpointError(f"{folder}: another worker is running in it; give each its own --folder")
        return folder, lock
    base = workers_folder() / run_id
    for slot in range(1, SLOTS + 1):
        place = base / (name if slot == 1 else f"{name}-{slot}")
        if (lock := _locked(place)) is not None:
            return place, lock
    raise CheckpointError(f"{base}: {SLOTS} workers of this name are running here")


def workers_folder() -> Path:
    """Where workers keep their files unless they are told otherwise: a folder for each run, and one for each worker in it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blocktrain" / "workers"


def _locked(folder: Path) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / "lock", timeout=0)
        lock.acquire()
    except filelock.Timeout:
        return None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be used ({error.strerror}); give another --folder") from None
    return lock


def memory_bytes(text: str) -> int:
    """6GiB, 500MB, 8e9 -> bytes."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]i?)?B?\s*", text, re.IGNORECASE)
    units = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
    try:
        amount = float(match[1]) * units[(match[2] or "").lower()] if match else 0.0
    except ValueError:
        amount = 0.0
    if not 0 < amount < 1e18:
        raise ConfigError(f"--memory {text}: expected an amount such as 6GiB or 500MB")
    return int(amount)
