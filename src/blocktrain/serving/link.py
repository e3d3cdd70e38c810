"""A client's tie to the stage at one address: says who is there and whether it can be used, carries frames, and comes back by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from blocktrain.config import RunConfig
from blocktrain.errors import ProtocolError
from blocktrain.serving.chain import StageStatus
from blocktrain.serving.frames import PROTOCOL, Frame, HelloReply, HelloRequest, Kind, Pong, Shape, decode, read_message
from blocktrain.serving.line import CLOSED, SERVICE, Broken, Line, Patience, Secrets, describe

HELLO_S = 4.0  # for a connection and an answer
PAUSE_S = 0.2  # before a stage that could not be reached is tried again; grows up to MAX_PAUSE_S
MAX_PAUSE_S = 2.0
log = logging.getLogger("blocktrain.client")


@dataclass(frozen=True)
class Expected:
    """What stages must be: the run's settings and, where they are known here, the digests of its weight files."""

    config: RunConfig
    config_digest: str
    digests: dict[str, str]

    @property
    def shape(self) -> Shape:
        return Shape.of(self.config)

    def problem(self, hello: HelloReply) -> str:
        """Why a stage is not one of this run's, or ""."""
        if hello.config_digest != self.config_digest:
            return f"serves a run with other settings: digest {hello.config_digest[:16]}, here {self.config_digest[:16]}"
        for name, digest in hello.digests.items():
            if self.digests.get(name, digest) != digest:
                return f"serves other weights: {name} is {digest[:16]}, here {self.digests[name][:16]}"
        blocks = self.config.model.blocks
        if not 0 <= hello.first < hello.stop <= blocks:
            return f"says it has blocks {hello.first} to {hello.stop - 1}, the run has {blocks}"
        return ""


class _Unfit(Exception):
    """A stage that answers and cannot be used: its state, and why."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state


async def greet(address: str, channel: grpc.aio.Channel, secrets: Secrets) -> HelloReply:
    """Ask a stage who it is. Raises AioRpcError, and ProtocolError where it speaks another protocol."""
    request = HelloRequest(protocol=list(PROTOCOL)).model_dump_json().encode()
    data = await channel.unary_unary(f"/{SERVICE}/Hello")(request, metadata=secrets.metadata, timeout=HELLO_S)
    hello: HelloReply = read_message(data, HelloReply)
    if hello.protocol[0] != PROTOCOL[0]:
        raise ProtocolError(f"protocol: it speaks {'.'.join(map(str, hello.protocol))}, this client {'.'.join(map(str, PROTOCOL))}")
    return hello


class StageLink:
    """A session with the stage at one address. `on_frame` gets its frames, `on_change` is told that it came or went."""

    def __init__(
        self,
        address: str,
        expected: Expected,
        secrets: Secrets,
        on_frame: Callable[[StageLink, Frame], None],
        on_change: Callable[[StageLink], None],
    ) -> None:
        self.address, self.expected, self.secrets = address, expected, secrets
        self.on_frame, self.on_change = on_frame, on_change
        self.hello: HelloReply | None = None
        self.state, self.reason = "down", "not reached yet"
        self.tried = False  # whether there was an answer, or the lack of one, to the first attempt
        self.texts, self.stalled_s = 0, 0.0
        self._patience = Patience()
        self._line: Line | None = None
        self.task = asyncio.create_task(self._run())

    @property
    def up(self) -> bool:
        return self.state == "up"

    @property
    def span(self) -> tuple[int, int]:
        return (self.hello.first, self.hello.stop) if self.hello else (0, 0)

    @property
    def problem(self) -> str:
        """Between whom, and what."""
        return f"client -> {self.address}: {self.reason}"

    @property
    def checkpoint(self) -> str:
        """Stages that differ in this must not share a text; those whose weights were compared with the run's here are all of one."""
        return self.hello.checkpoint if self.hello and not self.expected.digests else ""

    def status(self) -> StageStatus:
        node = self.hello.node if self.hello else ""
        return StageStatus(self.address, node, self.span, self.state, "" if self.up else self.reason, self.texts if self.up else 0)  # type: ignore[arg-type]

    def send(self, frame: Frame) -> None:
        """Nothing happens where the stage is not up: whoever had a text there has been told."""
        if self._line is not None:
            self._line.send(frame.encode())

    def _become(self, state: str, reason: str = "") -> None:
        self.state, self.reason, self.tried = state, reason, True
        self.on_change(self)

    async def _run(self) -> None:
        pause = PAUSE_S
        while True:
            began, channel = time.monotonic(), self.secrets.channel(self.address, self.expected.shape.max_bytes)
            try:
                self._check(await greet(self.address, channel, self.secrets))
                await self._session(channel)
            except Exception as error:  # whatever it is, the stage is tried again
                if self.up:
                    pause = PAUSE_S
                self._become(*_state_of(error))
            finally:
                self._line = None
                with contextlib.suppress(Exception):
                    await asyncio.shield(channel.close())
            await asyncio.sleep(max(PAUSE_S / 4, pause - (time.monotonic() - began)))
            pause = min(MAX_PAUSE_S, pause * 1.7)

    def _check(self, hello: HelloReply) -> None:
        """Raises _Unfit where the stage is not ready, or not one of this run's."""
        self.hello, self.texts = hello, hello.texts
        if hello.state != "up":
            raise _Unfit("failed" if hello.state == "failed" else "loading", hello.reason or hello.state)
        if problem := self.expected.problem(hello):
            raise _Unfit("failed", problem)

    async def _session(self, channel: grpc.aio.Channel) -> None:
        """Until it breaks. The stage is up once it has answered a first ping."""
        self._line = Line(self._patience, self._take)
        await self._line.run(channel, "Session", self.secrets)

    def _take(self, data: bytes) -> None:
        frame = decode(data, self.expected.shape)
        if frame.kind == Kind.PONG:
            self._patience.answered()
            if not self.up:
                self._become("up")
            pong: Pong = frame.message(Pong)
            self.texts, self.stalled_s = pong.texts, pong.stalled_s
        self.on_frame(self, frame)


def _state_of(error: Exception) -> tuple[str, str]:
    """What a stage is after an error, and why."""
    if isinstance(error, _Unfit):
        return error.state, str(error)
    if isinstance(error, grpc.aio.AioRpcError):
        final: Any = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION)
        told = describe(error)  # the greeting failed
        hint = " (where it has --tls-cert, --tls-ca is needed here)" if told == CLOSED else ""
        return ("failed" if error.code() in final else "down"), told + hint
    if isinstance(error, ProtocolError):
        return "failed", str(error)
    if not isinstance(error, Broken):
        log.error("a link to a stage failed", exc_info=error)
    return "down", str(error) or type(error).__name__
