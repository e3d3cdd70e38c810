"""Real processes are killed; the same command then ends in the digest of the run that was never disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blocktrain.training.checkpoint import load_run

SETTINGS = [
    *(
        "model.blocks=2",
        "model.layers_per_block=1",
        "model.width=32",
        "model.heads=2",
        "model.positions=32",
        "model.embed_dim=16",
        "model.noise_dim=8",
    ),
    *(
        "train.steps=60",
        "train.batch_size=4",
        "train.warmup_steps=2",
        "train.checkpoint_every=7",
        "train.log_every=1",
        "evaluate.windows=4",
        "train.device=cpu",
    ),
]


def command(run: Path, text: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "blocktrain", "train", str(run), "--data", str(text), "--json", *(f"--set={s}" for s in (*SETTINGS, *more))]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(run: Path, condition: str, process: subprocess.Popen[str]) -> None:
    """Until a file that matches appears."""
    limit = time.monotonic() + 120
    while not list(run.glob(condition)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, f"{condition} never appeared"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(text, digest of the run that nobody killed)."""
    from tests.conftest import write_text

    folder = tmp_path_factory.mktemp("unbroken")
    text = write_text(folder / "text.txt")
    done = subprocess.run(command(folder / "run", text), env=environment(), capture_output=True, text=True, check=True)
    return text, json.loads(done.stdout)["model_digest"]


def finish(run: Path, text: Path) -> str:
    """The same command once more, to the end; returns the digest it prints."""
    done = subprocess.run(command(run, text), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["model_digest"]


@pytest.mark.parametrize(
    "moment",
    ["run.toml", "metrics.jsonl", "checkpoints/.step-*.tmp", "checkpoints/step-00000007", "checkpoints/step-00000035", "checkpoints/step-00000060"],
)
def test_kill_minus_nine_at_any_moment(moment: str, unbroken: tuple[Path, str], tmp_path: Path):
    text, digest = unbroken
    run = tmp_path / "run"
    process = start(command(run, text))
    wait_for(run, moment, process)
    process.kill()
    process.communicate()
    assert finish(run, text) == digest


def test_killed_again_and_again(unbroken: tuple[Path, str], tmp_path: Path):
    text, digest = unbroken
    run = tmp_path / "run"
    for updates in (14, 28, 42):
        process = start(command(run, text))
        wait_for(run, f"checkpoints/step-{updates:08d}", process)
        process.kill()
        process.communicate()
    assert finish(run, text) == digest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_writes_a_checkpoint_and_says_how_to_go_on(number: int, unbroken: tuple[Path, str], tmp_path: Path):
    text, digest = unbroken
    run = tmp_path / "run"
    process = start(command(run, text, "train.checkpoint_every=1000"))
    wait_for(run, "metrics.jsonl", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "same command goes on" in err
    assert "Traceback" not in err
    assert 0 < load_run(run, lambda _: None).progress.updates < 60
    assert finish(run, text) == digest


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root; test_run.py has the same fault in one process")
def test_a_full_disk_pauses_the_run_and_loses_nothing(unbroken: tuple[Path, str], tmp_path: Path):
    """The run folder lies on a small file system that something else fills up."""
    text, digest = unbroken
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], check=True)
    try:
        ballast = small / "ballast"
        run = small / "run"
        process = start(command(run, text))
        wait_for(run, "checkpoints/step-00000014", process)
        ballast.write_bytes(b"\0" * (os.statvfs(small).f_bavail * os.statvfs(small).f_frsize))
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2, err
        assert "space" in err
        assert "Traceback" not in err
        assert load_run(run, lambda _: None).progress.updates >= 14
        ballast.unlink()
        assert finish(run, text) == digest
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
