"""A run of many workers as real processes on this machine: one coordinator, workers of one thread each, loopback HTTP between them.

Whatever ends the process that started them ends them too: an error or Ctrl-C here stops them in order, and where the system can (Linux), a kill does.
A run that was stopped goes on when it is started again; one that has finished leaves RUN/status.json and is not started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from blocktrain.errors import ExperimentError
from blocktrain.report.experiments.scale import Fields

# Every lease is waited for, and two workers share a block's round.
ROUNDS = ["round.replicas=2", "round.quorum=2", "round.deadline=fixed", "round.deadline_s=3600", "round.heartbeat_limit_s=120"]
ALONE_MIN = 10  # without a worker for so long, a coordinator gives up
PATIENCE_S = 120.0  # for workers to hear of the end
Say = Callable[[str], None]


def assignments(fields: Fields) -> list[str]:
    """Nested settings as --set takes them."""
    return [f"{section}.{key}={json.dumps(value)}" for section, values in fields.items() for key, value in values.items()]


def flags(settings: Sequence[str]) -> list[str]:
    return [f"--set={one}" for one in settings]


def start(*arguments: str, threads: int = 2, **options: Any) -> subprocess.Popen[str]:
    """A blocktrain command as a process that does not outlive this one."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if sys.platform == "linux":
        options["preexec_fn"] = _end_with_parent
    return subprocess.Popen([sys.executable, "-m", "blocktrain", *arguments], text=True, env=environment, stdin=subprocess.DEVNULL, **options)


def _end_with_parent() -> None:
    """Have the system send SIGTERM when the process that started this one is gone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def train_swarm(run: Path, data: str, settings: Sequence[str], workers: int, say: Say) -> dict[str, Any]:
    """Train a run to its end, from wherever it stands; its status, with the seconds that this took.

    What the processes say is in RUN-coordinator.log and RUN-worker-I.log beside the run. Raises ExperimentError naming the file.
    """
    done = run / "status.json"
    if done.exists():
        return json.loads(done.read_text())
    say(f"{run.name}: {workers} workers")
    run.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(open(log_of(run, name), "a")) for name in ("coordinator", *(f"worker-{i}" for i in range(workers)))]
        figures = _live(run, data, settings, logs, stack)
    figures["seconds"] = time.monotonic() - began
    done.write_text(json.dumps(figures))
    return figures


def log_of(run: Path, name: str) -> Path:
    return run.with_name(f"{run.name}-{name}.log")


def _live(run: Path, data: str, settings: Sequence[str], logs: Sequence[IO[str]], stack: contextlib.ExitStack) -> dict[str, Any]:
    """From the first process to the last one's end."""
    command = ["coordinator", str(run), "--listen", "127.0.0.1:0", "--no-evaluate", "--alone-min", str(ALONE_MIN), "--json", "--data", data]
    coordinator = start(*command, *flags(settings), threads=1, stdout=subprocess.PIPE, stderr=logs[0])
    stack.callback(_end, coordinator)
    assert coordinator.stdout is not None
    words = coordinator.stdout.readline().split()
    if not words:
        raise ExperimentError(f"{run.name}: the coordinator did not start: {_last_line(run, 'coordinator')}")
    workers = []
    for i, log in enumerate(logs[1:]):
        folder = str(run.parent / "workers" / f"{run.name}-{i}")
        workers.append(start("worker", words[-1], "--name", f"w{i}", "--folder", folder, "--threads", "1", threads=1, stderr=log))
        stack.callback(_end, workers[-1])
    said = coordinator.stdout.read().strip().splitlines()
    if coordinator.wait() or not said:
        raise ExperimentError(f"{run.name}: the coordinator ended with code {coordinator.returncode}: {_last_line(run, 'coordinator')}")
    codes = [worker.wait(timeout=PATIENCE_S) for worker in workers]
    for i, code in enumerate(codes):
        if code:
            raise ExperimentError(f"{run.name}: worker {i} ended with code {code}: {_last_line(run, f'worker-{i}')}")
    return json.loads(said[-1])


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _last_line(run: Path, name: str) -> str:
    """What a process said last, and where the rest is."""
    path = log_of(run, name)
    lines = path.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'it said nothing'} (see {path})"


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """Participation, versions, updates, and the bytes of the ledger, of a status."""
    blocks, kinds = figures["blocks"], figures["bytes"]["by_kind"]
    return {
        "participation": sum(b["participation"] for b in blocks) / len(blocks),
        "versions": [b["version"] for b in blocks],
        "down": figures["bytes"]["down"],
        "up": figures["bytes"]["up"],
        **{f"bytes_{kind}": kinds[kind] for kind in kinds},
        "seconds": figures["seconds"],
        "updates": figures["updates"],
    }
