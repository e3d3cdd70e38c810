"""What a worker does with an assignment on its own machine: files, inner loop, encoded update.

An update is a function of the assignment alone: weights of the versions it names, batches of its leased steps, draws from the run's seed,
and an inner optimizer that starts with empty moments. So whoever trains it gets the same update, and whoever joins late is not behind.

FOLDER/key.pem                 the worker's key
FOLDER/parts/                  versions of parts that are in use, the newest of each
FOLDER/update.safetensors      the update that is being handed in, with update.json: a restarted worker hands it in without training again
FOLDER/residual-PART...        what lossy updates have left out so far, to be sent with the next
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch
from torch import Tensor, nn

from blocktrain.codecs import encode_stream, read_update
from blocktrain.config import RunConfig, make_config
from blocktrain.diffusion.noise import make_partition
from blocktrain.errors import BlockTrainError, DataError
from blocktrain.model.transformer import BlockStack
from blocktrain.serialization import file_sha256, write_bytes
from blocktrain.streams import FileSource, TensorFile, tensor_stream
from blocktrain.swarm import crash
from blocktrain.swarm.aggregate import moved
from blocktrain.swarm.parts import INTERFACE, Layout, layout_of
from blocktrain.swarm.protocol import Metrics, PartFiles, RunInfo, Work, part_of
from blocktrain.swarm.worker import Link, Told, Trained
from blocktrain.training.data import load_corpus
from blocktrain.training.download import map_bytes, sha256_of
from blocktrain.training.hardware import choose_hardware
from blocktrain.training.objective import SpanBatches
from blocktrain.training.trainer import BlockTrainer

LOCAL_CORPORA = ("wiki", "python")  # those that a machine may have without a download


@dataclass
class StepReport:
    """What the worker's progress is told after each step."""

    step: int
    steps: int
    ce: float
    tokens_per_s: float


class TrainingEngine:
    """Trains assignments with torch in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        capacity_of: Callable[[RunConfig], int],
        *,
        device: str | None = None,
        report: Callable[[StepReport], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder, self.capacity_of, self.device = folder, capacity_of, device
        self.report, self.say = report, say
        self.config: RunConfig
        self.layout: Layout
        self.batches: SpanBatches
        self._sound: set[tuple[str, int, int, int]] = set()  # files whose digest was right
        self._stacks: tuple[list[tuple[int, ...]], list[BlockStack]] | None = None  # by the blocks they hold

    # --- Whenever the run's settings are read ---

    def configure(self, info: RunInfo) -> int:
        self.config, self._stacks = make_config(info.config, "the coordinator's run.toml"), None
        if self.device:
            train = self.config.train.model_copy(update={"device": self.device})
            self.config = self.config.model_copy(update={"train": train})
        self.layout = layout_of(self.config)
        self.hardware = choose_hardware(self.config)
        (self.folder / "parts").mkdir(parents=True, exist_ok=True)
        return self.capacity_of(self.config)

    async def prepare(self, info: RunInfo, link: Link) -> None:
        data = await self._text(info, link)
        self.batches = SpanBatches(data, self.config)

    async def _text(self, info: RunInfo, link: Link):
        """The training text: this machine's own copy if it is the same, else the coordinator's."""
        if info.corpus in LOCAL_CORPORA:
            try:
                data = self.config.data
                corpus = await asyncio.to_thread(load_corpus, info.corpus, heldout=data.heldout, heldout_fraction=data.heldout_fraction)
                if corpus.train_digest == info.text_digest:
                    return corpus.train
            except DataError:
                pass
        path = self.folder.parent / "texts" / f"{info.text_digest[:32]}.txt"
        async with _alone_with(path):
            if not path.exists():
                self.say(f"fetching the text, {info.text.size:,} bytes")
                await link.fetch(info.text, path)
        data = map_bytes(path)
        if sha256_of(data) != info.text_digest:
            raise DataError(f"{path}: is not the run's text any more; remove it and start again")
        return data

    # --- Files ---

    def _path(self, part: PartFiles) -> Path:
        codec = "" if part.codec == "file" else f"-{part.codec}"
        return self.folder / "parts" / f"{part.part}-{part.version:08d}{codec}-{part.full.sha256[:16]}.safetensors"

    async def fetch(self, work: Work, link: Link) -> None:
        for part in work.parts:
            path = self._path(part)
            if path.exists() and not await asyncio.to_thread(self._is_sound, path, part.full.sha256):
                self.say(f"{path.name}: is damaged here, fetching it again")
                path.unlink()
            if not path.exists() and not await self._from_deltas(part, path, link):
                await link.fetch(part.full, path)
        kept = {self._path(part).name for part in work.parts}
        for path in (self.folder / "parts").iterdir():
            if path.name not in kept and not path.name.endswith(".part"):
                path.unlink()

    def _is_sound(self, path: Path, sha256: str) -> bool:
        """Whether a file that is here has its digest; looked at again only where it has changed."""
        about = path.stat()
        seen = (path.name, about.st_size, about.st_mtime_ns, about.st_ino)
        if seen not in self._sound:
            if file_sha256(path) != sha256:
                return False
            self._sound.add(seen)
        return True

    async def _from_deltas(self, part: PartFiles, path: Path, link: Link) -> bool:
        """Make a version from an older one that is here; False where that does not work out."""
        here = {int(p.name.rpartition("/")[2].split("-")[-2]): p for p in path.parent.glob(f"{part.part}-*.safetensors") if _is_file_of(p, part.part)}
        starts = [delta.version - 1 for delta in part.deltas if delta.version - 1 in here]
        if part.codec != "file" or not starts:
            return False
        begin = max(starts)
        chain = [delta for delta in part.deltas if delta.version > begin]
        if sum(delta.blob.size for delta in chain) >= part.full.size:
            return False
        current = here[begin]
        for delta in chain:
            fetched = self.folder / "parts" / f"delta-{part.part}-{delta.version:08d}.part"
            try:
                await link.fetch(delta.blob, fetched)
            except Told as error:
                if error.kind != "unknown":
                    raise
                self.say(f"{part.part}: {error.reason}; fetching the version whole")
                return False
            made = path.with_name(f"{path.name}.{delta.version}.made.part")
            await asyncio.to_thread(self._apply, part.part, current, fetched, made)
            fetched.unlink()
            if current.name.endswith(".made.part"):
                current.unlink()
            current = made
        if await asyncio.to_thread(file_sha256, current) != part.full.sha256:
            self.say(f"{part.part}: the deltas do not lead to version {part.version}, fetching it whole")
            current.unlink()
            return False
        os.replace(current, path)
        return True

    def _apply(self, part: str, base: Path, delta: Path, target: Path) -> None:
        shapes = self.layout.part_shapes(part)
        update = read_update(FileSource(delta), shapes)
        tensors = moved(TensorFile(FileSource(base), base.name), update, shapes)
        with open(target, "wb") as file:
            for chunk in tensor_stream(self.layout.entries[part], tensors):
                file.write(chunk)

    def _tensors(self, part: PartFiles) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a part that was fetched, whatever it was encoded in."""
        source = FileSource(self._path(part))
        if part.codec == "file":
            file = TensorFile(source, part.part, self.layout.entries[part.part])
            yield from ((name, file.tensor(name)) for name in sorted(file.entries))
            return
        entries = self.layout.entries[part.part]
        update = read_update(source, {name: shape for name, (_, shape) in entries.items()}, [part.codec])
        yield from ((name, tensor.to(entries[name][0])) for name, tensor in update.tensors())

    # --- Training ---

    async def train(self, work: Work, seconds: float, stopped: Callable[[], bool]) -> Trained | None:
        end = time.monotonic() + seconds
        if (done := self._handed_in_before(work)) is not None:
            self.say("this assignment was trained before the restart, handing it in")
            return done
        return await asyncio.to_thread(self._train, work, end, stopped)

    def _train(self, work: Work, end: float, stopped: Callable[[], bool]) -> Trained | None:
        stack, peers = self._load(work)
        partition = make_partition(self.config.noise, self.config.model.blocks, None)
        span = (work.first, work.stop)
        trainer = BlockTrainer(stack, self.config, partition, [span], self.hardware, train_interface=self.layout.interface_travels, peers=peers)
        ce, began, done, slowest = 0.0, time.monotonic(), 0, 0.0
        steps = [step for first, stop in work.steps for step in range(first, stop)]
        for index, step in enumerate(steps):
            at = time.monotonic()
            if stopped() or at + slowest > end:
                break
            figures = trainer.step(self.batches.batch([span], step, work.schedule_step), step, work.schedule_step + index)
            slowest = max(slowest, time.monotonic() - at)
            ce, done = ce + figures.ce[0], index + 1
            crash.point("worker.in_training")
            self.report(StepReport(done, len(steps), figures.ce[0], done * self.config.tokens_per_step / (time.monotonic() - began)))
        if not done:
            return None
        took = time.monotonic() - began
        rate = done * self.config.tokens_per_step / took
        metrics = Metrics(ce=ce / done, tokens_per_s=rate, seconds=took)
        return self._encode(work, stack, done * self.config.train.batch_size, metrics)

    def _load(self, work: Work) -> tuple[BlockStack, BlockStack | None]:
        """The interface with the span's blocks and the frozen ones before them; and where blocks learn from their common vote, all blocks, frozen.

        All at the assignment's versions.
        """
        sent = [int(part.part.removeprefix("block-")) for part in work.parts if part.part != INTERFACE]
        votes = self.config.votes_at(work.schedule_step)
        held = tuple(range(work.first, work.stop)) if votes else tuple(sorted(sent))
        wanted = [held, tuple(sorted(sent))] if votes else [held]
        if self._stacks is None or self._stacks[0] != wanted:
            self._stacks = wanted, [BlockStack.of(self.config, blocks).to(self.hardware.device) for blocks in wanted]
        stack, *peers = self._stacks[1]
        for part in work.parts:
            states = [_module(each, part.part).state_dict() for each in (stack, *peers) if _holds(each, part.part)]
            for name, tensor in self._tensors(part):
                for state in states:
                    with torch.no_grad():
                        state[name].copy_(tensor)
        stack.requires_grad_(True)
        for each in peers:
            each.requires_grad_(False)
        return stack, peers[0] if peers else None

    # --- The update ---

    def _encode(self, work: Work, stack: BlockStack, num_samples: int, metrics: Metrics) -> Trained:
        """Write the pseudo-gradients as they travel; what a lossy codec leaves out is kept for the next update of these parts."""
        files = {part.part: part for part in work.parts}
        shapes = self.layout.update_shapes(work.first, work.stop)
        left: dict[str, dict[str, Tensor]] = {}
        before = {part: self._residual(part) for part in self.layout.parts_of(work.first, work.stop)}

        def deltas() -> Iterator[tuple[str, Tensor]]:
            for part in sorted(self.layout.parts_of(work.first, work.stop)):
                base = TensorFile(FileSource(self._path(files[part])), part, self.layout.entries[part])
                state = _module(stack, part).state_dict()
                for name in self.layout.moved_by(work.first, part):
                    yield f"{part}/{name}", state[name].detach().cpu().float() - base.tensor(name).float()

        def residual(name: str) -> Tensor | None:
            part, _, tensor = name.partition("/")
            file = before[part]
            return file.tensor(tensor) if file and tensor in file.entries else None

        def keep(name: str, tensor: Tensor) -> None:
            part, _, inner = name.partition("/")
            left.setdefault(part, {})[inner] = tensor

        path = self.folder / "update.safetensors"
        digest = hashlib.sha256()
        with open(path, "wb") as file:
            for chunk in encode_stream(shapes, deltas(), work.codec, residual, keep):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        for part, tensors in left.items():
            if (earlier := before[part]) is not None:  # of tensors that this update does not move
                tensors |= {name: earlier.tensor(name) for name in earlier.entries.keys() - tensors.keys()}
            entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
            with open(self.folder / f"residual-{part}.new", "wb") as file:
                for chunk in tensor_stream(entries, sorted(tensors.items())):
                    file.write(chunk)
        note = {"work": _identity(work), "sha256": digest.hexdigest(), "num_samples": num_samples, "metrics": metrics.model_dump()}
        write_bytes(self.folder / "update.json", json.dumps(note).encode())
        crash.point("worker.after_encode")
        return Trained(FileSource(path), digest.hexdigest(), num_samples, metrics)

    def _residual(self, part: str) -> TensorFile | None:
        path = self.folder / f"residual-{part}.safetensors"
        if not path.exists():
            return None
        try:
            file = TensorFile(FileSource(path), path.name)
        except (BlockTrainError, OSError) as error:
            self.say(f"{error}; what earlier updates left out is forgotten")
            return None
        shapes = self.layout.part_shapes(part)
        good = all(shapes.get(name) == shape and dtype == torch.float32 for name, (dtype, shape) in file.entries.items())
        return file if good else None

    def _handed_in_before(self, work: Work) -> Trained | None:
        """The update of this very assignment, where an earlier process of this worker has finished it."""
        path = self.folder / "update.safetensors"
        try:
            note = json.loads((self.folder / "update.json").read_text())
            if note["work"] != _identity(work) or file_sha256(path) != note["sha256"]:
                self._forget_residuals()
                return None
            return Trained(FileSource(path), note["sha256"], int(note["num_samples"]), Metrics(**note["metrics"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _forget_residuals(self) -> None:
        """An earlier process has finished an update and nobody here knows what became of it: what it was made with may be sent already."""
        for new in self.folder.glob("residual-*.new"):
            new.with_suffix(".safetensors").unlink(missing_ok=True)
            new.unlink()
        (self.folder / "update.json").unlink(missing_ok=True)

    def settled(self, work: Work, accepted: bool) -> None:
        (self.folder / "update.json").unlink(missing_ok=True)
        for part in self.layout.parts_of(work.first, work.stop):
            new = self.folder / f"residual-{part}.new"
            if new.exists():
                os.replace(new, self.folder / f"residual-{part}.safetensors") if accepted else new.unlink()


@asynccontextmanager
async def _alone_with(path: Path) -> AsyncIterator[None]:
    """No other worker of this machine is at the same file; a process that dies lets go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_suffix(".lock"), blocking=False, thread_local=False)
    while True:
        try:
            lock.acquire()
            break
        except filelock.Timeout:
            await asyncio.sleep(0.5)
    try:
        yield
    finally:
        lock.release()


def _holds(stack: BlockStack, part: str) -> bool:
    return part == INTERFACE or part in {part_of(b) for b in stack.held}


def _module(stack: BlockStack, part: str) -> nn.Module:
    return stack.interface if part == INTERFACE else stack.block(int(part.removeprefix("block-")))


def _identity(work: Work) -> str:
    """Of what decides an update."""
    return hashlib.sha256(work.model_dump_json().encode()).hexdigest()


def _is_file_of(path: Path, part: str) -> bool:
    """Whether this is a plain version of that part: PART-VERSION-DIGEST.safetensors."""
    rest = path.stem.removeprefix(f"{part}-").split("-")
    return len(rest) == 2 and rest[0].isdigit()
