"""One look at the status for everyone: taken in a thread, at most once an interval, as JSON that every reader can parse.

A listener holds no queue. It sends the newest look, and while a slow connection takes it in, the looks in between are gone; so memory does not grow
with readers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

MAX_LISTENERS = 64
KEEP_ALIVE_S = 15.0
RETRY_MS = 2000  # after which a browser comes back when the stream broke
CURVE_POINTS = 400  # of a curve that are sent; more cannot be seen
CURVES = ("losses", "participations")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Look:
    """The status at one time; None where it could not be made. `event` is what listeners are sent."""

    at: float
    status: dict[str, Any] | None
    event: bytes


class Watch:
    """Takes looks for all who ask, and counts those who listen."""

    def __init__(self, status: Callable[[], dict[str, Any]], interval_s: float) -> None:
        self.interval_s = interval_s
        self.listeners = 0
        self._status = status
        self._task: asyncio.Task[Look] | None = None

    async def look(self) -> Look:
        """A look that is at most interval_s old. Whoever finds it stale starts the next; all others wait for that one."""
        task = self._task
        if task is None or (task.done() and (task.cancelled() or time.monotonic() - task.result().at >= self.interval_s)):
            task = self._task = asyncio.create_task(asyncio.to_thread(take_look, self._status))
        return await asyncio.shield(task)  # a reader who leaves does not stop it for the others

    async def events(self) -> AsyncIterator[bytes]:
        """The stream of one listener, without end."""
        yield f"retry: {RETRY_MS}\n\n".encode()
        sent, last = b"", time.monotonic()
        while True:
            look = await self.look()
            if look.event != sent:
                yield look.event
                sent, last = look.event, time.monotonic()
            elif time.monotonic() - last >= KEEP_ALIVE_S:
                yield b": still here\n\n"
                last = time.monotonic()
            await asyncio.sleep(max(0.01, look.at + self.interval_s - time.monotonic()))


class Listening(StreamingResponse):
    """A listener's response. It is counted from its first byte to its end, however it ends."""

    def __init__(self, watch: Watch, headers: Mapping[str, str]) -> None:
        super().__init__(watch.events(), headers=headers, media_type="text/event-stream")
        self._watch = watch
        self._plain = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._watch.listeners >= MAX_LISTENERS:
            full = JSONResponse({"error": f"{MAX_LISTENERS} readers are listening already; try again later"}, 503, headers=self._plain)
            await full(scope, receive, send)
            return
        self._watch.listeners += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._watch.listeners -= 1


def take_look(status: Callable[[], dict[str, Any]]) -> Look:
    """Call the function and pack what it says. An error is logged, and listeners are told that there was one."""
    try:
        said = _finite(_thinned(status()))
        event = f"data: {json.dumps(said, allow_nan=False, separators=(',', ':'))}\n\n"
    except Exception:
        log.exception("the status could not be made")
        return Look(time.monotonic(), None, b'event: trouble\ndata: {"error":"the coordinator could not make its status"}\n\n')
    return Look(time.monotonic(), said, event.encode())


def _thinned(status: dict[str, Any]) -> dict[str, Any]:
    blocks = [block | {key: thin_curve(block.get(key) or []) for key in CURVES} for block in status.get("blocks") or []]
    return status | {"blocks": blocks, "headline": thin_curve(status.get("headline") or [])}


def thin_curve(points: list[Any]) -> list[Any]:
    """At most CURVE_POINTS and the newest: every second, fourth, eighth ... point, so that a curve that grows keeps its points."""
    step = 1
    while len(points) > CURVE_POINTS * step:
        step *= 2
    return points if step == 1 else points[:-1:step] + points[-1:]


def _finite(value: Any) -> Any:
    """JSON has no infinities: they become null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
