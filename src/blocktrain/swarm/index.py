"""What the rules often look up, kept beside a state so that no event has to read all of it.

Everything here follows from the state: it is built by reading that once, brought up to date with each change, and never stored. Whether a worker is
live depends on the time of the question. Each block keeps the workers that its round waits for in two sets, live and silent, and moves those whose
time has passed since it was last asked from one to the other; a worker that is heard again goes back.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable

from blocktrain.swarm.leases import Ranges, count_of, joined, without
from blocktrain.swarm.state import Assignment, Base, Block, State, Worker

REMEMBERED = 8  # versions for which a settled assignment's answer is kept


def silent_from(state: State, worker: Worker) -> float:
    """When a member is gone if it is not heard again."""
    return worker.seen_at + state.rules.heartbeat_limit_s if worker.present and not worker.revoked else -math.inf


def live(state: State, worker: Worker, now: float) -> bool:
    """Whether a member was heard within the heartbeat limit."""
    return now < silent_from(state, worker)


def age_of(state: State, base: Base) -> int:
    """Versions that a block has moved on by since it was given."""
    return state.blocks[base.block].version - base.version


class Alarms:
    """Keys with a time each, which may be earlier than their true time: that is asked for when it has come.

    A true time of None says that the key is of no interest any more.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._times: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._times)

    def set(self, time: float, key: str) -> None:
        if time < self._times.get(key, math.inf):
            self._times[key] = time
            heapq.heappush(self._heap, (time, key))

    def ring(self, now: float, true_time: Callable[[str], float | None]) -> list[str]:
        """Takes out and returns the keys whose true time has come."""
        rung: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            true, key = self._next(true_time)
            if true is not None and true <= now:
                rung.append(key)
            elif true is not None:
                self.set(true, key)
        return rung

    def next(self, true_time: Callable[[str], float | None]) -> float:
        """The earliest true time."""
        while self._heap:
            time = self._heap[0][0]
            true, key = self._next(true_time)
            if true is not None:
                self.set(true, key)
            if true == time:
                return time
        return math.inf

    def _next(self, true_time: Callable[[str], float | None]) -> tuple[float | None, str]:
        time, key = heapq.heappop(self._heap)
        if self._times.get(key) != time:
            return None, key  # it has an earlier one
        del self._times[key]
        return true_time(key), key


class Tally:
    """One block and its open round in numbers."""

    def __init__(self, taken: Ranges) -> None:
        self.taken = count_of(taken)  # steps
        self.took_part: set[str] = set()  # workers whose update from the present version was accepted
        self.given: defaultdict[int, set[str]] = defaultdict(set)  # version -> keys of assignments that begin from it
        self.fresh = 0  # pending updates from the present version
        self.end_round()

    def end_round(self) -> None:
        self.assigned = 0  # awaited by the open round, settled or not
        self.reported = 0  # of them, those whose update is pending
        self.waiting: list[str] = []  # of them, keys of those that are not settled, of workers that are live; in order
        self.silent: dict[str, float] = {}  # the others, since when
        self.alarms = Alarms()  # of those waiting: when their workers will be gone
        self.asked_at = -math.inf

    def is_waiting(self, key: str) -> bool:
        place = bisect_left(self.waiting, key)
        return place < len(self.waiting) and self.waiting[place] == key


class Index:
    def __init__(self, state: State) -> None:
        self.state = state
        self.tallies = [Tally(block.taken) for block in state.blocks]
        self.open: defaultdict[str, dict[str, None]] = defaultdict(dict)  # worker -> keys of its open assignments, in order
        self.num_open = 0
        self.held: defaultdict[str, int] = defaultdict(int)  # worker -> assignments that are remembered
        self.touched = set(range(len(state.blocks)))  # blocks for which decisions may have changed
        self.recheck: set[str] | None = None  # keys that may have to be forgotten at the next close; None: all
        self._uploads, self._leases, self._members = Alarms(), Alarms(), Alarms()
        for assignment in state.assignments.values():
            self.add(assignment)
        for block in state.blocks:
            self.recount(block)
        for name, worker in state.workers.items():
            self._members.set(worker.seen_at, name)

    # --- What changes ---

    def add(self, assignment: Assignment) -> None:
        """A new assignment; its blocks' rounds are open."""
        self.held[assignment.worker] += 1
        for base in assignment.bases:
            block, tally = self.state.blocks[base.block], self.tallies[base.block]
            tally.given[base.version].add(assignment.key)
            tally.assigned += self.awaits(block, assignment)
        if assignment.answer:
            self._settled(assignment)
            return
        self.open[assignment.worker][assignment.key] = None
        self.num_open += 1
        self._await(assignment)
        if self.state.rules.target_steps:
            self._leases.set(self.lapses_at(assignment), assignment.key)
            if len(self._leases) > 2 * self.num_open + 64:
                self._leases = Alarms()
                for key in self.open_keys():
                    self._leases.set(self.lapses_at(self.state.assignments[key]), key)
        if assignment.upload:
            self.begin(assignment)

    def begin(self, assignment: Assignment) -> None:
        """An upload is under way."""
        assert assignment.upload
        self._uploads.set(assignment.upload.began_at + self.state.rules.upload_limit_s, assignment.key)

    def restart(self, assignment: Assignment) -> None:
        """An upload that was under way is not any more."""
        if self.recheck is not None:
            self.recheck.add(assignment.key)
        if self.state.rules.target_steps:
            self._leases.set(self.lapses_at(assignment), assignment.key)

    def settle(self, assignment: Assignment) -> None:
        """An open assignment got its answer."""
        mine = self.open[assignment.worker]
        del mine[assignment.key]
        if not mine:
            del self.open[assignment.worker]
        self.num_open -= 1
        for base in assignment.bases:
            tally = self.tallies[base.block]
            if tally.is_waiting(assignment.key):
                del tally.waiting[bisect_left(tally.waiting, assignment.key)]
            tally.silent.pop(assignment.key, None)
            self.touched.add(base.block)
        self._settled(assignment)

    def _settled(self, assignment: Assignment) -> None:
        if assignment.answer and assignment.answer.accepted:
            for base in assignment.bases:
                if base.version == self.state.blocks[base.block].version:
                    self.tallies[base.block].took_part.add(assignment.worker)
        if self.recheck is not None and self.is_old(assignment):
            self.recheck.add(assignment.key)

    def forget(self, assignment: Assignment) -> None:
        """A settled assignment is no longer remembered."""
        for base in assignment.bases:
            given = self.tallies[base.block].given
            given[base.version].discard(assignment.key)
            if not given[base.version]:
                del given[base.version]
        self.held[assignment.worker] -= 1
        if not self.held[assignment.worker]:
            del self.held[assignment.worker]
            self._members.set(self.state.workers[assignment.worker].seen_at, assignment.worker)

    def enrol(self, worker: Worker) -> None:
        """A new member."""
        self._members.set(worker.seen_at, worker.name)

    def heard(self, worker: Worker) -> None:
        """The worker was heard: rounds wait again for what it has open."""
        for key in self.open.get(worker.name, ()):
            self._await(self.state.assignments[key])

    def _await(self, assignment: Assignment) -> None:
        for base in assignment.bases:
            tally = self.tallies[base.block]
            if not tally.is_waiting(assignment.key) and self.awaits(self.state.blocks[base.block], assignment):
                silent_at = silent_from(self.state, self.state.workers[assignment.worker])
                tally.silent.pop(assignment.key, None)
                insort(tally.waiting, assignment.key)
                tally.alarms.set(silent_at, assignment.key)
                self.touched.add(base.block)

    def accept(self, block: Block, assignment: Assignment, base: Base) -> None:
        """An update of the assignment is now pending in the block."""
        tally = self.tallies[block.index]
        tally.fresh += base.version == block.version
        tally.reported += self.awaits(block, assignment)
        self.touched.add(block.index)

    def recount(self, block: Block) -> None:
        """The block's pending updates are others than before."""
        tally = self.tallies[block.index]
        tally.fresh = sum(update.base == block.version for update in block.pending)
        tally.reported = sum(self.awaits(block, self.state.assignments.get(update.key)) for update in block.pending)
        self.touched.add(block.index)

    def end_round(self, block: Block, closed: bool) -> None:
        """The block's round has ended; if it was closed, with a new version, which is in the state."""
        tally = self.tallies[block.index]
        tally.end_round()
        tally.fresh = 0
        if closed:
            tally.took_part = set()
        self.touched.add(block.index)

    def take(self, block: Block, steps: Ranges) -> Ranges:
        """The block's taken steps with some more."""
        self.tallies[block.index].taken += count_of(steps)
        return joined(block.taken, steps)

    def free(self, block: Block, steps: Ranges) -> Ranges:
        """The block's taken steps without these, which are among them."""
        self.tallies[block.index].taken -= count_of(steps)
        return without(block.taken, steps)

    # --- What is looked up ---

    def waiting(self, block: Block, now: float) -> list[str]:
        """Keys of live workers whose update the open round waits for, in order."""
        tally = self.tallies[block.index]
        if now < tally.asked_at:  # asked about an earlier time than before
            for key in [key for key, since in tally.silent.items() if since > now]:
                insort(tally.waiting, key)
                tally.alarms.set(tally.silent.pop(key), key)
        tally.asked_at = now
        for key in tally.alarms.ring(now, lambda key: self._silent_at(tally, key)):
            del tally.waiting[bisect_left(tally.waiting, key)]
            tally.silent[key] = silent_from(self.state, self.state.workers[self.state.assignments[key].worker])
        return tally.waiting

    def next_silence(self, block: Block) -> float:
        """When the first of those waiting will be gone if it is not heard again."""
        tally = self.tallies[block.index]
        return tally.alarms.next(lambda key: self._silent_at(tally, key))

    def _silent_at(self, tally: Tally, key: str) -> float | None:
        return silent_from(self.state, self.state.workers[self.state.assignments[key].worker]) if tally.is_waiting(key) else None

    def awaits(self, block: Block, assignment: Assignment | None) -> bool:
        """Whether the block's open round waits or waited for the assignment."""
        if block.round is None or assignment is None or assignment.key < block.round.first:
            return False
        return any(b.block == block.index and b.version == block.version and b.awaited for b in assignment.bases)

    def took_part(self, worker: str, block: Block) -> bool:
        """Whether the worker's update for this round of the block is accepted or on its way: one update a round."""
        if worker in self.tallies[block.index].took_part:
            return True
        if block.round is None:  # an upload that outlasted its round is not on its way to the next
            return False
        mine = (self.state.assignments[key] for key in self.open.get(worker, ()) if key >= block.round.first)
        return any(b.block == block.index and b.version == block.version for a in mine for b in a.bases)

    def open_keys(self) -> Iterable[str]:
        return (key for mine in self.open.values() for key in mine)

    def missing(self, block: Block) -> int:
        """Steps that the block has still to be given; 1 where the run has no end."""
        target = self.state.rules.target_steps
        return max(0, target - self.tallies[block.index].taken) if target else 1

    def done(self, block: Block) -> bool:
        """Whether all steps that the block is to take are leased or counted."""
        return self.missing(block) == 0

    def lapses_at(self, assignment: Assignment) -> float:
        """When an open lease may be given to others, once a block is done."""
        upload = assignment.upload
        uploaded_by = upload.began_at + self.state.rules.upload_limit_s if upload else 0.0
        return min(silent_from(self.state, self.state.workers[assignment.worker]), max(2 * assignment.ends_at - assignment.issued_at, uploaded_by))

    def lapsed(self) -> list[str]:
        """Keys of open leases that may be given to others."""

        def true_time(key: str) -> float | None:
            assignment = self.state.assignments.get(key)
            return self.lapses_at(assignment) if assignment and assignment.answer is None else None

        return sorted(set(self._leases.ring(self.state.now, true_time)))

    def is_old(self, assignment: Assignment) -> bool:
        """Whether a settled assignment need not be remembered."""
        return min(age_of(self.state, base) for base in assignment.bases) > self.state.rules.max_age + REMEMBERED

    def aged(self, block: Block) -> list[str]:
        """Keys of assignments that may have become too old, or old enough to be forgotten, with the block's new version."""
        if self.recheck is None:
            keys = set(self.state.assignments)
        else:
            oldest = block.version - self.state.rules.max_age - 1
            given = self.tallies[block.index].given
            keys = self.recheck | given.get(oldest, set()) | given.get(oldest - REMEMBERED, set())
            keys.update(self._uploads.ring(self.state.now, lambda key: -math.inf))
        self.recheck = set()
        return sorted(keys & self.state.assignments.keys())

    def long_silent(self, since: float) -> list[str]:
        """Members that were last heard before then, and of whose assignments none is remembered."""

        def true_time(name: str) -> float | None:
            worker = self.state.workers.get(name)
            return worker.seen_at if worker and not worker.revoked and name not in self.held else None

        return sorted(set(self._members.ring(math.nextafter(since, -math.inf), true_time)))
