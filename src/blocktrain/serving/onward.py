"""The line from a stage to the next one at one address: opened when first needed, closed when no text has needed it for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from blocktrain.errors import ProtocolError
from blocktrain.serving.frames import Frame, Kind, Refusal, decode
from blocktrain.serving.line import Broken, Line, Patience, Secrets
from blocktrain.serving.stage import Stage

MAX_ONWARD = 128  # next stages of one stage
UNUSED_S = 20.0
log = logging.getLogger("blocktrain.stage")


class Onward:
    """`lost` is called once, with the address and why; with "" where nothing was wrong."""

    def __init__(self, address: str, secrets: Secrets, stage: Stage, patience: Patience, lost: Callable[[str, str], None]) -> None:
        self.address, self.secrets, self.stage, self.lost = address, secrets, stage, lost
        self.line = Line(patience, self._take)
        self.task = asyncio.create_task(self._run())

    def send(self, frame: Frame) -> None:
        self.line.send(frame.encode())

    def close(self) -> None:
        self.task.cancel()

    async def _run(self) -> None:
        """Send what is in line until the line breaks."""
        channel = self.secrets.channel(self.address, self.stage.shape.max_bytes)
        running = asyncio.create_task(self.line.run(channel, "Forward", self.secrets))
        problem = ""
        try:
            while self._used() and not running.done():
                await asyncio.wait({running}, timeout=UNUSED_S)
            problem = _problem_of(running) if running.done() else ""
        finally:
            running.cancel()
            self.lost(self.address, problem)
            with contextlib.suppress(Exception):
                await asyncio.shield(channel.close())

    def _used(self) -> bool:
        return any(text.request.next == self.address for text in self.stage.texts.values())

    def _take(self, data: bytes) -> None:
        frame = decode(data, self.stage.shape)
        self.line.patience.answered()
        if frame.kind == Kind.ERROR:
            raise Broken(f"it refused a frame: {frame.message(Refusal).reason}")


def _problem_of(running: asyncio.Task[None]) -> str:
    error = None if running.cancelled() else running.exception()
    if not isinstance(error, Broken | ProtocolError):
        log.error("a line to the next stage failed", exc_info=error)
    return str(error) or type(error).__name__
