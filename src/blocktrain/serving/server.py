"""A stage on the network: gRPC with raw frames.

    Hello    one message each way: who is there
    Session  a client's frames in, this stage's frames for it out; its end is the end of its texts here
    Forward  the stage before this one: frames in

A client keeps a session with every stage, so the last one answers it directly, every stage sees at once that it is gone, and it sees that a stage is.
Frames between stages go over one stream for each next stage, kept warm by pings so that a middlebox does not drop it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from blocktrain.errors import ProtocolError
from blocktrain.serving.frames import PROTOCOL, Frame, HelloReply, HelloRequest, Kind, Refusal, decode, message_frame, read_message
from blocktrain.serving.stage import Stage, StageRefused

SERVICE = "blocktrain.Stage"
MAX_SESSIONS = 256
MAX_OUTGOING = 1024  # frames for one client that it has not taken; beyond them its session ends
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
log = logging.getLogger("blocktrain.stage")


@dataclass(frozen=True)
class Secrets:
    """What guards a stage, and how it meets the next one. Empty: nothing, on loopback."""

    key: str = ""
    certificate: bytes = b""  # PEM, of this stage
    private_key: bytes = b""
    authority: bytes = b""  # PEM, what other stages' certificates must be signed by

    def channel(self, address: str, max_bytes: int) -> grpc.aio.Channel:
        """To a stage; its connection is made again by itself when it breaks."""
        options = [*KEEPALIVE, *sizes(max_bytes), ("grpc.use_local_subchannel_pool", 1)]
        options += [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.min_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2000)]
        if self.authority:
            return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.authority), options=options)
        return grpc.aio.insecure_channel(address, options=options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()


def sizes(max_bytes: int) -> list[tuple[str, int]]:
    return [("grpc.max_receive_message_length", max_bytes), ("grpc.max_send_message_length", max_bytes)]


class Session:
    """One client here; it owns the texts it opened."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._over = False

    def send(self, frame: Frame) -> None:
        if not self._over and self.outgoing.qsize() >= MAX_OUTGOING:
            self.end()
        if not self._over:
            self.outgoing.put_nowait(frame.encode())

    def end(self) -> None:
        """After what is in line."""
        self._over = True
        self.outgoing.put_nowait(None)


class Onward:
    """The stream to the next stage at one address; opened when first needed, and again after it broke."""

    def __init__(self, address: str, secrets: Secrets, max_bytes: int, lost: Callable[[str, str], None]) -> None:
        self.address, self.secrets, self.max_bytes, self.lost = address, secrets, max_bytes, lost
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.task = asyncio.create_task(self._run())

    def send(self, frame: Frame) -> None:
        self.queue.put_nowait(frame.encode())

    async def _run(self) -> None:
        """Send what is in line until the stream breaks; then whoever had texts on it is told, and the line is emptied."""
        channel = self.secrets.channel(self.address, self.max_bytes)
        try:
            call = channel.stream_unary(f"/{SERVICE}/Forward")(self._frames(), metadata=self.secrets.metadata)
            await call
            problem = "it ended the stream"
        except grpc.aio.AioRpcError as error:
            problem = describe(error)
        finally:
            await asyncio.shield(channel.close())
        self.lost(self.address, problem)

    async def _frames(self) -> AsyncIterator[bytes]:
        while True:
            yield await self.queue.get()


def describe(error: grpc.aio.AioRpcError) -> str:
    """A gRPC error in a few words."""
    name = error.code().name.lower().replace("_", " ")
    return f"{name}: {' '.join((error.details() or '').split())[:200]}"


class StageServer:
    """A stage's door. `stage` is None while it loads."""

    def __init__(self, secrets: Secrets, node: str = "") -> None:
        self.secrets, self.node = secrets, node or os.urandom(8).hex()
        self.stage: Stage | None = None
        self.hello: Callable[[], HelloReply] = lambda: HelloReply(protocol=list(PROTOCOL), node=self.node, state="loading")
        self.sessions: set[Session] = set()
        self._onward: dict[str, Onward] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.server: grpc.aio.Server | None = None

    async def start(self, address: str, max_bytes: int) -> int:
        """Listen; returns the port. Raises RuntimeError where the address cannot be had."""
        options = [*KEEPALIVE, *sizes(max_bytes), ("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 5000)]
        options += [("grpc.http2.max_ping_strikes", 0), ("grpc.max_concurrent_streams", MAX_SESSIONS * 2)]
        self.server = grpc.aio.server(options=options)
        handlers = {
            "Hello": grpc.unary_unary_rpc_method_handler(self._hello),
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Forward": grpc.stream_unary_rpc_method_handler(self._forward),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        if self.secrets.certificate:
            pair = [(self.secrets.private_key, self.secrets.certificate)]
            port = self.server.add_secure_port(address, grpc.ssl_server_credentials(pair))
        else:
            port = self.server.add_insecure_port(address)
        await self.server.start()
        return port

    async def stop(self, grace_s: float = 1.0) -> None:
        if self.server is not None:
            await self.server.stop(grace_s)
        for onward in self._onward.values():
            onward.task.cancel()
        if self.stage is not None:
            await asyncio.to_thread(self.stage.batcher.close)

    async def _admit(self, context: Any) -> None:
        """Whoever calls must know the key."""
        if not self.secrets.key:
            return
        given = dict(context.invocation_metadata()).get("authorization", "")
        given = given if isinstance(given, str) else ""
        if not hmac.compare_digest(given.encode(), f"Bearer {self.secrets.key}".encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "key: missing or wrong")

    async def _ready(self, context: Any) -> Stage:
        await self._admit(context)
        if self.stage is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "still loading")
        assert self.stage is not None
        return self.stage

    async def _hello(self, data: bytes, context: Any) -> bytes:
        await self._admit(context)
        theirs = [0, 0]
        try:
            theirs = read_message(data, HelloRequest).protocol
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if theirs[0] != PROTOCOL[0]:
            mine = ".".join(map(str, PROTOCOL))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"protocol: this stage speaks {mine}, you {theirs[0]}.{theirs[1]}")
        return self.hello().model_dump_json().encode()

    # --- A client ---

    async def _session(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        stage = await self._ready(context)
        if len(self.sessions) >= MAX_SESSIONS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_SESSIONS} clients are here, which is the most")
        session = Session()
        self.sessions.add(session)
        reader = asyncio.create_task(self._read_session(stage, session, frames))
        try:
            while (data := await session.outgoing.get()) is not None:
                yield data
        finally:
            reader.cancel()
            self.sessions.discard(session)
            stage.leave(session)

    async def _read_session(self, stage: Stage, session: Session, frames: AsyncIterator[bytes]) -> None:
        """What a client sends; a frame that cannot be read ends the session, with the reason."""
        try:
            async for data in frames:
                await self._take(stage, session, decode(data, stage.shape))
        except ProtocolError as error:
            session.send(message_frame(Kind.ERROR, bytes(16), Refusal(kind="refused", reason=str(error))))
        finally:
            session.end()

    async def _take(self, stage: Stage, session: Session, frame: Frame) -> None:
        if frame.kind == Kind.OPEN:
            try:
                stage.open(frame, session)
                session.send(Frame(Kind.OPENED, frame.text, frame.epoch))
            except (StageRefused, ProtocolError) as error:
                self._tell(session, frame, error)
        elif frame.kind == Kind.STEP:
            self._start(self._step(stage, frame, session))
        elif frame.kind == Kind.CLOSE:
            stage.close(frame.text, session)
        elif frame.kind == Kind.PING:
            session.send(message_frame(Kind.PONG, frame.text, stage.pong(frame.text), frame.epoch, frame.step))
        else:
            raise ProtocolError(f"frame: a client does not send {frame.kind.name}")

    # --- The stage before this one ---

    async def _forward(self, frames: AsyncIterator[bytes], context: Any) -> bytes:
        stage = await self._ready(context)
        try:
            async for data in frames:
                frame = decode(data, stage.shape)
                if frame.kind != Kind.STEP:
                    raise ProtocolError(f"frame: a stage does not send {frame.kind.name}")
                self._start(self._step(stage, frame, None))
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return b""

    async def _step(self, stage: Stage, frame: Frame, sender: Session | None) -> None:
        """Run it and send what comes out on its way; whatever goes wrong goes to the client."""
        known = stage.texts.get(frame.text)
        owner = known.owner if known else sender
        try:
            out, text = await stage.step(frame)
            owner = text.owner
            if out.kind == Kind.STEP:
                self._send_on(text.request.next, out)
            elif isinstance(owner, Session):
                owner.send(out)
            text.forwarded = frame.step
        except (StageRefused, ProtocolError) as error:
            if isinstance(error, StageRefused) and error.__cause__ is not None:
                log.error("a step failed", exc_info=error.__cause__)
            if isinstance(owner, Session):
                self._tell(owner, frame, error)

    def _tell(self, session: Session, frame: Frame, error: StageRefused | ProtocolError) -> None:
        refusal = error.refusal if isinstance(error, StageRefused) else Refusal(kind="refused", reason=str(error))
        session.send(message_frame(Kind.ERROR, frame.text, refusal, frame.epoch, frame.step))

    def _send_on(self, address: str, frame: Frame) -> None:
        assert self.stage is not None
        if address not in self._onward:
            self._onward[address] = Onward(address, self.secrets, self.stage.shape.max_bytes, self._lost)
        self._onward[address].send(frame)

    def _lost(self, address: str, problem: str) -> None:
        """The stage at an address cannot be reached: each client with a text on that way is told."""
        self._onward.pop(address, None)
        texts = self.stage.texts if self.stage else {}
        for name, text in texts.items():
            if text.request.next == address and isinstance(text.owner, Session):
                refusal = Refusal(kind="unreachable", reason=f"the next stage at {address}: {problem}", address=address)
                text.owner.send(message_frame(Kind.ERROR, name, refusal, text.epoch, max(text.step, 0)))

    def _start(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[assignment]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
