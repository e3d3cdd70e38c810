"""Real coordinators and workers for tests of faults: processes with files for their output, and what a run folder says afterwards.

They are forked from a process that has imported everything (forge.py), or started as `python -m blocktrain` where a test wants that. Every wait has
a limit and shows the processes' output where it is passed.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from blocktrain.config import load_config
from blocktrain.swarm.parts import Layout, layout_of
from blocktrain.swarm.store import Store, open_store
from tests.faults.forge import Forge

MODEL = (
    *("model.blocks=2", "model.layers_per_block=1", "model.width=32", "model.heads=2", "model.positions=32", "model.embed_dim=16"),
    *("model.noise_dim=8", "train.batch_size=4", "train.warmup_steps=2", "train.device=cpu", "evaluate.windows=4"),
)
ROUNDS = (
    *("round.deadline=fixed", "round.deadline_s=60", "round.min_work_s=0.1", "round.quorum=1", "round.inner_steps=3"),
    *("round.heartbeat_limit_s=3", "train.steps=12", "limits.keep_updates=true", "limits.free_disk_mb=0"),
)
ALONE = ("outer.interface=frozen", "objective.input=independent")  # with one worker, the digest does not depend on time
TOGETHER = ("outer.interface=averaged", "objective.input=upstream")
LIMIT_S = 300.0  # a machine may be busy
_making = threading.Lock()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def forge() -> Forge:
    """One for the test run."""
    with _making:
        return _forge()


@cache
def _forge() -> Forge:
    made = Forge()
    atexit.register(made.close)
    return made


@dataclass
class Process:
    """A process and the file that it writes to; `popen` only where it was not forked."""

    pid: int
    log: Path
    popen: subprocess.Popen[bytes] | None = None

    def poll(self) -> int | None:
        return self.popen.poll() if self.popen else forge().poll(self.pid)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code, once it has ended."""
        limit = time.monotonic() + limit_s
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                self.kill()
                raise AssertionError(f"{self.log.name} did not end in {limit_s:.0f} s:\n{self.output}")
            time.sleep(0.03)
        return code


@dataclass
class Swarm:
    """One run folder and its processes; `with` ends them all."""

    folder: Path
    text: Path
    settings: tuple[str, ...] = ALONE
    port: int = field(default_factory=free_port)
    processes: list[Process] = field(default_factory=list)
    run_folder: Path | None = None
    patch: str = ""  # Python that every coordinator runs first

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.end()

    @property
    def run(self) -> Path:
        return self.run_folder or self.folder / "run"

    def start(self, name: str, arguments: list[str], crash: str = "", patch: str = "", fresh: bool = False) -> Process:
        """A blocktrain command; with `patch`, that Python runs in it first. `fresh`: an interpreter of its own."""
        log = self.folder / f"{name}-{len(self.processes)}.log"
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "BLOCKTRAIN_CRASH_AT": crash}
        if fresh:
            assert not patch, "only forked processes are patched"
            with open(log, "wb") as file:
                command = [sys.executable, "-m", "blocktrain", *arguments]
                popen = subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT)
            process = Process(popen.pid, log, popen)
        else:
            process = Process(forge().start(arguments, str(log), environment, patch), log)
        self.processes.append(process)
        return process

    def coordinator(self, *more: str, crash: str = "", patch: str = "", fresh: bool = False) -> Process:
        sets = [f"--set={setting}" for setting in (*MODEL, *ROUNDS, *self.settings)]
        arguments = ["coordinator", str(self.run), "--listen", f"127.0.0.1:{self.port}", "--data", str(self.text), "--no-evaluate", *sets, *more]
        return self.start("coordinator", arguments, crash, "" if fresh else patch or self.patch, fresh)

    def worker(self, name: str = "w", folder: Path | None = None, crash: str = "", patch: str = "", fresh: bool = False) -> Process:
        """Starts as soon as there is a line to join by."""
        line = self.run / "swarm" / "join-line"
        self.until(line.exists, "a join line")
        arguments = ["worker", line.read_text(), "--name", name, "--folder", str(folder or self.folder / name)]
        return self.start(name, arguments, crash, patch, fresh)

    def until(self, condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
        """What the condition says, once that is something."""
        end = time.monotonic() + limit_s
        while not (found := condition()):
            assert time.monotonic() < end, f"{what}: not in {limit_s:.0f} s\n{self.outputs()}"
            time.sleep(0.03)
        return found

    def finish(self, *processes: Process) -> None:
        """These processes end well, and with them the run."""
        for process in processes:
            assert process.end() == 0, self.outputs()

    def outputs(self) -> str:
        return "\n".join(f"--- {process.log.name} ({process.poll()})\n{process.output}" for process in self.processes)

    # --- What the folder says ---

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """From the database as it is now; nothing where there is none yet."""
        path = self.run / "swarm" / "state.db"
        if not path.exists():
            return []
        with closing(sqlite3.connect(path, timeout=30)) as database:
            try:
                return database.execute(query).fetchall()
            except sqlite3.OperationalError:
                return []

    def version(self, part: str = "block-000") -> int:
        return self.rows(f"select max(version) from versions where part = '{part}'")[0][0] or 0 if self.rows("select 1 from versions") else 0

    def digests(self) -> dict[str, str]:
        """part -> sha256 of its newest version."""
        rows = self.rows("select part, manifest from versions order by version")
        return {part: json.loads(manifest)["file"]["sha256"] for part, manifest in rows}

    def opened(self) -> tuple[Store, Layout, Any]:
        config = load_config(self.run / "run.toml")
        return open_store(self.run / "swarm"), layout_of(config), config

    def status(self, *more: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "blocktrain", "coordinator", str(self.run), "--status", "--json", *more],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)
