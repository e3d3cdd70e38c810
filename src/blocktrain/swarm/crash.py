"""Named points at which a test may end this process as a power cut would, to show that nothing is lost there.

BLOCKTRAIN_CRASH_AT=NAME or NAME:N kills the process (SIGKILL, no clean-up) when it reaches that point for the N-th time. Without the variable a
point costs one dictionary look-up. docs/protocol.md lists the points; tests/faults goes through all of them.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "join.before_record",
    "ask.before_record",
    "ask.after_record",
    "begin.after_record",
    "part.before_write",
    "part.after_write",
    "commit.before_gate",
    "commit.before_record",
    "commit.after_record",
    "close.before_write",
    "close.after_block",
    "close.after_interface",
    "close.before_record",
    "close.after_record",
    "snapshot.before_delete",
    "export.before_rename",
    "worker.after_assignment",
    "worker.in_fetch",
    "worker.in_training",
    "worker.after_encode",
    "worker.after_part",
    "worker.before_commit",
    "worker.after_commit",
)
_name, _, _count = os.environ.get("BLOCKTRAIN_CRASH_AT", "").partition(":")
_left = {_name: int(_count or 1)} if _name in POINTS else {}


def point(name: str) -> None:
    """A place where a crash is tried by tests; does nothing otherwise."""
    if name in _left:
        _left[name] -= 1
        if _left[name] == 0:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
