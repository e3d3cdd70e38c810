"""The time that the rules of rounds take per event, from few workers to many: a table, then one JSON line.

    python benchmarks/rounds.py [--workers 100,1000,10000] [--blocks 16] [--rounds 4] [--seed 0]

Every worker joins, then asks, trains for about 20 s (its own speed, a tenth either way each time), begins its upload, pushes and asks again, about
`rounds` times. It beats every 10 s; one in a hundred dies in its work, one update in ten is short. After each event the host carries out what is due.
Journal, network and tensors are not part of it. The clock is simulated, and seconds are of the processor: a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from dataclasses import asdict, dataclass

from blocktrain.swarm.machine import Machine
from blocktrain.swarm.rounds import new_state
from blocktrain.swarm.rules import Rules
from blocktrain.swarm.state import Answer, Ask, Beat, Begin, Event, Join, Push

SAMPLES = 8  # a step


@dataclass(frozen=True)
class Row:
    workers: int
    blocks: int
    events: int
    closes: int
    live_s: float  # of the simulated clock
    seconds: float
    events_per_s: float
    us_per_event: float


class Simulation:
    def __init__(self, workers: int, blocks: int, seed: int) -> None:
        rules = Rules(deadline_s=60.0, deadline_min_s=10.0, quorum=2, inner_steps=100)
        self.machine = Machine(new_state(blocks, 0, rules, samples_per_step=SAMPLES, tokens_per_sample=1024, now=0.0))
        self.random = random.Random(seed)
        self.agenda: list[tuple[float, int, str, str]] = []  # when, which worker, what, on which assignment
        self.pace = [self.random.uniform(15, 25) for _ in range(workers)]
        self.dead = [False] * workers
        self.sent = self.closes = 0
        for worker in range(workers):
            self.plan(self.random.uniform(0, 5), worker, "join")

    def plan(self, at: float, worker: int, what: str, key: str = "") -> None:
        heapq.heappush(self.agenda, (at, worker, what, key))

    def send(self, event: Event) -> Answer:
        self.sent += 1
        return self.machine.apply(event)

    def run(self, events: int) -> None:
        while self.sent < events:
            wake_at = self.machine.wake_at()
            if wake_at is not None and wake_at < self.agenda[0][0]:
                self.carry_out(wake_at)
                continue
            now, worker, what, key = heapq.heappop(self.agenda)
            if not self.dead[worker]:
                self.act(now, worker, what, key)
                self.carry_out(now)

    def carry_out(self, now: float) -> None:
        for decision in self.machine.due(now):
            assert self.send(decision.event(now)).kind == "ok"
            self.closes += decision.action == "close"

    def act(self, now: float, worker: int, what: str, key: str) -> None:
        name = f"w{worker:05d}"
        if what == "join":
            self.send(Join(now, name, "1", 1))
            self.plan(now, worker, "ask")
            self.plan(now + 10, worker, "beat")
        elif what == "beat":
            self.send(Beat(now, name, "1"))
            self.plan(now + 10, worker, "beat")
        elif what == "ask":
            answer = self.send(Ask(now, name, "1", f"{self.sent}"))
            if answer.kind != "assigned":
                self.plan(now + answer.time_left_s, worker, "ask")
            elif self.random.random() < 0.01:
                self.dead[worker] = True
            else:
                self.plan(now + self.pace[worker] * self.random.uniform(0.9, 1.1), worker, "begin", answer.key)
        elif what == "begin":
            self.send(Begin(now, name, "1", key))
            self.plan(now + self.random.uniform(0.5, 1.5), worker, "push", key)
        else:
            assignment = self.machine.state.assignments.get(key)
            most = assignment.num_steps * SAMPLES if assignment else 1
            self.send(Push(now, name, "1", key, most if self.random.random() < 0.9 else most // 2))
            self.plan(now, worker, "ask")


def measure(workers: int, blocks: int, rounds: int, seed: int) -> Row:
    simulation = Simulation(workers, blocks, seed)
    events = workers * (1 + rounds * 5)  # ask, begin, push and two beats a round
    began = time.process_time()  # other processes do not count
    simulation.run(events)
    seconds = time.process_time() - began
    sent = simulation.sent
    return Row(workers, blocks, sent, simulation.closes, simulation.machine.state.now, seconds, sent / seconds, seconds / sent * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="100,1000,10000")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{'workers':>8} {'events':>8} {'closes':>7} {'events/s':>9} {'µs/event':>9}")
    rows: list[Row] = []
    for workers in map(int, args.workers.split(",")):
        row = measure(workers, args.blocks, max(args.rounds, 20_000 // (5 * workers)), args.seed)
        rows.append(row)
        print(f"{row.workers:8} {row.events:8} {row.closes:7} {row.events_per_s:9.0f} {row.us_per_event:9.1f}", flush=True)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
