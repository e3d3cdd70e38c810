"""The rules of rounds as a pure machine: who takes part, what a worker is given, which updates count, when a round ends.

Two doors. `apply(state, event)` gives the next state and an Answer; `decide(state, now)` says for each block whether its round waits,
closes (with which updates at which weights) or is abandoned. No tensors, clock, network or randomness: time and seed come in as arguments, so a
journal of events replays to the same state, and a service and a simulator that tell the same story get the same decisions. docs/rounds.md says the
rules in prose. A host with many workers keeps a `Machine` (machine.py), which does the same to a state of its own without reading all of it for
each event.

Each block has its own round and its own clock. A round opens with its first assignment, or with an update that came late for the one before; it fixes
deadline and quorum then. Closing is in two steps: the host writes the next version from the updates of a `close` decision, then
reports Close; whatever was accepted in between stays for the next round, one version older.
"""

from __future__ import annotations

from dataclasses import replace

from blocktrain.swarm.machine import Machine
from blocktrain.swarm.rules import Rules
from blocktrain.swarm.state import Answer, Block, Decision, Event, Figures, State


def new_state(num_blocks: int, seed: int, rules: Rules, *, samples_per_step: int, tokens_per_sample: int, now: float) -> State:
    """A run before its first event. Batch size and sequence length are fixed: they say which samples a step reads."""
    assert min(num_blocks, samples_per_step, tokens_per_sample) > 0
    blocks = tuple(Block(index, idle_since=now) for index in range(num_blocks))
    return State(seed, samples_per_step, tokens_per_sample, rules, blocks, now=now, seen_at=now)


def apply(state: State, event: Event) -> tuple[State, Answer]:
    """The state after an event, and what its sender is told; the state before stays as it is."""
    machine = Machine(replace(state, workers=dict(state.workers), assignments=dict(state.assignments)))
    return machine.state, machine.apply(event)


def decide(state: State, now: float) -> tuple[Decision, ...]:
    """What is to be done with each block's round."""
    return Machine(state).decide(now)


def figures(state: State, now: float) -> Figures:
    """The run as its status page shows it."""
    return Machine(state).figures(now)
