"""One text over stages: the client's side holds the truth, they hold only what can be made again.

It remembers every id it sent (and the states, where the first blocks ran here). When a stage of its route is lost it opens the text under the next
epoch on another route, sends all of it again in one step, and goes on. The logits are the same bits as before, so the text does not show it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.errors import BusyError, ServingError
from blocktrain.serving.chain import Step, rows_replaced
from blocktrain.serving.compute import Settings, mean_of
from blocktrain.serving.frames import Frame, Kind, Name, OpenRequest, Pong, Refusal, ids_tensor, message_frame, put_state
from blocktrain.serving.line import SLOWEST
from blocktrain.serving.link import StageLink

PATIENCE_S = 3.0  # for a lost stage to come back or another to appear
LOOK_S = 0.5  # between two looks for a step that is not answered
OPEN_S = 5.0  # for a stage to say that it has opened a text
STUCK_S = 3.0  # between one stage sending a step on and the next one having it
CLIENT = "client"


@dataclass(frozen=True)
class Hop:
    """Blocks first ... stop of a text, at one stage."""

    link: StageLink
    first: int
    stop: int


@dataclass(frozen=True)
class Place:
    """Where a text is at a stage, as it last said."""

    epoch: int  # -1: it does not know the text
    step: int  # the last one that came in
    forwarded: int  # the last one that left
    since: float  # when it first said so
    last: float  # when it last said so


class Routes(Protocol):
    """What a text asks of the chain it is on."""

    texts: dict[bytes, RemoteText]
    allow_missing_blocks: bool
    step_limit_s: float

    @property
    def config(self) -> RunConfig: ...
    def route(self, enter: int, skip: Sequence[int], avoid: set[str], checkpoint: str | None) -> list[Hop] | None: ...
    def missing(self, skip: Sequence[int] = (), checkpoint: str | None = None) -> list[int]: ...
    def why_not(self, skip: Sequence[int] = (), checkpoint: str | None = None) -> str: ...
    def broke(self, source: str, target: str) -> None: ...
    async def change(self, limit_s: float) -> None: ...


class StageLost(Exception):
    """A route that cannot be used any more."""


class _Full(StageLost):
    """A stage that has no room for the text."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(reason)
        self.address = address


class RemoteText:
    """One text over stages."""

    def __init__(self, chain: Routes, settings: Settings, enter: int) -> None:
        self.chain, self.settings, self.enter = chain, settings, enter
        self.name, self.epoch, self.number = os.urandom(16), 0, 0
        self.route: list[Hop] | None = None
        self.checkpoint: str | None = None  # of the stages it began on
        self.missing: tuple[int, ...] = ()
        self.switches = 0  # routes that were lost
        self.hops: list[tuple[int, int, int]] = []  # of the last step: first block, microseconds waited, microseconds computed
        self._ids: list[int] = []
        self._state: Tensor | None = None
        self._z: Tensor | None = None
        self._asked: Frame | None = None  # the step that is on its way
        self._answers: dict[str, Frame] = {}  # to it, by address
        self._turn: asyncio.Future[None] | None = None  # what is waited for: all stages to have opened the text, or an answer
        self._unopened: set[str] = set()
        self._places: dict[str, Place] = {}  # address -> where it says that this text is
        self._used: dict[str, StageLink] = {}  # stages that have been told of the text
        self._closed = False

    @property
    def _parallel(self) -> bool:
        """Whether each stage is asked by itself, since no block waits for another."""
        return self.chain.config.objective.parallel

    @property
    def _skip(self) -> tuple[int, ...]:
        return tuple(sorted({*self.settings.skip, *self.missing}))

    # --- A route ---

    async def begin(self) -> None:
        """Find a route and open the text on it. Raises BusyError where stages are full, and ServingError after PATIENCE_S without a route."""
        await self._find(time.monotonic() + PATIENCE_S, "")

    async def _find(self, end: float, problem: str) -> None:
        full: set[str] = set()
        while True:
            route = self.chain.route(self.enter, self._skip, full, self.checkpoint)
            if route is None and self.chain.allow_missing_blocks and self._leave_out():
                continue
            try:
                if route is not None:
                    return await self._open(route)
            except _Full as error:
                full.add(error.address)
                problem = str(error)
                continue
            except StageLost as lost:
                problem = str(lost)
            if full and self.epoch <= len(full):
                raise BusyError(problem)
            if time.monotonic() > end:
                raise (BusyError if full else ServingError)(self._why(problem))
            full = set()
            await self.chain.change(min(0.5, end - time.monotonic()))

    def _why(self, problem: str) -> str:
        if self.chain.missing(self._skip, self.checkpoint):
            return self.chain.why_not(self._skip, self.checkpoint) + (f"; lost: {problem}" if problem else "")
        return problem or "no way through the stages is left"

    def _leave_out(self) -> bool:
        """Go on without the blocks that no stage has, if any are left."""
        gone = {b for b in self.chain.missing(self._skip, self.checkpoint) if b >= self.enter}
        if not gone or {*self._skip, *gone} >= set(range(self.enter, self.chain.config.model.blocks)):
            return False
        self.missing = tuple(sorted({*self.missing, *gone}))
        return True

    async def _open(self, route: list[Hop]) -> None:
        """On all stages of the route at once. Raises StageLost, and ServingError where a stage refuses."""
        self.route, self.checkpoint, self.epoch = route, route[0].link.checkpoint, self.epoch + 1
        addresses = [hop.link.address for hop in route]
        for link in self._used.values():
            if link.address not in addresses:
                link.send(Frame(Kind.CLOSE, self.name, self.epoch))
        self._used = {hop.link.address: hop.link for hop in route}
        self._unopened = set(addresses)
        for hop, after in zip(route, [""] * len(route) if self._parallel else [*addresses[1:], ""], strict=True):
            request = OpenRequest(wire=self.settings.wire, skip=list(self._skip), first=hop.first, stop=hop.stop, next=after)
            hop.link.send(message_frame(Kind.OPEN, self.name, request, self.epoch))
            hop.link.texts += 1  # until it says how many there are
        await self._wait(OPEN_S)

    def lost(self, link: StageLink) -> None:
        """A stage is gone. Where the route leads through it, it is gone too."""
        if self.route is not None and any(hop.link is link for hop in self.route):
            self._end(StageLost(link.problem))

    def _end(self, error: Exception) -> None:
        """Whoever waits gets the error; the route is not taken again."""
        if isinstance(error, StageLost):
            self.route = None
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(error)
            self._turn.exception()  # looked at, should nobody wait for it any more

    async def _wait(self, limit_s: float | None = None) -> None:
        """For what the next frames bring. Raises what `_end` is given."""
        self._turn = asyncio.get_running_loop().create_future()
        began, self._places = time.monotonic(), {}
        while not self._turn.done():
            await asyncio.wait({self._turn}, timeout=LOOK_S)
            if self._turn.done():
                break
            if limit_s is not None and time.monotonic() - began > limit_s:
                self._end(StageLost(f"{', '.join(sorted(self._unopened))}: does not say that it opened the text"))
            elif limit_s is None:
                self._look_for_step()
        self._turn.result()

    # --- A step ---

    async def step(self, step: Step) -> Tensor:
        """One traversal -> logits (T - want, V). A route that is lost is replaced; raises ServingError when there is no other."""
        if self._closed:
            raise ServingError("the text is closed")
        self._remember(step)
        end, problem = None, ""
        while True:
            try:
                if self.route is None:
                    end = end or time.monotonic() + PATIENCE_S
                    self.switches += 1
                    await self._find(end, problem)
                    step = self._whole(step)
                return await self._traverse(step)
            except StageLost as lost:
                end, problem = end or time.monotonic() + PATIENCE_S, str(lost)
                if time.monotonic() > end:
                    raise ServingError(problem) from None

    def _remember(self, step: Step) -> None:
        self._ids = [*self._ids[: step.keep], *step.ids]
        self._state = rows_replaced(self._state, step.keep, step.state)
        self._z = rows_replaced(self._z, step.keep, step.z)

    def _whole(self, step: Step) -> Step:
        """The same step, with all positions before it sent again."""
        first_new = len(self._ids) - len(step.ids)
        return replace(step, keep=0, ids=self._ids, want=first_new + step.want, state=self._state, z=self._z)

    async def _traverse(self, step: Step) -> Tensor:
        assert self.route
        self.number += 1
        frame = Frame(Kind.STEP, self.name, self.epoch, self.number, step.keep, step.offset, len(step.ids), step.want, self.route[0].first)
        frame.tensors[Name.IDS] = ids_tensor(step.ids)
        put_state(frame, Name.STATE, step.state, self.settings.wire)
        put_state(frame, Name.Z, step.z, self.settings.wire)
        if step.votes is not None and not self._parallel:
            frame.tensors[Name.VOTES] = step.votes
        self._asked, self._answers = frame, {}
        for hop in self.route if self._parallel else self.route[:1]:
            hop.link.send(replace(frame, enter=hop.first))
        await self._wait()
        rows = [row for answer in self._answers.values() if (hops := answer.tensors.get(Name.HOPS)) is not None for row in hops.tolist()]
        self.hops = sorted(tuple(row) for row in rows)
        if not self._parallel:
            (answer,) = self._answers.values()
            return answer.tensors[Name.LOGITS]
        votes = torch.stack([answer.tensors[Name.VOTES] for answer in self._answers.values()]).sum(0)
        blocks = range(self.chain.config.model.blocks)
        return mean_of(votes if step.votes is None else votes + step.votes, len([b for b in blocks if b not in self._skip]))

    def _look_for_step(self) -> None:
        """Ask each stage where the step is. The route is lost where a stage has forgotten the text or is stuck, or the step is in none of them."""
        assert self.route and self._asked
        places = [self._places.get(hop.link.address) for hop in self.route]
        for hop, place in zip(self.route, places, strict=True):
            if place and place.epoch != self.epoch:
                return self._end(StageLost(f"{hop.link.address}: has forgotten the text"))
            if place and place.step >= self.number > place.forwarded and hop.link.stalled_s > self.chain.step_limit_s:
                self.chain.broke("*", hop.link.address)
                return self._end(StageLost(f"{hop.link.address}: its blocks have been at one step for {hop.link.stalled_s:.0f} s"))
        if self._parallel:
            self._look_each(places)
        else:
            self._look_between([place for place in places if place])
        if self.route is not None:
            for hop in self.route:
                hop.link.send(Frame(Kind.PING, self.name, self.epoch, self.number))

    def _look_between(self, places: list[Place]) -> None:
        """Where a step left the stage before long ago (the first: the client) and the next one does not have it, or nobody has it any more."""
        assert self.route and self._asked
        limit_s = self._limit_s
        if len(places) < len(self.route) or min(place.last - place.since for place in places) <= limit_s:
            return
        at = next((n for n, place in enumerate(places) if place.step < self.number), len(places))
        if at > 0 and places[at - 1].forwarded < self.number:
            return  # it is being computed
        way = [CLIENT, *(hop.link.address for hop in self.route), CLIENT][at : at + 2]
        if CLIENT not in way:
            self.chain.broke(*way)
        self._end(StageLost(f"{way[0]} -> {way[1]}: nothing arrives"))

    def _look_each(self, places: list[Place | None]) -> None:
        """The same where each stage has its step from the client and answers it."""
        assert self.route and self._asked
        limit_s = self._limit_s
        for hop, place in zip(self.route, places, strict=True):
            if place is None or hop.link.address in self._answers or place.last - place.since <= limit_s:
                continue
            if place.step < self.number:
                return self._end(StageLost(f"{CLIENT} -> {hop.link.address}: nothing arrives"))
            if place.forwarded >= self.number:
                return self._end(StageLost(f"{hop.link.address} -> {CLIENT}: nothing arrives"))

    @property
    def _limit_s(self) -> float:
        """After which a frame that left and is nowhere is lost."""
        assert self._asked
        return STUCK_S + self._asked.count * 4 * self.chain.config.model.width / SLOWEST

    # --- Frames ---

    def take(self, link: StageLink, frame: Frame) -> None:
        """A frame of this text from a stage. What belongs to another epoch or step is of no use any more."""
        if frame.kind == Kind.PONG:
            self._place(link, frame.message(Pong))
        elif frame.epoch != self.epoch or self._turn is None or self._turn.done():
            return
        elif frame.kind == Kind.OPENED:
            self._unopened.discard(link.address)
            if not self._unopened:
                self._turn.set_result(None)
        elif frame.kind == Kind.ANSWER and frame.step == self.number and not self._unopened and link.address in self._used:
            self._answer(link, frame)
        elif frame.kind == Kind.ERROR:
            self._fail(link, frame.message(Refusal))

    def _place(self, link: StageLink, pong: Pong) -> None:
        now, before = time.monotonic(), self._places.get(link.address)
        same = before is not None and (before.step, before.forwarded) == (pong.step, pong.forwarded)
        self._places[link.address] = Place(pong.epoch, pong.step, pong.forwarded, before.since if before and same else now, now)

    def _answer(self, link: StageLink, frame: Frame) -> None:
        """Only what was asked for, in numbers that are some."""
        assert self._turn is not None
        found, asked = frame.tensors.get(Name.VOTES if self._parallel else Name.LOGITS), self._asked
        if asked is None or found is None or (frame.keep, frame.count, frame.want) != (asked.keep, asked.count, asked.want):
            self._end(ServingError(f"{link.address}: its answer is not for the step that was asked"))
        elif not bool(torch.isfinite(found).all()):
            self._end(ServingError(f"{link.address}: its answer holds numbers that are not finite"))
        else:
            self._answers[link.address] = frame
            if self.route is not None and (not self._parallel or len(self._answers) == len(self.route)):
                self._turn.set_result(None)

    def _fail(self, link: StageLink, refusal: Refusal) -> None:
        """What a stage could not do, for whoever waits: another route, or an error."""
        told = f"{link.address}: {refusal.reason}"
        if refusal.kind == "unreachable":
            self.chain.broke(link.address, refusal.address)
            self._end(StageLost(f"{link.address} -> {refusal.address}: {refusal.reason}"))
        elif refusal.kind == "full":
            self._end(_Full(link.address, told))
        elif refusal.kind == "refused":
            self._end(ServingError(told))
        else:
            if refusal.kind == "failed":
                self.chain.broke("*", link.address)
            self._end(StageLost(told))

    async def close(self) -> None:
        self._closed = True
        self.chain.texts.pop(self.name, None)
        for link in self._used.values():
            link.send(Frame(Kind.CLOSE, self.name, self.epoch))
        self._used, self.route = {}, None
        self._end(ServingError("the text is closed"))
