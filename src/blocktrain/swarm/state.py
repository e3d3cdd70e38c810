"""What the rules of rounds know and hear: records of a run, events that change them, answers and decisions that come back.

Everything is a dataclass of plain values, so a state can be stored, compared and sent as JSON (see plain.py). All are frozen but State itself, which
belongs to one machine (machine.py) that changes it in place.

  State ── workers      name -> Worker: who may take part, when last heard
        ── assignments  key -> Assignment: one span of blocks given to one worker, with its lease of steps and, once settled, the answer
        ── blocks       Block: version, open Round, updates accepted and not yet counted (Pending), steps taken
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from blocktrain.swarm.leases import Ranges, count_of
from blocktrain.swarm.rules import Rules

Kind = Literal[
    "ok",  # done
    "assigned",  # here is work
    "wait",  # nothing now, ask again
    "fresh",  # the update counts, trained from the block's own version
    "late",  # the update counts, at least one of its blocks has moved on
    "unknown",  # no such member or assignment
    "conflict",  # another process holds this worker's place, or the round has moved on
    "forbidden",  # another worker's assignment
    "revoked",  # this worker may not take part any more
    "suspended",  # not for a while
    "unfit",  # the worker is too small for any span of the run
    "invalid",  # refused by the gate
    "too_old",  # every block has moved on too far
    "finished",  # every block has taken its steps: the run has ended
    "returned",  # the assignment was given back, or is another's turn now
]


@dataclass(frozen=True)
class Answer:
    """What an event's sender is told. `reason` is one sentence, for the log, the page and the worker alike."""

    kind: Kind
    reason: str
    key: str = ""  # of the assignment in question
    time_left_s: float = 0.0  # assigned: until the update should be in; wait: until it is worth asking again
    ages: tuple[tuple[int, int], ...] = ()  # fresh and late: (block, versions behind) of each block it counts for

    @property
    def accepted(self) -> bool:
        return self.kind in ("fresh", "late")

    @property
    def refused(self) -> bool:
        return self.kind not in ("ok", "assigned", "wait", "finished", "fresh", "late")


# --- Records ---


@dataclass(frozen=True)
class Worker:
    """A member: a name (its key), the one process that speaks for it, and how many blocks it can hold."""

    name: str
    process: str
    capacity: int
    seen_at: float
    present: bool = True  # it has not left
    revoked: bool = False
    strikes: int = 0
    suspended_until: float = 0.0
    last_ask: str = ""
    last_key: str = ""
    last_blocks: tuple[int, ...] = ()  # what it probably still has on its disk


@dataclass(frozen=True)
class Base:
    """A block of an assignment, as the worker finds it."""

    block: int
    version: int
    tokens: int  # accepted so far: where the block's learning-rate schedule stands
    awaited: bool  # the block's round waits for this update; not if it is about to close


@dataclass(frozen=True)
class Upload:
    """An upload that was admitted when it began."""

    began_at: float
    blocks: tuple[int, ...]  # for which it was not too old then


@dataclass(frozen=True)
class Assignment:
    """Work for one worker. `key` is the idempotence key; keys sort in the order in which they were given."""

    key: str
    worker: str
    bases: tuple[Base, ...]  # consecutive blocks
    seed: int
    steps: Ranges  # the lease: inner steps by their number in the block's data
    issued_at: float
    ends_at: float
    interface: int  # version of the shared interface when it was given
    upstream: tuple[int, ...]  # versions, when it was given, of all blocks before its first
    downstream: tuple[int, ...] = ()  # and of all after its last
    upload: Upload | None = None
    answer: Answer | None = None  # once settled, for good

    @property
    def num_steps(self) -> int:
        return count_of(self.steps)

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(base.block for base in self.bases)


@dataclass(frozen=True)
class Pending:
    """An update that was accepted for a block and is not yet counted."""

    key: str
    worker: str
    base: int  # version it was trained from
    tokens: int
    steps: Ranges  # of its lease, those it was trained on


@dataclass(frozen=True)
class Round:
    """A block's open round. Deadline and quorum are those of the rules when it opened."""

    opened_at: float
    first: str  # keys from here on belong to it
    quorum: int
    deadline_s: float


@dataclass(frozen=True)
class Outcome:
    """How a block's newest round ended; `assigned` counts the workers it was waiting for."""

    version: int  # the block's version in that round
    closed: bool
    reason: str
    assigned: int
    fresh: int  # updates by workers it was waiting for
    counted: int  # all updates, late ones too
    at: float


@dataclass(frozen=True)
class Block:
    index: int
    idle_since: float  # end of the last round
    version: int = 0
    tokens: int = 0  # counted so far
    round: Round | None = None
    pending: tuple[Pending, ...] = ()
    taken: Ranges = ()  # steps leased or counted
    arrivals: tuple[float, ...] = ()  # seconds that recent updates took, had they used their whole lease; the newest last
    assigned_total: int = 0  # over all rounds
    fresh_total: int = 0
    last: Outcome | None = None


@dataclass
class State:
    """Everything the rules know about a run."""

    seed: int
    samples_per_step: int
    tokens_per_sample: int
    rules: Rules
    blocks: tuple[Block, ...]
    now: float  # time of the newest event; time never runs backwards
    seen_at: float  # when any member was last heard
    next_serial: int = 0
    interface: int = 0  # version of what all blocks share
    workers: dict[str, Worker] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)


# --- Events ---


@dataclass(frozen=True)
class Join:
    """A process takes a worker's place; `takeover` even if another one holds it."""

    now: float
    worker: str
    process: str
    capacity: int
    takeover: bool = False


@dataclass(frozen=True)
class Beat:
    """A worker is alive; also each part of an upload."""

    now: float
    worker: str
    process: str


@dataclass(frozen=True)
class Ask:
    """A worker wants work. Repeats of one `ask` get one answer."""

    now: float
    worker: str
    process: str
    ask: str


@dataclass(frozen=True)
class Begin:
    """A worker is about to upload an update."""

    now: float
    worker: str
    process: str
    key: str


@dataclass(frozen=True)
class Push:
    """An update is here whole; `fault` is what the gate found wrong with its tensors, empty if nothing."""

    now: float
    worker: str
    process: str
    key: str
    num_samples: float
    fault: str = ""


@dataclass(frozen=True)
class GiveBack:
    """A worker will not finish an assignment."""

    now: float
    worker: str
    process: str
    key: str
    why: str


@dataclass(frozen=True)
class Leave:
    """A worker stops."""

    now: float
    worker: str
    process: str


@dataclass(frozen=True)
class Revoke:
    """The owner of the run withdraws a worker's right to take part."""

    now: float
    worker: str


@dataclass(frozen=True)
class ChangeRules:
    now: float
    rules: Rules


@dataclass(frozen=True)
class Close:
    """The block's next version, made of the updates `keys`, is written; with `interface`, so is the next version of the shared interface."""

    now: float
    block: int
    version: int  # that the round began from
    keys: tuple[str, ...]
    reason: str
    interface: int = -1  # its version that the next one was made from; -1: left as it is


@dataclass(frozen=True)
class Abandon:
    """The block's round ends with nothing to count."""

    now: float
    block: int
    version: int
    reason: str


MemberEvent = Beat | Ask | Begin | Push | GiveBack | Leave
Event = Join | MemberEvent | Revoke | ChangeRules | Close | Abandon
EVENTS = (Join, Beat, Ask, Begin, Push, GiveBack, Leave, Revoke, ChangeRules, Close, Abandon)


# --- Decisions ---


@dataclass(frozen=True)
class Share:
    """What one update counts in the mean of a block."""

    key: str
    worker: str
    age: int
    weight: float  # tokens x staleness factor


@dataclass(frozen=True)
class Decision:
    """What is to be done with a block's round now."""

    action: Literal["wait", "close", "abandon"]
    block: int
    version: int
    reason: str
    shares: tuple[Share, ...] = ()  # close: in the order of keys
    assigned: int = 0  # workers the round waits or waited for
    reported: int = 0  # of them, those whose update is here
    wake_at: float | None = None  # wait: when time alone may change the decision

    @property
    def fresh(self) -> int:
        """Updates trained from the block's own version."""
        return sum(share.age == 0 for share in self.shares)

    def event(self, now: float, interface: int = -1) -> Close | Abandon:
        """What to report when it is done; see Close for `interface`."""
        if self.action == "close":
            return Close(now, self.block, self.version, tuple(share.key for share in self.shares), self.reason, interface)
        assert self.action == "abandon"
        return Abandon(now, self.block, self.version, self.reason)


@dataclass(frozen=True)
class BlockFigures:
    """A block as the status page shows it."""

    block: int
    version: int
    tokens: int
    state: Literal["training", "idle", "starved", "done"]  # starved: nobody has worked on it for longer than the heartbeat limit
    assigned: int
    reported: int
    pending: int
    participation: float | None  # updates of assigned, over all rounds that have ended; None before the first
    deadline_in_s: float | None  # negative once it has passed
    reason: str


@dataclass(frozen=True)
class Figures:
    """A run as the status page shows it."""

    live: tuple[str, ...]  # workers, by name
    gone: tuple[str, ...]  # members that have not been heard for the heartbeat limit
    alone_s: float  # how long no worker has been there; 0 while one is
    blocks: tuple[BlockFigures, ...]
