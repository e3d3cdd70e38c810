"""A stage: consecutive blocks at work for texts that clients opened. No network here: frames come in, frames and where they go come out.

What a stage remembers of a text can be made again from the client's ids at any time, so nothing is kept on disk, and a text is forgotten when its
client is gone. Each text has an *epoch*: a client that must begin again (another stage died) opens it under the next one, and whatever is on its
way from before is refused. Of an epoch, steps come in order; the last one's answer is kept and given again to whoever asks again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blocktrain.errors import ProtocolError, ServingError
from blocktrain.model.transformer import MASK_ID
from blocktrain.serving.chain import Batcher
from blocktrain.serving.compute import BlockRunner, Job, Result, Settings, TextMemory
from blocktrain.serving.frames import Frame, Kind, Name, OpenRequest, Pong, Refusal, Shape, put_state, take_state

MAX_INT32 = (1 << 31) - 1


class StageRefused(Exception):
    """A frame that is not taken, with what the client is told."""

    def __init__(self, kind: str, reason: str, address: str = "") -> None:
        super().__init__(reason)
        self.refusal = Refusal(kind=kind, reason=reason, address=address)


@dataclass
class StageText:
    """What is known of one text."""

    owner: object  # the session that opened it
    request: OpenRequest
    epoch: int
    memory: TextMemory
    settings: Settings
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    job: asyncio.Future[Result] | None = None  # of the step that runs
    over: bool = False  # closed, or opened again under a later epoch
    last: Frame | None = None  # answer of, or frame after, the last step
    step: int = -1  # came in
    forwarded: int = -1  # left


class Stage:
    """The texts of one process."""

    MAX_WAITING = 2  # steps of one text at once; a client waits for each answer, so more are a fault

    def __init__(self, runner: BlockRunner, max_texts: int = 64) -> None:
        self.runner, self.batcher = runner, Batcher(runner)
        self.shape, self.max_texts = Shape.of(runner.config), max_texts
        self.texts: dict[bytes, StageText] = {}

    def open(self, frame: Frame, owner: object) -> None:
        """Know a text from now on, or begin it again under a later epoch. Raises StageRefused."""
        request: OpenRequest = frame.message(OpenRequest)
        self._check_open(request)
        known = self.texts.get(frame.text)
        if known is not None and known.owner is not owner:
            raise StageRefused("refused", "text: another client has opened it")
        if known is not None and frame.epoch <= known.epoch:
            raise StageRefused("refused", f"epoch: {frame.epoch} is not after {known.epoch}, which is open")
        if known is None and len(self.texts) >= self.max_texts:
            raise StageRefused("full", f"{self.max_texts} texts are open here, which is the most")
        if known is not None:
            _end(known)
        self.texts[frame.text] = StageText(owner, request, frame.epoch, TextMemory(), Settings(request.wire, tuple(request.skip)))

    def _check_open(self, request: OpenRequest) -> None:
        first, stop = self.runner.first, self.runner.stop
        if not first <= request.first < request.stop <= stop:
            raise StageRefused(
                "refused", f"first, stop: blocks {request.first} to {request.stop - 1} are not all here, this stage has {first} to {stop - 1}"
            )
        blocks = self.runner.config.model.blocks
        if len(set(request.skip)) != len(request.skip) or any(not 0 <= b < blocks for b in request.skip) or len(request.skip) >= blocks:
            raise StageRefused("refused", f"skip: {request.skip[:8]} are not some of the run's {blocks} blocks")
        if all(b in request.skip for b in range(request.first, request.stop)):
            raise StageRefused("refused", "skip: leaves nothing to do here")
        left = [b for b in range(request.stop, blocks) if b not in request.skip and not self.runner.config.objective.parallel]
        if bool(left) != bool(request.next):
            raise StageRefused("refused", f"next: {'needed, blocks come after these' if left else 'there is no block after these'}")

    def close(self, text: bytes, owner: object) -> None:
        if text in self.texts and self.texts[text].owner is owner:
            _end(self.texts.pop(text))

    def leave(self, owner: object) -> None:
        """A client is gone, and with it its texts."""
        for name in [name for name, text in self.texts.items() if text.owner is owner]:
            self.close(name, owner)

    def pong(self, text: bytes) -> Pong:
        known, since = self.texts.get(text), self.batcher.busy_since
        stalled = 0.0 if since is None else time.monotonic() - since
        if known is None:
            return Pong(texts=len(self.texts), stalled_s=stalled)
        return Pong(texts=len(self.texts), stalled_s=stalled, epoch=known.epoch, step=known.step, forwarded=known.forwarded)

    async def step(self, frame: Frame, sender: object | None = None) -> tuple[Frame, StageText]:
        """Run a step -> the frame for the next stage, or the answer, and the text with where that goes. Raises StageRefused and ProtocolError.

        `sender` is the client it came from, None where it came from a stage. If the text is closed meanwhile, so is the step (CancelledError).
        """
        text = self.texts.get(frame.text)
        if text is None:
            raise StageRefused("unknown", "text: it is not open here")
        if sender is not None and sender is not text.owner:
            raise StageRefused("refused", "text: another client has opened it")
        if text.waiting >= self.MAX_WAITING:
            raise StageRefused("refused", f"step: {text.waiting} steps of this text are waiting already")
        arrived, text.waiting = time.monotonic(), text.waiting + 1
        try:
            async with text.lock:
                return await self._step_in_turn(frame, text, arrived), text
        finally:
            text.waiting -= 1

    async def _step_in_turn(self, frame: Frame, text: StageText, arrived: float) -> Frame:
        if text.over:
            raise StageRefused("unknown", "text: it was closed")
        if frame.epoch != text.epoch:
            raise StageRefused("refused", f"epoch: {frame.epoch}, the text is in {text.epoch}")
        if text.last is not None and frame.step == text.last.step:
            return text.last
        if frame.step <= text.step:
            raise StageRefused("refused", f"step: {frame.step} comes after {text.step}")
        text.step = frame.step
        job = self._job(frame, text)
        waited = time.monotonic()
        if frame.remaining_ms and (waited - arrived) * 1000 >= frame.remaining_ms:
            raise StageRefused("failed", f"deadline: over after {waited - arrived:.1f} s in line")
        text.job = asyncio.ensure_future(self.batcher.run(job))
        try:
            result = await text.job
        except ServingError as error:  # it stops: nothing is wrong with it or with the step
            raise StageRefused("failed", str(error)) from None
        except Exception as error:
            text.memory = TextMemory()
            raise StageRefused("failed", f"the blocks failed ({type(error).__name__})") from error
        text.last = self._outgoing(frame, text, result, int((waited - arrived) * 1e6), arrived)
        return text.last

    def _job(self, frame: Frame, text: StageText) -> Job:
        """Raises ProtocolError naming what is wrong for this text."""
        runner, settings, request = self.runner, text.settings, text.request
        ids = frame.tensors.get(Name.IDS)
        if ids is None:
            raise ProtocolError("IDS: missing")
        if bool(((ids < 0) | (ids > MASK_ID)).any()):
            raise ProtocolError(f"IDS: must be 0 to {MASK_ID}")
        if not request.first <= frame.enter < request.stop:
            raise ProtocolError(f"enter: block {frame.enter} is not among {request.first} to {request.stop - 1} of this text")
        state, z = take_state(frame, Name.STATE, settings.wire), take_state(frame, Name.Z, settings.wire)
        begins = all(b in settings.skip for b in range(frame.enter))
        for name, x, needed in (("STATE", state, runner.chained and not begins), ("Z", z, runner.config.objective.noisy and not begins)):
            if (x is not None) != needed:
                raise ProtocolError(f"{name}: {'needed' if needed else 'not taken'} at block {frame.enter}")
        votes = frame.tensors.get(Name.VOTES)
        if (votes is not None) != runner.needs_votes(frame.enter, settings):
            raise ProtocolError(f"VOTES: {'not taken' if votes is not None else 'needed'} at block {frame.enter}")
        if votes is not None and bool(((votes > 0) | (votes < -MAX_INT32 // 2)).any()):
            raise ProtocolError("VOTES: holds a number that is no sum of log-probabilities")
        job = Job(text.memory, settings, frame.keep, frame.offset, ids[0].tolist(), frame.enter, state, z, votes, frame.want, stop=request.stop)
        job.tally = runner.config.objective.parallel
        for b in runner.blocks(job):
            have = text.memory.blocks[b].length if b in text.memory.blocks else 0
            if frame.keep > have:
                raise ProtocolError(f"keep: {frame.keep} positions, block {b} remembers {have} of this text")
        return job

    def _outgoing(self, frame: Frame, text: StageText, result: Result, waited_us: int, arrived: float) -> Frame:
        took_us = int((time.monotonic() - arrived) * 1e6)
        kind = Kind.STEP if text.request.next else Kind.ANSWER
        after = [b for b in range(text.request.stop, self.shape.blocks) if b not in text.settings.skip]
        enter = after[0] if after else self.shape.blocks - 1
        out = Frame(kind, frame.text, frame.epoch, frame.step, frame.keep, frame.offset, frame.count, frame.want, enter)
        if frame.remaining_ms:
            out.remaining_ms = max(1, frame.remaining_ms - took_us // 1000)
        out.tensors[Name.HOPS] = _with_hop(frame.tensors, text.request.first, waited_us, took_us - waited_us, self.shape.blocks)
        if result.votes is not None:
            out.tensors[Name.VOTES] = result.votes
        if kind == Kind.ANSWER:
            if result.logits is not None:
                out.tensors[Name.LOGITS] = result.logits
            return out
        out.tensors[Name.IDS] = frame.tensors[Name.IDS]
        put_state(out, Name.STATE, result.state, text.settings.wire)
        put_state(out, Name.Z, result.z, text.settings.wire)
        return out


def _end(text: StageText) -> None:
    """Nothing more is computed for it than what is being computed now."""
    text.over = True
    if text.job is not None:
        text.job.cancel()


def _with_hop(tensors: Mapping[Name, Tensor], first: int, waited_us: int, computed_us: int, most: int) -> Tensor:
    """The hops so far and this one, never more than a reader takes."""
    mine = torch.tensor([[first, min(waited_us, MAX_INT32), min(computed_us, MAX_INT32)]], dtype=torch.int32)
    before = tensors.get(Name.HOPS)
    return mine if before is None else torch.cat((before[: most - 1], mine))
