"""What the coordinator's work costs as a swarm grows: one row for each number of workers, then one JSON line. Exit code 1 if it grows.

    python benchmarks/swarm_scale.py [--workers 1000,3000,10000] [--blocks 16] [--rounds 2]

Stand-in workers of the `soft` regime through the real Coordinator: joins with keys and tokens, journal, gate, closes, ledger, all in memory. Time is
that of the whole simulation on one core, the workers' own side included, over the events in the journal. Signs of life are asked for every 30 s.
The goal: an event among the most workers costs at most 1.5 times what it costs among the fewest.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads; see blocktrain.__main__

from blocktrain.config import RunConfig, make_config, merge_fields, parse_assignment
from blocktrain.swarm.regimes import SOFT
from blocktrain.swarm.simulator import Plan, simulate

GOAL = 1.5
SETTINGS = ("round.heartbeat_limit_s=120", "limits.max_workers=100000", "train.device=cpu")


def config_for(blocks: int) -> RunConfig:
    fields: dict[str, Any] = {"model": {"blocks": blocks}}
    for text in (*SOFT.settings(), *SETTINGS):
        fields = merge_fields(fields, parse_assignment(text))
    return make_config(fields, "swarm_scale")


def measure(workers: int, options: argparse.Namespace) -> dict[str, Any]:
    began = time.process_time()
    outcome = simulate(Plan(config_for(options.blocks), SOFT, workers, 0, options.rounds, stand_in=True), None)
    cpu_s = time.process_time() - began
    return {
        "workers": workers,
        "events": outcome.events,
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(outcome.wall_s, 2),
        "events_per_s": round(outcome.events / cpu_s),
        "us_per_event": round(1e6 * cpu_s / outcome.events, 1),
        "s_per_round": round(cpu_s / options.rounds, 2),
        "virtual_s": round(outcome.virtual_s),
        "participation": round(outcome.participation or 0.0, 3),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1000,3000,10000")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="versions of each block")
    options = parser.parse_args()
    names = ("workers", "events", "events_per_s", "us_per_event", "s_per_round", "virtual_s", "participation", "peak_mib")
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names), flush=True)
    rows = []
    for workers in sorted(map(int, options.workers.split(","))):
        rows.append(measure(workers, options))
        print("| " + " | ".join(f"{rows[-1][name]:,}" for name in names) + " |", flush=True)
    growth = rows[-1]["us_per_event"] / rows[0]["us_per_event"]
    fewest, most = rows[0]["workers"], rows[-1]["workers"]
    print(f"\nan event among {most:,} workers costs {growth:.2f} times what it costs among {fewest:,} (goal: at most {GOAL})")
    figures = {"blocks": options.blocks, "growth": round(growth, 3), "goal": GOAL, "met": growth <= GOAL, "rows": rows}
    print(json.dumps({"benchmark": "swarm_scale", **figures}))
    sys.exit(0 if growth <= GOAL else 1)


if __name__ == "__main__":
    main()
