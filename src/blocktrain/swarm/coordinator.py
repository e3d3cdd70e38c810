"""The coordinator: who may take part, what they are given, what arrives, and the closing of rounds. It knows no network and no wall clock.

Every decision is the rules' (rounds.py). What this file adds is bytes: the files of an assignment, the gate for what comes back, the next
version. Two hosts use it: the HTTP service (server.py) and the simulator (simulator.py).

It stands on two rooms of its own: `Journal` (journal.py) has the state and the time, `Versions` (versions.py) the files and their manifests. So a
coordinator may be killed anywhere, and several may share a run.

`tick()` does what is due: ends rounds, writes versions, looks after old files. The host calls it after events and at `wake_at()`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import sqlalchemy as sa

from blocktrain.codecs import encoded_size
from blocktrain.config import RunConfig
from blocktrain.errors import BlockTrainError, CheckpointError, ConfigError, ProtocolError
from blocktrain.swarm import aggregate, crash, identity, store
from blocktrain.swarm.journal import FLUSH_S, one_line
from blocktrain.swarm.leases import Ranges, beyond, without
from blocktrain.swarm.parts import INTERFACE, Layout
from blocktrain.swarm.plain import to_json
from blocktrain.swarm.protocol import (
    PROTOCOL,
    AskReply,
    BeginReply,
    BeginRequest,
    BlobRef,
    CommitReply,
    CommitRequest,
    Hello,
    JoinReply,
    JoinRequest,
    RunInfo,
    Work,
    hello_text,
    join_text,
    part_of,
)
from blocktrain.swarm.rounds import new_state
from blocktrain.swarm.rules import Rules
from blocktrain.swarm.state import (
    Answer,
    Ask,
    Assignment,
    Beat,
    Begin,
    ChangeRules,
    Close,
    Decision,
    GiveBack,
    Join,
    Leave,
    Push,
    Revoke,
)
from blocktrain.swarm.store import BlobSource, Store, Transaction
from blocktrain.swarm.versions import Versions
from blocktrain.training.checkpoint import FREE, settings_changed, settings_of, vote_rests
from blocktrain.training.outer import NormRule, OuterRule


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


class Coordinator(Versions):
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
        super().__init__(config, layout, store, clock, say)
        self.run, self.text = run, text
        self._closing = threading.Lock()
        self._sessions: dict[str, Session] = {}  # by the hash of their secret
        self._secrets: dict[str, str] = {}  # worker -> that hash
        self._busy: set[str] = set()  # keys of uploads of which a request is being answered
        self._again = False  # something that is due could not be done
        self._norms: dict[str, dict[str, float]] = {}  # of pending updates, by part
        self._needed = 0  # bytes of disk that an upload asked for in vain
        self.closed: Callable[[], None] = lambda: None  # told after every new version
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
        train, model, rules = self.config.train, self.config.model, rules_of(self.config)
        samples, tokens = train.batch_size, model.positions
        first = new_state(self.layout.blocks, self.config.seed, rules, samples_per_step=samples, tokens_per_sample=tokens, now=0.0)
        self._write_first_versions(to_json(first))
        self._reload()
        if not serving:  # somebody only looks, or withdraws a right, beside the process that serves
            return
        self._keep_settings()
        if self.machine.state.rules != rules:
            self.change_rules(rules)
        self._sweep_files()

    def _keep_settings(self) -> None:
        """Remember what the run is trained with. Raises CheckpointError where a restart would change what makes its history or its shape."""
        kept, now = self.store.fact("settings"), self.config.model_dump_json()
        state = self.machine.state  # whose steps are those of its first settings, also where others were asked for
        steps = [block.tokens // (state.samples_per_step * state.tokens_per_sample) for block in state.blocks]
        if kept is not None:
            before = settings_of(kept, f"{self.run}: state.db")
            changes = settings_changed(before, self.config)
            if fixed := [change for change in changes if change.partition(":")[0] not in FREE]:
                raise CheckpointError(f"{self.run}: cannot go on from step {min(steps)} with {fixed[0]}; use a new run folder for it")
            if before.train.steps > self.config.train.steps < max(steps):
                raise CheckpointError(f"{self.run}: has {max(steps)} steps already, train.steps = {self.config.train.steps} is fewer")
            for change in changes:
                self.log(f"since step {min(steps)}: {change}")
            for sentence in dict.fromkeys(filter(None, (vote_rests(before, self.config, step) for step in steps))):
                self.log(sentence)
        if kept != now:
            with self.store.transaction() as tx:
                tx.put(store.facts, name="settings", value=now)

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

    @cached_property
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
            found = Session(rows[0]["worker"], rows[0]["process"])
            self._sessions.pop(self._secrets.get(found.worker, ""), None)  # it may be this one: two requests may come at once
            self._sessions[digest], self._secrets[found.worker] = found, digest
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

    def ask(self, who: Session, ask: str, config_digest: str | None = None) -> AskReply:
        """Work for a worker, with the files it needs; none for one that has read other settings than the run has now."""
        if config_digest is not None and config_digest != self.config_digest:
            return AskReply(kind="unknown", reason="the run's settings have changed; the worker reads them again")
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
        schedule_step = min(base.tokens for base in assignment.bases) // self.config.tokens_per_step
        votes = self.config.votes_at(schedule_step)
        parts = [self._part_files(INTERFACE, assignment.interface)]
        codec = self.config.outer.upstream_codec
        if self.config.objective.input == "upstream" or votes:
            parts += [self._part_files(part_of(b), version, codec) for b, version in enumerate(assignment.upstream)]
        if votes:
            parts += [self._part_files(part_of(b), version, codec) for b, version in enumerate(assignment.downstream, stop)]
        parts += [self._part_files(part_of(base.block), base.version) for base in assignment.bases]
        return Work(
            key=assignment.key,
            first=first,
            stop=stop,
            steps=list(assignment.steps),
            schedule_step=schedule_step,
            parts=parts,
            codec=self.config.outer.up_codec,
        )

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
                tx.put(store.notes, at=self.now(), kind="refusal", worker=worker, block=block, text=one_line(reason))
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
        self._sweep_if_due()
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
            blobs, ages = self.store.blobs, {share.key: share.age for share in decision.shares}
            return aggregate.next_version(aggregate.Step(blobs, self.layout, part, decision.block, before, found, rule, ages, outer.down_codec))

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

    @property
    def finished(self) -> bool:
        """Whether every block has taken all its steps."""
        state = self.machine.state
        target = state.rules.target_steps * state.samples_per_step * state.tokens_per_sample
        at_rest = all(block.round is None and not block.pending for block in state.blocks)
        # Updates whose samples fill no whole number of steps take more steps than they count tokens.
        return at_rest and (all(block.tokens >= target for block in state.blocks) or self.machine.finished)


def _commit_reply(answer: Answer) -> CommitReply:
    return CommitReply(kind=answer.kind, reason=answer.reason, key=answer.key, ages=list(answer.ages))


def _part_name(key: str, sha256: str, index: int) -> str:
    return f"updates/{key}/{sha256}/{index:06d}"
