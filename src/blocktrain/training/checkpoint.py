"""A run folder and its checkpoints: written whole or not at all, verified when read.

RUN/run.toml                         the configuration
RUN/metrics.jsonl                    one line every `train.log_every` steps
RUN/checkpoints/step-00000600/       interface.safetensors, block-000.safetensors, ..., training.safetensors, progress.json
RUN/reference/                       the end-to-end Transformer of the same shape, a run folder of its own

The block and interface files hold the weights that are evaluated and served (the moving average where there is one). `training.safetensors`
holds what only the inner loop needs: moments, raw weights under a moving average, statistics. A checkpoint is made in a
scratch folder, flushed, and renamed, so a kill at any moment leaves the one before. Two are kept: if the newest does not match its digests, the one
before is used, and said so.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from blocktrain.config import RunConfig, load_config, make_config, with_added_settings
from blocktrain.diffusion.noise import Partition, make_partition
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.model.layers import left_out
from blocktrain.model.transformer import BlockStack
from blocktrain.serialization import file_sha256, load_tensors, save_tensors, sync_folder, tensor_digest, write_bytes

KEPT = 2


class Progress(BaseModel):
    """progress.json: where a run stands."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    updates: int  # optimizer steps done, over all phases
    phase: int  # index of the block in training where blocks are trained one after another, else 0
    step: int  # optimizer steps done in this phase
    finished: bool
    bytes_seen: int  # training bytes that each block was trained on so far (the most advanced block)
    training_flops: float
    seconds: float  # spent in training steps, over all starts
    fitted: list[float] | None  # boundaries of an `information` partition
    config: str  # the RunConfig as JSON
    config_digest: str
    train_digest: str
    heldout_digest: str
    files: dict[str, str]  # name -> sha256

    def run_config(self) -> RunConfig:
        """The settings it was trained with; raises CheckpointError where this version does not know them."""
        return settings_of(self.config, f"checkpoint of update {self.updates}")


def settings_of(kept: str, source: str) -> RunConfig:
    """Settings that were kept as JSON; raises CheckpointError where this version does not know them."""
    try:
        return make_config(with_added_settings(json.loads(kept)), source)
    except (ConfigError, ValueError) as error:
        raise CheckpointError(f"{error}; it was written by another version") from None


def block_file(block: int) -> str:
    return f"block-{block:03d}.safetensors"


def save_checkpoint(
    run: Path, progress: Progress, parts: dict[str, dict[str, Tensor]], source: Checkpoint | None = None, kept: Iterable[str] = ()
) -> Checkpoint:
    """Write a checkpoint of `parts` (file name -> tensors); `kept` files are copied from `source` and verified against its digests.

    Raises CheckpointError if the disk is full or refuses, or if a kept file is damaged; the checkpoint before is then untouched.
    """

    def fill(folder: Path) -> None:
        for name in kept:
            assert source is not None, "files can be kept only from a checkpoint"
            shutil.copyfile(source.folder / name, folder / name)
            if file_sha256(folder / name) != source.progress.files[name]:
                raise CheckpointError(f"{source.folder / name}: damaged since it was written, its sha256 is not the one in progress.json")
        for name, tensors in parts.items():
            save_tensors(folder / name, tensors)

    return write_checkpoint(run, progress, fill)


def write_checkpoint(run: Path, progress: Progress, fill: Callable[[Path], None]) -> Checkpoint:
    """Write a checkpoint whose files `fill` puts into a scratch folder; whole or not at all. Raises CheckpointError like `save_checkpoint`."""
    folder = run / "checkpoints"
    target = folder / f"step-{progress.updates:08d}"
    scratch = folder / f".step-{progress.updates:08d}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".step-*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        scratch.mkdir()
        fill(scratch)
        files = {path.name: file_sha256(path) for path in sorted(scratch.iterdir())}
        progress = progress.model_copy(update={"files": files})
        write_bytes(scratch / "progress.json", progress.model_dump_json(indent=1).encode())
        sync_folder(scratch)
        if target.exists():
            shutil.rmtree(target)
        os.replace(scratch, target)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        kept = "the checkpoint before is intact" if _names(folder) else "there is no checkpoint before it"
        raise CheckpointError(f"{target}: cannot be written ({error.strerror}); {kept}, run again when cured") from None
    for old in _names(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return Checkpoint(target, progress)


def _names(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match their digests."""

    folder: Path
    progress: Progress

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_tensors(self.folder / name)


def latest_checkpoint(run: Path, warn: Callable[[str], None], names: Iterable[str] | None = None) -> Checkpoint | None:
    """The newest checkpoint whose files `names` (default: all) are intact, or None where there is none yet.

    Raises CheckpointError where all are damaged.
    """
    problem = ""
    for folder in reversed(_names(run / "checkpoints")):
        try:
            checkpoint = Checkpoint(folder, _read_progress(folder / "progress.json"))
            _verify(checkpoint, checkpoint.progress.files if names is None else names)
        except CheckpointError as error:
            problem = str(error)
            warn(f"{problem}; looking for an older checkpoint")
            continue
        return checkpoint
    if problem:
        raise CheckpointError(f"{problem}; no intact checkpoint is left in {run / 'checkpoints'}")
    return None


def discard_newer(run: Path, checkpoint: Checkpoint) -> None:
    """Remove damaged checkpoints newer than the one a run goes on from."""
    for folder in _names(run / "checkpoints"):
        if folder.name > checkpoint.folder.name:
            shutil.rmtree(folder, ignore_errors=True)


def _read_progress(path: Path) -> Progress:
    try:
        return Progress.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise CheckpointError(f"{path}: cannot be read ({first})") from None


def _verify(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    for name in names:
        path, digest = checkpoint.folder / name, checkpoint.progress.files.get(name)
        if digest is None:
            continue  # not trained yet; whoever needs it says so
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if file_sha256(path) != digest:
            raise CheckpointError(f"{path}: damaged, its sha256 is not the one in progress.json")


def load_module(module_name: str, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load weights by name; raises CheckpointError naming the first tensor that is missing, extra or of another shape."""
    unused = left_out(module)
    state, tensors = module.state_dict(), {name: tensor for name, tensor in tensors.items() if name not in unused}
    for name in sorted(state.keys() | tensors.keys()):
        if name not in tensors or name not in state:
            raise CheckpointError(f"{module_name}: tensor {name} is {'missing' if name not in tensors else 'not part of this model'}")
        if state[name].shape != tensors[name].shape:
            raise CheckpointError(f"{module_name}: tensor {name} has shape {tuple(tensors[name].shape)}, expected {tuple(state[name].shape)}")
    module.load_state_dict(tensors)


@dataclass(frozen=True)
class LoadedRun:
    """A run as it is evaluated and served."""

    folder: Path
    config: RunConfig  # as it is read now
    trained_config: RunConfig  # as the checkpoint was trained
    progress: Progress
    stack: BlockStack
    partition: Partition

    @property
    def model_digest(self) -> str:
        return tensor_digest(dict(self.stack.state_dict()))


def load_run(run: Path, warn: Callable[[str], None], blocks: Iterable[int] | None = None) -> LoadedRun:
    """Read a run folder's configuration and the served weights of `blocks` (default: all) from its newest checkpoint."""
    if not (run / "run.toml").is_file():
        raise CheckpointError(f"{run}: not a run folder (no run.toml); make one with `blocktrain train {run}`")
    held = list(range(load_config(run / "run.toml").model.blocks) if blocks is None else blocks)
    checkpoint = latest_checkpoint(run, warn, names=["interface.safetensors", *map(block_file, held)])
    if checkpoint is None:
        raise CheckpointError(f"{run}: has no checkpoint yet; train it with `blocktrain train {run}`")
    trained = checkpoint.progress.run_config()
    config = _as_read_now(trained, run / "run.toml")
    for change in settings_changed(config, load_config(run / "run.toml")):
        warn(f"{run / 'run.toml'}: says otherwise than the checkpoint, which is what counts here ({change})")
    if blocks is None:
        held = list(range(config.model.blocks))
    stack = BlockStack.of(config, held)
    load_module(f"{run}: interface.safetensors", stack.interface, checkpoint.tensors("interface.safetensors"))
    for b in held:
        if block_file(b) not in checkpoint.progress.files:
            raise CheckpointError(f"{run}: block {b} has not been trained yet; go on with `blocktrain train {run}`")
        load_module(f"{run}: {block_file(b)}", stack.block(b), checkpoint.tensors(block_file(b)))
    partition = make_partition(config.noise, config.model.blocks, checkpoint.progress.fitted)
    return LoadedRun(run, config, trained, checkpoint.progress, stack.eval().requires_grad_(False), partition)


MOMENTS = "training.safetensors"  # what training needs to go on, besides the weights

# Settings that may be changed while a run is under way; any other would make its history or its shape untrue.
INNER_LOOP = {"train.lr", "train.muon_lr", "train.weight_decay", "train.warmup_steps", "train.cooldown", "train.clip_norm"}
FREE = {
    *INNER_LOOP,
    *("train.steps", "train.checkpoint_every", "train.log_every", "train.device", "train.precision"),
    *("evaluate.windows", "evaluate.noise_draws", "evaluate.sigma_bins", "objective.start", "objective.readout", "objective.combine"),
    *("data.corpus", "data.heldout", "data.heldout_fraction"),  # the text itself is held by its digest
    *(f"{name}.{key}" for name in ("round", "outer", "limits") for key in type(getattr(RunConfig(), name)).model_fields),  # of many workers
}


def vote_rests(before: RunConfig, now: RunConfig, step: int) -> str:
    """A sentence where a common vote that had begun ends with other settings, since its beginning is a share of train.steps; else empty."""
    if not step or not before.votes_at(step - 1) or now.votes_at(step):
        return ""
    begins = next(s for s in range(step, now.train.steps + 1) if s == now.train.steps or now.votes_at(s))
    return f"the common vote had begun and rests until step {begins}, which is objective.vote_from of train.steps = {now.train.steps}"


def settings_changed(before: RunConfig, now: RunConfig) -> list[str]:
    """`section.field: old -> new` for every setting that differs, but for one that has no effect in either."""
    old, new = before.model_dump(), now.model_dump()
    if not before.objective.vote_weight and not now.objective.vote_weight:
        old["objective"]["vote_from"] = new["objective"]["vote_from"]
    changes = []
    for section in new:
        if not isinstance(new[section], dict):
            changes += [f"{section}: {old[section]} -> {new[section]}"] if old[section] != new[section] else []
            continue
        changes += [f"{section}.{k}: {old[section][k]} -> {v}" for k, v in new[section].items() if old[section][k] != v]
    return changes


def _as_read_now(trained: RunConfig, path: Path) -> RunConfig:
    """The trained settings, with those that only say how and where a run is read taken from run.toml as it is now."""
    now = load_config(path)
    fields = trained.model_dump()
    fields["evaluate"] = now.evaluate.model_dump()
    for name in ("data", "round", "outer", "limits"):
        fields[name] = getattr(now, name).model_dump()
    fields["train"] |= {"device": now.train.device, "precision": now.train.precision}
    fields["objective"] |= now.objective.reading
    return make_config(fields, str(path))
