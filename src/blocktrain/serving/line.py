"""How a client reaches a stage, and a stage the next one: a gRPC stream in both directions, with a pulse.

Pings go out all the time and are answered at once, even while the other side computes. They keep open what a middlebox drops when it is idle,
and their silence says within seconds that a process hangs, a machine is off or a way swallows everything; TCP would wait for minutes. A line that
was given up too early (the machine was only busy) is given more time from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
import grpc.aio

from blocktrain.serving.frames import Frame, Kind

SERVICE = "blocktrain.Stage"
PING_S = 0.4
SILENCE_S = 1.2  # without an answer: the other side, or the way to it, is gone
MAX_SILENCE_S = 10.0
REGRET_S = 5.0  # within which a line that answers was given up too early
FORGET_S = 300.0  # after which that no longer counts
SLOWEST = 512 * 1024  # bytes a second that a way is expected to carry; what is sent may take so long before silence counts
BULK = 1 << 16  # bytes from which a frame takes a while
MAX_UNSENT = 1 << 26  # bytes that wait for a way that does not take them
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
PING = Frame(Kind.PING).encode()


class Broken(Exception):
    """A line that is over, and why."""


@dataclass(frozen=True)
class Secrets:
    """What guards a stage, and how it meets the next one. Empty: nothing, on loopback."""

    key: str = field(default="", repr=False)
    certificate: bytes = b""  # PEM, of this stage
    private_key: bytes = field(default=b"", repr=False)
    authority: bytes = b""  # PEM, what other stages' certificates must be signed by

    def channel(self, address: str, max_bytes: int) -> grpc.aio.Channel:
        """To a stage, and to nothing else: no proxy is asked."""
        options = [*KEEPALIVE, *sizes(max_bytes), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        options += [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.min_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2000)]
        if self.authority:
            return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.authority), options=options)
        return grpc.aio.insecure_channel(address, options=options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()


def sizes(max_bytes: int) -> list[tuple[str, int]]:
    return [("grpc.max_receive_message_length", max_bytes), ("grpc.max_send_message_length", max_bytes)]


CLOSED = "it closed the connection"
_MEANINGS = (
    ("key: missing or wrong", "the key is missing or wrong (--key-file)"),
    ("Failed parsing HTTP/2", "what listens there is no stage"),
    ("Cancelling all calls", "it is ending"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by --tls-ca"),
    ("Hostname Verification Check failed", "its certificate is for another name"),
    ("WRONG_VERSION_NUMBER", "it speaks no TLS, and --tls-ca was given"),
    ("Connection refused", "connection refused: nothing listens there"),
    ("DNS", "its name is not known"),
    ("Socket closed", CLOSED),
    ("reset by peer", CLOSED),
    ("before receiving SETTINGS", "nothing is heard from there"),
    ("Deadline Exceeded", "no answer in time"),
)


def describe(error: grpc.aio.AioRpcError) -> str:
    """A gRPC error in a few words."""
    details = " ".join((error.details() or "").split())
    for sign, meaning in _MEANINGS:
        if sign in details:
            return meaning
    return f"{error.code().name.lower().replace('_', ' ')}: {details.rpartition('last error: ')[2][:300]}"


class Patience:
    """How long one way may be silent: for a while longer, after it was given up and was there all the same."""

    def __init__(self) -> None:
        self.seconds = SILENCE_S
        self._given_up = self._longer = float("-inf")

    def gave_up(self) -> None:
        self._given_up = time.monotonic()

    def answered(self) -> None:
        """A line works; if one was given up a moment ago, that was too early."""
        now = time.monotonic()
        if now - self._given_up < REGRET_S:
            self.seconds, self._longer = min(MAX_SILENCE_S, self.seconds * 2), now
            self._given_up = float("-inf")
        elif now - self._longer > FORGET_S:
            self.seconds = SILENCE_S


class Line:
    """One stream. `take` gets each frame's bytes; what it raises ends the line."""

    def __init__(self, patience: Patience, take: Callable[[bytes], None]) -> None:
        self.patience, self.take = patience, take
        self.unsent = 0  # bytes that the transport has not taken
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._heard = self._drained = time.monotonic()  # when a frame last came; when the large ones that were sent should have arrived
        self._problem = ""
        self._call: grpc.aio.StreamStreamCall | None = None

    def send(self, data: bytes) -> None:
        """In order, as soon as the way takes it; where it takes nothing for too long the line ends."""
        self.unsent += len(data)
        if len(data) > BULK:
            self._drained = max(self._drained, time.monotonic()) + len(data) / SLOWEST
        self._queue.put_nowait(data)
        if self.unsent > MAX_UNSENT + 2 * len(data):
            self._give_up(f"{self.unsent:,} bytes wait, and it takes none")

    async def run(self, channel: grpc.aio.Channel, method: str, secrets: Secrets) -> NoReturn:
        """Until it ends: raises Broken, or what `take` raises."""
        self._call = channel.stream_stream(f"/{SERVICE}/{method}")(metadata=secrets.metadata)
        self._heard = time.monotonic()
        tasks = [asyncio.create_task(self._pulse()), asyncio.create_task(self._write(self._call))]
        try:
            while isinstance(data := await self._call.read(), bytes):  # otherwise EOF
                self._heard = time.monotonic()
                self.take(data)
            raise Broken("it ended the connection")
        except grpc.aio.AioRpcError as error:
            raise Broken(self._problem or describe(error)) from None
        except asyncio.CancelledError:
            if not self._problem:
                raise
            raise Broken(self._problem) from None
        finally:
            for task in tasks:
                task.cancel()
            self._call.cancel()

    def _give_up(self, problem: str) -> None:
        self._problem = self._problem or problem
        if self._call is not None:
            self._call.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):  # the call is over, which its reader says
            while True:
                data = await self._queue.get()
                await call.write(data)
                self.unsent -= len(data)

    async def _pulse(self) -> None:
        while True:
            began = time.monotonic()
            self.send(PING)
            await asyncio.sleep(PING_S)
            now = time.monotonic()
            if now - began > 2 * PING_S:
                self._heard = now  # this process was held up: what came meanwhile is yet to be read
            elif now - max(self._heard, self._drained) > self.patience.seconds:
                self.patience.gave_up()
                self._give_up(f"silent for {self.patience.seconds:.1f} s")
                return
