"""A process that serves a coordinator with made-up blocks in a folder: python -m tests.abuse.target FOLDER. Prints port, token and two sessions."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tests.swarm_net import join, make_coordinator, serve


def main() -> None:
    limits = {"joins_per_minute": 1 << 20, "requests_per_s": 1 << 20, "part_mb": 0.01}
    coordinator = make_coordinator(Path(sys.argv[1]), limits=limits, round={"inner_steps": 4, "strikes": 1 << 20, "quorum": 1})
    with serve(coordinator) as served:
        sessions = [join(coordinator, name, served.token).session for name in ("hostile", "honest")]
        print(served.port, served.token, *sessions, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
