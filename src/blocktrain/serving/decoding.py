"""Text from a chain of blocks: exact, speculative and sweep.

exact        one traversal a byte: the plain autoregressive pipeline
speculative  the first blocks, on this machine, draft K bytes; one traversal of the others checks them all. The bytes are those of `exact`
sweep        W positions in one traversal, all but the first with their context masked. Only for a run that was trained with a window, and lossy

A text is remembered in a window of the run's T positions. When it is full, the text goes on from the last 3T/4 bytes; that happens at the same byte
in every mode, or the modes would differ after it. Each mode yields `Piece`s: bytes that are final, and the logits they were picked from.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.errors import ConfigError
from blocktrain.model.transformer import MASK_ID
from blocktrain.serving.chain import Batcher, Chain, Step, Text, rows_replaced
from blocktrain.serving.compute import BlockRunner, Job, Settings, TextMemory
from blocktrain.serving.sampling import Sampling, pick
from blocktrain.training.checkpoint import LoadedRun

EMPTY_PROMPT = b"\n"  # a model of p(next | past) needs one byte of past
MAX_DRAFT = 32
Mode = Literal["exact", "speculative", "sweep"]
MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True)
class Piece:
    """Bytes that were generated together, one traversal's worth."""

    ids: list[int]
    logits: Tensor  # (len(ids), V) float32


@dataclass
class Counts:
    """What a generation took; filled while it runs."""

    traversals: int = 0  # of the whole chain, the prompt's first included
    bytes: int = 0
    drafted: int = 0
    accepted: int = 0
    missing: tuple[int, ...] = ()  # blocks that were left out, since no stage has them
    prompt_s: float = 0.0  # until the first piece
    seconds: float = 0.0

    @property
    def bytes_per_traversal(self) -> float:
        return self.bytes / self.traversals if self.traversals else 0.0

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


@dataclass
class Window:
    """The positions of a text that are remembered: `known` ids from `offset` of the whole text on."""

    capacity: int
    offset: int = 0
    known: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int]) -> tuple[int, list[int]]:
        """Take in known bytes; returns how many remembered positions stay, and the ids to run after them."""
        keep, new = len(self.known), list(ids)
        if keep + len(new) > self.capacity:
            all_ids = self.known + new
            new = all_ids[-max(1, self.capacity * 3 // 4) :]
            self.offset += len(all_ids) - len(new)
            keep, self.known = 0, []
        self.known += new
        return keep, new

    @property
    def room(self) -> int:
        return self.capacity - len(self.known)

    @property
    def end(self) -> int:
        """Place in the whole text of the byte that comes next."""
        return self.offset + len(self.known)


async def exact(text: Text, capacity: int, prompt: bytes, max_bytes: int, sampling: Sampling, counts: Counts) -> AsyncIterator[Piece]:
    """One byte a traversal."""
    window, new = Window(capacity), list(prompt or EMPTY_PROMPT)
    for _ in range(max_bytes):
        keep, ids = window.add(new)
        logits = await text.step(Step(keep, window.offset, ids, want=len(ids) - 1))
        counts.traversals += 1
        new = [pick(logits[0], sampling, window.end)]
        yield Piece(new, logits)


class DraftLength:
    """How many bytes to draft: fixed, or what promises most bytes a second from the acceptance and the times seen so far.

    At acceptance a, a traversal that checks K drafts yields (1 - a^(K+1)) / (1 - a) bytes; it takes t, and a draft d.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self.fixed = fixed
        self.rejected, self.tried = 1.0, 5.0  # starts at a = 0.8, worth five drafts
        self.traversal_s, self.draft_s = 0.05, 0.001

    def choose(self) -> int:
        if self.fixed is not None:
            return self.fixed
        a = min(0.995, 1 - self.rejected / self.tried)

        def rate(k: int) -> float:
            return (1 - a ** (k + 1)) / (1 - a) / (self.traversal_s + k * self.draft_s)

        return max(range(1, MAX_DRAFT + 1), key=rate)

    def saw(self, drafted: int, accepted: int, traversal_s: float, draft_s: float) -> None:
        """Old observations fade, so that K follows a text that becomes easy or hard."""
        self.rejected = 0.95 * self.rejected + (accepted < drafted)
        self.tried = 0.95 * self.tried + min(accepted + 1, drafted)
        self.traversal_s = 0.7 * self.traversal_s + 0.3 * traversal_s
        if drafted:
            self.draft_s = 0.7 * self.draft_s + 0.3 * draft_s / drafted


class OwnDraft:
    """The first blocks of the run itself, up to the first with a read-out: what they compute for a draft is handed on, not computed again."""

    def __init__(self, run: LoadedRun, blocks: int | None = None) -> None:
        depth = run.config.objective.span if blocks is None else blocks
        check_own_draft(run.config, depth)
        self.enter = depth
        self.batcher = Batcher(BlockRunner(run, 0, depth))
        self.reader = self.batcher.runner

    def open(self, settings: Settings) -> DraftText:
        return OwnDraftText(self, settings)


def check_own_draft(config: RunConfig, depth: int) -> None:
    """Raises ConfigError where the first `depth` blocks cannot draft for the others."""
    if config.objective.span >= config.model.blocks:
        raise ConfigError(
            "--mode speculative: the run's first block was trained without a read-out of its own (one span over all blocks); name a --draft RUN"
        )
    if not config.objective.span <= depth < config.model.blocks:
        raise ConfigError(f"--draft-blocks: must be from {config.objective.span} to {config.model.blocks - 1} in this run, got {depth}")


class DraftText(ABC):
    """A draft model's view of one text."""

    enter = 0  # block at which the checked traversal enters

    @abstractmethod
    async def feed(self, keep: int, offset: int, ids: Sequence[int]) -> Tensor:
        """Take in ids after `keep` kept positions -> logits (V,) of the byte after them."""

    def rows(self, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        """State and z of positions start … stop, for the block at which the traversal enters."""
        return None, None

    def votes(self, start: int, stop: int) -> Tensor | None:
        """Where all blocks vote, the votes of its own at positions start … stop, after each of which it was asked for a byte."""
        return None


class OwnDraftText(DraftText):
    def __init__(self, draft: OwnDraft, settings: Settings) -> None:
        self.draft, self.settings, self.enter = draft, settings, draft.enter
        self.memory = TextMemory()
        self._state: Tensor | None = None  # (T, D) of all remembered positions
        self._z: Tensor | None = None
        self._votes: dict[int, Tensor] = {}  # (V,) of a position

    async def feed(self, keep: int, offset: int, ids: Sequence[int]) -> Tensor:
        job = Job(self.memory, self.settings, keep, offset, ids, enter=0, want=len(ids) - 1, read=True)
        result = await self.draft.batcher.run(job)
        self._state, self._z = rows_replaced(self._state, keep, result.state), rows_replaced(self._z, keep, result.z)
        if result.votes is not None:
            self._votes[keep + len(ids) - 1] = result.votes[0]
        assert result.logits is not None
        return result.logits[0]

    def votes(self, start: int, stop: int) -> Tensor | None:
        return torch.stack([self._votes[p] for p in range(start, stop)]) if self._votes else None

    def rows(self, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        return (None if x is None else x[start:stop] for x in (self._state, self._z))  # type: ignore[return-value]


class OtherDraft:
    """A whole other run on this machine, of the same vocabulary."""

    def __init__(self, run: LoadedRun) -> None:
        self.capacity = run.config.model.positions
        self.batcher = Batcher(BlockRunner(run))

    def open(self, settings: Settings) -> DraftText:
        return OtherDraftText(self, settings)


class OtherDraftText(DraftText):
    """Keeps a window of its own, since its run may have other positions."""

    def __init__(self, draft: OtherDraft, settings: Settings) -> None:
        self.draft, self.settings = draft, Settings(settings.wire)
        self.memory = TextMemory()
        self._window = Window(draft.capacity)

    async def feed(self, keep: int, offset: int, ids: Sequence[int]) -> Tensor:
        window = self._window
        begin = offset + keep - window.offset  # of ids, in its own window
        if not 0 < begin <= len(window.known):
            window.known, window.offset, begin = [], offset + keep, 0
        del window.known[begin:]
        kept, new = window.add(ids)
        result = await self.draft.batcher.run(Job(self.memory, self.settings, kept, window.offset, new, enter=0, want=len(new) - 1))
        assert result.logits is not None
        return result.logits[0]


Draft = OwnDraft | OtherDraft


async def speculative(
    text: Text, draft: DraftText, capacity: int, prompt: bytes, max_bytes: int, sampling: Sampling, length: DraftLength, counts: Counts
) -> AsyncIterator[Piece]:
    """K drafts, one traversal that checks them and adds a byte of its own, again."""
    window, new, left = Window(capacity), list(prompt or EMPTY_PROMPT), max_bytes
    while left:
        keep, ids = window.add(new)
        position, drafts = window.end, []
        began = time.perf_counter()
        guess = await draft.feed(keep, window.offset, ids)
        begun = time.perf_counter()  # the draft's own prompt is not a draft
        for i in range(min(length.choose(), left - 1, window.room)):
            drafts.append(pick(guess, sampling, position + i))
            guess = await draft.feed(len(window.known) + i, window.offset, drafts[-1:])
        drafted = time.perf_counter()
        end = len(window.known) + len(drafts)
        state, z = draft.rows(keep, end)
        votes = draft.votes(len(window.known) - 1, end)
        logits = await text.step(Step(keep, window.offset, ids + drafts, len(ids) - 1, draft.enter, state, z, votes))
        counts.traversals += 1
        picks: list[int] = []
        for i in range(len(drafts) + 1):
            picks.append(pick(logits[i], sampling, position + i))
            if i < len(drafts) and picks[i] != drafts[i]:
                break
        accepted = len(picks) - 1
        length.saw(len(drafts), accepted, time.perf_counter() - drafted + (begun - began) * (keep > 0), drafted - begun)
        counts.drafted += len(drafts)
        counts.accepted += accepted
        window.known += picks[:-1]
        new, left = picks[-1:], left - len(picks)
        yield Piece(picks, logits[: len(picks)])


async def sweep(text: Text, capacity: int, prompt: bytes, max_bytes: int, sampling: Sampling, width: int, counts: Counts) -> AsyncIterator[Piece]:
    """`width` bytes a traversal: the one after the known bytes as in `exact`, the others from positions that see a mask for their context."""
    window, new, left = Window(capacity), list(prompt or EMPTY_PROMPT), max_bytes
    while left:
        keep, ids = window.add(new)
        masked = min(width, left, window.room + 1) - 1
        logits = await text.step(Step(keep, window.offset, ids + [MASK_ID] * masked, len(ids) - 1))
        counts.traversals += 1
        new = [pick(logits[i], sampling, window.end + i) for i in range(masked + 1)]
        left -= len(new)
        yield Piece(new, logits)


def check_sweep(config: RunConfig, width: int) -> None:
    """Raises ConfigError where a run cannot give `width` bytes a traversal."""
    most = config.objective.window + 1
    if most == 1:
        raise ConfigError("--mode sweep: this run was trained without a window (--set objective.window=W when it is made)")
    if width > most:
        why = f"it was trained with objective.window = {config.objective.window}"
        raise ConfigError(f"--window: this run gives at most {most} bytes a traversal, got {width}: {why}")
    if width < 1:
        raise ConfigError(f"--window: must be at least 1, got {width}")


@dataclass(frozen=True)
class Plan:
    """How a text is to be generated."""

    mode: Mode = "exact"
    sampling: Sampling = field(default_factory=Sampling)
    max_bytes: int = 200
    settings: Settings = field(default_factory=Settings)
    draft_length: int | None = None  # speculative: fixed K; None adapts it
    window: int | None = None  # sweep: bytes a traversal; None takes the most that the run was trained for


async def generate(chain: Chain, plan: Plan, prompt: bytes, draft: Draft | None = None, counts: Counts | None = None) -> AsyncIterator[Piece]:
    """Pieces of up to `plan.max_bytes` bytes after the prompt. Raises ConfigError for a plan that the run does not allow.

    The text is closed whatever ends the generation. `draft` is needed for speculative.
    """
    counts = Counts() if counts is None else counts
    capacity, began = chain.config.model.positions, time.perf_counter()
    width = plan.window if plan.window is not None else chain.config.objective.window + 1
    if plan.mode == "sweep":
        check_sweep(chain.config, width)
    opened = draft.open(plan.settings) if draft is not None and plan.mode == "speculative" else None
    text = await chain.open(plan.settings, opened.enter if opened else 0)
    try:
        if plan.mode == "exact":
            pieces = exact(text, capacity, prompt, plan.max_bytes, plan.sampling, counts)
        elif plan.mode == "speculative":
            assert opened is not None
            length = DraftLength(plan.draft_length)
            pieces = speculative(text, opened, capacity, prompt, plan.max_bytes, plan.sampling, length, counts)
        else:
            pieces = sweep(text, capacity, prompt, plan.max_bytes, plan.sampling, width, counts)
        async for piece in pieces:
            if not counts.bytes:
                counts.prompt_s = time.perf_counter() - began
            counts.bytes += len(piece.ids)
            counts.seconds = time.perf_counter() - began
            counts.missing = text.missing
            yield piece
    finally:
        await text.close()
