"""The rules of rounds as a pure machine: who takes part, what a worker is given, which updates count, when a round ends.

Two doors. `apply(state, event)` gives the next state and an Answer; `decide(state, now)` (closing.py) says for each block whether its round waits,
closes (with which updates at which weights) or is abandoned. No tensors, clock, network or randomness: time and seed come in as arguments, so a
journal of events replays to the same state, and a service and a simulator that tell the same story get the same decisions. docs/rounds.md says the
rules in prose.

Each block has its own round and its own clock. A round opens with its first assignment, or with an update that came late for the one before; it fixes
deadline and quorum then. Closing is in two steps: the host writes the next version from the updates of a `close` decision, then
reports Close; whatever was accepted in between stays for the next round, one version older.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields, replace

from blocktrain.swarm.closing import awaited, decide, done, live, missing, starved
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
REMEMBERED = 8  # versions for which a settled assignment's answer is kept
Result = tuple[State, Answer]


def new_state(num_blocks: int, seed: int, rules: Rules, *, samples_per_step: int, tokens_per_sample: int, now: float) -> State:
    """A run before its first event. Batch size and sequence length are fixed: they say which samples a step reads."""
    assert min(num_blocks, samples_per_step, tokens_per_sample) > 0
    blocks = tuple(Block(index, idle_since=now) for index in range(num_blocks))
    return State(seed, samples_per_step, tokens_per_sample, rules, blocks, now=now, seen_at=now)


def apply(state: State, event: Event) -> Result:
    """What an event changes, and what its sender is told. An event from the past counts as of now."""
    assert math.isfinite(event.now)
    state = replace(state, now=max(state.now, event.now))
    match event:
        case Join():
            return _join(state, event)
        case Revoke():
            return _revoke(state, event.worker)
        case ChangeRules():
            return _change_rules(state, event.rules)
        case Close():
            return _close(state, event)
        case Abandon():
            return _abandon(state, event)
    if refusal := _membership(state, event):
        return state, refusal
    worker = replace(state.workers[event.worker], seen_at=state.now)
    state = replace(_put_worker(state, worker), seen_at=state.now)
    match event:
        case Beat():
            return state, Answer("ok", "heard")
        case Ask():
            return _ask(state, event, worker)
        case Leave():
            return _leave(state, worker)
    return _on_assignment(state, event)


def _on_assignment(state: State, event: Begin | Push | GiveBack) -> Result:
    """A member's word on one assignment; the first one that settles it stands."""
    assignment = state.assignments.get(event.key)
    if assignment is None:
        return state, Answer("unknown", f"assignment {event.key} is not known, or was settled long ago", event.key)
    if assignment.worker != event.worker:
        return state, Answer("forbidden", f"assignment {event.key} is not worker {event.worker}'s", event.key)
    if assignment.answer is not None:
        return state, assignment.answer
    if not _admitted(state, assignment):
        return _settle_too_old(state, assignment)
    match event:
        case Begin():
            return _begin(state, assignment)
        case Push():
            return _push(state, event, assignment)
        case GiveBack():
            return _settle(state, assignment, Answer("returned", f"given back: {event.why}", assignment.key))


# --- Members ---


def _join(state: State, event: Join) -> Result:
    before = state.workers.get(event.worker)
    if before and before.revoked:
        return state, Answer("revoked", f"worker {event.worker} may not take part in this run any more")
    if problem := unfit(state, event.capacity):
        return state, Answer("unfit", problem)
    if before and before.process != event.process and live(state, before, state.now) and not event.takeover:
        ago = state.now - before.seen_at
        return state, Answer("conflict", f"worker {event.worker} is process {before.process}, heard {ago:.0f} s ago: stop it, or join with takeover")
    worker = before or Worker(event.worker, event.process, event.capacity, state.now)
    if worker.process != event.process:
        state, worker = _hand_over(state, worker), replace(worker, last_ask="")
    worker = replace(worker, process=event.process, capacity=event.capacity, seen_at=state.now, present=True)
    return replace(_put_worker(state, worker), seen_at=state.now), Answer("ok", f"worker {event.worker} is a member")


def _hand_over(state: State, worker: Worker) -> State:
    """What a worker's new process finds: the newest open assignment, as if no upload had begun; uploads before it are gone."""
    *older, newest = [None, *(a for a in state.assignments.values() if a.worker == worker.name and a.answer is None)]
    for assignment in filter(None, older):
        state, _ = _settle(state, assignment, Answer("returned", "the process that was uploading it is gone", assignment.key))
    return _put_assignment(state, replace(newest, upload=None)) if newest else state


def _membership(state: State, event: MemberEvent) -> Answer | None:
    """Why the sender may not speak, or None."""
    worker = state.workers.get(event.worker)
    if worker and worker.revoked:
        return Answer("revoked", f"worker {event.worker} may not take part in this run any more")
    if worker is None or not worker.present:
        return Answer("unknown", f"worker {event.worker} is not a member: join first")
    if worker.process != event.process:
        return Answer("conflict", f"worker {event.worker} is process {worker.process} now: this one must stop, or join with takeover")
    return None


def _leave(state: State, worker: Worker) -> Result:
    state = _drop_open(state, worker.name, Answer("returned", f"worker {worker.name} left"))
    return _put_worker(state, replace(worker, present=False)), Answer("ok", f"worker {worker.name} left")


def _revoke(state: State, name: str) -> Result:
    """Drop what the worker is doing, and what it has done that is not yet counted."""
    reason = f"worker {name} may not take part in this run any more"
    worker = state.workers.get(name) or Worker(name, "", 0, state.now)
    state = _drop_open(state, name, Answer("revoked", reason))
    for block in state.blocks:
        kept = tuple(update for update in block.pending if update.worker != name)
        freed = united(r for update in block.pending if update.worker == name for r in update.steps)
        state = _put_block(state, replace(block, pending=kept, taken=without(block.taken, freed)))
    return _put_worker(state, replace(worker, revoked=True)), Answer("ok", reason)


def _drop_open(state: State, name: str, answer: Answer) -> State:
    for assignment in [a for a in state.assignments.values() if a.worker == name and a.answer is None]:
        state, _ = _settle(state, assignment, replace(answer, key=assignment.key))
    return state


def _forget(state: State) -> State:
    """Settle assignments that have become too old, and let go of long settled ones and of workers not heard for very long.

    Done whenever a block gets a new version: nothing else makes work old, but for uploads that are over their time.
    """
    for a in list(state.assignments.values()):
        if a.answer is None and not _admitted(state, a):
            state, _ = _settle_too_old(state, a)
        elif a.answer and min(_age(state, base) for base in a.bases) > state.rules.max_age + REMEMBERED:
            state = replace(state, assignments={key: kept for key, kept in state.assignments.items() if key != a.key})
    held = {a.worker for a in state.assignments.values()}
    oldest = state.now - state.rules.forget_s
    forgotten = {w.name for w in state.workers.values() if w.seen_at < oldest and not w.revoked and w.name not in held}
    return replace(state, workers={name: w for name, w in state.workers.items() if name not in forgotten}) if forgotten else state


# --- Work ---


def _ask(state: State, event: Ask, worker: Worker) -> Result:
    if _finished(state):
        return state, _finish(state)
    if state.now < worker.suspended_until:
        left = worker.suspended_until - state.now
        return state, Answer("suspended", f"worker {worker.name} is suspended for {left:.0f} s more", time_left_s=left)
    if problem := unfit(state, worker.capacity):
        return state, Answer("unfit", problem)
    repeated = state.assignments.get(worker.last_key) if event.ask == worker.last_ask else None
    if repeated:
        return state, _assigned(state, repeated, "asked before")
    training = [a for a in state.assignments.values() if a.worker == worker.name and a.answer is None and a.upload is None]
    for assignment in training:
        if _still_good(state, assignment):
            return _put_worker(state, replace(worker, last_ask=event.ask, last_key=assignment.key)), _assigned(state, assignment, "still open")
        answer = Answer("returned", "asked for other work after its blocks had moved on or its time had passed", assignment.key)
        state, _ = _settle(state, assignment, answer)
    return _give(state, event, worker)


def _give(state: State, event: Ask, worker: Worker) -> Result:
    """A new assignment, if there is a place for the worker."""
    placement = place(state, worker, state.now)
    if placement is None and (lapsed := _lapsed(state)):
        for assignment in lapsed:
            why = "the steps of the last leases are given to others: its worker is gone, or its time has passed twice over"
            state, _ = _settle(state, assignment, Answer("returned", why, assignment.key))
        placement = place(state, worker, state.now)
    if placement is None:
        if _finished(state):
            return state, _finish(state)
        reason = f"worker {worker.name} has done its part, or the rounds that are open have no time left for it"
        return state, Answer("wait", reason, time_left_s=retry_s(state, state.now))
    key = _key(state)
    steps = first_free(united(r for block in placement.blocks for r in block.taken), _lease(state, placement.blocks))
    bases = tuple(Base(b.index, b.version, b.tokens, waits) for b, waits in zip(placement.blocks, placement.awaited, strict=True))
    upstream = tuple(block.version for block in state.blocks[: bases[0].block])
    ends_at = state.now + placement.time_left_s
    assignment = Assignment(key, worker.name, bases, state.seed, steps, state.now, ends_at, state.interface, upstream)
    for block in placement.blocks:
        state = _put_block(state, replace(_opened(state, block, key), taken=united([*block.taken, *steps])))
    state = _put_worker(state, replace(worker, last_ask=event.ask, last_key=key, last_blocks=assignment.blocks))
    state = _put_assignment(replace(state, next_serial=state.next_serial + 1), assignment)
    return state, _assigned(state, assignment, "its need is greatest")


def _lease(state: State, blocks: Collection[Block]) -> int:
    """How many steps to lease: no more than the block that lacks most still needs."""
    most = state.rules.inner_steps
    return max(1, min(most, max(missing(state, block) for block in blocks))) if state.rules.target_steps else most


def _lapsed(state: State) -> list[Assignment]:
    """Open leases that nobody may fulfil, once a block has no more steps to give: of gone workers, and of those far beyond their time."""
    if not any(done(state, block) for block in state.blocks):
        return []
    return [a for a in state.assignments.values() if a.answer is None and state.now >= _lapses_at(state, a)]


def _lapses_at(state: State, a: Assignment) -> float:
    worker = state.workers[a.worker]
    uploaded_by = a.upload.began_at + state.rules.upload_limit_s if a.upload else 0.0
    return min(worker.seen_at + state.rules.heartbeat_limit_s, max(2 * a.ends_at - a.issued_at, uploaded_by))


def _finished(state: State) -> bool:
    """Whether the steps of every block are counted, and nobody is at work."""
    settled = all(done(state, block) and not block.pending for block in state.blocks)
    return settled and all(a.answer for a in state.assignments.values())


def _finish(state: State) -> Answer:
    return Answer("finished", f"all blocks have taken their {state.rules.target_steps} steps")


def _key(state: State) -> str:
    """The key of the next assignment; as text, keys sort as they were given."""
    return f"{state.next_serial:012d}"


def _assigned(state: State, assignment: Assignment, why: str) -> Answer:
    left = max(0.0, assignment.ends_at - state.now)
    names = ", ".join(f"{b.block} at version {b.version}" for b in assignment.bases)
    return Answer("assigned", f"block {names}, {assignment.num_steps} steps, {left:.1f} s left: {why}", assignment.key, left)


def _still_good(state: State, assignment: Assignment) -> bool:
    """Whether a worker that lost its work may begin it again."""
    current = all(state.blocks[b.block].version == b.version for b in assignment.bases if b.awaited)
    return current and assignment.ends_at - state.now >= state.rules.min_work_s


def _opened(state: State, block: Block, first: str) -> Block:
    if block.round:
        return block
    return replace(block, round=Round(state.now, first, state.rules.quorum, deadline_of(state.rules, block.arrivals)))


# --- Updates ---


def _begin(state: State, assignment: Assignment) -> Result:
    if assignment.upload:
        return state, Answer("ok", "the upload may go on", assignment.key)
    blocks = _admitted(state, assignment)
    state = _put_assignment(state, replace(assignment, upload=Upload(state.now, blocks)))
    return state, Answer("ok", "the upload may begin", assignment.key)


def _admitted(state: State, assignment: Assignment) -> tuple[int, ...]:
    """Blocks that take this update: those that have not moved on too far, now or when its upload began."""
    upload = assignment.upload
    then = upload.blocks if upload and state.now < upload.began_at + state.rules.upload_limit_s else ()
    return tuple(b.block for b in assignment.bases if b.block in then or _age(state, b) <= state.rules.max_age)


def _settle_too_old(state: State, assignment: Assignment) -> Result:
    age = min(_age(state, base) for base in assignment.bases)
    reason = f"too old: its block has moved on by {age} versions, at most {state.rules.max_age} count"
    return _settle(state, assignment, Answer("too_old", reason, assignment.key))


def _age(state: State, base: Base) -> int:
    return state.blocks[base.block].version - base.version


def _push(state: State, event: Push, assignment: Assignment) -> Result:
    fault = _count_fault(event.num_samples, assignment.num_steps * state.samples_per_step) or event.fault
    if fault:
        return _refuse(state, assignment, fault)
    num_samples = int(event.num_samples)
    num_steps = -(-num_samples // state.samples_per_step)
    steps = without(assignment.steps, beyond(assignment.steps, num_steps))
    whole_lease_s = (state.now - assignment.issued_at) * assignment.num_steps / num_steps
    admitted = _admitted(state, assignment)
    ages = tuple((b.block, _age(state, b)) for b in assignment.bases if b.block in admitted)
    for index, age in ages:
        block = _opened(state, state.blocks[index], _key(state))
        update = Pending(assignment.key, assignment.worker, block.version - age, num_samples * state.tokens_per_sample, steps)
        pending = tuple(sorted([*block.pending, update], key=lambda update: update.key))
        state = _put_block(state, replace(block, pending=pending, arrivals=(*block.arrivals, whole_lease_s)[-ARRIVALS:]))
    return _settle(state, assignment, _accepted(assignment, ages), num_steps, admitted)


def _refuse(state: State, assignment: Assignment, fault: str) -> Result:
    """A refusal by the gate: the worker gets a strike, and with the last one is suspended."""
    worker, limit = state.workers[assignment.worker], state.rules.strikes
    strikes = worker.strikes + 1
    sentence = f"{fault} (refusal {strikes} of {limit})"
    if strikes < limit:
        state, answer = _settle(state, assignment, Answer("invalid", sentence, assignment.key))
        return _put_worker(state, replace(worker, strikes=strikes)), answer
    sentence += f", suspended for {state.rules.suspension_s:g} s"
    state, answer = _settle(state, assignment, Answer("invalid", sentence, assignment.key))
    state = _drop_open(state, worker.name, Answer("suspended", f"worker {worker.name} is suspended after {limit} refusals"))
    return _put_worker(state, replace(worker, strikes=0, suspended_until=state.now + state.rules.suspension_s)), answer


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


def _settle(state: State, assignment: Assignment, answer: Answer, num_steps: int = 0, counted: Collection[int] = ()) -> Result:
    """Record an assignment's answer for good, and free the steps that no update of a `counted` block has used."""
    for index in assignment.blocks:
        block = state.blocks[index]
        unused = beyond(assignment.steps, num_steps if index in counted else 0)
        state = _put_block(state, replace(block, taken=without(block.taken, unused)))
    return _put_assignment(state, replace(assignment, answer=answer)), answer


# --- Rounds ---


def _close(state: State, event: Close) -> Result:
    block = state.blocks[event.block]
    here = {update.key for update in block.pending}
    if event.version != block.version or not event.keys or not here.issuperset(event.keys):
        gone = "it is closed already" if event.version != block.version else "an update in it was dropped meanwhile, decide again"
        return state, Answer("conflict", f"block {event.block} version {event.version} cannot be closed: {gone}")
    if event.interface >= 0:
        if event.interface != state.interface:
            gone = "the shared interface has moved on, decide again"
            return state, Answer("conflict", f"block {event.block} version {event.version} cannot be closed: {gone}")
        state = replace(state, interface=state.interface + 1)
    counted = [update for update in block.pending if update.key in event.keys]
    left = tuple(update for update in block.pending if update.key not in event.keys)
    block = _ended(state, block, event.reason, counted)
    block = replace(block, version=block.version + 1, tokens=block.tokens + sum(u.tokens for u in counted), pending=left)
    block = _opened(state, block, _key(state)) if left else block
    return _forget(_put_block(state, block)), Answer("ok", f"block {block.index} is at version {block.version}: {event.reason}")


def _abandon(state: State, event: Abandon) -> Result:
    block = state.blocks[event.block]
    if event.version != block.version or block.round is None or block.pending:
        return state, Answer("conflict", f"block {event.block} version {event.version} has moved on: decide again")
    return _put_block(state, _ended(state, block, event.reason, [])), Answer("ok", f"block {block.index}: {event.reason}")


def _ended(state: State, block: Block, reason: str, counted: list[Pending]) -> Block:
    """The block without its round, which is remembered as the last one and in the participation figures."""
    everyone = {a.key for a in awaited(state, block)}
    fresh = sum(update.key in everyone for update in counted)
    outcome = Outcome(block.version, bool(counted), reason, len(everyone), fresh, len(counted), state.now)
    totals = {"assigned_total": block.assigned_total + len(everyone), "fresh_total": block.fresh_total + fresh}
    return replace(block, round=None, idle_since=state.now, last=outcome, **totals)


def _change_rules(state: State, rules: Rules) -> Result:
    names = [field.name for field in fields(Rules) if getattr(rules, field.name) != getattr(state.rules, field.name)]
    changes = ", ".join(f"{name}: {getattr(state.rules, name)} -> {getattr(rules, name)}" for name in names)
    return replace(state, rules=rules), Answer("ok", f"{changes or 'nothing changed'}; deadline and quorum from each block's next round")


# --- Figures ---


def figures(state: State, now: float) -> Figures:
    """The run as its status page shows it."""
    now = max(now, state.now)
    members = sorted((w for w in state.workers.values() if w.present and not w.revoked), key=lambda w: w.name)
    alive = tuple(w.name for w in members if live(state, w, now))
    gone = tuple(w.name for w in members if w.name not in alive)
    blocks = tuple(_block_figures(state, block, decision, now) for block, decision in zip(state.blocks, decide(state, now), strict=True))
    return Figures(alive, gone, 0.0 if alive else now - state.seen_at, blocks)


def _block_figures(state: State, block: Block, decision: Decision, now: float) -> BlockFigures:
    return BlockFigures(
        block.index,
        block.version,
        block.tokens,
        "training" if block.round else "done" if done(state, block) else "starved" if starved(state, block, now) else "idle",
        decision.assigned,
        decision.reported,
        len(block.pending),
        block.fresh_total / block.assigned_total if block.assigned_total else None,
        block.round.opened_at + block.round.deadline_s - now if block.round else None,
        decision.reason,
    )


# --- Putting records in place ---


def _put_worker(state: State, worker: Worker) -> State:
    return replace(state, workers={**state.workers, worker.name: worker})


def _put_assignment(state: State, assignment: Assignment) -> State:
    return replace(state, assignments={**state.assignments, assignment.key: assignment})


def _put_block(state: State, block: Block) -> State:
    return replace(state, blocks=(*state.blocks[: block.index], block, *state.blocks[block.index + 1 :]))
