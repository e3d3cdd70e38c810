"""Disasters of a run with many workers, each with real processes: what dies, fills up, rots or runs fast, and what must be true afterwards.

Where one worker trains with a frozen interface, the end must be bit for bit that of the run to which nothing happened (`untouched`).
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from blocktrain.swarm.leases import united
from blocktrain.swarm.replay import read_books, replay, steps_of
from blocktrain.training.checkpoint import load_run
from tests.faults.swarm import TOGETHER, Process, Swarm

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
HALF_A_PART = """
import os, signal, time
import blocktrain.swarm.link as link
link.CHUNK = 8192
real = link.HttpLink.put_part
class Half:
    def __init__(self, source):
        self.source, self.size, self.left = source, source.size, -(-source.size // 8192) + 3
    def read(self, start, stop):
        self.left -= 1
        if self.left < 0:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.source.read(start, stop)
async def put_part(self, key, sha256, index, source, start, stop):
    await real(self, key, sha256, index, Half(source), start, stop)
link.HttpLink.put_part = put_part
"""
TOLD_FETCHES = """
import blocktrain.swarm.link as link
real = link.HttpLink.fetch
async def fetch(self, blob, target):
    print("FETCH", blob.name, flush=True)
    await real(self, blob, target)
link.HttpLink.fetch = fetch
"""
FILL = """
import os
from blocktrain.swarm import crash, host
def fill(done=[]):
    if not done:
        done.append(1)
        room = os.statvfs({folder!r})
        with open({folder!r} + "/ballast", "wb") as file:
            file.write(bytes(room.f_bavail * room.f_frsize))
def point(name):
    if name == {point!r}:
        fill()
crash.point = point
if {point!r} == "export":
    real = host.export
    def export(*a):
        fill()
        return real(*a)
    host.export = export
"""


@pytest.fixture
def swarm(swarm_text: Path, tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path, swarm_text) as made:
        yield made


def check_books(swarm: Swarm) -> None:
    """Every version follows from the accepted updates; nothing is lost or counted twice."""
    opened, layout, config = swarm.opened()
    assert replay(opened, layout, config) == swarm.digests()
    opened.close()


def log_of(swarm: Swarm) -> str:
    path = swarm.run / "coordinator.log"
    return path.read_text() if path.exists() else ""


def until_log(swarm: Swarm, text: str) -> None:
    swarm.until(lambda: text in log_of(swarm), f"{text!r} in the coordinator's log")


def kill_before(swarm: Swarm, crash: str) -> Process:
    """A coordinator that dies at a point, and its worker, which waits."""
    coordinator, worker = swarm.coordinator(crash=crash), swarm.worker()
    assert coordinator.end() == -signal.SIGKILL
    return worker


def spoil(path: Path, how: str) -> bytes:
    """Cut a file or flip a byte of it; returns what it was."""
    good = path.read_bytes()
    path.write_bytes(good[:-100] if how == "cut" else good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    return good


# --- Bytes that rot or break off ---


def test_half_a_part_and_then_the_worker_dies(swarm: Swarm, untouched: dict[str, str]):
    coordinator = swarm.coordinator()
    assert swarm.worker(patch=HALF_A_PART).end() == -signal.SIGKILL
    blobs = swarm.run / "swarm" / "blobs"
    swarm.until(lambda: not any(p.is_file() for p in (blobs / "scratch").glob("*")), "the half part is dropped")
    assert not [path for path in (blobs / "updates").glob("*/*/*") if path.is_file()]
    swarm.finish(swarm.worker(), coordinator)
    assert swarm.digests() == untouched


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_stored_update_that_rots_is_left_out_and_said_so(how: str, swarm: Swarm):
    worker = kill_before(swarm, "close.before_write:3")
    newest = max((swarm.run / "swarm" / "blobs" / "updates").glob("*/*/*"), key=lambda path: path.parts[-3])
    spoil(newest, how)
    swarm.finish(swarm.coordinator(), worker)
    assert re.search(f"update {newest.parts[-3]}.*left out", log_of(swarm))
    check_books(swarm)


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_version_that_rots_pauses_the_run_until_it_is_put_back(how: str, swarm: Swarm, untouched: dict[str, str]):
    worker = kill_before(swarm, "close.after_record:3")
    newest = max((swarm.run / "swarm" / "blobs" / "versions" / "block-000").glob("*"))
    good = spoil(newest, how)
    coordinator = swarm.coordinator()
    until_log(swarm, f"{newest} is damaged: put back a file whose sha256 begins with {newest.stem[-16:]}")
    with urlopen(f"http://127.0.0.1:{swarm.port}/v1/status") as reply:
        assert b'"paused"' in reply.read()
    newest.write_bytes(good)
    swarm.finish(coordinator, worker)
    assert "Traceback" not in swarm.outputs()
    assert swarm.digests() == untouched


# --- Full disks ---


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@needs_root
@pytest.mark.parametrize("point", ["part.before_write", "close.before_write", "export"])
def test_a_full_disk_of_the_coordinator_pauses_the_run(point: str, swarm_text: Path, untouched: dict[str, str], tmp_path: Path):
    with small_disk(tmp_path / "small", "16m") as small, Swarm(tmp_path, swarm_text, run_folder=small / "run") as swarm:
        coordinator = swarm.coordinator(patch=FILL.format(folder=str(small), point=point))
        worker = swarm.worker()
        swarm.until(lambda: "paused: " in coordinator.output, "the run is paused")
        time.sleep(3)
        assert coordinator.poll() is None
        assert worker.poll() is None or (point == "export" and worker.poll() == 0), "the last export may come after the worker's end"
        assert coordinator.output.count("paused: ") <= 6, "said once for each thing that cannot be written"
        (small / "ballast").unlink()
        swarm.finish(coordinator, worker)
        assert "the run goes on" in coordinator.output
        assert "Traceback" not in swarm.outputs()
        assert swarm.digests() == untouched
        assert load_run(swarm.run, lambda _: None).progress.finished
        check_books(swarm)


@needs_root
def test_a_full_disk_of_a_worker_is_refused_before_the_download(swarm: Swarm, tmp_path: Path):
    swarm.coordinator()
    with small_disk(tmp_path / "tiny", "256k") as tiny:
        worker = swarm.worker(folder=tiny / "w")
        assert worker.end() == 2
        assert "bytes are needed for" in worker.output and "Traceback" not in worker.output
        assert not list(tiny.rglob("*.part"))


# --- Clocks ---


@pytest.mark.parametrize("who", ["worker", "coordinator"])
@pytest.mark.parametrize("seconds", [600, -600])
def test_a_wrong_clock_changes_nothing(who: str, seconds: int, swarm: Swarm, untouched: dict[str, str]):
    patch = f"import time\nreal = time.time\ntime.time = lambda: real() + {seconds}"
    coordinator = swarm.coordinator(patch=patch if who == "coordinator" else "")
    swarm.finish(swarm.worker(patch=patch if who == "worker" else ""), coordinator)
    assert swarm.digests() == untouched


# --- Processes ---


def test_the_coordinator_is_killed_five_times_under_four_workers(swarm_text: Path, tmp_path: Path):
    chance = random.Random(5)
    with Swarm(tmp_path, swarm_text, (*TOGETHER, "train.steps=400")) as swarm:  # more than a fast machine does between five kills
        coordinator = swarm.coordinator()
        workers = [swarm.worker(f"w{i}") for i in range(4)]
        for _ in range(5):
            before = swarm.version()
            swarm.until(lambda before=before: swarm.version() > before, "a new version")
            time.sleep(chance.random())
            coordinator.kill()
            coordinator.end()
            coordinator = swarm.coordinator()
        swarm.finish(coordinator, *workers)
        check_books(swarm)


def test_without_workers_the_status_says_so_and_the_run_ends(swarm: Swarm):
    coordinator = swarm.coordinator("--alone-min", "0.1")
    workers = [swarm.worker("a"), swarm.worker("b")]
    swarm.until(lambda: swarm.version() > 0, "a version")
    for worker in workers:
        worker.kill()
    assert coordinator.end() == 1
    assert "ends with exit code 1" in coordinator.output
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", swarm.port))
    status = swarm.status()
    assert status["state"] == "waiting" and "no workers" in status["reason"]
    swarm.finish(swarm.coordinator(), swarm.worker("a"))
    check_books(swarm)


def test_a_killed_worker_is_not_waited_for_and_goes_on_with_its_lease(swarm: Swarm, untouched: dict[str, str]):
    coordinator, worker = swarm.coordinator(), swarm.worker(crash="worker.in_training:5")
    assert worker.end() == -signal.SIGKILL
    began = time.monotonic()
    until_log(swarm, "empty: no valid update")
    assert time.monotonic() - began < 3 + 20  # the heartbeat limit, and a busy machine; the deadline is 60 s
    swarm.finish(swarm.worker(), coordinator)
    opened, _, _ = swarm.opened()
    books = read_books(opened)
    for block in (0, 1):
        leases = steps_of(books, block).values()
        assert united(part for steps in leases for part in steps) == ((0, 12),)
        assert sum(stop - first for steps in leases for first, stop in steps) == 12
    opened.close()
    assert swarm.digests() == untouched


def test_a_worker_that_was_away_is_current_after_one_download_of_each_part(swarm_text: Path, tmp_path: Path):
    with Swarm(tmp_path, swarm_text, ("outer.interface=frozen", "objective.input=independent", "train.steps=36")) as swarm:
        coordinator, other, away = swarm.coordinator(), swarm.worker("other"), swarm.worker("away")
        swarm.until(lambda: "accepted" in away.output, "its first update")
        away.kill()
        away.end()
        then = swarm.version("block-000"), swarm.version("block-001")
        swarm.until(lambda: min(swarm.version("block-000") - then[0], swarm.version("block-001") - then[1]) >= 5, "five rounds")
        other.kill(signal.SIGSTOP)  # or it ends the run before the other is back
        back = swarm.worker("away", patch=TOLD_FETCHES)
        swarm.until(lambda: "accepted" in back.output or back.poll() is not None, "its next update")
        other.kill(signal.SIGCONT)
        fetched = [line.split()[1] for line in back.output.partition("accepted")[0].splitlines() if line.startswith("FETCH")]
        parts = [name.split("/")[1] for name in fetched if name.startswith("versions/")]
        assert len(parts) == len(set(parts)) <= 2, fetched
        assert all(int(name.split("/")[2][:8]) >= min(then) + 5 for name in fetched if "/block-" in name), fetched
        swarm.finish(coordinator, other, back)
        check_books(swarm)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_leaves_a_checkpoint_and_goes_on(number: int, swarm: Swarm, untouched: dict[str, str]):
    coordinator, worker = swarm.coordinator(), swarm.worker()
    swarm.until(lambda: min(swarm.version("block-000"), swarm.version("block-001")) > 0, "a version of each block")
    coordinator.kill(number)
    assert coordinator.end(30) == 0, coordinator.output
    assert "stopped; the same command goes on" in coordinator.output and "Traceback" not in coordinator.output
    assert load_run(swarm.run, lambda _: None).progress.updates >= 3
    coordinator = swarm.coordinator()
    worker.kill(number)
    assert worker.end() in (0, 130) and "Traceback" not in worker.output
    swarm.finish(swarm.worker(), coordinator)
    check_books(swarm)
    assert sorted(swarm.digests()) == sorted(untouched)
