"""The five numbers of a run, never mixed up, and what stands beside them.

1. oracle CE   per block, z made from the true target: a diagnostic of the block, never a model's score
2. rollout CE  after every block of the sweep, which never sees the target: mean and deviation over noise draws
3. headline CE the last of them: the deployed path, in nats per byte
4. composition gain = CE of the best single block alone - headline CE
5. gap         = headline CE - CE of the end-to-end Transformer of the same layers, tables and bytes (RUN/reference)

A block whose logits nothing trained (inside a span) has no CE; its entry is None. The order-5 n-gram line says what counting alone reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.config import reference_config
from blocktrain.diffusion.noise import log_bins
from blocktrain.errors import CheckpointError
from blocktrain.model.reference import NGramModel
from blocktrain.model.transformer import MASK_ID, parameter_count
from blocktrain.seeding import fold, generator
from blocktrain.training.checkpoint import LoadedRun, load_run
from blocktrain.training.composition import Composer
from blocktrain.training.data import Corpus, heldout_windows
from blocktrain.training.hardware import choose_hardware
from blocktrain.training.objective import NoiseLevels, SpanObjective, View, draw_noise

BATCH = 16  # held-out sequences scored at once


@dataclass(frozen=True)
class SigmaBin:
    """Oracle CE of one bin of noise levels, by the block that serves it."""

    low: float
    high: float
    block: int
    ce: float  # nats per byte


@dataclass(frozen=True)
class Evaluation:
    """All figures of a run; CE in nats per byte. Keys of to_json() are fixed."""

    headline_ce: float
    headline_by_window: list[float]  # one per held-out window; not in to_json(), for paired comparisons
    rollout_ce: list[float | None]  # one per block
    rollout_std: list[float | None]  # deviation over noise draws
    oracle_ce: list[float | None] | None  # one per block; None where no noisy target takes part
    sigma_bins: list[SigmaBin]
    best_single_block_ce: float | None  # of one block alone, or of the shortest prefix that has a read-out; None where there is only one read-out
    window_ce: float | None  # rollout CE of the masked positions of a window run
    reference_ce: float | None
    gap_standard_error: float | None  # of the paired difference over the held-out windows
    ngram_ce: float
    ngram_bytes: int
    noise_draws: int
    windows: int
    bytes_seen: int
    training_flops: float
    reference_flops: float | None
    reference_parameters: int | None
    parameters: int
    seed: int
    config_digest: str
    model_digest: str

    @property
    def composition_gain(self) -> float | None:
        """None where only one block has a read-out: nothing is composed then."""
        return None if self.best_single_block_ce is None else self.best_single_block_ce - self.headline_ce

    @property
    def gap(self) -> float | None:
        return None if self.reference_ce is None else self.headline_ce - self.reference_ce

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "headline_by_window"}
        plain["sigma_bins"] = [vars(b) for b in self.sigma_bins]
        derived = {
            "perplexity": math.exp(min(self.headline_ce, 700.0)),
            "bits_per_byte": self.headline_ce / math.log(2),
            "composition_gain": self.composition_gain,
            "gap": self.gap,
        }
        return plain | derived


class Evaluator:
    """Scores a loaded run on held-out windows (N, T + 1) of byte ids."""

    def __init__(self, run: LoadedRun, windows: np.ndarray) -> None:
        self.run, self.config = run, run.config
        self.hardware = choose_hardware(run.config)
        self.stack = run.stack.to(self.hardware.device)
        self.composer = Composer(self.stack, run.config, run.partition)
        self.windows = torch.from_numpy(windows.astype(np.int64))
        self.draws = run.config.evaluate.noise_draws if run.config.objective.noisy and run.config.objective.start == "noise" else 1

    def rollout(self, mask_last: int = 0, only: int | None = None) -> Tensor:
        """CE after every block (or after `only`) of every window for each noise draw: (draws, blocks, windows) float64, nats per byte.

        With `mask_last` the context of that many last positions is masked and only they are scored.
        """
        return torch.stack([self._rollout_once(draw, mask_last, only) for draw in range(self.draws)])

    def _rollout_once(self, draw: int, mask_last: int, only: int | None) -> Tensor:
        parts = []
        for index, (x, y) in enumerate(self._batches()):
            if mask_last:
                x = torch.cat((x[:, :-mask_last], torch.full_like(x[:, -mask_last:], MASK_ID)), dim=1)
            z = self.composer.start((x.size(0), x.size(1)), fold(self.config.seed, "evaluate", index), draw, only or 0)
            with torch.no_grad(), self.hardware.autocast():
                ce = [_ce(logits[:, -mask_last:], y[:, -mask_last:]) for logits in self.composer.sweep(x, z, only=only)]
            parts.append(torch.stack(ce))  # (blocks, N)
        return torch.cat(parts, dim=1)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self.windows.split(BATCH):
            ids = part.to(self.hardware.device)
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def oracle(self, block: int, low: float | None = None, high: float | None = None) -> float:
        """CE of a block whose z is made from the true target, at levels of its training range or of [low, high]."""
        total = 0.0
        for index, (x, y) in enumerate(self._batches()):
            seed = fold(self.config.seed, "oracle", index)
            levels = draw_noise(self.config, self.run.partition, x.size(0), seed)
            if low is not None and high is not None:
                levels = self._fixed_range(levels, block, low, high)
            objective = SpanObjective(self.stack, self.config, [View(x, y, levels, None, 1.0)])
            with torch.no_grad(), self.hardware.autocast():
                total += float(objective.loss((block, block + 1)).ce_per_sample.sum())
        return total / self.windows.size(0)

    def _fixed_range(self, levels: NoiseLevels, block: int, low: float, high: float) -> NoiseLevels:
        """The same levels with this block's drawn from [low, high], those before it at least as noisy and those after it at most."""
        sigma = levels.sigma.clone()
        u = (torch.arange(sigma.size(1)) + torch.rand(sigma.size(1), generator=generator(levels.seed, "bin"))) / sigma.size(1)
        sigma[block] = self.run.partition.density.quantile(u.clamp(max=1 - 1e-7), low, high)
        if levels.chained:
            sigma[block:] = torch.minimum(sigma[block:], sigma[block])
            sigma[: block + 1] = sigma[: block + 1].flip(0).cummax(0).values.flip(0)
        return NoiseLevels(sigma, levels.seed, levels.chained)

    def sigma_bins(self) -> list[SigmaBin]:
        """Oracle CE over evenly spaced bins of ln(sigma), each read from the block whose range holds its middle."""
        edges = log_bins(self.config.noise, self.config.evaluate.sigma_bins)
        bins = []
        for low, high in zip(edges, edges[1:], strict=False):
            middle = math.sqrt(low * high)
            block = next(b for b in range(self.config.model.blocks) if middle >= self.run.partition.boundaries[b + 1])
            if block in self.composer.readable:
                bins.append(SigmaBin(low, high, block, self.oracle(block, low, high)))
        return bins

    def best_single_block(self, rollout: list[float | None]) -> float | None:
        """Independent blocks: the best of each alone from its own start. Chained blocks: the shortest prefix that has a read-out."""
        if len(self.composer.readable) == 1:
            return None
        if self.config.objective.input == "upstream":
            first = rollout[self.composer.readable[0]]
            assert first is not None
            return first
        return min(float(self.rollout(only=b).mean()) for b in range(self.config.model.blocks))


def evaluate(run: LoadedRun, corpus: Corpus, warn: Callable[[str], None]) -> Evaluation:
    """All figures of a run on its corpus's held-out text; reads RUN/reference where it is trained."""
    windows = heldout_windows(corpus.heldout, run.config.model.positions, run.config.evaluate.windows)
    if len(windows) < run.config.evaluate.windows:
        warn(f"evaluate.windows: {run.config.evaluate.windows} asked for, the held-out text holds {len(windows)}")
    evaluator = Evaluator(run, windows)
    readable, blocks = evaluator.composer.readable, range(run.config.model.blocks)
    rollout = evaluator.rollout()  # (draws, blocks, windows)
    per_draw = rollout.mean(2)
    mean = [float(per_draw[:, b].mean()) if b in readable else None for b in blocks]
    spread = [(float(per_draw[:, b].std()) if len(per_draw) > 1 else 0.0) if b in readable else None for b in blocks]
    headline = mean[-1]
    assert headline is not None, "the last block always has a read-out"
    noisy, window = run.config.objective.noisy, run.config.objective.window
    reference = _reference(run, windows, warn)
    ngram = NGramModel.fit(corpus.train)
    return Evaluation(
        headline_ce=headline,
        headline_by_window=rollout[:, -1].mean(0).tolist(),
        rollout_ce=mean,
        rollout_std=spread,
        oracle_ce=[evaluator.oracle(b) if b in readable else None for b in blocks] if noisy else None,
        sigma_bins=evaluator.sigma_bins() if noisy else [],
        best_single_block_ce=evaluator.best_single_block(mean),
        window_ce=float(evaluator.rollout(mask_last=window)[:, -1].mean()) if window else None,
        reference_ce=float(reference[0].mean()) if reference else None,
        gap_standard_error=_standard_error(rollout[:, -1].mean(0) - reference[0]) if reference else None,
        ngram_ce=ngram.cross_entropy(windows),
        ngram_bytes=ngram.train_bytes,
        noise_draws=evaluator.draws,
        windows=len(windows),
        bytes_seen=run.progress.bytes_seen,
        training_flops=run.progress.training_flops,
        reference_flops=reference[1] if reference else None,
        reference_parameters=reference[2] if reference else None,
        parameters=parameter_count(run.stack),
        seed=run.config.seed,
        config_digest=run.progress.config_digest,
        model_digest=run.model_digest,
    )


def _reference(run: LoadedRun, windows: np.ndarray, warn: Callable[[str], None]) -> tuple[Tensor, float, int] | None:
    """(CE of each window, training FLOPs, parameters) of the end-to-end Transformer on the same windows, where it was trained as this run was."""
    folder = run.folder / "reference"
    if not (folder / "run.toml").is_file():
        return None
    advice = f"; `blocktrain train {run.folder} --reference` goes on, or remove that folder first"
    try:
        reference = load_run(folder, warn)
    except CheckpointError as error:  # the run itself is whole
        warn(f"{str(error).partition(';')[0]}, so there is no gap{advice}")
        return None
    mine, its = run.progress, reference.progress
    if not its.finished:
        problem = f"stopped at step {its.step}"
    elif its.config_digest != reference_config(run.trained_config).digest:
        problem = "was trained with other settings or for another number of steps"
    elif (its.train_digest, its.bytes_seen) != (mine.train_digest, mine.bytes_seen):
        problem = f"has seen {its.bytes_seen:,} bytes and this run's most advanced block {mine.bytes_seen:,}"
        advice = (
            "" if its.bytes_seen < mine.bytes_seen and (run.folder / "swarm").is_dir() else advice
        )  # spans that overlap see some blocks more often
    else:
        return Evaluator(reference, windows).rollout()[0, -1], its.training_flops, parameter_count(reference.stack)
    warn(f"{folder}: {problem}, so there is no gap{advice}")
    return None


def _standard_error(differences: Tensor) -> float | None:
    """Of the mean of (windows,) paired differences; None for a single window."""
    return float(differences.std() / len(differences) ** 0.5) if len(differences) > 1 else None


def _ce(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy of each sequence in nats per byte: logits (N, T, V), targets (N, T) -> (N,) float64 on the CPU."""
    ce = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none")
    return ce.view(y.shape).cpu().double().mean(1)
