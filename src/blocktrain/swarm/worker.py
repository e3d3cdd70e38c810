"""A worker: asks for work, fetches what it lacks, trains, hands in, asks again. It knows neither HTTP nor torch.

`Link` is its way to the coordinator (HTTP in link.py, a virtual wire in simulator.py), `Engine` what trains (engine.py, or a stand-in). Time
comes from the event loop, so that under a loop with a virtual clock the same worker lives through hours in seconds.

A worker keeps its promises: it hands in or gives back what it was given before it stops, and keeps back the time that its upload takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blocktrain.errors import BlockTrainError, DivergedError
from blocktrain.streams import Source
from blocktrain.swarm import crash
from blocktrain.swarm.protocol import (
    AskReply,
    BeginReply,
    BeginRequest,
    BlobRef,
    CommitReply,
    CommitRequest,
    JoinReply,
    Metrics,
    RunInfo,
    Work,
    part_of,
)

FIRST_UPLOAD_SHARE = 0.1  # of the time left that the first upload is thought to take
FADES = 0.7  # what the memory of the slowest upload is multiplied by with each assignment
MARGIN_S = 0.5
RESENDS = 5
LANES = 2  # parts of an update on their way at once
PATIENT_S = 2.0  # beyond the heartbeat limit, for a place that a killed process may still hold
DIVERGED = 3  # assignments that may diverge before the worker gives up


class Told(Exception):
    """The coordinator's answer to a request it did not grant."""

    def __init__(self, kind: str, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.retry_after_s = kind, reason, retry_after_s


class WorkerStopped(BlockTrainError):
    """The worker cannot go on: the coordinator said so, or was away for too long."""

    exit_code = 1


class Link(Protocol):
    """The way to a coordinator. A request that is not granted raises Told; one that never got through, WorkerStopped."""

    away_s: float  # for how long, in all, the coordinator could not be had at all

    async def info(self) -> RunInfo: ...
    async def join(self, capacity: int, takeover: bool) -> JoinReply: ...
    async def beat(self) -> None: ...
    async def ask(self, ask: str) -> AskReply: ...
    async def begin(self, request: BeginRequest) -> BeginReply: ...
    async def put_part(self, key: str, sha256: str, index: int, source: Source, start: int, stop: int) -> None: ...
    async def commit(self, request: CommitRequest) -> CommitReply: ...
    async def give_back(self, key: str, why: str) -> None: ...
    async def leave(self) -> None: ...
    async def fetch(self, blob: BlobRef, target: Path | None) -> None: ...
    async def close(self) -> None: ...
    def hurry(self) -> None: ...


@dataclass(frozen=True)
class Trained:
    """An encoded update, ready to be sent."""

    source: Source
    sha256: str
    num_samples: int
    metrics: Metrics


class Engine(Protocol):
    """What trains."""

    def configure(self, info: RunInfo) -> int:
        """Take up the run's settings; returns how many blocks fit this machine."""
        ...

    async def prepare(self, info: RunInfo, link: Link) -> None:
        """Get the text."""
        ...

    async def fetch(self, work: Work, link: Link) -> None:
        """Get the files that the work needs."""
        ...

    async def train(self, work: Work, seconds: float, stopped: Callable[[], bool]) -> Trained | None:
        """Train for at most so many seconds, fewer if stopped; None where not even one step was possible."""
        ...

    def settled(self, work: Work, accepted: bool) -> None:
        """What became of the update."""
        ...


@dataclass
class Worker:
    """One worker of one run. `run()` returns why it ended."""

    link: Link
    engine: Engine
    say: Callable[[str], None] = lambda _: None
    takeover: bool = False
    max_span: int | None = None
    name: str = ""
    stopping: bool = False
    updates: int = 0
    diverged: int = 0
    _upload_s: float | None = None
    _heartbeat_s: float = 5.0
    _limit_s: float = 30.0  # of silence, after which a worker counts as gone

    def stop(self) -> None:
        """Hand in what there is after the step in progress, then leave; a coordinator that is away is not waited for any more."""
        self.stopping = True
        self.link.hurry()

    async def run(self) -> str:
        """Until the run is finished or the worker is stopped. Raises WorkerStopped where it cannot go on."""
        try:
            info = await self._begin()
            beats = asyncio.ensure_future(self._beats())
            try:
                await self.engine.prepare(info, self.link)
                return await self._work_until_done()
            finally:
                beats.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await beats
                with contextlib.suppress(Told, BlockTrainError, TimeoutError):
                    await asyncio.wait_for(self.link.leave(), 10)
        except Told as error:
            raise WorkerStopped(f"{self.name or 'worker'}: {error.reason}") from None
        finally:
            await self.link.close()

    async def _begin(self) -> RunInfo:
        """Read the run's settings and take a place."""
        info = await self.link.info()
        capacity = self.engine.configure(info)
        self._limit_s = float(info.config["round"]["heartbeat_limit_s"])
        await self._join(min(capacity, self.max_span) if self.max_span else capacity)
        return info

    async def _join(self, capacity: int) -> None:
        reply = await self._place(capacity)
        self.name, self._heartbeat_s = reply.worker, reply.heartbeat_s
        self.say(f"joined as {reply.worker}, {capacity} block{'s' * (capacity != 1)} fit here")

    async def _place(self, capacity: int) -> JoinReply:
        """The worker's place. Where an earlier process of its own was killed, that is free once it has been silent for long enough."""
        end, told = _now() + self._limit_s + PATIENT_S, False
        while True:
            try:
                return await self.link.join(capacity, self.takeover)
            except Told as error:
                if error.kind != "conflict" or self.stopping or _now() > end:
                    raise
                if not told:
                    self.say(f"{error.reason}; waits {end - _now():.0f} s in case that process is gone")
                told = True
            await self._rest(PATIENT_S / 2)

    async def _beats(self) -> None:
        """Signs of life, beside everything else."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            with contextlib.suppress(Told, BlockTrainError):  # the next request of the worker itself hears of it
                await self.link.beat()

    async def _work_until_done(self) -> str:
        told = ""
        while not self.stopping:
            try:
                reply = await self.link.ask(secrets.token_hex(8))
            except Told as error:
                if error.kind == "suspended":
                    self.say(error.reason)
                    await self._rest(max(1.0, error.retry_after_s))
                elif error.kind == "unknown":  # this worker, or the settings it has read
                    self.say(error.reason)
                    await self.engine.prepare(await self._begin(), self.link)
                else:
                    raise
                continue
            if reply.kind == "finished":
                return f"the run is finished: {reply.reason}"
            if reply.work is None:
                if reply.reason != told:
                    self.say(f"waits: {reply.reason}")
                told = reply.reason
                await self._rest(reply.retry_after_s)
                continue
            told = ""
            await self._do(reply.work, reply.time_left_s)
        return "stopped"

    async def _rest(self, seconds: float) -> None:
        """Wait, but not beyond a stop."""
        end = _now() + seconds
        while not self.stopping and (left := end - _now()) > 0:
            await asyncio.sleep(min(left, 1.0))

    async def _sit_out(self, seconds: float) -> None:
        """No step fits into what this round has left: the next one may. One slow upload is not to keep the worker out for ever."""
        if self._upload_s is not None:
            self._upload_s *= FADES
        await self._rest(max(1.0, seconds))

    async def _do(self, work: Work, time_left_s: float) -> None:
        """One assignment, from its files to its answer."""
        began = _now()
        crash.point("worker.after_assignment")
        blocks = ", ".join(f"block {b} version {_version(work, b)}" for b in range(work.first, work.stop))
        num_steps = sum(stop - first for first, stop in work.steps)
        self.say(f"{blocks}: {num_steps} steps, {time_left_s:.0f} s left")
        try:
            await self.engine.fetch(work, self.link)
            crash.point("worker.in_fetch")
            reserve = self._upload_s * 1.5 if self._upload_s is not None else time_left_s * FIRST_UPLOAD_SHARE
            seconds = time_left_s - (_now() - began) - reserve - MARGIN_S
            trained = await self.engine.train(work, seconds, lambda: self.stopping)
            if trained is None:
                await self.link.give_back(work.key, "stopped before its first step" if self.stopping else "no time for one step and its upload")
                await self._sit_out(time_left_s - (_now() - began))
                return
            await self._hand_in(work, trained)
        except Told as error:
            if error.kind in ("revoked", "conflict", "forbidden"):
                raise
            self.engine.settled(work, False)
            self.say(f"{blocks}: {error.reason}")
            if error.kind == "unknown":  # a file is gone, its version is too old by now: this work cannot be done
                with contextlib.suppress(Told):
                    await self.link.give_back(work.key, error.reason[:200])
                await self._rest(PATIENT_S)  # the same work may come again
        except OSError as error:  # this machine's disk: the coordinator's trouble is waited for by the link
            with contextlib.suppress(Told):
                await self.link.give_back(work.key, "the worker's disk refused")
            raise WorkerStopped(f"{error.filename or self.name}: {error.strerror or error}; make room, and the same command goes on") from None
        except DivergedError as error:
            self.engine.settled(work, False)
            self.diverged += 1
            with contextlib.suppress(Told):  # its time may have passed
                await self.link.give_back(work.key, str(error)[:200])
            if self.diverged >= DIVERGED:
                raise
            self.say(f"{blocks}: {error}")

    async def _hand_in(self, work: Work, trained: Trained) -> None:
        """Begin, parts, commit; what is missing or damaged at the other end is sent again."""
        began = _now() - self.link.away_s
        request = BeginRequest(key=work.key, size=trained.source.size, sha256=trained.sha256)
        for _ in range(RESENDS):
            reply = await self.link.begin(request)
            await send_parts(self.link, work.key, trained.source, trained.sha256, reply)
            crash.point("worker.before_commit")
            try:
                done = await self.link.commit(
                    CommitRequest(
                        key=work.key, size=trained.source.size, sha256=trained.sha256, num_samples=trained.num_samples, metrics=trained.metrics
                    )
                )
            except Told as error:
                if error.kind != "resend":
                    raise
                self.say(error.reason)
                continue
            break
        else:
            raise Told("returned", f"the update was damaged {RESENDS} times on its way")
        crash.point("worker.after_commit")
        self._upload_s = max(_now() - self.link.away_s - began, (self._upload_s or 0.0) * FADES)
        self.engine.settled(work, True)
        self.updates += 1
        ce = f", CE {trained.metrics.ce:.4f} nats/byte" if trained.metrics.ce is not None else ""
        speed = f", {trained.metrics.tokens_per_s:,.0f} bytes/s" if trained.metrics.tokens_per_s else ""
        self.say(
            f"block {work.first}{f'-{work.stop - 1}' * (work.stop - work.first > 1)}: {done.reason}{ce}{speed}, {trained.source.size:,} bytes up"
        )


async def send_parts(link: Link, key: str, source: Source, sha256: str, reply: BeginReply) -> None:
    """The parts that the coordinator lacks, by two lanes: while one part is on its way, the next is made ready."""
    lacking = iter([index for index in range(-(-source.size // reply.part_bytes)) if index not in reply.received])

    async def lane() -> None:
        for index in lacking:
            start = index * reply.part_bytes
            await link.put_part(key, sha256, index, source, start, min(source.size, start + reply.part_bytes))
            crash.point("worker.after_part")

    lanes = [asyncio.ensure_future(lane()) for _ in range(LANES)]
    try:
        await asyncio.gather(*lanes)
    finally:
        for one in lanes:
            one.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)


def _version(work: Work, block: int) -> int:
    return next(part.version for part in work.parts if part.part == part_of(block))


def _now() -> float:
    return asyncio.get_running_loop().time()
