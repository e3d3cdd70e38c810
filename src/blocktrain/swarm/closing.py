"""When a block's round ends: whom it waits for, and the decision to wait, close or abandon, with its reason.

A pure reading of the state: nothing here changes anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from blocktrain.swarm.leases import count_of
from blocktrain.swarm.rules import Rules, deadline_of, staleness_factor
from blocktrain.swarm.state import Assignment, Block, Decision, Pending, Round, Share, State, Worker


def live(state: State, worker: Worker, now: float) -> bool:
    """Whether a member was heard within the heartbeat limit."""
    return worker.present and not worker.revoked and now < worker.seen_at + state.rules.heartbeat_limit_s


def awaited(state: State, block: Block) -> list[Assignment]:
    """Every assignment that the block's open round waits or waited for, settled or not."""
    if block.round is None:
        return []
    first = block.round.first
    since = itertools.takewhile(lambda key: key >= first, reversed(state.assignments))  # given in the order of keys
    return [state.assignments[key] for key in since if begins_from(state.assignments[key], block, awaited_only=True)]


def begins_from(assignment: Assignment, block: Block, awaited_only: bool = False) -> bool:
    """Whether the assignment begins from the block's present version."""
    return any(b.block == block.index and b.version == block.version and (b.awaited or not awaited_only) for b in assignment.bases)


def waiting_for(state: State, block: Block, now: float) -> list[Assignment]:
    """Assignments of live workers whose update is still to come."""
    return [a for a in awaited(state, block) if a.answer is None and live(state, state.workers[a.worker], now)]


def round_end(round: Round, now: float) -> float:
    """The deadline, and once it has passed without a quorum, twice the deadline."""
    deadline = round.opened_at + round.deadline_s
    return deadline if now < deadline else round.opened_at + 2 * round.deadline_s


def time_left(rules: Rules, block: Block, now: float) -> float:
    """For an update that would begin now."""
    return max(0.0, round_end(block.round, now) - now) if block.round else deadline_of(rules, block.arrivals)


def missing(state: State, block: Block) -> int:
    """Steps that the block has still to be given; 1 where the run has no end."""
    target = state.rules.target_steps
    return max(0, target - count_of(block.taken)) if target else 1


def done(state: State, block: Block) -> bool:
    """Whether all steps that the block is to take are leased or counted."""
    return missing(state, block) == 0


def decide(state: State, now: float) -> tuple[Decision, ...]:
    """What is to be done with each block's round."""
    return tuple(decide_block(state, block, max(now, state.now)) for block in state.blocks)


def decide_block(state: State, block: Block, now: float) -> Decision:
    """What is to be done with one block's round."""
    everyone, waiting = awaited(state, block), waiting_for(state, block, now)
    here = {update.key for update in block.pending}
    reported = sum(a.key in here for a in everyone)
    shares = tuple(_share(block, update) for update in block.pending)
    others = len(shares) - reported
    tally = f"{reported} of {len(everyone)} assigned" + (f" and {others} more" if others else "")
    decision = Decision("wait", block.index, block.version, "", (), len(everyone), reported)
    if block.round is None:
        return replace(decision, reason=_idle_reason(state, block, now))
    if reason := _reason_to_end(block.round, shares, bool(waiting), done(state, block), tally, now):
        return replace(decision, action="close" if shares else "abandon", shares=shares, reason=reason)
    silences = [state.workers[a.worker].seen_at + state.rules.heartbeat_limit_s for a in waiting]
    end = round_end(block.round, now)
    for_whom = f"for {', '.join(sorted(a.worker for a in waiting))}" if waiting else "for fresh updates beside late ones"
    return replace(decision, reason=f"waits {for_whom}: {tally}, {end - now:.1f} s left", wake_at=min([end, *silences]))


def _reason_to_end(round: Round, shares: Sequence[Share], waiting: bool, is_done: bool, tally: str, now: float) -> str:
    """Why the round ends now, with what is here; empty if it does not."""
    deadline = f"the deadline of {round.deadline_s:.1f} s has passed with {tally}"
    passed, twice = now >= round.opened_at + round.deadline_s, now >= round.opened_at + 2 * round.deadline_s
    if not shares:
        return f"empty: {'twice ' + deadline if waiting else 'no valid update, ' + tally}; the block stays as it is" if twice or not waiting else ""
    if not waiting and any(share.age == 0 for share in shares):
        return f"every live assignee has reported: {tally}"
    if not waiting and is_done:
        return f"the block has no more steps to give: {tally}"
    if passed and (not waiting or len(shares) >= round.quorum):
        return deadline
    return f"twice {deadline}, a quorum of {round.quorum} is no longer waited for" if twice else ""


def _share(block: Block, update: Pending) -> Share:
    age = block.version - update.base
    return Share(update.key, update.worker, age, update.tokens * staleness_factor(age))


def starved(state: State, block: Block, now: float) -> bool:
    """Whether nobody has worked on a block for longer than the heartbeat limit."""
    return block.round is None and not done(state, block) and now >= block.idle_since + state.rules.heartbeat_limit_s


def _idle_reason(state: State, block: Block, now: float) -> str:
    if done(state, block):
        return f"done: all its {state.rules.target_steps} steps are leased or counted"
    word = "starved" if starved(state, block, now) else "idle"
    return f"{word}: no worker has had this block for {now - block.idle_since:.0f} s"
