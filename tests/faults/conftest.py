"""The crash matrix as a table at the end of a test run."""

from __future__ import annotations

import pytest

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
