"""Consecutive blocks of a run at work on many texts: the arithmetic of a stage, of generation on one machine, and of a draft.

T new positions of a text, D width, E target-embedding width, V vocabulary, R = TILE rows.

A `Job` is what one traversal asks of these blocks for one text. Jobs of several texts share tiles (model/memory.py), so a layer's weights are read
once for all of them, and no text's numbers depend on who else is there. What one block hands to the next is rounded as it would be on the wire
whether or not a wire is between them, so a text does not depend on how the blocks are spread over hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.diffusion.sampling import euler_step
from blocktrain.model.memory import TILE, BlockMemory, BlockTile, Segment
from blocktrain.model.transformer import VOCABULARY
from blocktrain.training.checkpoint import LoadedRun
from blocktrain.training.composition import Composer, mean_of, vote
from blocktrain.training.hardware import choose_hardware

Wire = Literal["float32", "bfloat16", "int8"]
WIRES: tuple[str, ...] = get_args(Wire)


@dataclass(frozen=True)
class Settings:
    """What stays the same for a text: how states are rounded between blocks, and which blocks are left out."""

    wire: Wire = "bfloat16"
    skip: tuple[int, ...] = ()


class TextMemory:
    """What the blocks held here remember of one text."""

    def __init__(self) -> None:
        self.blocks: dict[int, BlockMemory] = {}


@dataclass
class Job:
    """New positions `keep` … `keep + T` of one text, from block `enter` on.

    Where block `enter` is not the first, its input comes along: `state` where blocks are chained, `z` where a noisy target takes part.
    """

    memory: TextMemory
    settings: Settings
    keep: int  # positions before it stay as they are, all after it are replaced
    offset: int  # place of position 0 in the whole text; the noise a sweep starts from is a function of it
    ids: Sequence[int]  # (T,) context ids
    enter: int
    state: Tensor | None = None  # (T, D) float32, as rounded on the wire
    z: Tensor | None = None  # (T, E)
    votes: Tensor | None = None  # (T - want, V) int32, of the blocks before `enter`, where blocks that are chained vote
    want: int = 0  # logits are made from this new position on
    read: bool = False  # logits of the last block here, though there are blocks after it
    stop: int | None = None  # the block after the last one to run here; None: the last one here
    tally: bool = False  # only the votes of the blocks here are wanted


@dataclass
class Result:
    """What a job gives: the input of the next block, or after the last one the logits."""

    state: Tensor | None = None  # (T, D) float32, rounded
    z: Tensor | None = None  # (T, E) float32, rounded
    votes: Tensor | None = None  # (T - want, V) int32, where all blocks vote
    logits: Tensor | None = None  # (T - want, V) float32


@dataclass
class _Rows:
    """A job at work."""

    job: Job
    result: Result = field(default_factory=Result)
    done: int = 0  # new positions that have been through


class BlockRunner:
    """The blocks `first` … `stop` of a run, on this machine's device."""

    def __init__(self, run: LoadedRun, first: int = 0, stop: int | None = None) -> None:
        self.config: RunConfig = run.config
        self.first, self.stop = first, run.config.model.blocks if stop is None else stop
        assert set(range(self.first, self.stop)) <= set(run.stack.held)
        self.hardware = choose_hardware(run.config)
        self.composer = Composer(run.stack.to(self.hardware.device), run.config, run.partition)

    @property
    def chained(self) -> bool:
        return self.config.objective.input == "upstream"

    def blocks(self, job: Job) -> list[int]:
        """The blocks here that a job runs through."""
        return [b for b in range(max(self.first, job.enter), self._stop(job)) if b not in job.settings.skip]

    def _stop(self, job: Job) -> int:
        return self.stop if job.stop is None else job.stop

    def left_over(self, job: Job) -> list[int]:
        """The blocks of the whole run after these."""
        return [b for b in range(self._stop(job), self.config.model.blocks) if b not in job.settings.skip]

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs of different texts together. The caller has checked shapes and ranges."""
        rows = [_Rows(job) for job in jobs]
        groups: dict[tuple[object, ...], list[_Rows]] = {}
        for row in rows:
            groups.setdefault((row.job.settings, row.job.enter, row.job.stop, row.job.read, row.job.tally), []).append(row)
        for group in groups.values():
            self._prepare(group)
            for tile in _tiles(group):
                self._run_tile(tile)
        return [row.result for row in rows]

    def _prepare(self, group: list[_Rows]) -> None:
        """Room for the results, and the state a sweep starts from."""
        blocks, model = self.blocks(group[0].job), self.config.model
        last = not self.left_over(group[0].job)
        for row in group:
            job, t = row.job, len(row.job.ids)
            if job.z is None and self.config.objective.noisy:
                job.z = self.composer.start((1, t), self.config.seed, first=blocks[0], position=job.offset + job.keep)
                job.z = None if job.z is None else job.z[0].cpu()
            if (last or job.read) and not job.tally:
                row.result.logits = torch.empty(t - job.want, VOCABULARY)
            if not last:
                row.result.state = torch.empty(t, model.width) if self.chained else None
                row.result.z = torch.empty(t, model.embed_dim) if self.config.objective.noisy else None
            if self.composer.voters and (job.tally or not last):
                row.result.votes = torch.empty(t - job.want, VOCABULARY, dtype=torch.int32)
            for b in blocks:
                memory = job.memory.blocks.setdefault(b, self.composer.stack.memory(b))
                memory.length = job.keep + t

    def _run_tile(self, tile: list[tuple[_Rows, int, int, int]]) -> None:
        """Each entry: a job at work, its first new position in this tile, the row where that lies, and how many there are."""
        job = tile[0][0].job
        device, model = self.hardware.device, self.config.model
        x = torch.zeros(1, TILE, dtype=torch.long)
        state = torch.zeros(1, TILE, model.width) if job.state is not None else None
        z = torch.zeros(1, TILE, model.embed_dim) if job.z is not None else None
        for rows, begin, row, count in tile:
            new, here = slice(begin, begin + count), slice(row, row + count)
            x[0, here] = torch.tensor(rows.job.ids[new])
            if state is not None and rows.job.state is not None:
                state[0, here] = rows.job.state[new]
            if z is not None and rows.job.z is not None:
                z[0, here] = rows.job.z[new]
        votes = self._votes(tile)
        x, state, z = x.to(device), state if state is None else state.to(device), z if z is None else z.to(device)
        blocks, after = self.blocks(job), self.left_over(job)
        boundaries, wire = self.composer.partition.boundaries, job.settings.wire
        logits: Tensor | None = None
        with torch.inference_mode(), self.hardware.autocast():
            for i, b in enumerate(blocks):
                segments = [Segment(r.job.memory.blocks[b], r.job.keep + begin, row, count) for r, begin, row, count in tile]
                following = [*blocks[i + 1 :], *after]
                read, votes_here = not following or (job.read and b == blocks[-1]), b in self.composer.voters
                output = self.composer.step(b, x, state, z, BlockTile(segments, device), read or votes_here)
                if votes_here:
                    votes = vote(votes, self.composer.scored(b, output, z))
                if read and not job.tally:
                    logits = (self.composer.scored(b, output, z) if votes is None else mean_of(votes, self._voted(job, b))).float().cpu()
                if not following:
                    break
                if self.chained:
                    state = round_as_sent(output.state.float(), wire)
                if z is not None:
                    assert output.denoised is not None
                    z = round_as_sent(euler_step(z, output.denoised.float(), boundaries[b], boundaries[following[0]]), wire)
        for rows, begin, row, count in tile:
            result, new, here = rows.result, slice(begin, begin + count), slice(row, row + count)
            for kept, found in ((result.logits, logits), (result.votes, votes)):
                wanted = max(begin, rows.job.want)
                if kept is not None and found is not None and wanted < begin + count:
                    kept[wanted - rows.job.want : begin + count - rows.job.want] = found[0, row + wanted - begin : row + count].cpu()
            if result.state is not None and state is not None:
                result.state[new] = state[0, here].cpu()
            if result.z is not None and z is not None:
                result.z[new] = z[0, here].cpu()

    def needs_votes(self, enter: int, settings: Settings) -> bool:
        """Whether a traversal that enters at a block brings the votes of blocks before it."""
        return not self.config.objective.parallel and any(b < enter and b not in settings.skip for b in self.composer.voters)

    def _voted(self, job: Job, last: int) -> int:
        """How many blocks have voted once block `last` has."""
        return len([b for b in self.composer.voters if b <= last and b not in job.settings.skip])

    def _votes(self, tile: list[tuple[_Rows, int, int, int]]) -> Tensor | None:
        """The votes that came along, (1, R, V); rows that nobody reads are zeros."""
        if tile[0][0].job.votes is None:
            return None
        votes = torch.zeros(1, TILE, VOCABULARY, dtype=torch.int32)
        for rows, begin, row, count in tile:
            wanted = max(begin, rows.job.want)
            if rows.job.votes is not None and wanted < begin + count:
                votes[0, row + wanted - begin : row + count] = rows.job.votes[wanted - rows.job.want : begin + count - rows.job.want]
        return votes.to(self.hardware.device)


def _tiles(group: list[_Rows]) -> Iterator[list[tuple[_Rows, int, int, int]]]:
    """Cut each job into chunks that do not cross a multiple of R, and pack the next chunk of every job into as few tiles as they need."""
    waiting = list(group)
    while waiting:
        tile: list[tuple[_Rows, int, int, int]] = []
        used = 0
        for rows in waiting:
            start = rows.job.keep + rows.done
            count = min(TILE - start % TILE, len(rows.job.ids) - rows.done)
            if used + count <= TILE:
                tile.append((rows, rows.done, used, count))
                rows.done += count
                used += count
        yield tile
        in_tile = {id(entry[0]) for entry in tile}
        waiting = [r for r in waiting if id(r) not in in_tile] + [r for r in waiting if id(r) in in_tile and r.done < len(r.job.ids)]


def round_as_sent(x: Tensor, wire: Wire) -> Tensor:
    """float32 (..., n) as it arrives over a wire: as it is, in bfloat16, or as int8 with one scale for each row of n."""
    if wire == "float32":
        return x
    if wire == "bfloat16":
        return x.bfloat16().float()
    numbers, scale = to_int8(x)
    return from_int8(numbers, scale)


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., n) float32 -> (..., n) int8 and (..., 1) float32; a row of zeros has scale 0."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, x / scale.clamp(min=1e-38), torch.zeros_like(x)).round().clamp(-127, 127).to(torch.int8), scale


def from_int8(numbers: Tensor, scale: Tensor) -> Tensor:
    """(..., n) int8 and (..., 1) float32 -> (..., n) float32."""
    return numbers.float() * scale
