"""Train a run folder from wherever it stands to its last step.

The plan is a list of phases: one that trains every span at each step (`interleaved`), or one per block (`sequential`), which holds
only that block's weights, gradients, moments and activations, plus the frozen weights before it where blocks are chained. In the sequential
order the interface is trained with the first block and frozen afterwards: trained on by later blocks it would drift away under those already done.

Everything random is a function of (seed, step), so a run that was stopped anywhere and started again ends in the weights of the unbroken run.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch
from torch import Tensor

from blocktrain.config import RunConfig, to_toml
from blocktrain.diffusion.noise import Partition, information_boundaries, make_partition
from blocktrain.errors import CheckpointError, DataError
from blocktrain.model.transformer import BlockStack
from blocktrain.serialization import write_bytes
from blocktrain.training.checkpoint import (
    FREE,
    INNER_LOOP,
    MOMENTS,
    Checkpoint,
    Progress,
    block_file,
    discard_newer,
    latest_checkpoint,
    load_module,
    save_checkpoint,
    settings_changed,
    vote_rests,
)
from blocktrain.training.data import Corpus
from blocktrain.training.hardware import Hardware, choose_hardware
from blocktrain.training.objective import Span, SpanBatches, spans_of
from blocktrain.training.optim import optimizer_tensors, restore_optimizers
from blocktrain.training.trainer import BlockTrainer, StepFigures, step_flops


@dataclass(frozen=True)
class Phase:
    """Blocks that are trained together, and the frozen ones they need."""

    spans: tuple[Span, ...]
    held: tuple[int, ...]  # every block in memory
    train_interface: bool

    @property
    def trained(self) -> list[int]:
        return sorted({b for span in self.spans for b in range(*span)})


def plan(config: RunConfig) -> list[Phase]:
    """The phases of a run, in order."""
    blocks = config.model.blocks
    if config.train.order == "interleaved":
        return [Phase(tuple(spans_of(blocks, config.objective.span)), tuple(range(blocks)), True)]
    before = config.objective.input == "upstream"
    return [Phase(((b, b + 1),), tuple(range(b + 1)) if before else (b,), b == 0) for b in range(blocks)]


@dataclass(frozen=True)
class StepReport:
    """What a caller is told after each step."""

    updates: int
    total_updates: int
    phase: Phase
    figures: StepFigures
    bytes_seen: int
    seconds: float
    tokens_per_s: float


class TrainingRun:
    """A run folder being trained. `report` is called after each step, `say` with sentences, `stopped` asked before each step."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        corpus: Corpus,
        *,
        report: Callable[[StepReport], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.folder, self.config, self.corpus = folder, config, corpus
        self.report, self.say, self.stopped = report, say, stopped
        self.hardware: Hardware = choose_hardware(config)
        self.phases = plan(config)
        self.batches = SpanBatches(corpus.train, config)
        _require_heldout(corpus, config)
        self.saved: Checkpoint | None = None  # the newest checkpoint
        self.fitted: list[float] | None = None
        self.seconds, self.flops = 0.0, 0.0

    def train(self) -> bool:
        """Train to the end; returns False if `stopped` ended it early (a checkpoint was then written).

        Raises CheckpointError where the folder cannot be written or does not belong to this run; what was written before stays.
        """
        try:
            return self._train()
        except OSError as error:
            where = error.filename or self.folder
            state = f"the checkpoint of step {self.saved.progress.updates} is intact" if self.saved else "nothing was trained yet"
            raise CheckpointError(f"{where}: cannot be written ({error.strerror}); {state}, run again when cured") from None

    def _train(self) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        with _only_trainer(self.folder):
            self.saved = self._resume()  # refuses before anything is written
            write_bytes(self.folder / "run.toml", to_toml(self.config).encode())
            _truncate_metrics(self.folder / "metrics.jsonl", self.saved.progress.updates if self.saved else 0)
            if self.saved and self.saved.progress.updates == self._target():
                return True
            first = self.saved.progress.phase if self.saved else 0
            return all(self._train_phase(index) for index in range(first, len(self.phases)))

    def _target(self) -> int:
        return len(self.phases) * self.config.train.steps

    def _resume(self) -> Checkpoint | None:
        """The checkpoint to go on from, after checking that it belongs to this text and shape."""
        checkpoint = latest_checkpoint(self.folder, self.say)
        if checkpoint is None:
            return None
        progress = checkpoint.progress
        changes = settings_changed(progress.run_config(), self.config)
        free = FREE if progress.phase == 0 else FREE - {"train.steps"}
        fixed = [change for change in changes if change.partition(":")[0] not in free]
        if fixed:
            raise CheckpointError(f"{self.folder}: cannot go on from step {progress.updates} with {fixed[0]}; use a new run folder for it")
        if (progress.train_digest, progress.heldout_digest) != (self.corpus.train_digest, self.corpus.heldout_digest):
            raise CheckpointError(f"{self.folder}: the text of data.corpus = {self.config.data.corpus!r} is not the one this run was trained on")
        if progress.updates > self._target():
            raise CheckpointError(f"{self.folder}: has {progress.updates} updates already, train.steps = {self.config.train.steps} is fewer")
        if progress.updates < self._target() and MOMENTS not in progress.files:
            raise CheckpointError(
                f"{self.folder}: was trained by many workers, or simulated, and its checkpoint has no optimizer moments, so train cannot go on; "
                f"train.steps = {progress.step} leaves it as it is"
            )
        if progress.updates < self._target():
            self.say(f"going on from step {progress.updates} of {self._target()}")
        for change in changes:
            if progress.updates < self._target():
                self.say(f"since step {progress.updates}: {change}")
            elif change.partition(":")[0] in INNER_LOOP:
                raise CheckpointError(
                    f"{self.folder}: finished at step {progress.updates}, so {change} would have no effect; raise train.steps to train on, "
                    "put it back, or use a new run folder"
                )
        discard_newer(self.folder, checkpoint)
        if progress.updates < self._target() and (resting := vote_rests(progress.run_config(), self.config, progress.step)):
            self.say(resting)
        self.fitted, self.seconds, self.flops = progress.fitted, progress.seconds, progress.training_flops
        return checkpoint

    def _train_phase(self, index: int) -> bool:
        phase, steps, checkpoint = self.phases[index], self.config.train.steps, self.saved
        stack = self._make_stack(phase, checkpoint)
        trainer = BlockTrainer(stack, self.config, self._partition(), phase.spans, self.hardware, train_interface=phase.train_interface)
        average = _Average(stack, self.config.train.ema)
        start = 0
        if checkpoint and checkpoint.progress.phase == index:
            start = checkpoint.progress.step
            self._restore(checkpoint, trainer, average)
        for step in range(start, steps):
            if self.stopped():
                self._save(index, step, trainer, average)
                return False
            if self.config.votes_at(step) and step and not self.config.votes_at(step - 1):
                self.say(f"step {step}: the blocks learn from their common vote from here on")
            began = time.monotonic()
            figures = trainer.step(self.batches.batch(phase.spans, step), step)
            average.update(step)
            self._fit_partition(trainer, step + 1)
            took = time.monotonic() - began
            self.seconds += took
            self.flops += step_flops(self.config, phase.spans, self.config.tokens_per_step, votes=self.config.votes_at(step))
            self._tell(index, step + 1, figures, took)
            if (step + 1) % self.config.train.checkpoint_every == 0 and step + 1 < steps:
                self._save(index, step + 1, trainer, average)
        self._save(index, steps, trainer, average)
        return True

    def _partition(self) -> Partition:
        return make_partition(self.config.noise, self.config.model.blocks, self.fitted)

    def _fit_partition(self, trainer: BlockTrainer, done: int) -> None:
        """Cut sigma by equal falls of cross entropy, once, from what training logged so far."""
        noise = self.config.noise
        if noise.partition != "information" or self.fitted or done < noise.information_fit_at * self.config.train.steps:
            return
        seen = [i for i, count in enumerate(trainer.bin_count.tolist()) if count]
        if len(seen) < 2:
            return
        edges = [trainer.bin_edges[i] for i in seen] + [trainer.bin_edges[seen[-1] + 1]]
        ce = [float(trainer.bin_sum[i] / trainer.bin_count[i]) for i in seen]
        self.fitted = information_boundaries(edges, ce, noise, self.config.model.blocks)
        trainer.partition = self._partition()
        self.say(f"step {done}: noise.partition fitted to {[round(cut, 3) for cut in self.fitted]}")

    def _make_stack(self, phase: Phase, checkpoint: Checkpoint | None) -> BlockStack:
        """A fresh stack, with every block and interface that an earlier phase has finished."""
        config = self.config
        stack = BlockStack.of(config, phase.held)
        if checkpoint:
            if not phase.train_interface:
                load_module("interface.safetensors", stack.interface, checkpoint.tensors("interface.safetensors"))
            for b in set(phase.held) - set(phase.trained):
                load_module(block_file(b), stack.block(b), checkpoint.tensors(block_file(b)))
        return stack.to(self.hardware.device)

    def _restore(self, checkpoint: Checkpoint, trainer: BlockTrainer, average: _Average) -> None:
        """Weights, moments, moving average and statistics of a phase that was under way."""
        extra = checkpoint.tensors(MOMENTS)
        served = {f"blocks.{b}.": checkpoint.tensors(block_file(b)) for b in self.phases[checkpoint.progress.phase].trained}
        if trainer.train_interface:
            served["interface."] = checkpoint.tensors("interface.safetensors")
        weights = {prefix + name: tensor for prefix, part in served.items() for name, tensor in part.items()}
        raw = _take(extra, "raw.")
        for name, tensor in trainer.stack.state_dict().items():
            if name in weights:
                tensor.copy_(raw.get(name, weights[name]))
        average.restore(weights)
        restore_optimizers(trainer.stack, trainer.optimizers, _take(extra, "optimizer."))
        trainer.bin_sum, trainer.bin_count = extra["statistics.bin_sum"], extra["statistics.bin_count"]

    def _save(self, index: int, step: int, trainer: BlockTrainer, average: _Average) -> None:
        phase, stack = self.phases[index], trainer.stack
        served = average.state()
        parts = {block_file(b): _take(served, f"blocks.{b}.") for b in phase.trained}
        if phase.train_interface:
            parts["interface.safetensors"] = _take(served, "interface.")
        extra = {f"optimizer.{k}": v for k, v in optimizer_tensors(stack, trainer.optimizers).items()}
        if average.decay:
            extra |= {f"raw.{k}": v for k, v in stack.state_dict().items()}
        extra |= {"statistics.bin_sum": trainer.bin_sum, "statistics.bin_count": trainer.bin_count}
        parts[MOMENTS] = extra
        done = {block_file(b) for earlier in self.phases[:index] for b in earlier.trained}
        kept = sorted(done | (set() if phase.train_interface else {"interface.safetensors"}))
        self.saved = save_checkpoint(self.folder, self._progress(index, step), parts, self.saved, kept)

    def _progress(self, index: int, step: int) -> Progress:
        steps, tokens = self.config.train.steps, self.config.tokens_per_step
        return Progress(
            updates=index * steps + step,
            phase=index,
            step=step,
            finished=index == len(self.phases) - 1 and step == steps,
            bytes_seen=(steps if index else step) * tokens,
            training_flops=self.flops,
            seconds=self.seconds,
            fitted=self.fitted,
            config=self.config.model_dump_json(),
            config_digest=self.config.digest,
            train_digest=self.corpus.train_digest,
            heldout_digest=self.corpus.heldout_digest,
            files={},
        )

    def _tell(self, index: int, step: int, figures: StepFigures, took: float) -> None:
        progress = self._progress(index, step)
        rate = self.config.tokens_per_step / took
        self.report(StepReport(progress.updates, self._target(), self.phases[index], figures, progress.bytes_seen, self.seconds, rate))
        if step % self.config.train.log_every and step != self.config.train.steps:
            return
        line = {
            "updates": progress.updates,
            "blocks": [list(span) for span in self.phases[index].spans],
            "bytes_seen": progress.bytes_seen,
            "training_flops": progress.training_flops,
            "loss": figures.loss,
            "ce": figures.ce,
            "anchor_ce": figures.anchor_ce,
            "grad_norm": figures.grad_norm,
            "rate": figures.rate,
            "tokens_per_s": rate,
        }
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


class _Average:
    """The exponential moving average of a stack's parameters; with decay 0 it is the stack itself.

    Early on the decay is (1 + n) / (10 + n) after n updates, so that the random first weights are forgotten however short the run.
    """

    def __init__(self, stack: BlockStack, decay: float) -> None:
        self.stack, self.decay = stack, decay
        self.shadow = {name: p.detach().clone() for name, p in stack.named_parameters()} if decay else {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after update `step` (from 0)."""
        if self.decay:
            decay = min(self.decay, (1 + step) / (10 + step))
            current: list[Tensor] = [p for _, p in self.stack.named_parameters()]
            torch._foreach_lerp_(list(self.shadow.values()), current, 1 - decay)

    def state(self) -> dict[str, Tensor]:
        return dict(self.shadow) if self.decay else dict(self.stack.state_dict())

    def restore(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in self.shadow.items():
            if name in weights:
                tensor.copy_(weights[name])


def _take(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _require_heldout(corpus: Corpus, config: RunConfig) -> None:
    """Find out before training, not after it, that nothing can be evaluated."""
    need = config.model.positions + 1
    if len(corpus.heldout) < need:
        raise DataError(
            f"the held-out text has {len(corpus.heldout)} bytes, one sequence needs {need}; "
            "give more text, a larger data.heldout_fraction, another data.heldout, or fewer model.positions"
        )


@contextlib.contextmanager
def _only_trainer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock while training; the system drops it when a process dies. Raises CheckpointError where another process has it."""
    try:
        with filelock.FileLock(folder / ".lock", timeout=0):
            yield
    except filelock.Timeout:
        raise CheckpointError(f"{folder}: is being trained by another process; wait for it, or stop it first") from None


def _truncate_metrics(path: Path, updates: int) -> None:
    """Drop lines that belong to steps after the checkpoint (they will be taken again) and what is not a line of ours."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            if json.loads(line)["updates"] <= updates:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            continue  # half a line, cut by a kill
    write_bytes(path, b"".join(kept))
