"""A worker that nobody can reach: it sits in a network namespace of its own, as behind a router that lets connections out and none in.

What it would answer to a connection from outside is not routed (a rule on source ports, since packet filters are not in every kernel; the test
tries a listener there first, and must not get through). Needs root and iproute2, which check.py installs. Elsewhere it says so with a warning
and shows the other half: a worker has no socket that could be reached.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import write_text
from tests.faults.swarm import ALONE, MODEL, ROUNDS, Process, Swarm

MAY = hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip") is not None
LISTENS = "0A"  # the state in /proc/net/tcp


@dataclass
class Inside:
    """How to run something in there, and the address by which it gets out."""

    enter: list[str]
    outside: str
    address: str = ""

    def start(self, *command: str, log: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with open(log, "wb") as file:
            return subprocess.Popen([*self.enter, *command], stdout=file, stderr=subprocess.STDOUT, env=environment)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def namespace() -> Iterator[Inside]:
    """A namespace with a way out and none in; removed at the end with all that is in it."""
    name, here, there = f"bt{os.getpid()}", f"bto{os.getpid()}", f"bti{os.getpid()}"
    net = f"10.203.{os.getpid() % 256}"
    ip("netns", "add", name)
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("addr", "add", f"{net}.1/30", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "addr", "add", f"{net}.2/30", "dev", there)
        for device in ("lo", there):
            ip("-n", name, "link", "set", device, "up")
        inside = Inside(["ip", "netns", "exec", name], f"{net}.1", f"{net}.2")
        subprocess.run([*inside.enter, "sh", "-c", "echo 50000 60999 > /proc/sys/net/ipv4/ip_local_port_range"], check=True)
        ip("-n", name, "rule", "add", "pref", "1", "iif", "lo", "ipproto", "tcp", "sport", "1-49999", "to", f"{net}.0/30", "blackhole")
        yield inside
    finally:
        ip("netns", "del", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", here)  # goes with the namespace, a little later


@pytest.fixture
def inside() -> Iterator[Inside]:
    if not MAY:
        warnings.warn("no root or no `ip`: only that a worker listens nowhere is tested, not a network without a way in", stacklevel=1)
        yield Inside([], "127.0.0.1")
        return
    with namespace() as made:
        yield made


def test_nobody_gets_in(inside: Inside, tmp_path: Path):
    """The namespace is what the other tests take it for: a listener in it cannot be reached, one outside can."""
    if not inside.enter:
        return
    listener = inside.start(sys.executable, "-m", "http.server", "7700", "--bind", inside.address, log=tmp_path / "listener")
    try:
        code = f"import socket; socket.create_connection(('{inside.address}', 7700), 1)"
        limit = time.monotonic() + 30
        while subprocess.run([*inside.enter, "ss", "-Hltn"], capture_output=True, text=True, check=True).stdout.count(":7700") == 0:
            assert time.monotonic() < limit
            time.sleep(0.05)
        with pytest.raises(TimeoutError):
            socket.create_connection((inside.address, 7700), 1.5)
        with socket.create_server((inside.outside, 0)) as bound:
            out = code.replace(inside.address, inside.outside).replace("7700", str(bound.getsockname()[1]))
            subprocess.run([*inside.enter, sys.executable, "-c", out], check=True)
    finally:
        listener.kill()
        listener.wait()


def listening(pid: int) -> list[str]:
    """Sockets in this process's network, and of this process, that take connections."""
    mine = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(os.readlink(entry))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in mine:
                found.append(words[1])
    return found


def test_a_worker_that_cannot_be_reached_trains_and_the_doctor_finds_nothing(inside: Inside, tmp_path: Path):
    with Swarm(tmp_path, write_text(tmp_path / "text.txt"), ALONE) as swarm:
        sets = [f"--set={setting}" for setting in (*MODEL, *ROUNDS, *ALONE)]
        listen = f"{inside.outside}:{swarm.port}"
        coordinator = swarm.start(
            "coordinator", ["coordinator", str(swarm.run), "--listen", listen, "--data", str(swarm.text), "--no-evaluate", *sets]
        )
        path = swarm.run / "swarm" / "join-line"
        line = swarm.until(lambda: path.exists() and path.read_text(), "a join line")
        assert line.startswith("https://" if inside.enter else "http://")
        program = [sys.executable, "-m", "blocktrain"]
        examined = subprocess.run([*inside.enter, *program, "doctor", line], capture_output=True, text=True, check=False, timeout=120)
        assert examined.returncode == 0, examined.stdout + examined.stderr
        assert "WRONG" not in examined.stdout and "ok    token" in examined.stdout and "not tried" not in examined.stdout
        popen = inside.start(*program, "worker", line, "--name", "hidden", "--folder", str(tmp_path / "hidden"), log=tmp_path / "hidden.log")
        worker = Process(popen.pid, tmp_path / "hidden.log", popen)
        swarm.processes.append(worker)
        swarm.until(lambda: swarm.version() >= 1 or worker.poll() is not None, "a first version")
        if worker.poll() is None:
            assert listening(worker.pid) == []
        swarm.finish(worker, coordinator)
        assert swarm.version("block-000") == swarm.version("block-001") == 4
