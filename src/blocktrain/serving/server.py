"""A stage on the network: gRPC with raw frames.

    Hello    one message each way: who is there
    Session  a client's frames in, this stage's frames for it out; its end is the end of its texts here
    Forward  the stage before this one: frames in, answers to its pings out

A client keeps a session with every stage, so the last one answers it directly, every stage sees at once that it is gone, and it sees that a stage is.
Frames between stages go over one line for each next stage. Whoever does not take what is sent to it loses its line, not this stage its memory.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from blocktrain.errors import ProtocolError
from blocktrain.serving.frames import (
    PROTOCOL,
    Frame,
    HelloReply,
    HelloRequest,
    Kind,
    Refusal,
    decode,
    message_frame,
    read_message,
    text_of,
)
from blocktrain.serving.line import KEEPALIVE, SERVICE, Patience, Secrets, sizes
from blocktrain.serving.onward import MAX_ONWARD, Onward
from blocktrain.serving.stage import Stage, StageRefused

MAX_PEERS = 256  # sessions, and as many stages before this one
MAX_OUTGOING = 1 << 26  # bytes for one client that it has not taken; beyond them its session ends
LAST_WORDS_S = 2.0  # for a client to take what is left for it when its session ends
HANDSHAKE_MS = 10_000  # for a connection to say that it is HTTP/2
UNUSED_MS = 60_000  # after which a connection without a call is closed
log = logging.getLogger("blocktrain.stage")


class Peer:
    """A client or a stage that called; a client owns the texts it opened."""

    def __init__(self) -> None:
        self.unsent = 0
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._over = self.too_slow = False
        self.writer: asyncio.Task[None] | None = None

    def send(self, frame: Frame) -> None:
        if self._over:
            return
        data = frame.encode()
        self.unsent += len(data)
        self._outgoing.put_nowait(data)
        if self.unsent > MAX_OUTGOING + len(data):
            self.too_slow = True
            self.end()
            if self.writer is not None:
                self.writer.cancel()

    def end(self) -> None:
        """After what is in line."""
        self._over = True
        self._outgoing.put_nowait(None)

    async def write(self, context: Any) -> None:
        while (data := await self._outgoing.get()) is not None:
            try:
                await context.write(data)
            except Exception:  # whatever gRPC has for a call that is over
                return
            self.unsent -= len(data)


Taker = Callable[[Stage, Peer, Frame], None]


class StageServer:
    """A stage's door. `stage` is None while it loads."""

    def __init__(self, secrets: Secrets, node: str = "") -> None:
        self.secrets, self.node = secrets, node or os.urandom(8).hex()
        self.stage: Stage | None = None
        self.hello: Callable[[], HelloReply] = lambda: HelloReply(protocol=list(PROTOCOL), node=self.node, state="loading")
        self.clients: set[Peer] = set()
        self.stages: set[Peer] = set()
        self._onward: dict[str, Onward] = {}
        self._patience: dict[str, Patience] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.server: grpc.aio.Server | None = None
        self._stopping = False

    async def start(self, address: str, max_bytes: int) -> int:
        """Listen; returns the port. Raises RuntimeError where the address cannot be had."""
        options = [*KEEPALIVE, *sizes(max_bytes), ("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 5000)]
        options += [("grpc.http2.max_ping_strikes", 0), ("grpc.max_concurrent_streams", MAX_PEERS)]
        options += [("grpc.server_handshake_timeout_ms", HANDSHAKE_MS), ("grpc.max_connection_idle_ms", UNUSED_MS)]
        self.server = grpc.aio.server(options=options)
        handlers = {
            "Hello": grpc.unary_unary_rpc_method_handler(self._hello),
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Forward": grpc.stream_stream_rpc_method_handler(self._forward),
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
        self._stopping = True
        if self.server is not None:
            await self.server.stop(grace_s)
        for onward in self._onward.values():
            onward.close()
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

    # --- Lines ---

    async def _session(self, frames: AsyncIterator[bytes], context: Any) -> None:
        await self._serve(self.clients, self._from_client, frames, context)

    async def _forward(self, frames: AsyncIterator[bytes], context: Any) -> None:
        await self._serve(self.stages, self._from_stage, frames, context)

    async def _serve(self, peers: set[Peer], take: Taker, frames: AsyncIterator[bytes], context: Any) -> None:
        """Until one side ends it. A call that cannot be ended, since nobody takes its last words, holds its place until its connection is gone."""
        await self._admit(context)
        if self.stage is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "still loading")
        if len(peers) >= MAX_PEERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_PEERS} are connected, which is the most")
        stage, peer = self.stage, Peer()
        assert stage is not None
        peers.add(peer)
        context.add_done_callback(lambda _: peers.discard(peer))
        reader = asyncio.create_task(self._read(stage, peer, take, frames))
        peer.writer = asyncio.create_task(peer.write(context))
        try:
            await asyncio.wait({reader, peer.writer}, return_when=asyncio.FIRST_COMPLETED)
            stage.leave(peer)
            await asyncio.wait({peer.writer}, timeout=LAST_WORDS_S)
            if peer.too_slow:
                context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
                context.set_details(f"{MAX_OUTGOING:,} bytes waited to be taken, which is the most")
        finally:
            stage.leave(peer)
            for task in (reader, peer.writer):
                task.cancel()
                task.add_done_callback(self._look)

    async def _read(self, stage: Stage, peer: Peer, take: Taker, frames: AsyncIterator[bytes]) -> None:
        """What comes in. A frame that cannot be read, or that this peer does not send, ends the line, with the reason."""
        try:
            async for data in frames:
                try:
                    take(stage, peer, decode(data, stage.shape))
                except ProtocolError as error:
                    if not self._tell_owner(stage, text_of(data), peer, error):
                        raise
        except ProtocolError as error:
            peer.send(message_frame(Kind.ERROR, bytes(16), Refusal(kind="refused", reason=str(error))))
        finally:
            peer.end()

    def _tell_owner(self, stage: Stage, name: bytes, peer: Peer, error: ProtocolError) -> bool:
        """A bad frame from a stage is the loss of one text, not of all that come the same way."""
        text = stage.texts.get(name)
        if peer not in self.stages or text is None or not isinstance(text.owner, Peer):
            return False
        refusal = Refusal(kind="refused", reason=f"from the stage before: {error}")
        text.owner.send(message_frame(Kind.ERROR, name, refusal, text.epoch, max(text.step, 0)))
        return True

    def _from_client(self, stage: Stage, peer: Peer, frame: Frame) -> None:
        if frame.kind == Kind.OPEN:
            try:
                stage.open(frame, peer)
                peer.send(Frame(Kind.OPENED, frame.text, frame.epoch))
            except (StageRefused, ProtocolError) as error:
                _tell(peer, frame, error)
        elif frame.kind == Kind.STEP:
            self._start(self._step(stage, frame, peer))
        elif frame.kind == Kind.CLOSE:
            stage.close(frame.text, peer)
        elif frame.kind == Kind.PING:
            peer.send(message_frame(Kind.PONG, frame.text, stage.pong(frame.text), frame.epoch, frame.step))
        else:
            raise ProtocolError(f"frame: a client does not send {frame.kind.name}")

    def _from_stage(self, stage: Stage, peer: Peer, frame: Frame) -> None:
        if frame.kind == Kind.STEP:
            self._start(self._step(stage, frame, None))
        elif frame.kind == Kind.PING:
            peer.send(message_frame(Kind.PONG, bytes(16), stage.pong(b"")))
        else:
            raise ProtocolError(f"frame: a stage does not send {frame.kind.name}")

    # --- Steps ---

    async def _step(self, stage: Stage, frame: Frame, sender: Peer | None) -> None:
        """Run it and send what comes out on its way; whatever goes wrong goes to the client."""
        known = stage.texts.get(frame.text)
        tell = sender or (known.owner if known else None)
        try:
            out, text = await stage.step(frame, sender)
            if out.kind == Kind.STEP:
                self._send_on(text.request.next, out)
            elif isinstance(text.owner, Peer):
                text.owner.send(out)
            text.forwarded = frame.step
        except (StageRefused, ProtocolError) as error:
            if error.__cause__ is not None:
                log.error("a step failed", exc_info=error.__cause__)
            if isinstance(tell, Peer):
                _tell(tell, frame, error)

    def _send_on(self, address: str, frame: Frame) -> None:
        """Raises StageRefused where too many next stages were named."""
        assert self.stage is not None
        if address not in self._onward:
            if len(self._onward) >= MAX_ONWARD:
                raise StageRefused("full", f"texts go on from here to {MAX_ONWARD} addresses, which is the most")
            if len(self._patience) >= 8 * MAX_ONWARD:
                self._patience.clear()
            patience = self._patience.setdefault(address, Patience())
            self._onward[address] = Onward(address, self.secrets, self.stage, patience, self._lost)
        self._onward[address].send(frame)

    def _lost(self, address: str, problem: str) -> None:
        """The stage at an address cannot be reached: each client with a text on that way is told."""
        self._onward.pop(address, None)
        for name, text in self.stage.texts.items() if self.stage and problem else ():
            if text.request.next == address and isinstance(text.owner, Peer):
                refusal = Refusal(kind="unreachable", reason=problem, address=address)
                text.owner.send(message_frame(Kind.ERROR, name, refusal, text.epoch, max(text.step, 0)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._look)

    def _look(self, task: asyncio.Task[None]) -> None:
        """What a task of a line ends with is known by then, unless it is a fault of ours. A line may be cut by our own stop."""
        known = (grpc.RpcError, grpc.aio.BaseError if self._stopping else grpc.aio.UsageError)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, known):
            log.error("a line failed", exc_info=error)


def _tell(peer: Peer, frame: Frame, error: StageRefused | ProtocolError) -> None:
    refusal = error.refusal if isinstance(error, StageRefused) else Refusal(kind="refused", reason=str(error))
    peer.send(message_frame(Kind.ERROR, frame.text, refusal, frame.epoch, frame.step))
