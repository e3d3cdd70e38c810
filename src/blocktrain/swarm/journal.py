"""A run's state and the journal that makes it: what several processes agree by, and what a killed one finds again.

An event is appended in one transaction and only then answered. State in memory is a copy of the journal's: a transaction first applies what other
processes have appended, and a failed one makes this process read everything anew. What cannot go on for now is said once, under its own name.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import sqlalchemy as sa

from blocktrain.swarm import crash, store
from blocktrain.swarm.machine import Machine
from blocktrain.swarm.plain import from_json, from_tagged_json, to_json, to_tagged_json
from blocktrain.swarm.state import EVENTS, Answer, Event, State
from blocktrain.swarm.store import Store, Transaction

SNAPSHOT_EVERY = 500  # events of journal, and one more for each record of the state: what an event costs does not grow with the run
FLUSH_S = 1.0  # for so long the ledger's newest bytes may be in memory only
NOTES_KEPT = 1000


class Journal:
    """The rules' machine on a store. `clock` gives seconds that never run backwards, `say` gets sentences."""

    def __init__(self, store: Store, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self.store, self.clock, self.say = store, clock, say
        self.machine: Machine
        self._lock = threading.RLock()
        self._offset, self.seq, self._snapshot_seq = -math.inf, 0, 0  # the first look at the journal sets the offset
        self._caught_up = False  # nothing has been read from the journal since our own newest event
        self._stale = False  # the state in memory may be ahead of the journal
        self._bytes: dict[tuple[str, str, str, str], int] = {}
        self._bytes_lock, self._flushed_at = threading.Lock(), -FLUSH_S
        self._log: deque[tuple[float, str]] = deque(maxlen=200)
        self._problems: dict[str, str] = {}  # what cannot go on just now -> why
        self.changed: Callable[[], None] = lambda: None  # told after every event

    def _reload(self) -> None:
        """State from the newest snapshot and the journal after it."""
        self._stale = True
        with self.store.transaction() as tx:
            self._catch_up(tx)

    def _catch_up(self, tx: Transaction) -> None:
        """Apply what other processes have appended; from their snapshot where the journal does not reach back far enough."""
        events = [] if self._stale else tx.events_after(self.seq)
        if self._stale or (events and events[0][0] > self.seq + 1):
            newest = tx.rows(sa.select(store.snapshots).order_by(store.snapshots.c.seq.desc()).limit(1))[0]
            self.machine, self.seq = Machine(from_json(State, newest["state"])), newest["seq"]
            self._snapshot_seq = self.seq
            events = tx.events_after(self.seq)
        for seq, text in events:
            self.machine.apply(from_tagged_json(EVENTS, text))
            self.seq = seq
        self._stale = False
        self._offset = max(self._offset, self.machine.state.now - self.clock())

    def _look(self) -> None:
        """Read what other processes have appended."""
        with self._lock, self.store.transaction() as tx:
            self._catch_up(tx)

    def now(self) -> float:
        """Seconds on the run's own clock: it goes on where the last process left it, whatever this machine's clock says."""
        return self.clock() + self._offset

    # --- Events ---

    def record(self, make: Callable[[float], Event], also: Callable[[Transaction, Answer], None] = lambda *_: None) -> Answer:
        """Append an event and what belongs to it, then answer; raises OSError, with nothing changed, where the database cannot be written."""
        with self._lock:
            try:
                if self._stale:
                    self._reload()
                with self.store.transaction() as tx:
                    self._catch_up(tx)
                    event = make(self.now())
                    answer = self.machine.apply(event)
                    tx.append(self.seq + 1, to_tagged_json(event))
                    also(tx, answer)
                    self._flush_bytes(tx, FLUSH_S)
                self.seq += 1
                self._caught_up = True
            except BaseException as error:
                self._stale, self._caught_up = True, False
                if isinstance(error, OSError):
                    self.pause("journal", str(error))
                with suppress(OSError):
                    self._reload()
                raise
            self.resume("journal")
            if self.seq - self._snapshot_seq >= SNAPSHOT_EVERY + len(self.machine.state.assignments) + len(self.machine.state.workers):
                self._snapshot()
        self.changed()
        return answer

    def _snapshot(self) -> None:
        self._snapshot_seq = self.seq
        try:
            with self.store.transaction() as tx:
                tx.put(store.snapshots, seq=self.seq, state=to_json(self.machine.state))
            crash.point("snapshot.before_delete")
            with self.store.transaction() as tx:
                tx.execute(store.snapshots.delete().where(store.snapshots.c.seq < self.seq))
                # Enough of the journal stays for other processes to see that they are behind.
                tx.execute(store.events.delete().where(store.events.c.seq <= self.seq - SNAPSHOT_EVERY))
                newest = sa.select(sa.func.max(store.notes.c.id)).scalar_subquery()
                tx.execute(store.notes.delete().where(store.notes.c.id < newest - NOTES_KEPT))
        except OSError as error:
            self.pause("journal", str(error))

    @contextmanager
    def reading(self) -> Iterator[State]:
        """The state, with no event in between."""
        with self._lock:
            yield self.machine.state

    # --- What people are told ---

    @property
    def problem(self) -> str:
        """Why the run cannot go on just now; empty if it can."""
        return next(iter(self._problems.values()), "")

    def pause(self, what: str, problem: str) -> None:
        """Something cannot go on for now. Said once; who found it tries again."""
        if problem != self._problems.get(what):
            self._problems[what] = problem
            self.log(f"paused: {problem}; nothing is lost, the run goes on when that is cured")

    def resume(self, what: str) -> None:
        """The same thing has gone well again."""
        if self._problems.pop(what, "") and not self._problems:
            self.log("the run goes on")

    def log(self, text: str) -> None:
        """A sentence for the log and the page, on one line whoever wrote it."""
        text = one_line(text)
        self._log.append((self.now(), text))
        self.say(text)

    def logged(self) -> list[tuple[float, str]]:
        return list(self._log)

    # --- The ledger ---

    def count(self, worker: str, part: str, kind: str, direction: str, num_bytes: int) -> None:
        """Bytes that moved; they reach the database with the first event or tick when FLUSH_S have passed since the last did."""
        if num_bytes:
            with self._bytes_lock:
                place = worker, part, kind, direction
                self._bytes[place] = self._bytes.get(place, 0) + num_bytes

    def _flush_bytes(self, tx: Transaction, every_s: float = 0.0) -> None:
        now = self.clock()
        if now < self._flushed_at + every_s and len(self._bytes) < SNAPSHOT_EVERY:
            return
        with self._bytes_lock:
            counted, self._bytes, self._flushed_at = self._bytes, {}, now
        try:
            tx.add_bytes(counted)
        except BaseException:
            with self._bytes_lock:
                for place, count in counted.items():
                    self._bytes[place] = self._bytes.get(place, 0) + count
            raise

    def counted_bytes(self) -> list[Mapping[str, Any]]:
        """The ledger: rows of worker, part, kind, direction, bytes."""
        with self._lock, self.store.transaction() as tx:
            self._flush_bytes(tx)
            return tx.rows(sa.select(store.ledger))


def one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
