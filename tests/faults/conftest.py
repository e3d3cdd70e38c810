"""What the tests of many workers share, and the crash matrix as a table at the end of a test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_text
from tests.faults.swarm import Swarm

MATRIX: pytest.StashKey[list[tuple[str, ...]]] = pytest.StashKey()
HEADER = ("point", "process", "run", "killed at time", "restarts", "digest equal", "replay equal")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MATRIX] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(MATRIX, [])
    if not rows:
        return
    terminalreporter.section("crash matrix")
    widths = [max(len(row[i]) for row in (HEADER, *rows)) for i in range(len(HEADER))]
    for row in (HEADER, *rows):
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@pytest.fixture(scope="session")
def swarm_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("swarm") / "text.txt")


@pytest.fixture(scope="session")
def untouched(swarm_text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the run to which nothing happened, by commands in interpreters of their own."""
    with Swarm(tmp_path_factory.mktemp("untouched"), swarm_text) as swarm:
        coordinator = swarm.coordinator(fresh=True)
        swarm.finish(coordinator, swarm.worker(fresh=True))
        return swarm.digests()
