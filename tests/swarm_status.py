"""A status as a coordinator says it, made up, and a server that says it."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from blocktrain.swarm.dashboard import add_page

EVIL = "<img src=x onerror=alert(1)>"


def decay(tokens: float, lowest: float, seed: int = 0) -> float:
    """A loss curve that looks like one."""
    return round(lowest + 3.2 * math.exp(-tokens / 9000) + 0.03 * math.sin(tokens / 900 + seed), 4)


def make_block(block: int, version: int = 12, state: str = "training") -> dict[str, Any]:
    curve = [[at, at * 3400, decay(at * 3400, 1.4 + 0.03 * (block % 7), block)] for at in range(version + 1)]
    return {
        "block": block,
        "version": version,
        "state": state,
        "participation": 0.93 if state == "training" else 0.4,
        "loss": curve[-1][2],
        "losses": curve,
        "participations": [[at, 0.5 + 0.5 * ((at * 7 + block) % 5) / 4] for at in range(version + 1)],
        "assigned": 2,
        "reported": 1,
        "pending": 0,
        "deadline_in_s": 42.0 if state == "training" else None,
        "tokens": version * 3400,
        "target_tokens": 81920,
        "reason": "waits for the last of 2 assigned workers" if state == "training" else "no live worker has room for this block",
        "bytes_down": 48_200_000,
        "bytes_up": 12_100_000,
    }


def make_worker(number: int, name: str | None = None, state: str = "live") -> dict[str, Any]:
    return {
        "worker": name or f"lab-{number}",
        "state": state,
        "blocks": [number % 3],
        "version": 12,
        "tokens_per_s": 5300.0 + 37 * number if state == "live" else None,
        "bytes_down": 48_200_000 + number,
        "bytes_up": 12_100_000,
        "updates": 7 + number % 4,
        "refusals": 0 if state == "live" else 3,
        "seen_s_ago": 1.2 if state == "live" else 340.0,
        "last": "block 0 at version 12: trained 100 steps, the update was taken" if state == "live" else "three refusals in a row: wait 600 s",
    }


def make_status(blocks: int = 3, workers: int = 5) -> dict[str, Any]:
    refusal = {"s_ago": 3.0, "worker": EVIL, "block": 0, "reason": f"norm 84.1 is more than 3 times the median 6.2 of 5 updates {EVIL}"}
    return {
        "run": "first",
        "run_id": "9f3c51aa07d24e0c",
        "config_digest": "4be1d0a9c2f7",
        "state": "training",
        "reason": "3 of 3 blocks have workers; the next headline is measured at version 32",
        "uptime_s": 4980.0,
        "tokens": 122_400,
        "target_tokens": 245_760,
        "headline_ce": 1.612,
        "headline_tokens": 122_400,
        "reference_ce": 1.41,
        "ngram_ce": 2.43,
        "headline": [[at * 12_240, decay(at * 4080, 1.55)] for at in range(11)],
        "blocks": [make_block(number) for number in range(blocks)],
        "interface": {"version": 31, "mode": "averaged"},
        "workers": [make_worker(number) for number in range(workers)],
        "refusals": [refusal, {"s_ago": 75.0, "worker": "lab-3", "block": 1, "reason": "the update is 4 versions behind, 3 are allowed"}],
        "log": [
            {"s_ago": 1.0 + 20 * at, "text": f"block {at % 3} is at version {12 - at // 3}: every live assignee has reported: 2 of 2 assigned"}
            for at in range(9)
        ],
        "updates": {"fresh": 20, "late": 2, "refused": 1, "too_old": 0},
        "bytes": {
            "down": 812_000_000,
            "up": 203_000_000,
            "by_kind": {"weights": 790_000_000, "updates": 201_000_000, "text": 21_000_000, "control": 3_000_000},
        },
    }


class Swarm:
    """What a coordinator would say, and the server that says it. Seconds to a deadline run; everything else changes when a test changes it."""

    def __init__(self, status: dict[str, Any]) -> None:
        self.said, self.began, self.calls = status, time.monotonic(), 0
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def status(self) -> dict[str, Any]:
        self.calls += 1
        passed = time.monotonic() - self.began
        blocks = [block | {"deadline_in_s": block["deadline_in_s"] and max(0.0, block["deadline_in_s"] - passed)} for block in self.said["blocks"]]
        return self.said | {"uptime_s": self.said["uptime_s"] + passed, "blocks": blocks}

    @contextlib.contextmanager
    def serve(self, interval_s: float = 0.1) -> Iterator[None]:
        app = FastAPI()
        add_page(app, self.status, interval_s=interval_s)
        server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()
