"""Starts blocktrain processes in milliseconds: a process that has imported everything forks one for each command.

Importing torch and the rest costs seconds of CPU, and a crash matrix starts a hundred processes. What it forks is a process like any other, with its
own memory, files and signals; it can be killed at any moment. Nothing but imports has happened before the fork: no thread, no socket, no draw.

Requests are lines of JSON on standard input, answered by lines on standard output: a new process's id, or the exit code of one (null while it runs).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

PRELOADED = (
    *("blocktrain.cli", "blocktrain.swarm.host", "blocktrain.swarm.launch", "blocktrain.report.memory", "blocktrain.serving.decoding"),
    *("uvicorn.protocols.http.httptools_impl", "uvicorn.loops.auto", "torch._dynamo", "torch._decomp.decompositions"),
)
ROOT = Path(__file__).parents[2]


class Forge:
    """The other end: used by tests, from any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.faults.forge"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.popen = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self.popen.stdin and self.popen.stdout
        with self.lock:
            self.popen.stdin.write(json.dumps(request) + "\n")
            self.popen.stdin.flush()
            return json.loads(self.popen.stdout.readline())

    def start(self, arguments: list[str], log: str, environment: dict[str, str], patch: str) -> int:
        return self._ask({"start": arguments, "log": log, "environment": environment, "patch": patch})

    def poll(self, pid: int) -> int | None:
        """As of subprocess: negative where a signal ended it."""
        return self._ask({"poll": pid})

    def close(self) -> None:
        assert self.popen.stdin
        self.popen.stdin.close()
        self.popen.wait()


def serve() -> None:
    """In the process that forks."""
    for name in PRELOADED:
        importlib.import_module(name)
    codes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer = fork(request) if "start" in request else poll(request["poll"], codes)
        print(json.dumps(answer), flush=True)


def poll(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes.get(pid)


def fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = become(request)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def become(request: dict[str, Any]) -> int:
    """A command of its own, with its own output and environment."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    from blocktrain.__main__ import main
    from blocktrain.swarm import crash

    importlib.reload(crash)  # it reads the environment once
    sys.argv = ["blocktrain", *request["start"]]
    exec(request["patch"], {})
    main()
    return 0


if __name__ == "__main__":
    serve()
