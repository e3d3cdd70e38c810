"""Rounds under any sequence of events: nothing accepted is lost or counted twice, no sample is leased twice, nobody blocks a round for ever.

The machine below is a host with bad luck: workers come, go, die, lie and come back, decisions are carried out late or never, rules change, and
now and then the host itself dies and starts again from its journal.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blocktrain.swarm.leases import Ranges, first_free, joined, united, without
from blocktrain.swarm.machine import Machine
from blocktrain.swarm.plain import from_json, from_tagged_json, to_json, to_tagged_json
from blocktrain.swarm.rounds import apply, decide, figures, new_state
from blocktrain.swarm.rules import Rules, staleness_factor
from blocktrain.swarm.state import (
    EVENTS,
    Abandon,
    Answer,
    Ask,
    Beat,
    Begin,
    ChangeRules,
    Close,
    Decision,
    Event,
    GiveBack,
    Join,
    Leave,
    Push,
    Revoke,
    State,
)

BLOCKS, SAMPLES, TOKENS = 2, 4, 10
RULES = Rules(deadline_s=20, deadline_min_s=5, heartbeat_limit_s=12, min_work_s=1, inner_steps=6, max_span=2, suspension_s=40, upload_limit_s=60)
workers = st.sampled_from("abcde")
crews = st.sets(st.sampled_from("abcde"), min_size=1)
wrong = st.sampled_from([False] * 9 + [True])


def steps_of(ranges: Ranges) -> set[int]:
    return {step for first, stop in ranges for step in range(first, stop)}


class Host(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.first = self.state = new_state(BLOCKS, 7, RULES, samples_per_step=SAMPLES, tokens_per_sample=TOKENS, now=self.now)
        self.machine = Machine(from_json(State, to_json(self.first)))  # lives on, while `apply` makes a new one for each event
        self.journal: list[str] = []
        self.decided: list[Decision] = []  # decisions whose work is under way
        self.accepted: Counter[tuple[str, int]] = Counter()  # (key, block)
        self.counted: Counter[tuple[str, int]] = Counter()
        self.dropped: Counter[tuple[str, int]] = Counter()  # by revocation
        self.counted_steps: list[set[int]] = [set() for _ in range(BLOCKS)]
        self.answers: dict[str, Answer] = {}  # what settled each assignment
        self.asks = 0

    def send(self, event: Event) -> Answer:
        """One event through the journal, and what must hold of the step."""
        self.journal.append(to_tagged_json(event))
        before = self.state
        self.state, answer = apply(before, event)
        assert answer.reason and "\n" not in answer.reason
        assert self.machine.apply(event) == answer
        self.the_machine_says_the_same(self.now)
        for old, new in zip(before.blocks, self.state.blocks, strict=True):
            closed = isinstance(event, Close) and event.block == old.index and answer.kind == "ok"
            assert new.version == old.version + closed
            assert closed or new.tokens == old.tokens
        return answer

    def process(self, worker: str, wrong: bool = False) -> str:
        """The process that speaks for a worker, or one that does not."""
        return "wrong" if wrong or worker not in self.state.workers else self.state.workers[worker].process

    def key(self, worker: str, back: int) -> str:
        """The key of a worker's newest assignment, or of one before it; or one that nobody has."""
        keys = sorted((a.key for a in self.state.assignments.values() if a.worker == worker), reverse=True)
        return keys[back] if back < len(keys) else "999999999999"

    def the_machine_says_the_same(self, now: float) -> None:
        decisions = decide(self.state, now)
        due = [decision for decision in decisions if decision.action != "wait"]
        assert self.machine.due(now) == due
        wake_at = self.machine.wake_at()
        later = now + 100 if wake_at is None else (max(now, self.state.now) + wake_at) / 2
        assert [decision for decision in decide(self.state, later) if decision.action != "wait"] == due, "nothing new before it wakes"

    # --- What happens ---

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @initialize(capacities=st.lists(st.integers(1, 4), min_size=4, max_size=4))
    def first_workers_join(self, capacities: list[int]) -> None:
        for name, capacity in zip("abcd", capacities, strict=True):
            self.send(Join(self.now, name, "1", capacity))

    @rule(worker=workers, process=st.sampled_from("12"), capacity=st.integers(1, 4), takeover=st.booleans())
    def join(self, worker: str, process: str, capacity: int, takeover: bool) -> None:
        self.send(Join(self.now, worker, process, capacity, takeover))

    @rule(names=crews)
    def beat(self, names: set[str]) -> None:
        for name in sorted(names):
            self.send(Beat(self.now, name, self.process(name)))

    @rule(names=crews, slip=wrong)
    def ask(self, names: set[str], slip: bool) -> None:
        for name in sorted(names):
            self.ask_as(name, self.process(name, slip))

    def ask_as(self, worker: str, process: str) -> None:
        self.asks += 1
        before = self.state
        answer = self.send(Ask(self.now, worker, process, f"{self.asks}"))
        again = self.send(Ask(self.now, worker, process, f"{self.asks}"))
        if answer.kind != "assigned":
            return
        assert again.key == answer.key and again.time_left_s == answer.time_left_s
        work = self.state.assignments[answer.key]
        assert work.worker == worker
        assert work.blocks == tuple(range(work.blocks[0], work.blocks[-1] + 1))
        if answer.key in before.assignments:
            return
        assert len(work.blocks) == min(before.workers[worker].capacity, before.rules.max_span, BLOCKS)
        assert answer.time_left_s >= before.rules.min_work_s or any(not base.awaited for base in work.bases)
        assert work.num_steps == before.rules.inner_steps
        for base in work.bases:
            assert base.version == self.state.blocks[base.block].version
            assert not steps_of(work.steps) & self.counted_steps[base.block]
            mine = [a for a in before.assignments.values() if a.worker == worker and base.block in a.blocks]
            current = [a for a in mine if {b.block: b.version for b in a.bases}[base.block] == base.version]
            assert not any(a.answer and a.answer.accepted for a in current), "one update a round"

    @rule(worker=workers, back=st.integers(0, 2))
    def begin_upload(self, worker: str, back: int) -> None:
        self.send(Begin(self.now, worker, self.process(worker), self.key(worker, back)))

    @rule(names=crews, back=st.sampled_from([0, 0, 0, 1, 2]), share=st.sampled_from([1.0, 1.0, 0.5, 0.1]))
    def push(self, names: set[str], back: int, share: float) -> None:
        for name in sorted(names):
            self.push_as(name, self.key(name, back), math.ceil(share * SAMPLES * RULES.inner_steps))

    @rule(
        names=crews,
        slow=workers,
        uploads=st.booleans(),
        seconds=st.sampled_from([0.0, 2.0, 9.0]),
        rounds=st.integers(0, 5),
        patience=st.sampled_from([0.0, 0.0, 45.0]),
    )
    def a_slow_worker_among_others(self, names: set[str], slow: str, uploads: bool, seconds: float, rounds: int, patience: float) -> None:
        """Whole rounds by a few workers, with a host that is prompt, while another one is at work on its first or uploading it."""
        self.ask({slow}, False)
        if uploads:
            self.begin_upload(slow, 0)
        for _ in range(rounds):
            self.ask(names - {slow}, False)
            self.now += seconds
            self.push(names - {slow}, 0, 1.0)
            self.now += patience
            self.beat(names - {slow})
            self.the_host_keeps_up()
        self.push({slow}, 0, 0.5)

    @rule(early=crews, late=crews, last=st.sampled_from(["", "", "d", "e"]))
    def updates_come_while_a_round_is_being_closed(self, early: set[str], late: set[str], last: str) -> None:
        self.ask(early | late, False)
        self.push(early, 0, 0.5)
        self.now += 45
        self.the_host_decides()
        self.push(late, 0, 1.0)
        if last:
            self.leave(last, last == "e")
        self.carry_out(1)

    @rule(
        worker=workers,
        victim=workers,
        num_samples=st.sampled_from([0, -3, math.nan, 1e30, 0.5, 4]),
        fault=st.sampled_from(["", "tensor w: not finite"]),
    )
    def push_badly(self, worker: str, victim: str, num_samples: float, fault: str) -> None:
        """A lie, a broken tensor, or another's place."""
        self.push_as(worker, self.key(victim, 0), num_samples, fault)

    def push_as(self, worker: str, key: str, num_samples: float, fault: str = "") -> None:
        before = self.state.assignments.get(key)
        process = self.process(worker)
        answer = self.send(Push(self.now, worker, process, key, num_samples, fault))
        if before is None or worker != before.worker or answer.kind in ("conflict", "unknown", "revoked"):
            assert not answer.accepted
            return
        if before.answer is not None:
            assert answer == before.answer
            return
        settled = self.state.assignments[key].answer
        assert settled == answer, "the first answer stands"
        if answer.accepted:
            assert not fault and num_samples in range(1, 25)
            for block, age in answer.ages:
                assert age <= self.state.rules.max_age or before.upload
                self.accepted[key, block] += 1

    @rule(worker=workers)
    def give_back(self, worker: str) -> None:
        self.send(GiveBack(self.now, worker, self.process(worker), self.key(worker, 0), "the machine is needed"))

    @rule(worker=st.sampled_from("de"), revoked=wrong)
    def leave(self, worker: str, revoked: bool) -> None:
        if not revoked:
            self.send(Leave(self.now, worker, self.process(worker)))
            return
        for block in self.state.blocks:
            self.dropped.update((update.key, block.index) for update in block.pending if update.worker == worker)
        self.send(Revoke(self.now, worker))

    @rule(deadline_s=st.sampled_from([2.0, 10.0, 20.0]), quorum=st.integers(1, 4), max_span=st.integers(1, 3), max_age=st.integers(0, 4))
    def change_rules(self, deadline_s: float, quorum: int, max_span: int, max_age: int) -> None:
        before = [block.round for block in self.state.blocks]
        self.send(ChangeRules(self.now, replace(RULES, deadline_s=deadline_s, quorum=quorum, max_span=max_span, max_age=max_age)))
        assert [block.round for block in self.state.blocks] == before

    @rule()
    def the_host_keeps_up(self) -> None:
        self.the_host_decides()
        self.carry_out(1)

    @rule()
    def the_host_decides(self) -> None:
        self.decided = [decision for decision in decide(self.state, self.now) if decision.action != "wait"]

    @precondition(lambda self: self.decided)
    @rule(twice=st.booleans())
    def the_host_carries_out_what_it_decided(self, twice: bool) -> None:
        """Perhaps long after, and perhaps twice."""
        self.carry_out(1 + twice)

    def carry_out(self, times: int) -> None:
        for decision in self.decided:
            event = decision.event(self.now)
            for _ in range(times):
                pending = {update.key: update for update in self.state.blocks[decision.block].pending}
                tokens = self.state.blocks[decision.block].tokens
                if self.send(event).kind == "ok" and isinstance(event, Close):
                    assert self.state.blocks[decision.block].tokens == tokens + sum(pending[key].tokens for key in event.keys)
                    for key in event.keys:
                        self.counted[key, decision.block] += 1
                        steps = steps_of(pending[key].steps)
                        assert not steps & self.counted_steps[decision.block], "a sample counts once in an epoch"
                        self.counted_steps[decision.block] |= steps
        self.decided = []

    @rule()
    def the_host_dies_and_replays_its_journal(self) -> None:
        state = from_json(State, to_json(self.first))
        for line in self.journal:
            state, _ = apply(state, from_tagged_json(EVENTS, line))
        assert state == self.state == from_json(State, to_json(state))
        assert decide(state, self.now) == decide(self.state, self.now)
        self.state = state
        self.decided = []

    @rule(seconds=st.sampled_from([1.0, 15.0, 40.0]))
    def somebody_asks_what_will_be_due(self, seconds: float) -> None:
        """The answers afterwards are those that they would have been."""
        self.the_machine_says_the_same(self.now + seconds)
        assert self.machine.figures(self.now + seconds) == figures(self.state, self.now + seconds)

    # --- What always holds ---

    @invariant()
    def a_machine_is_what_its_state_says(self) -> None:
        assert self.machine.state == self.state
        assert self.machine.decide(self.now) == decide(self.state, self.now)
        self.the_machine_says_the_same(self.now)

    @invariant()
    def accepted_is_counted_or_pending_or_revoked_and_never_twice(self) -> None:
        pending = Counter((update.key, block.index) for block in self.state.blocks for update in block.pending)
        assert self.accepted == self.counted + pending + self.dropped
        assert all(count == 1 for count in self.accepted.values())

    @invariant()
    def steps_taken_are_those_of_open_leases_and_of_updates_and_none_has_two_owners(self) -> None:
        for block in self.state.blocks:
            owners = [self.counted_steps[block.index]]
            owners += [steps_of(a.steps) for a in self.state.assignments.values() if a.answer is None and block.index in a.blocks]
            owners += [steps_of(update.steps) for update in block.pending]
            assert sum(map(len, owners)) == len(set().union(*owners))
            assert steps_of(block.taken) == set().union(*owners)

    @invariant()
    def nobody_blocks_a_round_for_ever(self) -> None:
        """If nothing more is heard, every open round ends: at the latest at the heartbeat limit, or at the deadline where late updates wait."""
        for block in self.state.blocks:
            if block.round:
                silent = self.now + self.state.rules.heartbeat_limit_s
                fresh = any(update.base == block.version for update in block.pending)
                end = silent if fresh or not block.pending else max(silent, block.round.opened_at + block.round.deadline_s)
                assert decide(self.state, end)[block.index].action != "wait"
                assert decide(self.state, block.round.opened_at + 2 * block.round.deadline_s)[block.index].action != "wait"

    @invariant()
    def decisions_say_what_they_mean(self) -> None:
        for decision, block in zip(decide(self.state, self.now), self.state.blocks, strict=True):
            assert decision.reason
            assert (decision.action == "close") == bool(decision.shares)
            assert [share.key for share in decision.shares] == [update.key for update in block.pending][: len(decision.shares)]
            for share, update in zip(decision.shares, block.pending, strict=False):
                assert share.weight == update.tokens * staleness_factor(block.version - update.base) > 0
            if decision.wake_at is not None:
                assert decision.wake_at > self.now
                between = (self.now + decision.wake_at) / 2
                assert decide(self.state, between)[block.index].action == "wait"

    @invariant()
    def figures_add_up(self) -> None:
        shown = figures(self.state, self.now)
        assert all(block.participation is None or 0 <= block.participation <= 1 for block in shown.blocks)
        assert (shown.alone_s == 0) or not shown.live
        assert all(block.reported <= block.assigned for block in shown.blocks)

    @invariant()
    def a_worker_has_one_assignment_in_training(self) -> None:
        training = Counter(a.worker for a in self.state.assignments.values() if a.answer is None and a.upload is None)
        assert all(count == 1 for count in training.values())


Host.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestHost = Host.TestCase


# --- The end of a run ---

deeds = st.sampled_from("ask ask begin push push half lie return crash leave takeover revoke time time rest".split())


class Ending:
    """A prompt host and workers that crash, return and are refused, until the run has ended."""

    def __init__(self, span: int, target: int, capacities: list[int]) -> None:
        self.now, self.asks, self.target = 0.0, 0, target
        rules = replace(RULES, target_steps=target, max_span=span, suspension_s=5.0)
        self.state = new_state(3, 7, rules, samples_per_step=SAMPLES, tokens_per_sample=TOKENS, now=0.0)
        self.machine = Machine(from_json(State, to_json(self.state)))
        self.capacity = dict(zip("abcd", capacities, strict=True))
        self.process = dict.fromkeys("abcd", 1)
        self.up: set[str] = set()
        self.counted: list[Counter[int]] = [Counter() for _ in self.state.blocks]

    def send(self, event: Event) -> Answer:
        if isinstance(event, Close):
            for update in self.state.blocks[event.block].pending:
                self.counted[event.block].update(steps_of(update.steps))
        self.state, answer = apply(self.state, event)
        assert self.machine.apply(event) == answer and self.machine.state == self.state
        decisions = decide(self.state, self.now)
        assert self.machine.due(self.now) == [decision for decision in decisions if decision.action != "wait"]
        for decision in decisions:
            if decision.action != "wait" and not isinstance(event, Close | Abandon):
                assert self.send(decision.event(self.now)).kind == "ok"
        return answer

    def does(self, name: str, deed: str) -> Answer | None:
        who = (self.now, name, str(self.process[name]))
        if deed in ("time", "rest"):
            self.now += 2 if deed == "time" else 30
            return None
        if deed == "crash":
            self.up.discard(name)
        if deed == "crash" or (deed != "takeover" and name not in self.up):
            return None
        if deed == "takeover":
            self.process[name] += 1
            self.up.add(name)
            return self.send(Join(self.now, name, str(self.process[name]), self.capacity[name], takeover=True))
        if deed == "ask":
            self.asks += 1
            return self.send(Ask(*who, str(self.asks)))
        mine = [a for a in self.state.assignments.values() if a.worker == name and a.answer is None]
        if deed == "leave":
            self.up.discard(name)
            return self.send(Leave(*who))
        if deed == "revoke":
            return self.send(Revoke(self.now, name)) if name == "d" else None
        if not mine:
            return None
        key, most = mine[-1].key, mine[-1].num_steps * SAMPLES
        if deed == "begin":
            return self.send(Begin(*who, key))
        if deed == "return":
            return self.send(GiveBack(*who, key, "no memory"))
        return self.send(Push(*who, key, {"push": most, "half": max(1, most // 2), "lie": 0}[deed]))


@settings(max_examples=120, deadline=None)
@given(
    span=st.integers(1, 2),
    target=st.integers(1, 40),
    capacities=st.lists(st.integers(1, 2), min_size=4, max_size=4),
    history=st.lists(st.tuples(st.sampled_from("abcd"), deeds), max_size=80),
    rest=st.sets(st.sampled_from("abc"), min_size=1),
)
def test_whoever_crashes_a_run_ends_with_its_steps_counted(
    span: int, target: int, capacities: list[int], history: list[tuple[str, str]], rest: set[str]
) -> None:
    run = Ending(span, target, capacities)
    for name in "abcd":
        run.does(name, "takeover")
    for name, deed in history:
        run.does(name, deed)
    for name in "abcd":
        run.does(name, "takeover" if name in rest else "crash")
    ended: set[str] = set()
    for _ in range(400):
        for name in sorted(rest):
            answer = run.does(name, "ask")
            ended |= {name} if answer and answer.kind == "finished" else set()
            run.does(name, "push")
        if ended == rest:
            break
        run.now += 1.0
    assert ended == rest
    for counted in run.counted:
        assert max(counted.values()) == 1
        assert set(counted) == set(range(target)) if span == 1 else len(counted) >= target


sets = st.sets(st.integers(0, 40))


@given(taken=sets, more=sets, less=sets, count=st.integers(0, 12))
def test_ranges_are_sets(taken: set[int], more: set[int], less: set[int], count: int) -> None:
    one, two, three = (united((i, i + 1) for i in numbers) for numbers in (taken, more, less))
    assert joined(one, two) == united((i, i + 1) for i in taken | more)
    assert without(one, three) == united((i, i + 1) for i in taken - less)
    free = [i for i in range(100) if i not in taken | more][:count]
    assert first_free([one, two], count) == united((i, i + 1) for i in free)
