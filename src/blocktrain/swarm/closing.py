"""When a block's round ends: whom it waits for, and the decision to wait, close or abandon, with its reason.

A pure reading of the state: nothing here changes anything.
"""

from __future__ import annotations

import math

from blocktrain.swarm.index import Index
from blocktrain.swarm.rules import Rules, deadline_of, staleness_factor
from blocktrain.swarm.state import Block, Decision, Pending, Round, Share

NAMED = 3  # of the workers that a round waits for, in its reason


def round_end(round: Round, now: float) -> float:
    """The deadline, and once it has passed without a quorum, twice the deadline."""
    deadline = round.opened_at + round.deadline_s
    return deadline if now < deadline else round.opened_at + 2 * round.deadline_s


def time_left(rules: Rules, block: Block, now: float) -> float:
    """For an update that would begin now."""
    return max(0.0, round_end(block.round, now) - now) if block.round else deadline_of(rules, block.arrivals)


def decide_block(index: Index, block: Block, now: float) -> Decision:
    """What is to be done with one block's round."""
    tally, waiting = index.tallies[block.index], index.waiting(block, now)
    action, reason, shares, wake_at = "wait", reason_to_end(index, block, now), (), None
    if block.round is None:
        reason = _idle_reason(index, block, now)
    elif reason and block.pending:
        action, shares = "close", tuple(_share(block, update) for update in block.pending)
    elif reason:
        action = "abandon"
    else:
        end = round_end(block.round, now)
        reason, wake_at = f"waits {_for_whom(index, waiting)}: {_count(index, block)}, {end - now:.1f} s left", min(end, index.next_silence(block))
    return Decision(action, block.index, block.version, reason, shares, tally.assigned, tally.reported, wake_at)


def holds_until(index: Index, block: Block, now: float) -> float:
    """Until when a decision of now stands if nothing happens."""
    if block.round is None:
        return math.inf
    deadlines = (block.round.opened_at + times * block.round.deadline_s for times in (1, 2))
    return min([index.next_silence(block), *(deadline for deadline in deadlines if deadline > now)])


def reason_to_end(index: Index, block: Block, now: float) -> str:
    """Why the round ends now, with what is here; empty if it does not."""
    if block.round is None:
        return ""
    waiting, here, deadline_s = bool(index.waiting(block, now)), len(block.pending), block.round.deadline_s
    passed, twice = now >= block.round.opened_at + deadline_s, now >= block.round.opened_at + 2 * deadline_s
    if waiting and not passed:
        return ""
    tally = _count(index, block)
    deadline = f"the deadline of {deadline_s:.1f} s has passed with {tally}"
    if not here:
        return f"empty: {'twice ' + deadline if waiting else 'no valid update, ' + tally}; the block stays as it is" if twice or not waiting else ""
    if not waiting and index.tallies[block.index].fresh:
        return f"every live assignee has reported: {tally}"
    if not waiting and index.done(block):
        return f"the block has no more steps to give: {tally}"
    if passed and (not waiting or here >= block.round.quorum):
        return deadline
    return f"twice {deadline}, a quorum of {block.round.quorum} is no longer waited for" if twice else ""


def starved(index: Index, block: Block, now: float) -> bool:
    """Whether nobody has worked on a block for longer than the heartbeat limit."""
    return block.round is None and not index.done(block) and now >= block.idle_since + index.state.rules.heartbeat_limit_s


def _count(index: Index, block: Block) -> str:
    tally = index.tallies[block.index]
    others = len(block.pending) - tally.reported
    return f"{tally.reported} of {tally.assigned} assigned" + (f" and {others} more" if others else "")


def _for_whom(index: Index, waiting: list[str]) -> str:
    """The first workers that are waited for, in the order in which they were given their work."""
    if not waiting:
        return "for fresh updates beside late ones"
    names = ", ".join(index.state.assignments[key].worker for key in waiting[:NAMED])
    return f"for {names}" + (f" and {len(waiting) - NAMED} more" if len(waiting) > NAMED else "")


def _share(block: Block, update: Pending) -> Share:
    age = block.version - update.base
    return Share(update.key, update.worker, age, update.tokens * staleness_factor(age))


def _idle_reason(index: Index, block: Block, now: float) -> str:
    if index.done(block):
        return f"done: none of its {index.state.rules.target_steps} steps is left to give"
    word = "starved" if starved(index, block, now) else "idle"
    return f"{word}: no worker has had this block for {now - block.idle_since:.0f} s"
