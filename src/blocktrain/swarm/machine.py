"""The rules at work: a state that events change in place, each at a cost that does not grow with the number of workers.

The same events make the same state, answers and decisions, also where a machine is made anew from a stored state between any two of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import fields, replace

from blocktrain.swarm.closing import decide_block, holds_until, starved
from blocktrain.swarm.index import Index, age_of, live
from blocktrain.swarm.leases import beyond, first_free, united, without
from blocktrain.swarm.placement import place, retry_s, unfit
from blocktrain.swarm.rules import Rules, deadline_of
from blocktrain.swarm.state import (
    Abandon,
    Answer,
    Ask,
    Assignment,
    Base,
    Beat,
    Begin,
    Block,
    BlockFigures,
    ChangeRules,
    Close,
    Decision,
    Event,
    Figures,
    GiveBack,
    Join,
    Leave,
    MemberEvent,
    Outcome,
    Pending,
    Push,
    Revoke,
    Round,
    State,
    Upload,
    Worker,
)

ARRIVALS = 32  # recent arrivals of a block that set its deadline


class Machine:
    """A run. It takes the state over: nobody else may change it, and who wants to keep it copies it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._index = Index(state)
        self._ready: dict[int, Decision] = {}  # by block: what is due
        self._holds_until = [math.inf] * len(state.blocks)
        self._asked_at = -math.inf

    def apply(self, event: Event) -> Answer:
        """Changes what the event changes, and says what its sender is told. An event from the past counts as of now."""
        assert math.isfinite(event.now)
        self.state.now = max(self.state.now, event.now)
        match event:
            case Join():
                return self._join(event)
            case Revoke():
                return self._revoke(event.worker)
            case ChangeRules():
                return self._change_rules(event.rules)
            case Close():
                return self._close(event)
            case Abandon():
                return self._abandon(event)
        if refusal := self._membership(event):
            return refusal
        worker = replace(self.state.workers[event.worker], seen_at=self.state.now)
        self._heard(worker)
        match event:
            case Beat():
                return Answer("ok", "heard")
            case Ask():
                return self._ask(event, worker)
            case Leave():
                return self._leave(worker)
        return self._on_assignment(event)

    # --- What is due ---

    def decide(self, now: float) -> tuple[Decision, ...]:
        """What is to be done with each block's round."""
        return tuple(decide_block(self._index, block, max(now, self.state.now)) for block in self.state.blocks)

    def due(self, now: float) -> list[Decision]:
        """The decisions that are not to wait. Blocks that nothing has happened to are not looked at again before time may have changed theirs."""
        now = max(now, self.state.now)
        touched, self._index.touched = self._index.touched, set()
        for block in self.state.blocks:
            if block.index in touched or now >= self._holds_until[block.index] or now < self._asked_at:
                decision = decide_block(self._index, block, now)
                self._ready.pop(block.index, None)
                if decision.action != "wait":
                    self._ready[block.index] = decision
                self._holds_until[block.index] = holds_until(self._index, block, now)
        self._asked_at = now
        return [self._ready[index] for index in sorted(self._ready)]

    def wake_at(self) -> float | None:
        """When `due` may have something new with no event in between, or somewhat earlier; None: never."""
        if self._index.touched:
            return self.state.now
        earliest = min(self._holds_until)
        return earliest if math.isfinite(earliest) else None

    # --- Members ---

    def _join(self, event: Join) -> Answer:
        before = self.state.workers.get(event.worker)
        if before and before.revoked:
            return Answer("revoked", f"worker {event.worker} may not take part in this run any more")
        if problem := unfit(self.state, event.capacity):
            return Answer("unfit", problem)
        if before and before.process != event.process and live(self.state, before, self.state.now) and not event.takeover:
            ago = self.state.now - before.seen_at
            return Answer("conflict", f"worker {event.worker} is process {before.process}, heard {ago:.0f} s ago: stop it, or join with takeover")
        worker = before or Worker(event.worker, event.process, event.capacity, self.state.now)
        if worker.process != event.process:
            self._hand_over(worker)
            worker = replace(worker, last_ask="")
        self._heard(replace(worker, process=event.process, capacity=event.capacity, seen_at=self.state.now, present=True))
        return Answer("ok", f"worker {event.worker} is a member")

    def _heard(self, worker: Worker) -> None:
        is_new = worker.name not in self.state.workers
        self.state.workers[worker.name] = worker
        self.state.seen_at = self.state.now
        if is_new:
            self._index.enrol(worker)
        self._index.heard(worker)

    def _open(self, name: str) -> list[Assignment]:
        """A worker's open assignments, in the order in which they were given."""
        return [self.state.assignments[key] for key in self._index.open.get(name, ())]

    def _hand_over(self, worker: Worker) -> None:
        """What a worker's new process finds: the newest open assignment, as if no upload had begun; uploads before it are gone."""
        *older, newest = [None, *self._open(worker.name)]
        for assignment in filter(None, older):
            self._settle(assignment, Answer("returned", "the process that was uploading it is gone", assignment.key))
        if newest:
            self.state.assignments[newest.key] = newest = replace(newest, upload=None)
            self._index.restart(newest)

    def _membership(self, event: MemberEvent) -> Answer | None:
        """Why the sender may not speak, or None."""
        worker = self.state.workers.get(event.worker)
        if worker and worker.revoked:
            return Answer("revoked", f"worker {event.worker} may not take part in this run any more")
        if worker is None or not worker.present:
            return Answer("unknown", f"worker {event.worker} is not a member: join first")
        if worker.process != event.process:
            return Answer("conflict", f"worker {event.worker} is process {worker.process} now: this one must stop, or join with takeover")
        return None

    def _leave(self, worker: Worker) -> Answer:
        self._drop_open(worker.name, Answer("returned", f"worker {worker.name} left"))
        self.state.workers[worker.name] = replace(worker, present=False)
        return Answer("ok", f"worker {worker.name} left")

    def _revoke(self, name: str) -> Answer:
        """Drop what the worker is doing, and what it has done that is not yet counted."""
        reason = f"worker {name} may not take part in this run any more"
        worker = self.state.workers.get(name) or Worker(name, "", 0, self.state.now)
        self._drop_open(name, Answer("revoked", reason))
        for block in self.state.blocks:
            if freed := united(r for update in block.pending if update.worker == name for r in update.steps):
                kept = tuple(update for update in block.pending if update.worker != name)
                self._put_block(replace(block, pending=kept, taken=self._index.free(block, freed)))
                self._index.recount(self.state.blocks[block.index])
        self.state.workers[name] = replace(worker, revoked=True)
        return Answer("ok", reason)

    def _drop_open(self, name: str, answer: Answer) -> None:
        for assignment in self._open(name):
            self._settle(assignment, replace(answer, key=assignment.key))

    def _forget(self, block: Block) -> None:
        """Settle assignments that have become too old, and let go of long settled ones and of workers not heard for very long.

        Done whenever a block gets a new version: nothing else makes work old, but for uploads that are over their time.
        """
        for key in self._index.aged(block):
            a = self.state.assignments[key]
            if a.answer is None and not self._admitted(a):
                self._settle_too_old(a)
            elif a.answer and self._index.is_old(a):
                del self.state.assignments[key]
                self._index.forget(a)
        for name in self._index.long_silent(self.state.now - self.state.rules.forget_s):
            del self.state.workers[name]

    # --- Work ---

    def _ask(self, event: Ask, worker: Worker) -> Answer:
        if self._finished():
            return self._finish()
        if self.state.now < worker.suspended_until:
            left = worker.suspended_until - self.state.now
            return Answer("suspended", f"worker {worker.name} is suspended for {left:.0f} s more", time_left_s=left)
        if problem := unfit(self.state, worker.capacity):
            return Answer("unfit", problem)
        repeated = self.state.assignments.get(worker.last_key) if event.ask == worker.last_ask else None
        if repeated:
            return self._assigned(repeated, "asked before")
        for assignment in self._open(worker.name):
            if assignment.upload:
                continue
            if self._still_good(assignment):
                self.state.workers[worker.name] = replace(worker, last_ask=event.ask, last_key=assignment.key)
                return self._assigned(assignment, "still open")
            why = "asked for other work after its blocks had moved on or its time had passed"
            self._settle(assignment, Answer("returned", why, assignment.key))
        return self._give(event, worker)

    def _give(self, event: Ask, worker: Worker) -> Answer:
        """A new assignment, if there is a place for the worker."""
        state = self.state
        placement = place(self._index, worker, state.now)
        if placement is None and self._take_back():
            placement = place(self._index, worker, state.now)
        if placement is None and self._finished():
            return self._finish()
        if placement is None:
            reason = f"worker {worker.name} has done its part, or the rounds that are open have no time left for it"
            return Answer("wait", reason, time_left_s=retry_s(self._index, state.now))
        key = self._key()
        steps = first_free([block.taken for block in placement.blocks], self._lease(placement.blocks))
        bases = tuple(Base(b.index, b.version, b.tokens, waits) for b, waits in zip(placement.blocks, placement.awaited, strict=True))
        upstream, downstream = (tuple(b.version for b in some) for some in (state.blocks[: bases[0].block], state.blocks[bases[-1].block + 1 :]))
        ends_at = state.now + placement.time_left_s
        assignment = Assignment(key, worker.name, bases, state.seed, steps, state.now, ends_at, state.interface, upstream, downstream)
        for block in placement.blocks:
            self._put_block(replace(self._opened(block, key), taken=self._index.take(block, steps)))
        state.workers[worker.name] = replace(worker, last_ask=event.ask, last_key=key, last_blocks=assignment.blocks)
        state.next_serial += 1
        state.assignments[key] = assignment
        self._index.add(assignment)
        return self._assigned(assignment, "its need is greatest")

    def _lease(self, blocks: Collection[Block]) -> int:
        """How many steps to lease: no more than the block that lacks most still needs."""
        most = self.state.rules.inner_steps
        return max(1, min(most, max(self._index.missing(block) for block in blocks))) if self.state.rules.target_steps else most

    def _take_back(self) -> bool:
        """Once a block has no more steps to give, leases of workers that are gone, or far beyond their time, are there for others."""
        if not any(self._index.done(block) for block in self.state.blocks):
            return False
        lapsed = self._index.lapsed()
        for key in lapsed:
            why = "the steps of the last leases are given to others: its worker is gone, or its time has passed twice over"
            self._settle(self.state.assignments[key], Answer("returned", why, key))
        return bool(lapsed)

    def _finished(self) -> bool:
        """Whether the steps of every block are counted, and nobody is at work."""
        return not self._index.num_open and all(self._index.done(block) and not block.pending for block in self.state.blocks)

    @property
    def finished(self) -> bool:
        """Whether whoever asks is told that the run has ended."""
        return self._finished()

    def _finish(self) -> Answer:
        return Answer("finished", f"all blocks have taken their {self.state.rules.target_steps} steps")

    def _key(self) -> str:
        """The key of the next assignment; as text, keys sort as they were given."""
        return f"{self.state.next_serial:012d}"

    def _assigned(self, assignment: Assignment, why: str) -> Answer:
        left = max(0.0, assignment.ends_at - self.state.now)
        names = ", ".join(f"{b.block} at version {b.version}" for b in assignment.bases)
        return Answer("assigned", f"block {names}, {assignment.num_steps} steps, {left:.1f} s left: {why}", assignment.key, left)

    def _still_good(self, assignment: Assignment) -> bool:
        """Whether a worker that lost its work may begin it again."""
        current = all(self.state.blocks[b.block].version == b.version for b in assignment.bases if b.awaited)
        return current and assignment.ends_at - self.state.now >= self.state.rules.min_work_s

    def _opened(self, block: Block, first: str) -> Block:
        rules = self.state.rules
        return block if block.round else replace(block, round=Round(self.state.now, first, rules.quorum, deadline_of(rules, block.arrivals)))

    # --- Updates ---

    def _on_assignment(self, event: Begin | Push | GiveBack) -> Answer:
        """A member's word on one assignment; the first one that settles it stands."""
        assignment = self.state.assignments.get(event.key)
        if assignment is None:
            return Answer("unknown", f"assignment {event.key} is not known, or was settled long ago", event.key)
        if assignment.worker != event.worker:
            return Answer("forbidden", f"assignment {event.key} is not worker {event.worker}'s", event.key)
        if assignment.answer is not None:
            return assignment.answer
        if not self._admitted(assignment):
            return self._settle_too_old(assignment)
        match event:
            case Begin():
                return self._begin(assignment)
            case Push():
                return self._push(event, assignment)
            case GiveBack():
                return self._settle(assignment, Answer("returned", f"given back: {event.why}", assignment.key))

    def _begin(self, assignment: Assignment) -> Answer:
        if assignment.upload:
            return Answer("ok", "the upload may go on", assignment.key)
        assignment = replace(assignment, upload=Upload(self.state.now, self._admitted(assignment)))
        self.state.assignments[assignment.key] = assignment
        self._index.begin(assignment)
        return Answer("ok", "the upload may begin", assignment.key)

    def _admitted(self, assignment: Assignment) -> tuple[int, ...]:
        """Blocks that take this update: those that have not moved on too far, now or when its upload began."""
        upload, rules = assignment.upload, self.state.rules
        then = upload.blocks if upload and self.state.now < upload.began_at + rules.upload_limit_s else ()
        return tuple(b.block for b in assignment.bases if b.block in then or age_of(self.state, b) <= rules.max_age)

    def _settle_too_old(self, assignment: Assignment) -> Answer:
        age = min(age_of(self.state, base) for base in assignment.bases)
        reason = f"too old: its block has moved on by {age} versions, at most {self.state.rules.max_age} count"
        return self._settle(assignment, Answer("too_old", reason, assignment.key))

    def _push(self, event: Push, assignment: Assignment) -> Answer:
        state = self.state
        fault = _count_fault(event.num_samples, assignment.num_steps * state.samples_per_step) or event.fault
        if fault:
            return self._refuse(assignment, fault)
        num_samples = int(event.num_samples)
        num_steps = -(-num_samples // state.samples_per_step)
        steps = without(assignment.steps, beyond(assignment.steps, num_steps))
        whole_lease_s = (state.now - assignment.issued_at) * assignment.num_steps / num_steps
        bases = [base for base in assignment.bases if base.block in self._admitted(assignment)]
        for base in bases:
            block = self._opened(state.blocks[base.block], self._key())
            update = Pending(assignment.key, assignment.worker, base.version, num_samples * state.tokens_per_sample, steps)
            pending = _with(block.pending, update)
            self._put_block(replace(block, pending=pending, arrivals=(*block.arrivals, whole_lease_s)[-ARRIVALS:]))
            self._index.accept(state.blocks[base.block], assignment, base)
        ages = tuple((base.block, age_of(state, base)) for base in bases)
        return self._settle(assignment, _accepted(assignment, ages), num_steps, [base.block for base in bases])

    def _refuse(self, assignment: Assignment, fault: str) -> Answer:
        """A refusal by the gate: the worker gets a strike, and with the last one is suspended."""
        worker, rules = self.state.workers[assignment.worker], self.state.rules
        strikes = worker.strikes + 1
        sentence = f"{fault} (refusal {strikes} of {rules.strikes})"
        if strikes < rules.strikes:
            self.state.workers[worker.name] = replace(worker, strikes=strikes)
            return self._settle(assignment, Answer("invalid", sentence, assignment.key))
        sentence += f", suspended for {rules.suspension_s:g} s"
        answer = self._settle(assignment, Answer("invalid", sentence, assignment.key))
        self._drop_open(worker.name, Answer("suspended", f"worker {worker.name} is suspended after {rules.strikes} refusals"))
        self.state.workers[worker.name] = replace(worker, strikes=0, suspended_until=self.state.now + rules.suspension_s)
        return answer

    def _settle(self, assignment: Assignment, answer: Answer, num_steps: int = 0, counted: Collection[int] = ()) -> Answer:
        """Record an assignment's answer for good, and free the steps that no update of a `counted` block has used."""
        for number in assignment.blocks:
            if unused := beyond(assignment.steps, num_steps if number in counted else 0):
                block = self.state.blocks[number]
                self._put_block(replace(block, taken=self._index.free(block, unused)))
        assignment = replace(assignment, answer=answer)
        self.state.assignments[assignment.key] = assignment
        self._index.settle(assignment)
        return answer

    # --- Rounds ---

    def _close(self, event: Close) -> Answer:
        block, keys = self.state.blocks[event.block], set(event.keys)
        here = {update.key for update in block.pending}
        gone = ""
        if event.version != block.version:
            gone = "it is closed already"
        elif not keys or not here.issuperset(keys):
            gone = "an update in it was dropped meanwhile, decide again"
        elif event.interface >= 0 and event.interface != self.state.interface:
            gone = "the shared interface has moved on, decide again"
        if gone:
            return Answer("conflict", f"block {event.block} version {event.version} cannot be closed: {gone}")
        counted = [update for update in block.pending if update.key in keys]
        left = tuple(update for update in block.pending if update.key not in keys)
        block = self._ended(block, event.reason, counted)
        block = replace(block, version=block.version + 1, tokens=block.tokens + sum(u.tokens for u in counted), pending=left)
        block = self._opened(block, self._key()) if left else block
        self.state.interface += event.interface >= 0
        self._put_block(block)
        self._index.end_round(block, closed=True)
        self._forget(block)
        return Answer("ok", f"block {block.index} is at version {block.version}: {event.reason}")

    def _abandon(self, event: Abandon) -> Answer:
        block = self.state.blocks[event.block]
        if event.version != block.version or block.round is None or block.pending:
            return Answer("conflict", f"block {event.block} version {event.version} has moved on: decide again")
        self._put_block(self._ended(block, event.reason, []))
        self._index.end_round(block, closed=False)
        return Answer("ok", f"block {block.index}: {event.reason}")

    def _ended(self, block: Block, reason: str, counted: list[Pending]) -> Block:
        """The block without its round, which is remembered as the last one and in the participation figures."""
        assigned = self._index.tallies[block.index].assigned
        fresh = sum(self._index.awaits(block, self.state.assignments.get(update.key)) for update in counted)
        outcome = Outcome(block.version, bool(counted), reason, assigned, fresh, len(counted), self.state.now)
        totals = {"assigned_total": block.assigned_total + assigned, "fresh_total": block.fresh_total + fresh}
        return replace(block, round=None, idle_since=self.state.now, last=outcome, **totals)

    def _change_rules(self, rules: Rules) -> Answer:
        names = [field.name for field in fields(Rules) if getattr(rules, field.name) != getattr(self.state.rules, field.name)]
        changes = ", ".join(f"{name}: {getattr(self.state.rules, name)} -> {getattr(rules, name)}" for name in names)
        self.state.rules = rules
        self._index = Index(self.state)
        return Answer("ok", f"{changes or 'nothing changed'}; deadline and quorum from each block's next round")

    def _put_block(self, block: Block) -> None:
        blocks = self.state.blocks
        self.state.blocks = (*blocks[: block.index], block, *blocks[block.index + 1 :])

    # --- Figures ---

    def figures(self, now: float) -> Figures:
        """The run as its status page shows it."""
        state, now = self.state, max(now, self.state.now)
        members = sorted((w for w in state.workers.values() if w.present and not w.revoked), key=lambda w: w.name)
        alive = tuple(w.name for w in members if live(state, w, now))
        gone = tuple(w.name for w in members if not live(state, w, now))
        blocks = tuple(self._block_figures(block, decision, now) for block, decision in zip(state.blocks, self.decide(now), strict=True))
        return Figures(alive, gone, 0.0 if alive else now - state.seen_at, blocks)

    def _block_figures(self, block: Block, decision: Decision, now: float) -> BlockFigures:
        at_rest = "done" if self._index.done(block) else "starved" if starved(self._index, block, now) else "idle"
        return BlockFigures(
            block.index,
            block.version,
            block.tokens,
            "training" if block.round else at_rest,
            decision.assigned,
            decision.reported,
            len(block.pending),
            block.fresh_total / block.assigned_total if block.assigned_total else None,
            block.round.opened_at + block.round.deadline_s - now if block.round else None,
            decision.reason,
        )


def _with(pending: tuple[Pending, ...], update: Pending) -> tuple[Pending, ...]:
    """Pending updates with one more, in the order of keys."""
    place = bisect_left(pending, update.key, key=lambda other: other.key)
    return (*pending[:place], update, *pending[place:])


def _accepted(assignment: Assignment, ages: tuple[tuple[int, int], ...]) -> Answer:
    late = [f"block {index} with staleness {age}" for index, age in ages if age]
    refused = sorted(set(assignment.blocks) - {index for index, _ in ages})
    parts = ["accepted" if not late else f"accepted, counted next round: {', '.join(late)}"]
    parts += [f"too old for block {', '.join(map(str, refused))}"] if refused else []
    return Answer("late" if late else "fresh", "; ".join(parts), assignment.key, ages=ages)


def _count_fault(num_samples: object, most: int) -> str:
    """What is wrong with a number of samples that should be whole and at most what was leased; empty if nothing."""
    if isinstance(num_samples, int | float) and not isinstance(num_samples, bool) and 1 <= num_samples <= most and num_samples % 1 == 0:
        return ""
    short = "of more than 20 digits" if isinstance(num_samples, int) and abs(num_samples) >= 10**20 else repr(num_samples)[:40]
    return f"num_samples {short} is not a whole number from 1 to {most}"
