"""A worker's way to its coordinator inside one process, with the delays that a network would have: the simulator's `Link`.

A request travels for as long as its worker's wire says, then calls the same method of the same `Coordinator` that the HTTP service calls, and its
reply travels back. What is not granted is raised as over HTTP (replies.py), and bytes are booked on the same accounts, bodies exactly and headers by
two constants. A wire that is cut delivers nothing any more: that is how a worker vanishes without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from blocktrain.errors import BlockTrainError
from blocktrain.streams import Source
from blocktrain.swarm import identity
from blocktrain.swarm.coordinator import Coordinator, Refused, Session
from blocktrain.swarm.protocol import (
    PROTOCOL,
    Answer,
    AskReply,
    AskRequest,
    BeginReply,
    BeginRequest,
    BlobRef,
    CommitReply,
    CommitRequest,
    GiveBackRequest,
    Hello,
    JoinReply,
    JoinRequest,
    Message,
    RunInfo,
    join_text,
)
from blocktrain.swarm.replies import ASK_WAIT_S, Again, answered, find_blob, given_back, granted, heard, refusal
from blocktrain.swarm.worker import Told, WorkerStopped

T = TypeVar("T")
HEADERS_UP, HEADERS_DOWN = 230, 140  # bytes of a request and of a reply beside their bodies, as HTTP/1.1 has them here
PAUSE_S = 1.0  # before a request is repeated


@dataclass(frozen=True)
class Wire:
    """What lies between one worker and the coordinator."""

    latency_s: float = 0.0  # one way
    up_bytes_s: float = float("inf")  # of files; messages take their latency
    down_bytes_s: float = float("inf")
    jitter: float = 0.0  # sigma of the log-normal factor on each transfer: the share of a line that others leave free


class Bell:
    """Rings for everyone who waits for it at that moment."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def ring(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Until it rings, or so many seconds have passed."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, seconds)
        finally:
            self._waiting.pop(future, None)


class SimLink:
    """One process of one worker at a coordinator in this process. `closed` rings when a block has a new version."""

    away_s = 0.0

    def __init__(
        self,
        coordinator: Coordinator,
        token: str,
        name: str,
        key: identity.WorkerKey,
        *,
        process: str,
        wire: Wire,
        dice: random.Random,
        closed: Bell,
        say: Callable[[str], None] = lambda _: None,
        told: Callable[[str], None] = lambda _: None,  # gets the kind of each refusal of an update
    ) -> None:
        self.coordinator, self.token, self.name, self.key, self.process = coordinator, token, name, key, process
        self.wire, self.dice, self.closed, self.say, self.told = wire, dice, closed, say, told
        self.worker = ""
        self._secret, self._digest = "", ""
        self._cut = False

    def cut(self) -> None:
        """From now on nothing gets through, in either direction."""
        self._cut = True

    # --- Joining ---

    async def info(self) -> RunInfo:
        await self._challenge()
        info = await self._call(None, self._run_info)
        self._digest = info.config_digest
        return info

    def _run_info(self) -> RunInfo:
        if self.coordinator.token_name(self.token) is None:
            raise Refused(Answer(kind="revoked", reason="token: unknown or revoked"))
        return self.coordinator.info()

    async def _challenge(self) -> str:
        """Without certificate and signature: whom one talks to is not in question here, and their lengths would be left to chance."""
        coordinator = self.coordinator

        def hello() -> Hello:
            challenge = identity.challenge(coordinator.secret, coordinator.now())
            return Hello(protocol=PROTOCOL, run_id=coordinator.run_id, challenge=challenge, certificate="", signature="")

        return (await self._call(None, hello)).challenge

    async def join(self, capacity: int, takeover: bool) -> JoinReply:
        challenge, run_id = await self._challenge(), self.coordinator.run_id
        signature = self.key.sign(join_text(run_id, challenge, self.key.public, self.process))
        request = JoinRequest(
            protocol=PROTOCOL,
            run_id=run_id,
            config_digest=self._digest,
            name=self.name,
            public_key=self.key.public,
            process=self.process,
            challenge=challenge,
            signature=signature,
            capacity=capacity,
            takeover=takeover,
        )
        reply = await self._call(request, lambda: self.coordinator.join(self.token, request))
        self._secret, self.worker = reply.session, reply.worker
        return reply

    # --- Requests ---

    async def beat(self) -> None:
        await self._call(None, lambda: answered(self.coordinator.beat(self._session())))

    async def ask(self, ask: str) -> AskReply:
        """Waits at the coordinator for a round to end, as the HTTP service does."""
        request = AskRequest(ask=ask, config_digest=self._digest or None)
        await self._up(self.wire.latency_s)
        reply = self._at_coordinator(lambda: self.coordinator.ask(self._session(), ask, request.config_digest))
        if reply.kind == "wait":
            await self.closed.wait(min(ASK_WAIT_S, reply.retry_after_s))
            reply = self._at_coordinator(lambda: self.coordinator.ask(self._session(), ask, request.config_digest))
        await self._down(request, reply)
        return self._at_coordinator(lambda: granted(reply))

    async def begin(self, request: BeginRequest) -> BeginReply:
        return await self._update(request, lambda: granted(self.coordinator.begin(self._session(), request)))

    async def commit(self, request: CommitRequest) -> CommitReply:
        return await self._update(request, lambda: granted(self.coordinator.commit(self._session(), request)))

    async def _update(self, request: Message, act: Callable[[], T]) -> T:
        try:
            return await self._call(request, act)
        except Told as error:
            self.told(error.kind)
            raise

    async def give_back(self, key: str, why: str) -> None:
        await self._call(GiveBackRequest(key=key, why=why), lambda: given_back(self.coordinator.give_back(self._session(), key, why), key))

    async def leave(self) -> None:
        await self._call(None, lambda: answered(self.coordinator.leave(self._session())))

    def hurry(self) -> None:
        """A simulated coordinator is never away."""

    async def close(self) -> None:
        """Nothing is held open."""

    def _session(self) -> Session:
        return self.coordinator.session(self._secret)

    # --- Files ---

    async def put_part(self, key: str, sha256: str, index: int, source: Source, start: int, stop: int) -> None:
        await self._up(self.wire.latency_s + (stop - start) / self.wire.up_bytes_s * self._factor())

        def arrive() -> Answer:
            session = self._session()
            length = self.coordinator.part_length(session, key, index)
            assert length == stop - start, "the worker cuts parts as the coordinator said"
            self.coordinator.beat(session)
            writer = self.coordinator.open_part(key, sha256, index)
            writer.write(bytes(source.read(start, stop)))
            self.coordinator.keep_part(key, writer)
            return Answer(kind="ok", reason=f"part {index} is here", key=key)

        part = self.coordinator.part_booked_on(key)
        self.coordinator.count(self.worker, part, "updates", "up", HEADERS_UP + stop - start)
        self.coordinator.count(self.worker, part, "updates", "down", HEADERS_DOWN)
        self._at_coordinator(arrive)
        await self._sleep(self.wire.latency_s)

    async def fetch(self, blob: BlobRef, target: Path | None) -> None:
        """A file; without a target only its time and its bytes."""
        await self._up(self.wire.latency_s)
        size, kind, part = self._at_coordinator(lambda: (self._session(), find_blob(self.coordinator, blob.name))[1])
        self.coordinator.count(self.worker, part, kind, "up", HEADERS_UP)
        self.coordinator.count(self.worker, part, kind, "down", HEADERS_DOWN + size)
        chunks = list(self.coordinator.store.blobs.chunks(blob.name, 0, size)) if target else []
        await self._sleep(self.wire.latency_s + size / self.wire.down_bytes_s * self._factor())
        if target:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(b"".join(chunks))

    # --- The wire ---

    def _factor(self) -> float:
        return self.dice.lognormvariate(0.0, self.wire.jitter) if self.wire.jitter else 1.0

    async def _call(self, request: Message | None, act: Callable[[], T]) -> T:
        """A request, repeated for as long as the coordinator says that it may be."""
        while True:
            await self._up(self.wire.latency_s)
            try:
                reply = self._at_coordinator(act)
            except Again as error:
                await self._sleep(error.after_s or PAUSE_S)
                continue
            await self._down(request, reply)
            return reply

    def _at_coordinator(self, act: Callable[[], T]) -> T:
        """What the coordinator says, or what a link over HTTP would raise for it."""
        try:
            return act()
        except (Refused, BlockTrainError, OSError) as error:
            code, answer = refusal(error)
            if code == 200:  # done before: a part of an update that has been counted
                return cast(T, answer)
            raise heard(code, answer) from None

    async def _up(self, seconds: float) -> None:
        if self._cut:
            raise WorkerStopped(f"{self.name}: has no way to the coordinator")
        await self._sleep(seconds)

    async def _down(self, request: Message | None, reply: object) -> None:
        """The way back of a reply that concerns no part; both directions are booked."""
        up, down = (len(message.model_dump_json()) if isinstance(message, Message) else 0 for message in (request, reply))
        self.coordinator.count(self.worker, "", "control", "up", HEADERS_UP + up)
        self.coordinator.count(self.worker, "", "control", "down", HEADERS_DOWN + down)
        await self._sleep(self.wire.latency_s)

    async def _sleep(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds)
