"""Every named point at which a coordinator or worker may die: it does, and the same command then ends where the run that nobody killed ends.

A cell is one run with one process killed (SIGKILL) at one point, then started again by the same command. Each must finish; its replay must make every
version again, with no update lost or counted twice and no step in two updates. With one worker and a frozen interface nothing depends on time: there
the digests must be those of the unbroken run, too. The second set has two workers, an averaged interface and upstream blocks, where the digest may
differ.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from blocktrain.errors import CheckpointError
from blocktrain.swarm import crash
from blocktrain.swarm.replay import replay
from blocktrain.training.checkpoint import load_run
from tests.faults.conftest import MATRIX
from tests.faults.swarm import ALONE, TOGETHER, Swarm

AT_ONCE = 3  # cells side by side
FIRST = ("join.before_record", "snapshot.before_delete", "export.before_rename", "worker.in_fetch")  # the others when reached for the third time
FEW_EVENTS = "import blocktrain.swarm.journal as j\nj.SNAPSHOT_EVERY = 12"  # so that a short run has snapshots
drawing = threading.Lock()  # first weights come from torch's one generator: not from two threads at once
COMMON = (
    *("begin.after_record", "commit.after_record", "close.after_block", "close.after_interface", "close.before_record", "close.after_record"),
    *("worker.after_part", "worker.after_commit"),
)


@dataclass(frozen=True)
class Cell:
    """One point in one kind of run."""

    point: str
    settings: tuple[str, ...]

    @property
    def process(self) -> str:
        return "worker" if self.point.startswith("worker.") else "coordinator"

    @property
    def kind(self) -> str:
        return "alone" if self.settings == ALONE else "together"


@dataclass
class Outcome:
    """What became of a cell; `problem` is empty where all is well."""

    restarts: int
    digests: dict[str, str]
    problem: str


def reached_by(point: str, settings: tuple[str, ...]) -> bool:
    """The interface is closed along with a block only where it travels."""
    return point != "close.after_interface" or settings == TOGETHER


CELLS = [
    *(Cell(point, ALONE) for point in crash.POINTS if reached_by(point, ALONE)),
    *(Cell(point, TOGETHER) for point in COMMON),
]


def crash_at(point: str) -> str:
    return f"{point}:{1 if point in FIRST else 3}"


def run_cell(cell: Cell, folder: Path, text: Path) -> Outcome:
    more = ("train.steps=24",) if cell.settings == TOGETHER else ()  # so that the one to be killed gets to its point, however fast the other is
    with Swarm(folder, text, (*cell.settings, *more), patch=FEW_EVENTS) as swarm:
        at = crash_at(cell.point)
        stay = ["--stay"] if cell.process == "worker" else []  # others may end the run before the killed worker is back
        coordinator = swarm.coordinator(*stay, crash=at if cell.process == "coordinator" else "")
        worker = swarm.worker(crash=at if cell.process == "worker" else "")
        others = [swarm.worker("other")] if cell.settings == TOGETHER else []
        killed = coordinator if cell.process == "coordinator" else worker
        assert killed.end() == -signal.SIGKILL, f"{cell.point} was not reached\n{swarm.outputs()}"
        if killed is coordinator:
            swarm.finish(*others, worker, swarm.coordinator())
        else:
            swarm.finish(*others, swarm.worker())
            coordinator.kill(signal.SIGTERM)
            swarm.finish(coordinator)
        return Outcome(1, swarm.digests(), replayed(swarm))


def replayed(swarm: Swarm) -> str:
    """What the replay says is wrong, and the checkpoint must be whole."""
    with drawing:
        assert load_run(swarm.run, lambda _: None).progress.finished
        opened, layout, config = swarm.opened()
        try:
            digests = replay(opened, layout, config)
        except CheckpointError as error:
            return str(error)
        finally:
            opened.close()
    return "" if digests == swarm.digests() else "the newest versions are others than the manifests'"


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, swarm_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Cell, Future[Outcome]]]:
    """Every cell that this session asks for, a few at a time."""
    asked = [item.callspec.params["cell"] for item in request.session.items if hasattr(item, "callspec") and "cell" in item.callspec.params]
    pool = ThreadPoolExecutor(AT_ONCE)
    yield {cell: pool.submit(run_cell, cell, tmp_path_factory.mktemp("cell"), swarm_text) for cell in asked}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.kind}-{cell.point}")
def test_killed_at_every_point(cell: Cell, outcomes: dict[Cell, Future[Outcome]], untouched: dict[str, str], pytestconfig: pytest.Config):
    outcome = outcomes[cell].result()
    same = outcome.digests == untouched if cell.settings == ALONE else None
    row = (cell.point, cell.process, cell.kind, crash_at(cell.point).partition(":")[2], str(outcome.restarts))
    pytestconfig.stash[MATRIX].append((*row, {True: "yes", False: "NO", None: "-"}[same], "yes" if not outcome.problem else f"NO: {outcome.problem}"))
    assert outcome.problem == ""
    assert same is not False


def test_the_matrix_has_every_point():
    assert {cell.point for cell in CELLS} == set(crash.POINTS)
    assert sum(cell.process == "coordinator" for cell in CELLS if cell.settings == ALONE) >= 10
