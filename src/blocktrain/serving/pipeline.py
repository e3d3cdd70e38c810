"""The client's side of a chain of stages: it holds the truth, they hold only what can be made again.

One `StageLink` an address keeps a session with a stage, says who it is and whether it is there, and comes back by itself. `RemoteChain` picks a route
of live stages through all blocks. `RemoteText` remembers every id it sent (and the states, where the first blocks ran here): when a stage is lost it
opens the text under the next epoch on another route, sends all of it again in one step, and goes on. The logits are the same bits as before, so the
text does not show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc.aio
import torch
from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.errors import ProtocolError, ServingError
from blocktrain.model.transformer import VOCABULARY
from blocktrain.serving.chain import ChainStatus, StageStatus, Step
from blocktrain.serving.compute import Settings
from blocktrain.serving.frames import (
    PROTOCOL,
    Frame,
    HelloReply,
    HelloRequest,
    Kind,
    Name,
    OpenRequest,
    Pong,
    Refusal,
    Shape,
    decode,
    ids_tensor,
    message_frame,
    put_state,
    read_message,
)
from blocktrain.serving.server import SERVICE, Secrets, describe

HELLO_S = 4.0  # for a connection and an answer
PING_S = 1.0
SILENCE_S = 3.5  # without a pong: the stage, or the way to it, is gone
STUCK_S = 3.0  # between one stage sending a step on and the next one having it
PATIENCE_S = 3.0  # for a lost stage to come back or another to appear
AVOID_S = 20.0  # for which a way between two stages that broke is not taken


@dataclass(frozen=True)
class Expected:
    """What stages must be: the run's settings and, where they are known here, the digests of its weight files."""

    config: RunConfig
    config_digest: str
    digests: dict[str, str]

    @property
    def shape(self) -> Shape:
        model = self.config.model
        return Shape(model.positions, model.width, model.embed_dim, VOCABULARY, model.blocks)

    def problem(self, hello: HelloReply) -> str:
        """Why a stage is not one of this run's, or ""."""
        if hello.config_digest != self.config_digest:
            return f"serves a run with other settings: config {hello.config_digest[:16]}, here {self.config_digest[:16]}"
        for name, digest in hello.digests.items():
            if self.digests.get(name, digest) != digest:
                return f"serves other weights: {name} is {digest[:16]}, here {self.digests[name][:16]}"
        return ""


class StageLost(Exception):
    """A route that cannot be used any more."""


class StageLink:
    """A session with the stage at one address."""

    def __init__(self, address: str, expected: Expected, secrets: Secrets, on_frame: Callable[[StageLink, Frame], None]) -> None:
        self.address, self.expected, self.secrets, self.on_frame = address, expected, secrets, on_frame
        self.hello: HelloReply | None = None
        self.state, self.reason = "down", "not reached yet"
        self.texts, self.stalled_s = 0, 0.0
        self.heard = 0.0
        self.changed = asyncio.Event()  # set, and replaced, at each change of state
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self.task = asyncio.create_task(self._run())

    @property
    def up(self) -> bool:
        return self.state == "up"

    @property
    def span(self) -> tuple[int, int]:
        return (self.hello.first, self.hello.stop) if self.hello else (0, 0)

    def status(self) -> StageStatus:
        node = self.hello.node if self.hello else ""
        return StageStatus(self.address, node, self.span, self.state, "" if self.up else self.reason, self.texts)  # type: ignore[arg-type]

    def send(self, frame: Frame) -> None:
        self._out.put_nowait(frame.encode())

    def _become(self, state: str, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self.changed.set()
        self.changed = asyncio.Event()

    async def _run(self) -> None:
        pause = 0.2
        while True:
            channel = self.secrets.channel(self.address, self.expected.shape.max_bytes)
            began = time.monotonic()
            try:
                if await self._greet(channel):
                    await self._session(channel)
                    pause = 0.2
            except grpc.aio.AioRpcError as error:
                self._become("down", describe(error))
            except (ProtocolError, OSError) as error:
                self._become("down", str(error))
            finally:
                if self.up:
                    self._become("down", "the session ended")
                with contextlib.suppress(Exception):
                    await asyncio.shield(channel.close())
            await asyncio.sleep(max(0.0, pause - (time.monotonic() - began)))
            pause = min(2.0, pause * 1.7)

    async def _greet(self, channel: grpc.aio.Channel) -> bool:
        """Whether the stage is one of this run's and ready."""
        request = HelloRequest(protocol=list(PROTOCOL)).model_dump_json().encode()
        data = await channel.unary_unary(f"/{SERVICE}/Hello")(request, metadata=self.secrets.metadata, timeout=HELLO_S)
        hello: HelloReply = read_message(data, HelloReply)
        if hello.protocol[0] != PROTOCOL[0]:
            raise ProtocolError(f"protocol: it speaks {'.'.join(map(str, hello.protocol))}, this client {'.'.join(map(str, PROTOCOL))}")
        self.hello = hello
        if hello.state != "up":
            self._become("failed" if hello.state == "failed" else "loading", hello.reason or hello.state)
            return False
        if problem := self.expected.problem(hello):
            raise ProtocolError(problem)
        if not 0 <= hello.first < hello.stop <= self.expected.config.model.blocks:
            raise ProtocolError(f"blocks: it says {hello.first} to {hello.stop - 1}, the run has {self.expected.config.model.blocks}")
        self.texts = hello.texts
        return True

    async def _session(self, channel: grpc.aio.Channel) -> None:
        """Until it breaks. Raises AioRpcError."""
        self._out = asyncio.Queue()
        call = channel.stream_stream(f"/{SERVICE}/Session")(self._frames(), metadata=self.secrets.metadata)
        self.heard = time.monotonic()
        self._become("up")
        pinging = asyncio.create_task(self._ping(call))
        try:
            async for data in call:
                self.heard = time.monotonic()
                self._take(decode(data, self.expected.shape))
            raise ProtocolError("the stage ended the session")
        except asyncio.CancelledError:
            if asyncio.current_task() and asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise ProtocolError(f"silent for {SILENCE_S} s") from None
        finally:
            pinging.cancel()
            call.cancel()

    async def _frames(self):  # type: ignore[no-untyped-def]
        queue = self._out
        while True:
            yield await queue.get()

    async def _ping(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            await asyncio.sleep(PING_S)
            if time.monotonic() - self.heard > SILENCE_S:
                call.cancel()
                return
            self.send(Frame(Kind.PING))

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.PONG:
            pong: Pong = frame.message(Pong)
            self.texts, self.stalled_s = pong.texts, pong.stalled_s
        self.on_frame(self, frame)


@dataclass(frozen=True)
class Hop:
    """Blocks first ... stop of a text, at one stage."""

    link: StageLink
    first: int
    stop: int


@dataclass(frozen=True)
class Place:
    """Where a text is at a stage, as it last said."""

    step: int  # the last one that came in
    forwarded: int  # the last one that left
    since: float  # for how long it has been so
    last: float


class RemoteChain:
    """The blocks of a run behind stages."""

    def __init__(self, expected: Expected, addresses: Sequence[str], secrets: Secrets | None = None, allow_missing_blocks: bool = False) -> None:
        self.expected, self.config, self.shape = expected, expected.config, expected.shape
        self.allow_missing_blocks = allow_missing_blocks
        self.texts: dict[bytes, RemoteText] = {}
        self.links = [StageLink(address, expected, secrets or Secrets(), self._take) for address in dict.fromkeys(addresses)]
        self._broken: dict[tuple[str, str], float] = {}  # way from address to address -> until when it is not taken

    async def ready(self, limit_s: float = 8.0) -> None:
        """Wait until stages that are up hold every block. Raises ServingError saying what each address lacks.

        Where blocks may be missing, those that are not there after the wait are.
        """
        end = time.monotonic() + limit_s
        while missing := self.missing():
            if time.monotonic() > end or (all(link.state == "failed" for link in self.links)):
                if self.allow_missing_blocks and len(missing) < self.config.model.blocks:
                    break
                raise ServingError(self.why_not())
            await self._change(end - time.monotonic())
        if self._mixed():
            raise ServingError(f"the stages serve different weights: {self._mixed()}")

    async def _change(self, limit_s: float) -> None:
        """Until some stage comes or goes, at most `limit_s`."""
        waits = [asyncio.ensure_future(link.changed.wait()) for link in self.links]
        await asyncio.wait(waits, timeout=max(0.01, min(limit_s, 1.0)), return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def live(self) -> list[StageLink]:
        """Stages that are up, each once however many addresses it has."""
        found: dict[str, StageLink] = {}
        for link in self.links:
            if link.up and link.hello:
                found.setdefault(link.hello.node, link)
        return list(found.values())

    def missing(self, skip: Sequence[int] = ()) -> list[int]:
        held = {b for link in self.live() for b in range(*link.span)}
        return [b for b in range(self.config.model.blocks) if b not in held and b not in skip]

    def _mixed(self) -> str:
        """Two stages that serve different files under one name, or ""."""
        seen: dict[str, tuple[str, str]] = {}
        for link in self.live():
            for name, digest in link.hello.digests.items() if link.hello else ():
                other, theirs = seen.setdefault(name, (link.address, digest))
                if theirs != digest:
                    return f"{name} is {theirs[:16]} at {other} and {digest[:16]} at {link.address}"
        return ""

    def why_not(self) -> str:
        missing = self.missing()
        which = f"block{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        problems = "; ".join(f"{link.address}: {link.reason}" for link in self.links if not link.up)
        return f"no stage holds {which} now" + (f" ({problems})" if problems else f" ({len(self.links)} stages are up and hold the others)")

    def status(self) -> ChainStatus:
        shown: dict[str, StageStatus] = {}
        for link in self.links:
            status = link.status()
            if status.node not in shown or not status.node or status.state == "up":
                shown[status.node or link.address] = status
        return ChainStatus(list(shown.values()), self.missing(), max((link.stalled_s for link in self.links if link.up), default=0.0))

    async def open(self, settings: Settings, enter: int = 0) -> RemoteText:
        text = RemoteText(self, settings, enter)
        self.texts[text.name] = text
        try:
            await text.begin()
        except BaseException:
            await text.close()
            raise
        return text

    async def close(self) -> None:
        for text in list(self.texts.values()):
            await text.close()
        for link in self.links:
            link.task.cancel()
        await asyncio.gather(*(link.task for link in self.links), return_exceptions=True)

    def route(self, enter: int, skip: Sequence[int], avoid: set[str]) -> list[Hop] | None:
        """Stages through all blocks from `enter` on that are not skipped, the idlest first; None where there is no way."""
        now = time.monotonic()
        self._broken = {way: until for way, until in self._broken.items() if until > now}
        links = sorted((link for link in self.live() if link.address not in avoid), key=lambda link: (link.texts, -link.span[1]))
        dead: set[tuple[int, str]] = set()

        def onward(block: int, before: str) -> list[Hop] | None:
            while block in skip:
                block += 1
            if block >= self.config.model.blocks:
                return []
            if (block, before) in dead:
                return None
            for link in links:
                first, stop = link.span
                if first <= block < stop and (before, link.address) not in self._broken:
                    rest = onward(stop, link.address)
                    if rest is not None:
                        return [Hop(link, block, stop), *rest]
            dead.add((block, before))
            return None

        return onward(enter, "")

    def broke(self, source: str, target: str) -> None:
        self._broken[source, target] = time.monotonic() + AVOID_S

    def _take(self, link: StageLink, frame: Frame) -> None:
        """A frame from a stage, for the text it belongs to."""
        if frame.text in self.texts:
            self.texts[frame.text].take(link, frame)
        elif frame.kind == Kind.ERROR and frame.text == bytes(16):
            raise ProtocolError(f"it refused a frame: {frame.message(Refusal).reason}")


class RemoteText:
    """One text over stages."""

    def __init__(self, chain: RemoteChain, settings: Settings, enter: int) -> None:
        self.chain, self.settings, self.enter = chain, settings, enter
        self.name, self.epoch, self.number = os.urandom(16), 0, 0
        self.route: list[Hop] | None = None
        self.missing: tuple[int, ...] = ()
        self.switches = 0  # routes that were lost
        self.hops: list[tuple[int, int, int]] = []  # of the last step: first block, microseconds waited, microseconds computed
        self._ids: list[int] = []
        self._state: Tensor | None = None
        self._z: Tensor | None = None
        self._avoid: set[str] = set()
        self._answer: asyncio.Future[Frame] | None = None
        self._opened: dict[str, asyncio.Future[None]] = {}
        self._places: dict[str, Place] = {}  # address -> where it says that this text is
        self._used: dict[str, StageLink] = {}

    @property
    def _skip(self) -> tuple[int, ...]:
        return tuple(sorted({*self.settings.skip, *self.missing}))

    async def begin(self) -> None:
        """Find a route and open the text on it. Raises ServingError after PATIENCE_S without one."""
        end = time.monotonic() + PATIENCE_S
        while True:
            self.route = self.chain.route(self.enter, self._skip, self._avoid)
            if self.route is None and self.chain.allow_missing_blocks and self._leave_out():
                continue
            if self.route is not None:
                try:
                    return await self._open()
                except StageLost as lost:
                    problem = str(lost)
            else:
                problem = self.chain.why_not() if self.chain.missing(self._skip) else f"no way through the stages is left ({', '.join(self._avoid)})"
            if time.monotonic() > end:
                raise ServingError(problem)
            await self.chain._change(end - time.monotonic())

    def _leave_out(self) -> bool:
        """Go on without the blocks that no stage has, if any are left."""
        gone = self.chain.missing(self._skip)
        gone = [b for b in gone if b >= self.enter]
        if not gone or len(self._skip) + len(gone) >= self.chain.config.model.blocks:
            return False
        self.missing = tuple(sorted({*self.missing, *gone}))
        return True

    async def _open(self) -> None:
        """On all stages of the route at once. Raises StageLost, and ServingError where a stage refuses."""
        assert self.route
        self.epoch, loop = self.epoch + 1, asyncio.get_running_loop()
        self._opened = {hop.link.address: loop.create_future() for hop in self.route}
        for hop, after in zip(self.route, [*self.route[1:], None], strict=True):
            request = OpenRequest(
                wire=self.settings.wire, skip=list(self._skip), first=hop.first, stop=hop.stop, next=after.link.address if after else ""
            )
            self._used[hop.link.address] = hop.link
            hop.link.send(message_frame(Kind.OPEN, self.name, request, self.epoch))
        for hop in self.route:
            await self._while_up(self._opened[hop.link.address])

    async def _while_up(self, future: asyncio.Future[None] | asyncio.Future[Frame]) -> None:
        """Wait, but not for a stage of the route that is gone, nor for a step that went missing between two. Raises StageLost."""
        began = time.monotonic()
        while not future.done():
            assert self.route
            for hop in self.route:
                if not hop.link.up:
                    raise StageLost(f"{hop.link.address}: {hop.link.reason}")
            waits = {future, *(asyncio.ensure_future(hop.link.changed.wait()) for hop in self.route)}
            await asyncio.wait(waits, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits - {future}:
                wait.cancel()
            if not future.done() and time.monotonic() - began > PING_S:
                self._look_for_step()
        future.result()

    def _look_for_step(self) -> None:
        """Ask each stage where the step is; raises StageLost where one has sent it on long ago and the next never got it."""
        assert self.route
        for hop, after in zip(self.route, self.route[1:], strict=False):
            here, there = self._places.get(hop.link.address), self._places.get(after.link.address)
            if here and there and here.forwarded >= self.number > there.step and there.last - here.since > STUCK_S:
                self.chain.broke(hop.link.address, after.link.address)
                raise StageLost(f"{after.link.address}: nothing arrives there from the stage at {hop.link.address}")
        for hop in self.route:
            hop.link.send(Frame(Kind.PING, self.name, self.epoch, self.number))

    async def step(self, step: Step) -> Tensor:
        """One traversal -> logits (T - want, V). A route that is lost is replaced; raises ServingError when there is no other."""
        if step.keep == 0:
            self._avoid = set()
        self._remember(step)
        end = time.monotonic() + PATIENCE_S + 1.5
        while True:
            try:
                if self.route is None:
                    await self.begin()
                    step = self._whole(step)
                return await self._traverse(step)
            except StageLost as lost:
                self.switches += 1
                self.route = None
                if time.monotonic() > end:
                    raise ServingError(str(lost)) from None

    def _remember(self, step: Step) -> None:
        self._ids = [*self._ids[: step.keep], *step.ids]
        self._state = _replaced(self._state, step.keep, step.state)
        self._z = _replaced(self._z, step.keep, step.z)

    def _whole(self, step: Step) -> Step:
        """The same step, with all positions before it sent again."""
        first_new = len(self._ids) - len(step.ids)
        return replace(step, keep=0, ids=self._ids, want=first_new + step.want, state=self._state, z=self._z)

    async def _traverse(self, step: Step) -> Tensor:
        assert self.route
        self.number += 1
        self._places = {}
        enter = self.route[0].first
        frame = Frame(Kind.STEP, self.name, self.epoch, self.number, step.keep, step.offset, len(step.ids), step.want, enter)
        frame.tensors[Name.IDS] = ids_tensor(step.ids)
        put_state(frame, Name.STATE, step.state, self.settings.wire)
        put_state(frame, Name.Z, step.z, self.settings.wire)
        self._answer = asyncio.get_running_loop().create_future()
        self.route[0].link.send(frame)
        await self._while_up(self._answer)
        answer = self._answer.result()
        hops = answer.tensors.get(Name.HOPS)
        self.hops = [] if hops is None else [tuple(row) for row in hops.tolist()]  # type: ignore[misc]
        return answer.tensors[Name.LOGITS]

    def take(self, link: StageLink, frame: Frame) -> None:
        """A frame of this text from a stage. What belongs to another epoch or step is of no use any more."""
        if frame.kind == Kind.PONG:
            pong: Pong = frame.message(Pong)
            now, before = time.monotonic(), self._places.get(link.address)
            same = before is not None and (before.step, before.forwarded) == (pong.step, pong.forwarded)
            self._places[link.address] = Place(pong.step, pong.forwarded, before.since if before and same else now, now)
        elif frame.epoch != self.epoch:
            return
        elif frame.kind == Kind.OPENED:
            _settle(self._opened.get(link.address), None)
        elif frame.kind == Kind.ANSWER and frame.step == self.number and Name.LOGITS in frame.tensors:
            _settle(self._answer, frame)
        elif frame.kind == Kind.ERROR:
            self._fail(link, frame.message(Refusal))

    def _fail(self, link: StageLink, refusal: Refusal) -> None:
        """What a stage could not do, for whoever waits: another route, or an error."""
        if refusal.kind == "unreachable":
            self.chain.broke(link.address, refusal.address)
        elif refusal.kind in ("failed", "full"):
            self._avoid.add(link.address)
        told = f"{link.address}: {refusal.reason}"
        error: Exception = ServingError(told) if refusal.kind == "refused" else StageLost(told)
        for future in (self._answer, *self._opened.values()):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # looked at, should nobody wait for it any more

    async def close(self) -> None:
        self.chain.texts.pop(self.name, None)
        for link in self._used.values():
            if link.up:
                link.send(Frame(Kind.CLOSE, self.name, self.epoch))
        self._used = {}


def _settle(future: asyncio.Future | None, value: object) -> None:  # type: ignore[type-arg]
    if future is not None and not future.done():
        future.set_result(value)


def _replaced(old: Tensor | None, keep: int, new: Tensor | None) -> Tensor | None:
    """`old` rows before `keep`, then `new`."""
    if new is None or old is None or keep == 0:
        return new
    return torch.cat((old[:keep], new))
