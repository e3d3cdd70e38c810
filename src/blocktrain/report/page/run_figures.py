"""What a run folder tells of itself. Whatever is not there is a sentence that says so, where the figures would have been: `T | str`.

Read: metrics.jsonl (of the run and of its reference), the noise statistics in the newest checkpoint, the evaluation (made anew, unless the caller
has it), and of a run of many workers its status, its manifests and its updates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.config import RunConfig, load_config
from blocktrain.diffusion.noise import log_bins
from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.report.texts import corpus_of
from blocktrain.swarm.host import read_status
from blocktrain.swarm.parts import INTERFACE
from blocktrain.swarm.replay import read_books
from blocktrain.swarm.store import open_store
from blocktrain.training.checkpoint import MOMENTS, latest_checkpoint, load_run
from blocktrain.training.evaluate import evaluate

SIGMA_BINS = 64  # as the trainer counts
Say = Callable[[str], None]


@dataclass(frozen=True)
class Curve:
    """Training CE of a span of blocks (nats per byte) against bytes that it has seen."""

    name: str
    bytes_seen: list[float]
    ce: list[float]


@dataclass(frozen=True)
class SigmaDraws:
    """Noise levels drawn in training: SIGMA_BINS + 1 rising edges, sequences drawn in each bin, and their mean CE (nats per byte)."""

    edges: list[float]
    counts: list[float]
    ce: list[float | None]


@dataclass(frozen=True)
class SwarmFigures:
    """A run of many workers."""

    participations: dict[int, list[tuple[int, float]]]  # block -> (round, share of the assigned work that came in time)
    uploads: dict[int, list[tuple[int, float]]]  # block -> (bytes of all updates counted up to that version of it, its training CE)
    up: int  # bytes of the ledger: everything that workers sent
    down: int


@dataclass(frozen=True)
class RunFigures:
    """A run; what it lacks is a sentence."""

    label: str
    config: RunConfig
    curves: list[Curve] | str
    reference: list[Curve] | str
    evaluation: dict[str, Any] | str
    sigma: SigmaDraws | str
    swarm: SwarmFigures | str


def read_run(folder: Path, label: str, say: Say, evaluation: Mapping[str, Any] | None = None) -> RunFigures:
    """Everything about one run. Raises ConfigError where it is no run folder."""
    path = folder / "run.toml"
    if not path.is_file():
        raise ConfigError(f"{folder}: not a run folder (no run.toml); make one with `blocktrain train {folder}`")
    config = load_config(path)
    swarm, status = _or_sentence(lambda: _swarm(folder), "") if (folder / "swarm").is_dir() else ("trained without workers on a network", None)
    return RunFigures(
        label,
        config,
        curves_of(folder, config) if status is None else _swarm_curves(status),
        curves_of(folder / "reference", config) if (folder / "reference").is_dir() else "no end-to-end reference was trained in its folder",
        dict(evaluation) if evaluation is not None else _evaluated(folder, say),
        _sigma(folder, config, say),
        swarm,
    )


def evaluate_run(folder: Path, say: Say) -> dict[str, Any]:
    """The evaluation as JSON has it. Raises CheckpointError, DataError and ConfigError (the text is another now)."""
    loaded = load_run(folder, say)
    return evaluate(loaded, corpus_of(loaded), say).to_json()


def _evaluated(folder: Path, say: Say) -> dict[str, Any] | str:
    say(f"evaluating {folder} ...")
    try:
        return evaluate_run(folder, say)
    except BlockTrainError as error:
        return f"not evaluated: {error}"


def curves_of(folder: Path, config: RunConfig) -> list[Curve] | str:
    """Of metrics.jsonl, one curve a span. Lines that are not of ours (half of one, cut by a kill) are passed over."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return "no metrics.jsonl, so there is no training curve"
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for line in lines:
        for span, bytes_seen, ce in _points(line, config):
            found.setdefault(span, []).append((bytes_seen, ce))
    if not found:
        return "metrics.jsonl holds no step yet"
    return [Curve(_span_name(span), [x for x, _ in points], [ce for _, ce in points]) for span, points in sorted(found.items())]


def _points(line: bytes, config: RunConfig) -> list[tuple[tuple[int, int], float, float]]:
    """(span, bytes it has seen, CE) of one line."""
    try:
        row = json.loads(line)
        points = []
        for (first, stop), ce in zip(row["blocks"], row["ce"], strict=True):
            before = first * config.train.steps if config.train.order == "sequential" else 0  # steps that other blocks took
            points.append(((int(first), int(stop)), float((row["updates"] - before) * config.tokens_per_step), float(ce)))
    except (ValueError, KeyError, TypeError):
        return []
    return [point for point in points if math.isfinite(point[2])]


def _span_name(span: tuple[int, int]) -> str:
    first, stop = span
    return f"block {first}" if stop - first == 1 else f"blocks {first}-{stop - 1}"


def _sigma(folder: Path, config: RunConfig, say: Say) -> SigmaDraws | str:
    """Which noise levels were drawn, and how hard each was."""
    if not config.objective.noisy:
        return "no noisy target takes part (objective.denoise_weight = 0)"
    try:
        checkpoint = latest_checkpoint(folder, say)
        if checkpoint is None or MOMENTS not in checkpoint.progress.files:
            return "the checkpoint has no statistics of the noise that was drawn"
        tensors = checkpoint.tensors(MOMENTS)
    except BlockTrainError as error:
        return str(error)
    total, counts = (tensors[f"statistics.bin_{kind}"].tolist() for kind in ("sum", "count"))
    if not sum(counts):
        return "no noise level has been drawn yet"
    ce = [a / n if n else None for a, n in zip(total, counts, strict=True)]
    return SigmaDraws(log_bins(config.noise, SIGMA_BINS), counts, ce)


# --- Many workers ---


def _or_sentence(read: Callable[[], tuple[SwarmFigures, dict[str, Any]]], name: str) -> tuple[SwarmFigures | str, dict[str, Any] | None]:
    try:
        return read()
    except (BlockTrainError, OSError) as error:
        return f"{name}{error}", None


def _swarm(folder: Path) -> tuple[SwarmFigures, dict[str, Any]]:
    status = read_status(folder)
    participations = {row["block"]: [(version, share) for version, share in row["participations"] if share is not None] for row in status["blocks"]}
    return SwarmFigures(participations, _uploads(folder), status["bytes"]["up"], status["bytes"]["down"]), status


def _uploads(folder: Path) -> dict[int, list[tuple[int, float]]]:
    """How many bytes of updates had been counted, over all blocks, when a version was made. An update is counted once, whatever its span."""
    opened = open_store(folder / "swarm")
    try:
        books = read_books(opened)
    finally:
        opened.close()
    heard: set[str] = set()
    total, points = 0, dict[int, list[tuple[int, float]]]()
    for manifest in books.manifests:
        if manifest["part"] == INTERFACE or "shares" not in manifest:
            continue
        new = {share["key"] for share in manifest["shares"]} - heard
        heard |= new
        total += sum(books.updates[key]["size"] for key in new if key in books.updates)
        if manifest.get("ce") is not None:
            points.setdefault(manifest["block"], []).append((total, manifest["ce"]))
    return points


def _swarm_curves(status: dict[str, Any]) -> list[Curve] | str:
    """Of each block, over its versions."""
    curves = [
        Curve(f"block {row['block']}", [float(tokens) for _, tokens, _ in row["losses"]], [ce for _, _, ce in row["losses"]])
        for row in status["blocks"]
        if row["losses"]
    ]
    return curves or "no round has closed yet"
