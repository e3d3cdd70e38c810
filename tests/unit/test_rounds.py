"""The rules of rounds, told as stories of one line.

A story is a list of clauses: `20s` lets time pass until then (living workers beat, the host carries out every decision as it falls due), and
`a b ask` lets workers act. Workers: join, ask, begin (an upload), push (all samples), half (of them), die, restart, leave, return.
"""

from __future__ import annotations

import ast
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktrain.swarm
from blocktrain.errors import ConfigError, ProtocolError
from blocktrain.swarm.leases import beyond, count_of, first_free, united, without
from blocktrain.swarm.machine import Machine
from blocktrain.swarm.plain import from_json, from_tagged_json, to_json, to_tagged_json
from blocktrain.swarm.rounds import apply, decide, figures, new_state
from blocktrain.swarm.rules import Rules, deadline_of, staleness_factor
from blocktrain.swarm.state import (
    EVENTS,
    Answer,
    Ask,
    Assignment,
    Beat,
    Begin,
    Block,
    ChangeRules,
    Close,
    Event,
    GiveBack,
    Join,
    Leave,
    Push,
    Revoke,
    State,
)

SAMPLES = 4  # a step
TOKENS = 10  # a sample


class Story:
    """A host in miniature: it keeps the state, the time, what each worker was told, and a log of rounds."""

    def __init__(self, text: str = "", *, blocks: int = 1, capacity: int = 1, **rules: Any) -> None:
        self.rules = Rules(
            **{"deadline": "fixed", "deadline_s": 60, "inner_steps": 10, "heartbeat_limit_s": 30, "quorum": 2, "max_span": blocks} | rules
        )
        self.state = new_state(blocks, 7, self.rules, samples_per_step=SAMPLES, tokens_per_sample=TOKENS, now=0.0)
        self.capacity, self.now, self.asks = capacity, 0.0, 0
        self.processes: dict[str, int] = {}
        self.alive: set[str] = set()
        self.told: dict[str, Answer] = {}
        self.key: dict[str, str] = {}  # of each worker's newest assignment
        self.log: list[str] = []
        self.tell(text)

    def tell(self, text: str) -> Story:
        for clause in filter(None, (part.strip() for part in text.split(","))):
            *who, verb = clause.split()
            if verb.endswith("s") and verb[:-1].replace(".", "").isdigit():
                self.wait_until(float(verb[:-1]))
            for name in who:
                self.act(name, verb)
        return self

    def send(self, event: Event) -> Answer:
        self.state, answer = apply(self.state, event)
        self.settle()
        return answer

    def settle(self) -> None:
        """Carry out what is due, as a host does after each event."""
        for decision in decide(self.state, self.now):
            if decision.action != "wait":
                self.state, answer = apply(self.state, decision.event(self.now))
                assert answer.kind == "ok"
                self.log.append(f"{self.now:g}s block {decision.block}: {decision.action}, {decision.reason}")

    def wait_until(self, then: float) -> None:
        while self.now < then:
            wakes = [d.wake_at for d in decide(self.state, self.now) if d.wake_at is not None and d.wake_at > self.now]
            self.now = min([then, self.now + 5, *wakes])
            for name in sorted(self.alive):
                self.send(Beat(self.now, name, self.process(name)))
            self.settle()

    def process(self, name: str) -> str:
        return f"{name}{self.processes.get(name, 1)}"

    def act(self, name: str, verb: str) -> Answer:
        process, key = self.process(name), self.key.get(name, "none")
        if verb == "die":
            self.alive.discard(name)
            return Answer("ok", "")
        if verb == "restart":
            self.processes[name] = self.processes.get(name, 1) + 1
            return self.act(name, "join")
        self.asks += 1
        most = SAMPLES * self.assignment(name).num_steps if key in self.state.assignments else 1
        events: dict[str, Event] = {
            "join": Join(self.now, name, process, self.capacity),
            "ask": Ask(self.now, name, process, f"ask {self.asks}"),
            "begin": Begin(self.now, name, process, key),
            "push": Push(self.now, name, process, key, most),
            "half": Push(self.now, name, process, key, most // 2),
            "return": GiveBack(self.now, name, process, key, "out of memory"),
            "leave": Leave(self.now, name, process),
        }
        answer = self.told[name] = self.send(events[verb])
        if answer.kind == "assigned":
            self.key[name] = answer.key
        if verb == "join" and answer.kind == "ok":
            self.alive.add(name)
        if verb == "leave":
            self.alive.discard(name)
        return answer

    def push(self, name: str, num_samples: float = 1, fault: str = "") -> Answer:
        self.told[name] = self.send(Push(self.now, name, self.process(name), self.key[name], num_samples, fault))
        return self.told[name]

    def assignment(self, name: str) -> Assignment:
        return self.state.assignments[self.key[name]]

    def block(self, index: int = 0) -> Block:
        return self.state.blocks[index]

    @property
    def versions(self) -> list[int]:
        return [block.version for block in self.state.blocks]


# --- Who takes part ---


def test_a_process_that_has_not_joined_is_told_to():
    assert Story("a ask").told["a"] == Answer("unknown", "worker a is not a member: join first")


def test_two_processes_with_one_key_at_once():  # case 39
    story = Story("a join, a ask, 3s")
    answer = story.send(Join(3.0, "a", "other", 1))
    assert answer == Answer("conflict", "worker a is process a1, heard 0 s ago: stop it, or join with takeover")
    assert story.act("a", "push").kind == "fresh"  # the holder goes on

    story = Story("a join, a ask")
    assert story.send(Join(1.0, "a", "other", 1, takeover=True)).kind == "ok"
    assert story.act("a", "push") == Answer("conflict", "worker a is process other now: this one must stop, or join with takeover")
    key = story.key["a"]
    assert story.send(Push(2.0, "a", "other", key, 4)).kind == "fresh"
    assert story.send(Push(2.0, "a", "other", key, 4)).kind == "fresh"  # told again, not counted again
    assert story.block().tokens == 4 * TOKENS


def test_a_killed_workers_place_is_free_after_the_heartbeat_limit():
    assert Story("a join, a die, 29s, a restart").told["a"].kind == "conflict"
    assert Story("a join, a die, 30s, a restart").told["a"].kind == "ok"


def test_a_worker_too_small_for_the_run_is_told_both_numbers():
    answer = Story("a join", blocks=4, min_span=2).told["a"]
    assert answer == Answer("unfit", "the worker can hold 1 blocks, this run trains spans of at least 2")


def test_a_dead_worker_is_not_expected_in_the_next_round():  # case 13
    story = Story("a b join, a b ask, 10s, a push, b die, 41s, a ask, 50s, a push")
    assert story.log[0].startswith("40s block 0: close, every live assignee has reported: 1 of 2 assigned")  # b was last heard at 10 s
    assert story.log[1] == "50s block 0: close, every live assignee has reported: 1 of 1 assigned"


def test_all_workers_crash_and_the_status_says_since_when():  # case 17
    story = Story("a b join, a b ask, 10s, a b die, 130s")
    shown = figures(story.state, story.now)
    assert shown.live == () and shown.gone == ("a", "b")
    assert shown.alone_s == 120
    assert shown.blocks[0].state == "starved" and story.versions == [0]
    assert story.log == ["40s block 0: abandon, empty: no valid update, 0 of 2 assigned; the block stays as it is"]
    assert story.tell("a restart, a ask, a push").versions == [1]


def test_one_worker_on_a_block_is_enough_and_none_is_no_error():  # case 16
    assert Story("a join, a ask, 20s, a push").versions == [1]
    assert Story("500s").versions == [0]


def test_a_revoked_worker_is_out_at_its_next_call_and_its_open_update_is_dropped():  # case 41
    story = Story("a b c join, a b c ask, a b push")
    assert story.send(Revoke(1.0, "a")).kind == "ok"
    assert [update.worker for update in story.block().pending] == ["b"]
    for verb in ("ask", "push", "join", "leave", "begin"):
        assert story.act("a", verb).kind == "revoked"
    story.tell("c push")
    assert story.block().tokens == 2 * 40 * TOKENS
    assert "a" not in figures(story.state, 1.0).live + figures(story.state, 1.0).gone

    story = Story("a b join, a b ask")
    story.send(Revoke(1.0, "a"))
    assert story.tell("2s, b push").log == ["2s block 0: close, every live assignee has reported: 1 of 2 assigned"]


def test_revocation_frees_only_the_steps_that_the_dropped_update_had_used():
    story = Story("a b c join, c ask, a ask, a half, b ask")
    assert [story.assignment(name).steps for name in "cab"] == [((0, 10),), ((10, 20),), ((15, 25),)]
    story.send(Revoke(0.0, "a"))
    assert story.block().taken == ((0, 10), (15, 25))


def test_who_never_joined_can_be_revoked_too():
    story = Story()
    story.send(Revoke(0.0, "a"))
    assert story.act("a", "join").kind == "revoked"


def test_revocation_while_a_round_is_being_closed_asks_for_a_new_decision():
    story = Story("a b join, a b ask")
    story.state, _ = apply(story.state, Push(1.0, "a", "a1", story.key["a"], 4))
    story.state, _ = apply(story.state, Push(1.0, "b", "b1", story.key["b"], 4))
    (before,) = decide(story.state, 1.0)
    story.state, _ = apply(story.state, Revoke(1.0, "a"))
    story.state, answer = apply(story.state, before.event(1.0))
    assert answer.kind == "conflict" and "decide again" in answer.reason
    (after,) = decide(story.state, 1.0)
    assert [share.worker for share in after.shares] == ["b"]


def test_a_worker_that_leaves_hands_its_work_to_others():
    story = Story("a b join, a ask, a leave, b ask")
    assert story.assignment("b").steps == ((0, 10),)
    assert story.act("a", "ask").kind == "unknown"
    assert story.tell("a join, a ask").assignment("a").steps == ((10, 20),)


def test_records_of_workers_that_are_long_gone_are_dropped_but_not_those_of_revoked_ones():
    story = Story("a b c d join", forget_s=1000)
    story.send(Revoke(0.0, "b"))
    story.tell("a c die, 1500s, d ask, d push")
    assert set(story.state.workers) == {"b", "d"}


# --- What a worker is given ---


def test_an_assignment_says_everything_that_the_work_depends_on():
    story = Story("a join, a ask", blocks=2, capacity=2)
    work = story.assignment("a")
    assert work.blocks == (0, 1) and [b.version for b in work.bases] == [0, 0]
    assert (work.seed, work.steps, work.issued_at, work.ends_at) == (7, ((0, 10),), 0.0, 60.0)
    assert story.told["a"] == Answer("assigned", "block 0 at version 0, 1 at version 0, 10 steps, 60.0 s left: its need is greatest", work.key, 60.0)


def test_the_schedule_goes_on_from_the_tokens_that_were_counted():
    assert Story("a join, a ask, a half, a ask").assignment("a").bases[0].tokens == 20 * TOKENS


def test_the_same_ask_gets_the_same_assignment():
    story = Story("a join, a ask, 10s")
    again = story.send(Ask(10.0, "a", "a1", f"ask {story.asks}"))
    assert again.key == story.key["a"] and again.time_left_s == 50
    assert story.tell("20s, a ask").told["a"].key == again.key  # another ask, but the work is still open
    assert len(story.state.assignments) == 1


def test_an_ask_is_only_a_repeat_within_one_process():
    story = Story("a join, a ask, a push, a die, 40s, a restart")
    assert story.send(Ask(40.0, "a", "a2", f"ask {story.asks - 2}")).key != story.key["a"]


def test_workers_go_where_fewest_are():
    story = Story("a b c d join, a b c d ask", blocks=3)
    assert [story.assignment(name).blocks for name in "abcd"] == [(0,), (1,), (2,), (0,)]


def test_a_single_worker_serves_all_blocks_in_turn():
    story = Story("a join" + ", a ask, a push" * 9, blocks=3)
    assert story.versions == [3, 3, 3]


def test_a_worker_gets_as_long_a_span_as_fits_it_and_the_run_allows():
    story = Story(blocks=5, max_span=3)
    for name, capacity in (("tiny", 1), ("mid", 2), ("big", 9)):
        story.capacity = capacity
        story.tell(f"{name} join, {name} ask")
    assert [story.assignment(name).blocks for name in ("tiny", "mid", "big")] == [(0,), (1, 2), (2, 3, 4)]


def test_a_worker_has_one_update_a_round():
    story = Story("a b join, a b ask, a push, a ask")
    assert story.told["a"].kind == "wait"
    assert story.told["a"].reason == "worker a has done its part, or the rounds that are open have no time left for it"
    assert 1 <= story.told["a"].time_left_s <= 7.5
    assert story.tell("b push, a ask").told["a"].kind == "assigned"


def test_a_round_that_is_about_to_end_takes_no_further_assignee():
    story = Story("a b c d join, a b ask, 59s, c ask", min_work_s=2)
    assert story.told["c"].kind == "wait"
    assert story.tell("a push, 61s, d ask").told["d"].time_left_s == 59  # the quorum is still out: until twice the deadline


def test_a_round_that_can_close_takes_no_further_assignee():
    story = Story("a b join, a ask")
    story.state, _ = apply(story.state, Push(1.0, "a", "a1", story.key["a"], 4))
    _, answer = apply(story.state, Ask(1.0, "b", "b1", "x"))
    assert answer.kind == "wait" and answer.time_left_s == 1


def test_a_long_span_is_not_cut_short_by_one_block_that_is_about_to_close():
    """Block 1 closes in 5 s, block 0 in 60: the worker gets 60 s, block 1 does not wait for it and takes it late."""
    story = Story("a b join, a ask, b ask, 30s, a push, 55s", blocks=2)
    story.capacity = 2
    story.tell("c join, c ask")
    assert story.told["c"].time_left_s == 60
    assert [b.awaited for b in story.assignment("c").bases] == [True, False]
    story.tell("57s, b push, 100s, c push")
    assert story.told["c"].ages == ((0, 0), (1, 1))


def test_a_restarted_worker_trains_again_within_one_round():  # case 12
    story = Story("a b join, a b ask, 10s, a die, 40s, a restart, a ask, 50s, a b push")
    assert story.told["a"].kind == "fresh" and story.versions == [1]
    assert len(story.state.assignments) == 2  # it took up the work that it had


def test_a_restarted_worker_whose_time_has_passed_gets_new_work_on_the_same_samples():
    story = Story("a join, a ask, 10s, a die, 70s, a restart, a ask")
    assert story.state.assignments["000000000000"].answer == Answer(
        "returned", "asked for other work after its blocks had moved on or its time had passed", "000000000000"
    )
    assert story.key["a"] == "000000000001" and story.assignment("a").steps == ((0, 10),)


def test_a_worker_killed_in_its_upload_begins_that_work_again():  # case 12
    story = Story("a join, a ask, 20s, a begin, a die, 50s, a restart, a ask")
    assert story.told["a"].key == "000000000000" and story.assignment("a").steps == ((0, 10),)
    assert story.tell("55s, a push").versions == [1]


def test_a_worker_killed_while_it_trains_and_uploads_keeps_the_newer_work():
    story = Story("a join, a ask, 20s, a begin, a ask, a die, 50s, a restart, a ask", blocks=2)
    first, second = story.state.assignments.values()
    assert first.answer == Answer("returned", "the process that was uploading it is gone", first.key)
    assert second.answer is None and story.told["a"].key == second.key


def test_an_upload_that_never_ends_does_not_keep_its_worker_from_the_block():
    story = Story("a join, a ask, a begin, 119s, a ask")
    assert story.told["a"].kind == "wait"
    assert story.tell("121s, a ask").told["a"].kind == "assigned"


def test_a_block_without_a_worker_waits_alone_and_is_shown_as_starved():  # case 12
    story = Story("a b c join, a b c ask" + ", 45s", blocks=4)
    story.tell("a push, 50s, b push, 55s, c push")
    assert story.versions == [1, 1, 1, 0]
    shown = figures(story.state, 60.0).blocks
    assert [block.state for block in shown] == ["idle", "idle", "idle", "starved"]
    assert shown[3].reason == "starved: no worker has had this block for 60 s"
    assert story.tell("a ask").assignment("a").blocks == (3,)  # whoever asks next is sent there


# --- What becomes of an update ---


def test_an_update_counts_its_tokens():
    story = Story("a b join, a b ask, 10s, a push")
    story.state, answer = apply(story.state, Push(11.0, "b", "b1", story.key["b"], 8))
    assert answer == Answer("fresh", "accepted", story.key["b"], ages=((0, 0),))
    (decision,) = decide(story.state, 11.0)
    assert [(share.worker, share.age, share.weight) for share in decision.shares] == [("a", 0, 400.0), ("b", 0, 80.0)]
    assert decision.fresh == 2


def test_an_upload_that_began_before_the_deadline_and_ends_after_it_is_banked():  # case 11
    story = Story("a b join, a b ask, 10s, a push, 58s, b begin, 65s, b push", quorum=1)
    assert story.log == ["60s block 0: close, the deadline of 60.0 s has passed with 1 of 2 assigned"]
    assert story.told["b"] == Answer("late", "accepted, counted next round: block 0 with staleness 1", story.key["b"], ages=((0, 1),))
    assert story.tell("b ask").told["b"].kind == "assigned"  # still a member
    story.tell("70s, b push")
    assert story.block().last and (story.block().last.counted, story.block().last.fresh) == (2, 1)


@pytest.mark.parametrize("age", [0, 1, 2, 3])
def test_an_update_weighs_the_less_the_more_versions_it_is_behind(age: int):  # case 23
    story = Story("a b join, a ask, 1s, b ask, b push" + ", 61s" * (age > 0), quorum=1)
    for _ in range(age - 1):
        story.tell("b ask, b push")
    story.state, _ = apply(story.state, Push(story.now, "a", "a1", story.key["a"], 40))
    (share,) = [share for share in decide(story.state, 500.0)[0].shares if share.worker == "a"]
    assert (share.age, share.weight) == (age, 400 * staleness_factor(age))
    assert share.weight == pytest.approx([400, 282.84, 230.94, 200][age], abs=0.01)


def test_an_update_four_versions_behind_is_refused_with_both_numbers():  # case 23
    story = Story("a b join, a ask, 1s, b ask, b push, 61s" + ", b ask, b push" * 3 + ", a push", quorum=1)
    assert story.versions == [4]
    assert story.told["a"] == Answer("too_old", "too old: its block has moved on by 4 versions, at most 3 count", story.key["a"])
    assert story.told["a"].refused and story.state.workers["a"].strikes == 0


def test_an_upload_that_was_admitted_stays_admitted_for_an_hour():
    rounds = ", b ask, b push" * 5
    late = Story(f"a b join, a ask, 1s, b ask, b push, 61s, a begin{rounds}, a push", quorum=1)
    assert late.told["a"].ages == ((0, 6),)
    assert Story(f"a b join, a ask, 1s, b ask, b push, 61s, a begin{rounds}, 3700s, a push", quorum=1).told["a"].kind == "too_old"


@pytest.mark.parametrize(
    ("rounds", "kind", "ages", "reason"),
    [
        (0, "fresh", ((0, 0), (1, 0)), "accepted"),
        (2, "late", ((0, 2), (1, 0)), "accepted, counted next round: block 0 with staleness 2"),
        (4, "fresh", ((1, 0),), "accepted; too old for block 0"),
    ],
)
def test_a_span_counts_for_each_block_with_that_blocks_own_age(rounds: int, kind: str, ages: Any, reason: str):
    """While a wide worker has blocks 0 and 1, a narrow one takes block 0 some versions on."""
    story = Story("wide join, wide ask", blocks=2, capacity=2, quorum=1)
    story.capacity = 1
    story.tell("x join, 1s, x ask, x push, 61s" + ", x ask, x push" * (rounds - 1) if rounds else "")
    assert story.versions == [rounds, 0]
    answer = story.act("wide", "push")
    assert (answer.kind, answer.ages, answer.reason) == (kind, ages, reason)
    leased = story.assignment("wide").steps
    assert without(leased, story.block(0).taken) == (leased if rounds == 4 else ())  # block 0 may see what did not count again
    assert without(leased, story.block(1).taken) == ()


BAD_COUNTS = [0, -1, math.nan, math.inf, -math.inf, 1e30, 41, 2.5, True, 10**400]


@pytest.mark.parametrize("num_samples", BAD_COUNTS, ids=lambda n: str(n)[:6] if n != 10**400 else "huge")
def test_a_number_of_samples_that_cannot_be_is_refused(num_samples: float):  # case 34
    story = Story("a b join, a b ask")
    answer = story.push("a", num_samples)
    assert answer.kind == "invalid"
    assert "is not a whole number from 1 to 40 (refusal 1 of 3)" in answer.reason and len(answer.reason) < 120
    assert story.tell("b push").block().tokens == 40 * TOKENS  # the other's round is untouched


def test_a_round_in_which_everybody_reports_nothing_leaves_the_block_as_it_was():  # case 34
    story = Story("a b join, a b ask")
    story.push("a", 0)
    story.push("b", 0)
    assert story.versions == [0]
    assert story.log == ["0s block 0: abandon, empty: no valid update, 0 of 2 assigned; the block stays as it is"]


def test_a_repeated_push_gets_the_first_answer_and_counts_once():
    story = Story("a b join, a b ask, a push")
    first = story.told["a"]
    assert story.push("a", 4) == first and story.push("a", math.nan) == first
    assert story.tell("b push").block().tokens == 80 * TOKENS
    assert story.push("a", 4) == first  # the round has closed meanwhile


def test_assignments_of_nobody_and_of_others_are_refused():
    story = Story("a b join, a ask")
    assert story.send(Push(0.0, "b", "b1", "000000000099", 4)).kind == "unknown"
    answer = story.send(Push(0.0, "b", "b1", story.key["a"], 4))
    assert answer == Answer("forbidden", "assignment 000000000000 is not worker b's", story.key["a"])
    assert story.act("a", "push").kind == "fresh"


def test_answers_are_remembered_long_enough_and_not_for_ever():
    story = Story("a join" + ", a ask, a push" * 50)
    assert len(story.state.assignments) == 11  # up to 3 + 8 versions behind


def test_work_that_is_given_back_goes_to_the_next():
    story = Story("a b join, a ask, a return, b ask")
    assert story.told["a"] == Answer("returned", "given back: out of memory", story.key["a"])
    assert story.assignment("b").steps == ((0, 10),)
    assert story.act("a", "push") == story.told["a"]  # too late to change its mind
    assert story.state.workers["a"].strikes == 0


def test_three_refusals_by_the_gate_suspend_a_worker_for_a_while():
    story = Story("a b join, b ask, a ask")
    for refusal in (1, 2, 3):
        answer = story.push("a", 4, "tensor layers.0.weight: holds values that are not finite")
        assert f"not finite (refusal {refusal} of 3)" in answer.reason
        story.tell("a ask")
    assert story.told["a"] == Answer("suspended", "worker a is suspended for 600 s more", time_left_s=600.0)
    assert story.act("b", "push").kind == "fresh"
    assert story.tell("599s, a ask").told["a"].kind == "suspended"
    assert story.tell("601s, a ask").told["a"].kind == "assigned"
    assert story.state.workers["a"].strikes == 0


def test_suspension_drops_what_the_worker_has_under_way():
    story = Story("a join, a ask, a begin", blocks=2)
    uploading = story.key["a"]
    for _ in range(3):
        story.tell("a ask")
        story.push("a", 0)
    assert "suspended for 600 s" in story.told["a"].reason
    answer = story.send(Push(1.0, "a", "a1", uploading, 4))
    assert answer == Answer("suspended", "worker a is suspended after 3 refusals", uploading)
    assert all(block.taken == () for block in story.state.blocks)


def test_one_bad_update_among_five_leaves_four():
    story = Story("a b c d e join, a b c d e ask, a b push")
    story.push("c", 4, "tensor w: holds values that are not finite")
    story.tell("d e push")
    assert story.block().last and story.block().last.counted == 4
    assert story.log == ["0s block 0: close, every live assignee has reported: 4 of 5 assigned"]


# --- When a round ends ---


def test_a_round_closes_early_when_every_live_assignee_has_reported():
    assert Story("a b join, a b ask, 7s, a b push").log == ["7s block 0: close, every live assignee has reported: 2 of 2 assigned"]


def test_the_reason_to_wait_names_three_workers_at_most():
    story = Story("d c b a e join, d c b a e ask, c push")
    assert decide(story.state, 0.0)[0].reason == "waits for d, b, a and 1 more: 1 of 5 assigned, 60.0 s left"


def test_what_is_due_stays_due_until_it_is_carried_out_and_no_longer():
    machine = Machine(Story("a b join, a b ask").state)
    assert machine.due(0.0) == [] and machine.wake_at() == 30.0  # a and b would be gone
    for name in "ab":
        assert machine.apply(Push(1.0, name, f"{name}1", f"{'ab'.index(name):012d}", 4)).kind == "fresh"
    (decision,) = machine.due(1.0)
    assert machine.due(2.0) == [decision] and machine.wake_at() == 60.0
    machine.apply(Revoke(3.0, "a"))
    assert [[share.worker for share in d.shares] for d in machine.due(3.0)] == [["b"]]
    assert machine.apply(machine.due(3.0)[0].event(3.0)).kind == "ok"
    assert machine.due(3.0) == [] and machine.wake_at() is None


def test_a_worker_that_is_heard_again_is_waited_for_again():
    machine = Machine(Story("a b join, a b ask, 10s, a push, b die, 39s").state)
    assert machine.due(39.0) == []
    assert [decision.action for decision in machine.due(41.0)] == ["close"]
    machine.apply(Beat(41.0, "b", "b1"))
    assert machine.due(41.0) == []


def test_workers_of_different_capacity_mix_in_one_run():
    story = Story(blocks=4, max_span=3, target_steps=30)
    for name, capacity in (("one", 1), ("two", 2), ("three", 3), ("all", 9)):
        story.capacity = capacity
        story.tell(f"{name} join")
    lengths: set[tuple[str, int]] = set()
    for _ in range(20):
        for name in ("one", "two", "three", "all"):
            if story.act(name, "ask").kind == "assigned":
                lengths.add((name, len(story.assignment(name).blocks)))
        story.tell(f"{story.now + 1}s, one two three all push")
    assert story.act("one", "ask").kind == "finished"
    assert {("one", 1), ("two", 2), ("three", 3), ("all", 3)} <= lengths
    assert all(count_of(block.taken) >= 30 for block in story.state.blocks)


def test_a_round_with_its_quorum_closes_at_the_deadline():
    story = Story("a b c join, a b c ask, 10s, a b push, 59.9s")
    assert story.versions == [0]
    assert decide(story.state, story.now)[0].reason == "waits for c: 2 of 3 assigned, 0.1 s left"
    assert story.tell("60s").log == ["60s block 0: close, the deadline of 60.0 s has passed with 2 of 3 assigned"]


def test_a_round_without_its_quorum_waits_for_it_until_twice_the_deadline():
    story = Story("a b c join, a b c ask, 10s, a push, 119s", quorum=3)
    assert story.versions == [0]
    reason = "twice the deadline of 60.0 s has passed with 1 of 3 assigned, a quorum of 3 is no longer waited for"
    assert story.tell("120s").log == [f"120s block 0: close, {reason}"]


def test_a_worker_that_lives_but_never_reports_does_not_hold_a_block_for_ever():
    story = Story("a join, a ask, 200s")
    assert story.log == ["120s block 0: abandon, empty: twice the deadline of 60.0 s has passed with 0 of 1 assigned; the block stays as it is"]
    assert story.tell("b join, b ask, 210s, b push").versions == [1]  # nobody waits for a
    assert story.tell("a push").told["a"].kind == "late"  # and still its work is not thrown away


def test_late_updates_alone_wait_for_fresh_ones_until_the_deadline():
    story = Story("a b join, a b ask, 10s, a push, 61s, b push, 100s", quorum=1)
    assert story.versions == [1]
    assert decide(story.state, story.now)[0].reason == "waits for fresh updates beside late ones: 0 of 0 assigned and 1 more, 21.0 s left"
    assert story.tell("130s").log[-1] == "121s block 0: close, the deadline of 60.0 s has passed with 0 of 0 assigned and 1 more"


def test_each_block_has_its_own_clock():
    story = Story("a join, a ask, 20s, b join, b ask, 130s", blocks=2)
    assert [line.split(":")[0] for line in story.log] == ["120s block 0"]
    assert story.tell("140s").log[-1].startswith("140s block 1")


def test_an_update_that_comes_while_the_round_is_being_closed_stays_for_the_next():
    story = Story("a b c join, a b c ask")
    for name in "ab":
        story.state, _ = apply(story.state, Push(1.0, name, f"{name}1", story.key[name], 4))
    (decision,) = decide(story.state, 60.0)
    story.state, _ = apply(story.state, Push(60.0, "c", "c1", story.key["c"], 4))
    story.state, _ = apply(story.state, decision.event(61.0))
    assert [(update.worker, story.block().version - update.base) for update in story.block().pending] == [("c", 1)]
    assert story.block().round is not None
    assert story.block().tokens == 2 * 4 * TOKENS


def test_an_update_that_comes_while_the_round_is_being_abandoned_saves_it():
    story = Story("a join, a ask")
    (decision,) = decide(story.state, 120.0)
    assert decision.action == "abandon"
    story.state, _ = apply(story.state, Push(120.0, "a", "a1", story.key["a"], 4))
    story.state, answer = apply(story.state, decision.event(120.0))
    assert answer == Answer("conflict", "block 0 version 0 has moved on: decide again")
    assert decide(story.state, 120.0)[0].action == "close"


def test_closing_twice_is_refused():
    story = Story("a join, a ask, a push")
    answer = story.send(Close(1.0, 0, 0, ("000000000000",), "again"))
    assert answer == Answer("conflict", "block 0 version 0 cannot be closed: it is closed already")
    assert story.versions == [1]


def test_the_shared_interface_moves_on_with_one_close_at_a_time():
    story = Story("a b c join, a b c ask", blocks=3)
    for name in "abc":
        story.state, _ = apply(story.state, Push(1.0, name, f"{name}1", story.key[name], 4))
    first, second, third = (decision.event(1.0, interface=0) for decision in decide(story.state, 1.0))
    story.state, answer = apply(story.state, first)
    assert answer.kind == "ok" and story.state.interface == 1
    state, answer = apply(story.state, second)
    assert state == story.state
    assert answer == Answer("conflict", "block 1 version 0 cannot be closed: the shared interface has moved on, decide again")
    assert isinstance(second, Close) and isinstance(third, Close)
    story.state, _ = apply(story.state, replace(second, interface=1))
    story.state, _ = apply(story.state, replace(third, interface=-1))  # travels without it
    assert story.versions == [1, 1, 1] and story.state.interface == 2


def test_work_names_the_versions_of_the_blocks_before_it_and_of_the_interface_as_it_was_given():
    story = Story("a b c join, a b ask, a push, c ask", blocks=3)
    assert story.assignment("c").blocks == (2,) and story.assignment("c").upstream == (1, 0) and story.assignment("c").downstream == ()
    story.state = replace(story.state, interface=5)
    story.tell("b push, a ask, c ask")
    assert story.versions == [1, 1, 0]
    assert story.assignment("c").upstream == (1, 0) and story.assignment("c").interface == 0  # told again as it was
    assert story.assignment("a").interface == 5
    assert story.assignment("a").blocks == (0,) and story.assignment("a").upstream == () and story.assignment("a").downstream == (1, 0)


def test_shares_do_not_depend_on_the_order_of_arrival():
    orders = ["a b c", "c a b", "b c a"]
    shares = []
    for order in orders:
        story = Story("a b c join, a b c ask")
        for name in order.split():
            story.state, _ = apply(story.state, Push(1.0, name, f"{name}1", story.key[name], 4))
        shares.append(decide(story.state, 1.0)[0].shares)
    assert shares[0] == shares[1] == shares[2]


def test_participation_is_of_assigned():
    story = Story("a b c d join, a b c d ask, 10s, a b c push, d return, 11s, a b ask, a push, b die, 100s")
    assert story.block().last and (story.block().last.assigned, story.block().last.fresh) == (2, 1)
    assert figures(story.state, story.now).blocks[0].participation == pytest.approx((3 + 1) / (4 + 2))


# --- The end of the run ---


def test_a_run_ends_when_every_block_has_taken_its_steps():
    story = Story("a b join, a ask, a push, b ask, b push, a ask, a push, a ask", target_steps=25)
    assert [a.steps for a in story.state.assignments.values()] == [((0, 10),), ((10, 20),), ((20, 25),)]  # the last is shorter
    assert story.told["a"] == Answer("finished", "all blocks have taken their 25 steps") and not story.told["a"].refused
    assert story.block().tokens == 25 * SAMPLES * TOKENS
    assert figures(story.state, 500.0).blocks[0].state == "done"
    assert figures(story.state, 500.0).blocks[0].reason == "done: none of its 25 steps is left to give"
    story.send(ChangeRules(500.0, replace(story.rules, target_steps=26)))
    assert story.act("a", "join").kind == "ok" and story.act("a", "ask").kind == "assigned"  # it goes on


def test_while_others_work_on_the_last_steps_a_worker_waits():
    story = Story("a b join, a b ask, b push, b ask", target_steps=20)
    assert story.told["b"].kind == "wait"
    assert story.tell("a push, b ask").told["b"].kind == "finished"


def test_steps_that_come_back_are_given_again_before_the_end():
    story = Story("a b c join, a b ask, b half, c ask", target_steps=20)
    assert story.assignment("c").steps == ((15, 20),)
    assert story.tell("c return, b ask").told["b"].kind == "wait"  # its part of this round is done
    story.tell("a push, b ask, b push, a ask")
    assert story.told["a"].kind == "finished" and story.block().taken == ((0, 20),)


def test_the_end_does_not_wait_for_a_dead_workers_lease():
    story = Story("a b join, a b ask, a die, 10s, b push, b ask", target_steps=20)
    assert story.told["b"].kind == "wait"
    story.tell("31s, b ask")
    assert story.told["b"].kind == "assigned" and story.assignment("b").steps == ((0, 10),)
    assert story.tell("b push, b ask").told["b"].kind == "finished"
    answer = story.tell("a restart").send(Push(40.0, "a", "a2", story.key["a"], 4))
    assert answer.kind == "returned" and answer.reason.startswith("the steps of the last leases are given to others")


def test_the_end_does_not_wait_for_ever_for_a_worker_that_lives_and_does_not_report():
    story = Story("a b join, a b ask, 10s, b push, 119s, b ask", target_steps=20, quorum=1)
    assert story.told["b"].kind == "wait" and story.versions == [1]
    assert story.tell("120s, b ask, b push, b ask").told["b"].kind == "finished"
    uploading = Story("a b join, a b ask, 10s, b push, a begin, 500s, b ask", target_steps=20, quorum=1)
    assert uploading.told["b"].kind == "wait"
    assert uploading.tell("a push, 501s, b ask").told["b"].kind == "finished"  # with nobody to come, it is not waited for a fresh one


def test_nobody_is_sent_to_a_done_block_unless_it_lies_beside_one_that_is_not():
    story = Story("n join, n ask, n push", blocks=2, target_steps=10, max_span=2)
    story.capacity = 2
    story.tell("w join, w ask")
    work = story.assignment("w")
    assert work.blocks == (0, 1) and work.steps == ((10, 20),)
    assert story.tell("w push, w ask, n ask").told["w"].kind == "finished" == story.told["n"].kind


def test_a_span_is_shortened_where_done_blocks_have_no_place_for_the_worker():
    story = Story(blocks=2, target_steps=10)
    for name, capacity, what in (("n", 1, "join, n ask"), ("w", 2, "join, w ask, w half")):
        story.capacity = capacity
        story.tell(f"{name} {what}")
    assert story.assignment("w").blocks == (0, 1)
    assert [count_of(block.taken) for block in story.state.blocks] == [10 + 5, 5]
    story.tell("w ask")
    assert story.assignment("w").blocks == (1,)  # block 0 is done and waits for n; w has done its part there


# --- Deadlines and changed rules ---


def test_the_deadline_follows_recent_arrivals_within_its_bounds():
    rules = Rules(deadline="recent", deadline_s=60, deadline_min_s=5, deadline_max_s=100, deadline_mads=4, min_work_s=1)
    assert deadline_of(rules, (10, 11)) == 60  # too few to go by
    assert deadline_of(rules, (9, 10, 11, 10, 40)) == 10 + 4 * 1
    assert deadline_of(rules, (10, 10, 10)) == 10 + 4 * 0.5  # alike: 5 % of slack
    assert deadline_of(rules, (0.1, 0.1, 0.1)) == 5
    assert deadline_of(rules, (500, 500, 500)) == 100
    assert deadline_of(replace(rules, deadline="fixed"), (10, 10, 10)) == 60


def test_rounds_close_soon_after_the_usual_arrivals_and_a_slow_worker_is_still_used():  # case 9
    """Eight workers take 10 s, give or take one; the ninth takes 40."""
    names = [f"w{i}" for i in range(8)]
    story = Story(f"{' '.join(names)} slow join, slow ask", deadline="recent", deadline_s=60, quorum=4)
    lengths: list[float] = []
    answers: list[str] = []
    began, slow_began = 0.0, 0.0
    story.tell(f"{' '.join(names)} ask")
    while len(lengths) < 6:
        story.wait_until(story.now + 0.25)
        for i, name in enumerate(names):
            if story.assignment(name).answer is None and story.now >= began + 9 + i * 2 / 7:
                story.act(name, "push")
        if story.now >= slow_began + 40:
            answers.append(story.act("slow", "push").kind)
            slow_began = story.now
            story.act("slow", "ask")
        if len(story.log) > len(lengths):
            lengths.append(story.now - began)
            began = story.now
            story.tell(f"{' '.join(names)} ask")
    assert max(lengths[:1]) <= 60
    assert max(lengths[1:]) < 20
    assert answers == ["fresh", "late"]


def test_work_that_was_cut_short_is_reckoned_as_the_whole_of_it():
    """Otherwise deadlines would shorten work, and short work deadlines."""
    assert Story("a join, a ask, 30s, a half").block().arrivals == (60.0,)


def test_a_changed_deadline_and_quorum_take_effect_at_the_next_round():  # case 10
    story = Story("a b c join, a b c ask, 1s")
    answer = story.send(ChangeRules(1.0, replace(story.rules, deadline_s=20, quorum=1)))
    assert answer.reason == "deadline_s: 60 -> 20, quorum: 2 -> 1; deadline and quorum from each block's next round"
    story.tell("2s, a push, 59s")
    assert story.log == []
    assert story.tell("b push, 60s").log == ["60s block 0: close, the deadline of 60.0 s has passed with 2 of 3 assigned"]
    assert story.tell("a b ask, 61s, a push, 85s").log[1] == "80s block 0: close, the deadline of 20.0 s has passed with 1 of 2 assigned"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deadline_s": 0.0}, r"round\.deadline_s: must be a positive"),
        ({"quorum": 0}, r"round\.quorum"),
        ({"heartbeat_limit_s": math.inf}, r"round\.heartbeat_limit_s"),
        ({"deadline_mads": math.nan}, r"round\.deadline_mads"),
        ({"max_age": -1}, r"round\.max_age"),
        ({"target_steps": -1}, r"round\.target_steps"),
        ({"min_span": 3, "max_span": 2}, r"round\.min_span: 3 is more than round\.max_span 2"),
        ({"deadline_min_s": 50, "deadline_max_s": 40}, r"round\.deadline_min_s"),
        ({"min_work_s": 50, "deadline_s": 40}, r"round\.min_work_s: 50 does not fit"),
    ],
)
def test_rules_that_contradict_each_other_are_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Rules(**change)


def test_time_never_runs_backwards():
    story = Story("a join, a ask, 50s")
    state, _ = apply(story.state, Beat(-1e9, "a", "a1"))
    assert state.now == 50 and state.workers["a"].seen_at == 50
    assert decide(state, 0.0) == decide(state, 50.0)


# --- Data ---


def samples(seed_steps: tuple[tuple[int, int], ...], windows: int) -> list[tuple[int, int]]:
    """(epoch, place in the epoch) of every sample that a lease reads; see training.data.Batches."""
    return [divmod(step * SAMPLES + row, windows) for first, stop in seed_steps for step in range(first, stop) for row in range(SAMPLES)]


def test_killed_and_restarted_workers_repeat_no_sample_beyond_their_open_lease():  # case 27
    story = Story("a b join, a b ask, 10s, a push, b die, 45s, a ask, b restart, b ask, 50s, a b push, a b ask, 55s, a b half", quorum=1)
    counted = [a for a in story.state.assignments.values() if a.answer and a.answer.accepted]
    seen = [sample for a in counted for sample in samples(without(a.steps, beyond(a.steps, 5 if a.key > "000000000003" else 10)), windows=100)]
    assert len(seen) == len(set(seen))
    # b died with steps 10 to 19: nobody else got them while its lease was open, and b itself trained on them when it came back
    assert [a.steps for a in story.state.assignments.values()][:3] == [((0, 10),), ((10, 20),), ((20, 30),)]


def test_steps_that_no_update_used_are_leased_again():
    story = Story("a join, a ask, a half, a ask")
    assert story.block().taken == ((0, 15),)
    assert story.assignment("a").steps == ((5, 15),)


def test_leases_are_those_of_the_batches():
    """Two leases read different windows of the text within an epoch."""
    from blocktrain.training.data import Batches

    batches = Batches(np.arange(901, dtype=np.uint16), SAMPLES, 10, seed=7)
    story = Story("a b join, a b ask")
    starts = {
        name: [int(row[0]) for first, stop in story.assignment(name).steps for s in range(first, stop) for row in batches.batch(s)] for name in "ab"
    }
    assert batches.windows_per_epoch == 89
    assert not set(starts["a"]) & set(starts["b"])
    assert len(set(starts["a"])) == len(starts["a"]) == 40


def test_ranges():
    taken = united([(5, 8), (0, 2), (2, 3), (4, 4), (6, 9)])
    assert taken == ((0, 3), (5, 9))
    assert first_free([taken], 4) == ((3, 5), (9, 11))
    assert first_free([()], 3) == first_free([], 3) == ((0, 3),)
    assert first_free([taken, ((3, 4), (10, 20))], 4) == ((4, 5), (9, 10), (20, 22))
    assert without(taken, ((1, 6), (8, 20))) == ((0, 1), (6, 8))
    assert beyond(taken, 4) == ((6, 9),)
    assert count_of(taken) == 7


# --- The machine is pure, and can be written down ---


def test_the_rules_import_nothing_but_plain_python_and_the_errors():
    modules = ("rounds", "machine", "placement", "closing", "index", "state", "rules", "leases", "plain")
    allowed = {"blocktrain.errors", *("blocktrain.swarm." + name for name in modules)}
    allowed |= set("__future__ collections.abc collections dataclasses typing types functools bisect heapq math statistics json".split())
    assert "time" not in allowed and allowed - {name for name in allowed if "." in name} <= sys.stdlib_module_names
    for path in Path(blocktrain.swarm.__path__[0]).glob("*.py"):
        if path.stem not in modules:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
            assert set(names) <= allowed, path.name


def test_a_state_comes_back_from_json_as_it_was():
    story = Story("a b c join, a b c ask, 10s, a begin, a push, b half, c return, 70s, a ask, a begin", blocks=3, capacity=2)
    story.send(Revoke(story.now, "b"))
    assert from_json(State, to_json(story.state)) == story.state
    assert from_json(State, to_json(Story().state)) == Story().state


def test_every_event_comes_back_from_json_as_it_was():
    sent: list[Event] = [
        Join(0.1 + 0.2, "wörker\n", "p", 3, True),
        Push(1, "a", "p", "k", math.inf, "fault"),
        Push(1, "a", "p", "k", 10**60),
        ChangeRules(1.0, Rules(quorum=5)),
        Close(1.0, 0, 3, ("a", "b"), "reason"),
        Close(1.0, 0, 3, ("a", "b"), "reason", interface=4),
    ]
    assert [from_tagged_json(EVENTS, to_tagged_json(event)) for event in sent] == sent
    back = from_tagged_json(EVENTS, to_tagged_json(Push(1.0, "a", "p", "k", math.nan)))
    assert isinstance(back, Push) and math.isnan(back.num_samples)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 5000,
        '{"Beat":{}}',
        '{"Boom":{}}',
        '{"Beat":{"now":"x","worker":"a","process":"p"}}',
        '{"Beat":{"now":true,"worker":"a","process":"p"}}',
    ],
)
def test_a_damaged_journal_line_is_refused(text: str):
    with pytest.raises(ProtocolError):
        from_tagged_json(EVENTS, text)


def test_a_damaged_state_is_refused_with_the_place():
    text = to_json(Story("a join").state)
    with pytest.raises(ProtocolError, match=r"State\.workers\.a\.strikes: is '0', expected int"):
        from_json(State, text.replace('"strikes":0', '"strikes":"0"'))
    with pytest.raises(ProtocolError, match=r"State\.rules\.deadline: is 'never'"):
        from_json(State, text.replace('"fixed"', '"never"'))
    with pytest.raises(ProtocolError, match=r"State: fields differ from those of State \(\['next', 'next_serial'\]"):
        from_json(State, text.replace('"next_serial"', '"next"'))


def test_a_round_takes_no_more_workers_than_replicas_says():
    story = Story("a b c join, a b c ask", replicas=2)
    assert [story.told[name].kind for name in "abc"] == ["assigned", "assigned", "wait"]
    story.tell("5s, a push, b push, c ask")
    assert story.told["c"].kind == "assigned"
