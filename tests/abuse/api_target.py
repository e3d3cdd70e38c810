"""A process that serves a tiny run with random weights: python -m tests.abuse.api_target. Prints its port."""

from __future__ import annotations

import threading

from tests.serving_net import local_engine, serve


def main() -> None:
    with serve(local_engine()) as served:
        print(served.port, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
