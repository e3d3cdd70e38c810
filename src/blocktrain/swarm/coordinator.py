"""The coordinator: who may take part, what they are given, what arrives, and the closing of rounds. It knows no network and no wall clock.

Every decision is the rules' (rounds.py). What this file adds is bytes: the files of an assignment, the gate for what comes back, the next
version. Two hosts use it: the HTTP service (server.py) and the simulator (simulator.py).

An event is appended to the journal in one transaction and only then answered. State in memory is a copy of the journal's: a transaction
first applies what other processes have appended, and a failed one makes this process read everything anew. So a coordinator may be killed
anywhere, and several may share a run.

`tick()` does what is due: ends rounds, writes versions, looks after old files. The host calls it after events and at `wake_at()`.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from blocktrain.codecs import encoded_size
from blocktrain.config import RunConfig
from blocktrain.errors import BlockTrainError, CheckpointError, ConfigError, ProtocolError
from blocktrain.swarm import aggregate, crash, identity, store
from blocktrain.swarm.leases import Ranges, beyond, without
from blocktrain.swarm.parts import INTERFACE, Layout
from blocktrain.swarm.plain import from_json, from_tagged_json, to_json, to_tagged_json
from blocktrain.swarm.protocol import (
    PROTOCOL,
    AskReply,
    BeginReply,
    BeginRequest,
    BlobRef,
    CommitReply,
    CommitRequest,
    Delta,
    Hello,
    JoinReply,
    JoinRequest,
    PartFiles,
    RunInfo,
    Work,
    hello_text,
    join_text,
    part_of,
)
from blocktrain.swarm.rounds import Machine, new_state
from blocktrain.swarm.rules import Rules
from blocktrain.swarm.state import (
    EVENTS,
    Answer,
    Ask,
    Assignment,
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
from blocktrain.swarm.store import BlobSource, Store, Transaction
from blocktrain.training.outer import NormRule, OuterRule

SNAPSHOT_EVERY = 500  # events of journal, and one more for each record of the state: what an event costs does not grow with the run
FLUSH_S = 1.0  # for so long the ledger's newest bytes may be in memory only
NOTES_KEPT = 1000
SWEEP_VERSIONS_S = 3600.0  # between looks for files of versions that nothing names; one that two looks in a row find is deleted
SWEEP_S = 60.0  # between looks for parts of uploads that nobody will finish


@dataclass(frozen=True)
class Text:
    """The training text as workers fetch it: a stored blob, and the digest that batches are bound to."""

    blob: BlobRef
    digest: str
    corpus: str


@dataclass(frozen=True)
class Session:
    """A member that has shown its session's secret."""

    worker: str
    process: str


class PartWriter:
    """One part of an upload on its way."""

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        self.coordinator, self.name = coordinator, name
        with self._pausing():
            self.writer = coordinator.store.blobs.writer()

    def write(self, piece: bytes) -> None:
        with self._pausing():
            self.writer.write(piece)

    def discard(self) -> None:
        self.writer.discard()

    def keep(self) -> None:
        crash.point("part.before_write")
        with self._pausing():
            self.writer.keep(self.name, settled=False)  # a part that a power cut damages is sent again: commit digests the whole
        self.coordinator.resume("disk")
        crash.point("part.after_write")

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.coordinator.no_room(str(error))
            raise


class Refused(Exception):
    """A request that ends with an answer of the rules, or of the door before them."""

    def __init__(self, answer: Any) -> None:  # an Answer of the rules, or one that is a message already
        super().__init__(answer.reason)
        self.answer = answer


def rules_of(config: RunConfig) -> Rules:
    """The rules of rounds that a run's settings ask for."""
    names = {field.name for field in fields(Rules)} - {"target_steps"}
    chosen = {name: getattr(config.round, name) for name in names}
    return Rules(**chosen, target_steps=config.train.steps)


def check_config(config: RunConfig) -> None:
    """Refuse settings that only one machine can follow."""
    if config.noise.partition == "information":
        raise ConfigError("noise.partition: 'information' is fitted on one machine; give a list of boundaries, or 'lognormal'")
    if config.train.ema:
        raise ConfigError("train.ema: must be 0 with a coordinator, the mean of the workers is what is served")
    if config.train.order == "sequential":
        raise ConfigError("train.order: must be 'interleaved' with a coordinator, every worker trains its own blocks anyway")


class Coordinator:
    """One run's coordinator. `clock` gives seconds that never run backwards, `say` gets sentences; `serving` is False for whoever only looks."""

    def __init__(
        self,
        run: str,
        config: RunConfig,
        layout: Layout,
        store: Store,
        text: Text,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda _: None,
        serving: bool = True,
    ) -> None:
        check_config(config)
        self.run, self.config, self.layout, self.store, self.text = run, config, layout, store, text
        self.clock, self.say = clock, say
        self._lock, self._closing = threading.RLock(), threading.Lock()
        self._offset, self.seq, self._swept_at = -math.inf, 0, clock()  # the first look at the journal sets the offset
        self._orphans: set[str] = set()  # files of versions that nothing named at the last look
        self._versions_swept_at = -math.inf
        self._bytes: dict[tuple[str, str, str, str], int] = {}
        self._bytes_lock, self._flushed_at = threading.Lock(), -FLUSH_S
        self._snapshot_seq = 0
        self._caught_up = False  # nothing has been read from the journal since our own newest event
        self._sessions: dict[str, Session] = {}  # by the hash of their secret
        self._secrets: dict[str, str] = {}  # worker -> that hash
        self._busy: set[str] = set()  # keys of uploads of which a request is being answered
        self._again = False  # something that is due could not be done
        self._curves: dict[str, list[tuple[int, int, float | None, float | None]]] = {}
        self._curves_seq, self._curves_lock = 0, threading.Lock()
        self._norms: dict[str, dict[str, float]] = {}  # of pending updates, by part
        self._manifests: dict[tuple[str, int], dict[str, Any]] = {}
        self._log: deque[tuple[float, str]] = deque(maxlen=200)
        self._problems: dict[str, str] = {}  # what cannot go on just now -> why
        self._needed = 0  # bytes of disk that an upload asked for in vain
        self._stale = False  # the state in memory may be ahead of the journal
        self._sound: dict[str, Any] = {}  # blob -> what its file looked like when its digest was right
        self.changed: Callable[[], None] = lambda: None  # told after every event
        self.closed: Callable[[], None] = lambda: None  # told after every new version
        self.machine: Machine
        self._open(serving)

    # --- Opening ---

    def _open(self, serving: bool) -> None:
        self.run_id = self.store.fact_once("run_id", secrets.token_hex(6))
        self.pem = self.store.fact_once("certificate", identity.new_certificate(f"blocktrain {self.run}"))
        self.secret = self.store.fact_once("secret", secrets.token_hex(32))
        same = {"layout": self.layout.digest, "text": self.text.digest, "seed": str(self.config.seed)}
        for name, value in same.items():
            if (have := self.store.fact_once(name, value)) != value:
                raise CheckpointError(
                    f"{self.run}: the coordinator's state is of another {name} ({have[:16]}, now {value[:16]}); use a new run folder"
                )
        self._write_first_versions()
        self._reload()
        if not serving:  # somebody only looks, or withdraws a right, beside the process that serves
            return
        if self.machine.state.rules != (rules := rules_of(self.config)):
            self.change_rules(rules)
        self._sweep_files()

    def _write_first_versions(self) -> None:
        with self.store.transaction() as tx:
            have = {row["part"] for row in tx.rows(sa.select(store.versions.c.part).distinct())}
            started = bool(tx.rows(sa.select(store.snapshots.c.seq)))
        missing = [part for part in self.layout.entries if part not in have]
        manifests = [aggregate.first_version(self.store.blobs, self.layout, part) for part in missing]
        rules, model = rules_of(self.config), self.config.model
        first = new_state(
            self.layout.blocks, self.config.seed, rules, samples_per_step=self.config.train.batch_size, tokens_per_sample=model.positions, now=0.0
        )
        with self.store.transaction() as tx:
            for manifest in manifests:
                tx.put(store.versions, part=manifest["part"], version=0, seq=0, manifest=json.dumps(manifest))
            if not started:
                tx.put(store.snapshots, seq=0, state=to_json(first))

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

    # --- The journal ---

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
        text = _one_line(text)
        self._log.append((self.now(), text))
        self.say(text)

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

    # --- The door ---

    def hello(self, nonce: str) -> Hello:
        challenge = identity.challenge(self.secret, self.now())
        signature = identity.sign_as_coordinator(self.pem, hello_text(nonce, self.run_id, challenge))
        certificate = identity.certificate_of(self.pem)
        return Hello(protocol=PROTOCOL, run_id=self.run_id, challenge=challenge, certificate=certificate, signature=signature)

    def info(self) -> RunInfo:
        return RunInfo(
            protocol=PROTOCOL,
            run=self.run,
            run_id=self.run_id,
            config=self.config.model_dump(mode="json"),
            config_digest=self.config_digest,
            corpus=self.text.corpus,
            text=self.text.blob,
            text_digest=self.text.digest,
        )

    @property
    def config_digest(self) -> str:
        """Of what worker and coordinator must agree on."""
        plain = self.config.model_dump(mode="json", exclude={"data", "evaluate", "round", "limits"})
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    def token_named(self, name: str) -> str | None:
        """A fresh token of that name; None where one of that name exists already (only its hash is kept)."""
        token = identity.new_token()
        with self.store.transaction() as tx:
            if tx.rows(sa.select(store.tokens.c.name).where(store.tokens.c.name == name)):
                return None
            tx.put(store.tokens, name=name, hash=identity.hashed(token), revoked=False)
        return token

    def token_name(self, token: str) -> str | None:
        """Whose token this is; None for one that is unknown or revoked."""
        with self.store.transaction() as tx:
            found = tx.rows(sa.select(store.tokens).where(store.tokens.c.hash == identity.hashed(token), store.tokens.c.revoked.is_(False)))
        return found[0]["name"] if found else None

    def revoke_token(self, name: str) -> list[str]:
        """Withdraw a token and everyone who joined with it; returns their names."""
        with self.store.transaction() as tx:
            if not tx.execute(store.tokens.update().where(store.tokens.c.name == name).values(revoked=True)):
                raise ConfigError(f"token {name!r}: there is none of that name")
            workers = [row["worker"] for row in tx.rows(sa.select(store.sessions.c.worker).where(store.sessions.c.token == name))]
        for worker in workers:
            self.revoke(worker)
        return workers

    def revoke(self, worker: str) -> Answer:
        """Withdraw one worker's right to take part."""
        answer = self.record(lambda now: Revoke(now, worker))
        self._refused(worker, None, answer.reason)
        self.tick_soon()
        return answer

    def join(self, token: str, request: JoinRequest) -> JoinReply:
        """A process becomes a worker's voice. Raises Refused or ProtocolError."""
        name = self.token_name(token)
        if name is None:
            raise Refused(Answer("revoked", "token: unknown or revoked"))
        if request.protocol != PROTOCOL:
            raise ProtocolError(f"protocol: the worker speaks {request.protocol}, the coordinator {PROTOCOL}; install the same version")
        if request.run_id != self.run_id:
            raise ProtocolError(f"run_id: {request.run_id} is not this run, which is {self.run_id}")
        if request.config_digest != self.config_digest:
            raise ProtocolError(f"config_digest: {request.config_digest[:16]} here is {self.config_digest[:16]}; read the run's settings again")
        if not identity.is_challenge(self.secret, self.now(), request.challenge):
            raise ProtocolError("challenge: is not of the last minutes; say hello again")
        identity.check_worker(request.public_key, join_text(self.run_id, request.challenge, request.public_key, request.process), request.signature)
        worker, session = identity.worker_name(request.name, request.public_key), identity.new_token()
        with self.store.transaction() as tx:
            known = tx.rows(sa.select(store.sessions.c.public_key).where(store.sessions.c.worker == worker))
        if known and known[0]["public_key"] != request.public_key:  # eight digits of a digest can be met by trying keys
            raise Refused(Answer("forbidden", f"worker {worker} has another key; join under another name"))
        members = self.machine.state.workers
        if worker not in members and len(members) >= (most := self.config.limits.max_workers):
            with self._lock:  # whoever left, is gone or was revoked fills no place; their records are bounded too
                live = len(self.machine.figures(self.now()).live)
            if live >= most or len(members) >= 10 * most:
                raise Refused(Answer("wait", f"the run has {live} workers, limits.max_workers is reached", time_left_s=30.0))

        def also(tx: Transaction, answer: Answer) -> None:
            if not tx.rows(sa.select(store.tokens.c.name).where(store.tokens.c.name == name, store.tokens.c.revoked.is_(False))):
                raise Refused(Answer("revoked", "token: revoked"))  # in between
            if answer.kind == "ok":
                row = {"process": request.process, "hash": identity.hashed(session), "token": name, "public_key": request.public_key}
                tx.put(store.sessions, worker=worker, **row)

        crash.point("join.before_record")
        answer = self.record(lambda now: Join(now, worker, request.process, request.capacity, request.takeover), also)
        if answer.refused:
            raise Refused(answer)
        self._sessions.pop(self._secrets.pop(worker, ""), None)
        self.log(f"worker {worker} joined, it can hold {request.capacity} block{'s' * (request.capacity != 1)}")
        return JoinReply(worker=worker, session=session, reason=answer.reason, heartbeat_s=self.machine.state.rules.heartbeat_limit_s / 4)

    def knows(self, secret: str) -> bool:
        """Whether this is a session that was heard of before, so that nothing has to be looked up for it."""
        return identity.hashed(secret) in self._sessions

    def session(self, secret: str) -> Session:
        """Whose session this is. Raises Refused."""
        digest = identity.hashed(secret)
        found = self._sessions.get(digest)
        if found is None:
            with self.store.transaction() as tx:
                rows = tx.rows(sa.select(store.sessions).where(store.sessions.c.hash == digest))
            if not rows:
                raise Refused(Answer("revoked", "session: unknown, or another process of this worker has joined since"))
            found = self._sessions[digest] = Session(rows[0]["worker"], rows[0]["process"])
            self._sessions.pop(self._secrets.get(found.worker, ""), None)
            self._secrets[found.worker] = digest
        self._require_right(found.worker)
        return found

    def _require_right(self, worker: str) -> None:
        member = self.machine.state.workers.get(worker)
        if member and member.revoked:
            raise Refused(Answer("revoked", f"worker {worker} may not take part in this run any more"))

    # --- Work ---

    def beat(self, who: Session) -> Answer:
        """A worker is alive. Repeats within an eighth of the heartbeat limit are heard without a line in the journal."""
        with self._lock:
            member = self.machine.state.workers.get(who.worker)
            limit = self.machine.state.rules.heartbeat_limit_s
            recent = member and member.process == who.process and member.present and self.now() - member.seen_at < limit / 8
        return Answer("ok", "heard") if recent else self.record(lambda now: Beat(now, who.worker, who.process))

    def leave(self, who: Session) -> Answer:
        answer = self.record(lambda now: Leave(now, who.worker, who.process))
        self.log(answer.reason)
        return answer

    def ask(self, who: Session, ask: str) -> AskReply:
        """Work for a worker, with the files it needs."""
        crash.point("ask.before_record")
        answer = self.record(lambda now: Ask(now, who.worker, who.process, ask))
        crash.point("ask.after_record")
        work = self._work(self.machine.state.assignments[answer.key]) if answer.kind == "assigned" else None
        return AskReply(
            kind=answer.kind,
            reason=answer.reason,
            key=answer.key,
            time_left_s=answer.time_left_s if work else 0.0,
            retry_after_s=0.0 if work else answer.time_left_s,
            work=work,
        )

    def _work(self, assignment: Assignment) -> Work:
        first, stop = assignment.blocks[0], assignment.blocks[-1] + 1
        parts = [self._part_files(INTERFACE, assignment.interface)]
        if self.config.objective.input == "upstream":
            codec = self.config.outer.upstream_codec
            parts += [self._part_files(part_of(b), version, codec) for b, version in enumerate(assignment.upstream)]
        parts += [self._part_files(part_of(base.block), base.version) for base in assignment.bases]
        tokens = min(base.tokens for base in assignment.bases)
        return Work(
            key=assignment.key,
            first=first,
            stop=stop,
            steps=list(assignment.steps),
            schedule_step=tokens // self.config.tokens_per_step,
            parts=parts,
            codec=self.config.outer.up_codec,
        )

    def manifest(self, part: str, version: int) -> dict[str, Any]:
        """Of a version of a part; manifests never change."""
        found = self._manifests.get((part, version))
        if found is None:
            found = self.store.manifest(part, version)
            assert found is not None, f"{part} version {version} has no manifest"
            if len(self._manifests) > 10_000:
                self._manifests.clear()
            self._manifests[part, version] = found
        return found

    def _part_files(self, part: str, version: int, codec: str = "fp32") -> PartFiles:
        """How to get a version of a part; `codec` only for parts that are read and not trained."""
        manifest = self.manifest(part, version)
        if codec != "fp32":
            return PartFiles(part=part, version=version, full=self._coded(part, manifest, codec), codec=codec)  # type: ignore[arg-type]
        deltas = []
        for older in range(version, max(0, version - self._kept(part)), -1):
            if (delta := self.manifest(part, older)["delta"]) is None:
                break
            deltas.append(Delta(version=older, blob=_ref(delta)))
        return PartFiles(part=part, version=version, full=_ref(manifest["file"]), deltas=deltas[::-1])

    def _coded(self, part: str, manifest: dict[str, Any], codec: str) -> BlobRef:
        """A version encoded for whoever only reads it, made once and found again by a fact."""
        fact = f"coded {part} {manifest['version']} {codec}"
        known = self.store.fact(fact)
        if known is None:
            blob = aggregate.encoded_part(self.store.blobs, self.layout, part, manifest, codec)  # type: ignore[arg-type]
            known = self.store.fact_once(fact, json.dumps(vars(blob)))
        return _ref(json.loads(known))

    def give_back(self, who: Session, key: str, why: str) -> Answer:
        answer = self.record(lambda now: GiveBack(now, who.worker, who.process, key, why))
        self.log(f"worker {who.worker}: {answer.reason}")
        return answer

    # --- Updates ---

    @property
    def part_bytes(self) -> int:
        return int(self.config.limits.part_mb * (1 << 20))

    def begin(self, who: Session, request: BeginRequest) -> BeginReply:
        """Admit an upload, before any byte of it. Sizes are checked here; the disk must have room."""
        assignment = self._own(who, request.key)
        expected = self._update_size(assignment)
        if request.size != expected:
            raise ProtocolError(f"size: {request.size} bytes, this update has {expected} as {self.config.outer.up_codec}")
        self._require_room(request.size)
        answer = self.record(lambda now: Begin(now, who.worker, who.process, request.key))
        crash.point("begin.after_record")
        with self._alone_with(request.key):
            settled = self._own(who, request.key).answer is not None
            received = list(range(-(-expected // self.part_bytes))) if settled else self._received(request.key, request.sha256)
        return BeginReply(kind=answer.kind, reason=answer.reason, key=request.key, part_bytes=self.part_bytes, received=received)

    @contextmanager
    def _alone_with(self, key: str) -> Iterator[None]:
        """Nothing else touches the parts of this upload, so what the gate has seen is what will be averaged. Raises Refused where it is busy."""
        with self._lock:
            if key in self._busy:
                raise Refused(Answer("wait", f"assignment {key}: another request about its upload is being answered", key, 1.0))
            self._busy.add(key)
        try:
            yield
        finally:
            self._busy.discard(key)

    def _require_room(self, num_bytes: int) -> None:
        """Raises OSError where so many bytes more would fill the disk."""
        free = self.store.blobs.free_bytes()
        if free is not None and free - num_bytes < self.config.limits.free_disk_mb * (1 << 20):
            self._needed = num_bytes + int(self.config.limits.free_disk_mb * (1 << 20))
            problem = f"the coordinator's disk has {free >> 20} MiB left, {num_bytes >> 10} KiB of an update do not fit"
            self.pause("disk", problem)
            raise OSError(problem)

    def _own(self, who: Session, key: str) -> Assignment:
        """The assignment of that key, if it is this worker's. Raises Refused."""
        assignment = self.machine.state.assignments.get(key)
        if self._stale or assignment is None or (assignment.answer is None and assignment.upload is None):
            self._look()  # another coordinator may know more
            assignment = self.machine.state.assignments.get(key)
        if assignment is None:
            raise Refused(Answer("unknown", f"assignment {key} is not known, or was settled long ago", key))
        if assignment.worker != who.worker:
            raise Refused(Answer("forbidden", f"assignment {key} is not worker {who.worker}'s", key))
        return assignment

    def _update_size(self, assignment: Assignment) -> int:
        return encoded_size(self.layout.update_shapes(assignment.blocks[0], assignment.blocks[-1] + 1), self.config.outer.up_codec)

    def part_length(self, who: Session, key: str, index: int) -> int:
        """How long part `index` of an upload must be. Raises Refused where the upload was not admitted."""
        assignment = self._own(who, key)
        if assignment.answer is not None:
            raise Refused(assignment.answer)
        if assignment.upload is None:
            raise Refused(Answer("conflict", f"assignment {key}: begin the upload first", key))
        return self._part_size(assignment, index)

    def _part_size(self, assignment: Assignment, index: int) -> int:
        size = self._update_size(assignment)
        if not 0 <= index < -(-size // self.part_bytes):
            raise ProtocolError(f"part: {index} is not one of {-(-size // self.part_bytes)} parts")
        return min(self.part_bytes, size - index * self.part_bytes)

    def open_part(self, key: str, sha256: str, index: int) -> PartWriter:
        """Where a part's bytes go until its digest is known to be right; `sha256` is that of the whole update.

        Parts of another update under this key are dropped.
        """
        with self._alone_with(key):
            self._require_open(key)
            self._require_room(self._part_size(self.machine.state.assignments[key], index))
            self._received(key, sha256)
        return PartWriter(self, _part_name(key, sha256, index))

    def no_room(self, problem: str) -> None:
        """A part could not be written."""
        self._needed = min(self.part_bytes, encoded_size(self.layout.update_shapes(0, self.layout.blocks), self.config.outer.up_codec))
        self.pause("disk", f"an update could not be written: {problem}")

    def keep_part(self, key: str, writer: PartWriter) -> None:
        """A part is here whole. Raises Refused where its assignment has been settled meanwhile."""
        try:
            with self._alone_with(key):
                self._require_open(key)
                writer.keep()
        except Refused:
            writer.discard()
            raise

    def _require_open(self, key: str) -> None:
        """Raises Refused where an assignment has its answer."""
        assignment = self.machine.state.assignments.get(key)
        if self._stale or assignment is None or (assignment.answer is None and assignment.upload is None):
            self._look()  # another coordinator may know more
            assignment = self.machine.state.assignments.get(key)
        if assignment is None:
            raise Refused(Answer("unknown", f"assignment {key} is not known, or was settled long ago", key))
        if assignment.answer is not None:
            raise Refused(assignment.answer)

    def part_booked_on(self, key: str) -> str:
        """The part of the model on which an upload's bytes are booked: the first block of its span."""
        assignment = self.machine.state.assignments.get(key)
        return part_of(assignment.blocks[0]) if assignment else ""

    def _received(self, key: str, sha256: str) -> list[int]:
        """Parts of this very update that are here; those of another one under the same key are dropped."""
        names = self.store.blobs.names(f"updates/{key}/")
        mine = [name for name in names if name.startswith(f"updates/{key}/{sha256}/")]
        if others := set(names) - set(mine):
            self._look()  # another coordinator may have accepted them
            self._require_open(key)
            self.store.blobs.delete(others)
        return sorted(int(name.rpartition("/")[2]) for name in mine)

    def commit(self, who: Session, request: CommitRequest) -> CommitReply:
        """An update is here whole: the gate, then the rules. A repeat gets the first answer again."""
        with self._alone_with(request.key):
            return self._commit(who, request)

    def _commit(self, who: Session, request: CommitRequest) -> CommitReply:
        assignment = self._own(who, request.key)
        if assignment.answer is not None:
            return _commit_reply(assignment.answer)
        expected = self._update_size(assignment)
        if request.size != expected:
            raise ProtocolError(f"size: {request.size} bytes, this update has {expected} as {self.config.outer.up_codec}")
        names = [_part_name(request.key, request.sha256, i) for i in range(-(-expected // self.part_bytes))]
        source = self._whole(request, names)
        if source is None:
            return CommitReply(
                kind="resend", reason="parts are missing, or the digest of what is here is another: send again what is missing", key=request.key
            )
        crash.point("commit.before_gate")
        norms, fault = self._gate(assignment, source, request.sha256)
        self._settle(names)
        crash.point("commit.before_record")

        def also(tx: Transaction, answer: Answer) -> None:
            if answer.kind in ("unknown", "forbidden", "conflict", "revoked"):
                return
            if tx.rows(sa.select(store.updates.c.key).where(store.updates.c.key == request.key)):
                return  # another coordinator has taken an update under this key: the first answer stands, with its bytes
            samples = request.num_samples
            tx.put(
                store.updates,
                key=request.key,
                worker=who.worker,
                blocks=json.dumps(assignment.blocks),
                codec=self.config.outer.up_codec,
                size=request.size,
                parts=json.dumps(source.parts),
                sha256=request.sha256,
                num_samples=int(samples) if answer.accepted else 0,
                taken_by=json.dumps([block for block, _ in answer.ages]),
                steps=json.dumps(self._steps_of(assignment, samples) if answer.accepted else []),
                norm=max(norms.values(), default=0.0),
                metrics=json.dumps({**request.metrics.model_dump(), "norms": norms}),
                kind=answer.kind,
                reason=answer.reason,
                at=self.now(),
            )

        answer = self.record(lambda now: Push(now, who.worker, who.process, request.key, request.num_samples, fault), also)
        crash.point("commit.after_record")
        if answer.accepted:
            self._norms[request.key] = norms
        else:
            self._refused(who.worker, assignment.blocks[0], answer.reason)
            self.store.blobs.delete(names)
        self.tick_soon()
        return _commit_reply(answer)

    def _steps_of(self, assignment: Assignment, num_samples: float) -> Ranges:
        """The part of a lease that an update of so many samples was trained on."""
        return without(assignment.steps, beyond(assignment.steps, -(-int(num_samples) // self.config.train.batch_size)))

    def _settle(self, names: Sequence[str]) -> None:
        """What is about to be promised outlives a power cut."""
        try:
            self.store.blobs.settle(names)
        except OSError as error:
            self.no_room(str(error))
            raise

    def _whole(self, request: CommitRequest, names: Sequence[str]) -> BlobSource | None:
        """The upload as one run of bytes, or None where a part is missing or the digest is another; such parts are dropped."""
        sizes = [self.store.blobs.size(name) for name in names]
        if None not in sizes and sum(size or 0 for size in sizes) == request.size:
            source = BlobSource(self.store.blobs, [(name, size or 0) for name, size in zip(names, sizes, strict=True)])
            if self._digest(source) == request.sha256:
                return source
            self.store.blobs.delete(names)
        return None

    def _gate(self, assignment: Assignment, source: BlobSource, sha256: str) -> tuple[dict[str, float], str]:
        """(norm of each part, what is wrong with the update)."""
        first, stop = assignment.blocks[0], assignment.blocks[-1] + 1
        try:
            norms = aggregate.inspect(source, self.layout, first, stop, self.config.outer.up_codec)
        except ProtocolError as error:
            return {}, str(error)
        pending = {update.key for b in assignment.blocks for update in self.machine.state.blocks[b].pending}
        with self.store.transaction() as tx:
            same = store.updates.c.sha256 == sha256
            copies = tx.rows(
                sa.select(store.updates.c.key).where(same, store.updates.c.kind.in_(["fresh", "late"]), store.updates.c.key != assignment.key)
            )
        if copies and any(norms.values()):  # whoever's rate is 0 moves nothing, and honestly so
            return norms, f"its bytes are those of update {copies[0]['key']}: copied or replayed"
        rule = NormRule(self.config.outer.norm_limit, self.config.outer.norm_beyond)
        return norms, aggregate.norm_fault(norms, self._norms_of(pending), rule)

    def _norms_of(self, keys: set[str]) -> list[dict[str, float]]:
        """Norms of accepted updates; most were measured by this process."""
        if missing := keys - self._norms.keys():
            with self.store.transaction() as tx:
                rows = tx.rows(sa.select(store.updates.c.key, store.updates.c.metrics).where(store.updates.c.key.in_(missing)))
            self._norms |= {row["key"]: json.loads(row["metrics"])["norms"] for row in rows}
        return [self._norms[key] for key in keys if key in self._norms]

    def _refused(self, worker: str, block: int | None, reason: str) -> None:
        self.log(f"worker {worker}: refused: {reason}")
        try:
            with self.store.transaction() as tx:
                tx.put(store.notes, at=self.now(), kind="refusal", worker=worker, block=block, text=_one_line(reason))
        except OSError as error:
            self.pause("journal", str(error))

    # --- What is due ---

    def tick_soon(self) -> None:
        """The host is told that something may be due."""
        self.changed()

    def wake_at(self) -> float | None:
        """When something may be due with no event before; what could not be done is tried again after a second."""
        return self.now() + 1.0 if self._again else self.machine.wake_at()

    def tick(self) -> int:
        """End what rounds are due to end; returns how many new versions that made."""
        made = 0
        self._look_for_room()
        for _ in range(2 * self.layout.blocks):
            self._again = False
            due = self._due()
            for decision in due:
                made += self._carry_out(decision)
            if not due or self._again:
                break
        if self.clock() - self._swept_at > SWEEP_S:
            self._sweep_uploads()
        if self.clock() - self._versions_swept_at > SWEEP_VERSIONS_S:
            self._sweep_versions()
        return made

    def _look_for_room(self) -> None:
        free = self.store.blobs.free_bytes() if "disk" in self._problems else None
        if free is not None and free >= self._needed:
            self.resume("disk")

    def _due(self) -> list[Decision]:
        with self._lock:
            caught_up, self._caught_up = self._caught_up, False
            if not caught_up or self._stale:  # what other processes append in the meantime, the next tick or event sees
                with self.store.transaction() as tx:
                    self._catch_up(tx)
                    self._flush_bytes(tx, FLUSH_S)
            return self.machine.due(self.now())

    def _carry_out(self, decision: Decision) -> int:
        """1 where a new version was made."""
        try:
            if decision.action == "close":
                made = self._close(decision)
            else:
                made = 0
                self.log(self.record(decision.event).reason)
        except (OSError, BlockTrainError) as error:  # one block's trouble is not to keep the others from ending theirs
            self._again = True
            self.pause(f"block {decision.block}", f"block {decision.block} cannot end its round: {error}")
            return 0
        self.resume(f"block {decision.block}")
        return made

    def _close(self, decision: Decision) -> int:
        """Write the block's next version, and the interface's, then record both with the event that makes them so."""
        with self._closing:
            state, interface = self.machine.state, self.machine.state.interface if self.layout.interface_travels else -1
            keys = [share.key for share in decision.shares]
            with self.store.transaction() as tx:
                rows = {row["key"]: row for row in tx.rows(sa.select(store.updates).where(store.updates.c.key.in_(keys)))}
            if state.blocks[decision.block].version != decision.version or set(rows) != set(keys):
                self._again = True
                return 0
            manifests = self._next_manifests(decision, rows, interface)
            crash.point("close.before_record")

            def also(tx: Transaction, answer: Answer) -> None:
                for manifest in manifests if answer.kind == "ok" else ():
                    tx.put(store.versions, part=manifest["part"], version=manifest["version"], seq=self.seq + 1, manifest=json.dumps(manifest))

            answer = self.record(
                lambda now: Close(now, decision.block, decision.version, tuple(keys), decision.reason, interface=interface),
                also,
            )
            crash.point("close.after_record")
            if answer.kind != "ok":
                self._again = True
                return 0
            self.log(answer.reason)
            for key in rows:
                self._norms.pop(key, None)
            self._drop_old(manifests, rows)
        self.closed()
        self.changed()
        return 1

    def _next_manifests(self, decision: Decision, rows: Mapping[str, Mapping[str, Any]], interface: int) -> list[dict[str, Any]]:
        part, outer = part_of(decision.block), self.config.outer
        arrived = {key: there for key, row in rows.items() if (there := self._arrived(row))}
        damaged = {share.key for share in decision.shares if share.key not in arrived}
        shares = [share for share in decision.shares if share.key in arrived]
        crash.point("close.before_write")

        def step(part: str, before: dict[str, Any], rule: OuterRule) -> dict[str, Any]:
            self._require_sound(before)
            norms = NormRule(outer.norm_limit, outer.norm_beyond)
            found = aggregate.contributions(part, decision.block, self.layout, shares, arrived, norms)
            blobs, fresh = self.store.blobs, decision.fresh
            return aggregate.next_version(aggregate.Step(blobs, self.layout, part, decision.block, before, found, rule, fresh, outer.down_codec))

        moved = step(part, self.manifest(part, decision.version), OuterRule(outer.optimizer, outer.lr, outer.momentum))
        manifests = [moved | self._story(decision, rows) | {"damaged": sorted(damaged)}]
        crash.point("close.after_block")
        if interface >= 0:
            manifests.append(step(INTERFACE, self.manifest(INTERFACE, interface), OuterRule()) | {"block": decision.block})
            crash.point("close.after_interface")
        return manifests

    def _story(self, decision: Decision, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What a block's manifest tells beside its files."""
        shares = [{"key": s.key, "worker": s.worker, "age": s.age, "weight": s.weight, "sha256": rows[s.key]["sha256"]} for s in decision.shares]
        heard = [(rows[s.key]["num_samples"], json.loads(rows[s.key]["metrics"]).get("ce")) for s in decision.shares]
        known = [(n, ce) for n, ce in heard if ce is not None and n]
        ce = sum(n * ce for n, ce in known) / sum(n for n, _ in known) if known else None
        block = self.machine.state.blocks[decision.block]
        tokens = block.tokens + sum(u.tokens for u in block.pending if u.key in rows)
        share = decision.reported / decision.assigned if decision.assigned else None
        return {
            "block": decision.block,
            "shares": shares,
            "reason": decision.reason,
            "ce": ce,
            "tokens": tokens,
            "fresh": decision.fresh,
            "participation": share,
        }

    def _arrived(self, row: Mapping[str, Any]) -> aggregate.Arrived | None:
        """An update as it was accepted; None, with a word in the log, where its bytes have been lost or damaged since."""
        blocks = json.loads(row["blocks"])
        source = BlobSource(self.store.blobs, [(name, size) for name, size in json.loads(row["parts"])])
        if self._digest(source) != row["sha256"]:
            lost = "its stored bytes are not those that were accepted; it is left out of the mean, its samples stay counted"
            self._refused(row["worker"], blocks[0], f"update {row['key']}: {lost}")
            return None
        norms = json.loads(row["metrics"])["norms"]
        return aggregate.Arrived(row["key"], blocks[0], blocks[-1] + 1, source, row["sha256"], norms)

    def _digest(self, source: BlobSource) -> str:
        """sha256 of what can be read of it."""
        digest = hashlib.sha256()
        try:
            for name, size in source.parts:
                for chunk in self.store.blobs.chunks(name, 0, size):
                    digest.update(chunk)
        except FileNotFoundError:
            return ""
        return digest.hexdigest()

    # --- Damage ---

    def _require_sound(self, manifest: Mapping[str, Any]) -> None:
        """Nothing is built upon a damaged version. Raises OSError naming the file."""
        for kind in ("file", "residual", "momentum"):
            blob = manifest[kind]
            if blob and self.store.blobs.digest(blob["name"], blob["size"]) != blob["sha256"]:
                raise OSError(self._damage(blob["name"]))

    def _damage(self, name: str) -> str:
        digest = _digest_in(name)
        where = self.store.blobs.path(name) or name
        return f"{where} is damaged: put back a file whose sha256 begins with {digest} (the run's checkpoints hold the newest versions)"

    def damage_of(self, name: str) -> str:
        """Why a blob cannot be served: its bytes are not those of its name. Looked at again only where its file has changed; empty if all is well.

        Raises FileNotFoundError where it has been dropped meanwhile, which is no damage.
        """
        path = self.store.blobs.path(name)
        seen = (path.stat().st_size, path.stat().st_mtime_ns) if path else self.store.blobs.size(name)
        if self._sound.get(name) == seen:
            return ""
        if not self.store.blobs.digest(name, self.store.blobs.size(name) or 0).startswith(_digest_in(name)):
            if self.store.blobs.size(name) is None:
                raise FileNotFoundError(name)
            self.pause(f"file {name}", problem := self._damage(name))
            return problem
        if len(self._sound) > 10_000:
            self._sound.clear()
        self._sound[name] = seen
        self.resume(f"file {name}")
        return ""

    # --- Old files ---

    def _drop_old(self, manifests: Sequence[Mapping[str, Any]], rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Files of versions that nobody needs any more, and of updates that are counted in all their blocks."""
        gone: list[str] = []
        if not self.config.limits.keep_updates:
            pending = {update.key for block in self.machine.state.blocks for update in block.pending}
            gone += [name for key, row in rows.items() if key not in pending for name, _ in json.loads(row["parts"])]
        for manifest in manifests:
            gone += self._files_before(manifest["part"], manifest["version"] - self._kept(manifest["part"]))
        try:
            self.store.blobs.delete(gone)
        except OSError as error:
            self.log(f"old files could not be removed: {error}")

    def _kept(self, part: str) -> int:
        """Versions of a part that stay in the store: the interface moves with each block's close."""
        return self.config.limits.keep_versions * (self.layout.blocks if part == INTERFACE else 1)

    def _files_before(self, part: str, oldest: int) -> list[str]:
        """Files that only versions at or before `oldest` name (manifests stay)."""
        if oldest < 0:
            return []
        kept = {name for version in range(oldest + 1, oldest + self._kept(part) + 1) for name in _files(self.manifest(part, version))}
        names = set(_files(self.manifest(part, oldest)))
        for codec in ("bf16", "int8"):
            if known := self.store.fact(f"coded {part} {oldest} {codec}"):
                names.add(json.loads(known)["name"])
        return sorted(names - kept)

    def _sweep_files(self) -> None:
        """Files that a crash left: scratch, and parts of uploads that nobody will finish."""
        self.store.blobs.delete(self.store.blobs.names("scratch/"))
        self._sweep_uploads()

    def _sweep_uploads(self) -> None:
        """Parts of uploads that nobody will finish."""
        self._swept_at = self.clock()
        if self.config.limits.keep_updates:
            return
        blobs = self.store.blobs
        there = blobs.names("updates/")
        with self._lock, self.store.transaction() as tx:
            self._catch_up(tx)
            state = self.machine.state
            needed = {update.key for block in state.blocks for update in block.pending}
            needed |= {key for key, assignment in state.assignments.items() if assignment.answer is None}
        blobs.delete(name for name in there if name.split("/")[1] not in needed)

    def _sweep_versions(self) -> None:
        """Files of closes that were lost to another coordinator, or cut short before they looked after their own."""
        self._versions_swept_at = self.clock()
        there = set(self.store.blobs.names("versions/"))
        with self.store.transaction() as tx:
            newest = tx.rows(sa.select(store.versions.c.part, sa.func.max(store.versions.c.version).label("version")).group_by(store.versions.c.part))
        for row in newest:
            part, keep = row["part"], self.config.limits.keep_versions * (self.layout.blocks if row["part"] == INTERFACE else 1)
            for version in range(max(0, row["version"] - keep), row["version"] + 1):
                there.difference_update(_files(self.manifest(part, version)))
                for codec in ("bf16", "int8"):
                    if known := self.store.fact(f"coded {part} {version} {codec}"):
                        there.discard(json.loads(known)["name"])
        self.store.blobs.delete(there & self._orphans)
        self._orphans = there - self._orphans

    # --- Changes from outside ---

    def change_rules(self, rules: Rules) -> None:
        answer = self.record(lambda now: ChangeRules(now, rules))
        self.log(f"rules changed: {answer.reason}")

    def take_up(self, config: RunConfig) -> None:
        """New settings of a live run: rounds and limits at once, anything that decides the training is refused. Raises ConfigError."""
        check_config(config)
        fixed = {"data", "evaluate", "round", "limits"}
        before, now = self.config.model_dump(exclude=fixed), config.model_dump(exclude=fixed)
        if before != now:
            wrong = next(name for name in before if before[name] != now[name])
            raise ConfigError(
                f"[{wrong}]: differs from what this run is trained with and is not taken up; rounds and limits may change in a live run"
            )
        rules = rules_of(config)
        self.config = config
        if rules != self.machine.state.rules:
            self.change_rules(rules)

    # --- Figures ---

    @contextmanager
    def reading(self) -> Iterator[State]:
        """The state, with no event in between."""
        with self._lock:
            yield self.machine.state

    @property
    def finished(self) -> bool:
        """Whether every block has taken all its steps."""
        state = self.machine.state
        target = state.rules.target_steps * state.samples_per_step * state.tokens_per_sample
        at_rest = all(block.round is None and not block.pending for block in state.blocks)
        # Updates whose samples fill no whole number of steps take more steps than they count tokens.
        return at_rest and (all(block.tokens >= target for block in state.blocks) or self.machine.finished)

    def curves(self) -> dict[str, list[tuple[int, int, float | None, float | None]]]:
        """Of each block: (version, tokens, CE, participation) of every version; only what is new since the last look is read."""
        new = sa.select(store.versions.c.seq, store.versions.c.manifest).where(store.versions.c.part != INTERFACE, store.versions.c.version > 0)
        with self._curves_lock:
            with self.store.transaction() as tx:
                rows = tx.rows(new.where(store.versions.c.seq > self._curves_seq).order_by(store.versions.c.seq))
            for row in rows:
                told = json.loads(row["manifest"])
                point = told["version"], told["tokens"], told.get("ce"), told.get("participation")
                self._curves.setdefault(told["part"], []).append(point)
                self._curves_seq = row["seq"]
            return {part: list(points) for part, points in self._curves.items()}

    def logged(self) -> list[tuple[float, str]]:
        return list(self._log)

    def counted_bytes(self) -> list[Mapping[str, Any]]:
        """The ledger: rows of worker, part, kind, direction, bytes."""
        with self._lock, self.store.transaction() as tx:
            self._flush_bytes(tx)
            return tx.rows(sa.select(store.ledger))


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _commit_reply(answer: Answer) -> CommitReply:
    return CommitReply(kind=answer.kind, reason=answer.reason, key=answer.key, ages=list(answer.ages))


def _part_name(key: str, sha256: str, index: int) -> str:
    return f"updates/{key}/{sha256}/{index:06d}"


def _digest_in(name: str) -> str:
    """The digits of its content's sha256 that a blob's name ends in."""
    return name.rpartition("/")[2].partition(".")[0].rpartition("-")[2]


def _ref(blob: Mapping[str, Any]) -> BlobRef:
    return BlobRef(name=blob["name"], size=blob["size"], sha256=blob["sha256"])


def _files(manifest: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("file", "delta", "residual", "momentum"):
        if manifest[kind]:
            yield manifest[kind]["name"]
