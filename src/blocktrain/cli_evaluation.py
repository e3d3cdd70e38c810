"""The five numbers of a run on the command line: made, kept as RUN/evaluation.json, and shown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from blocktrain.cli_common import out, say
from blocktrain.config import RunConfig, make_config, merge_fields


def evaluation_of(run: Path, overrides: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """(evaluation, run as it was loaded). Kept in the run folder unless settings are overridden."""
    from blocktrain.report.texts import corpus_of
    from blocktrain.training.checkpoint import load_run
    from blocktrain.training.evaluate import evaluate as evaluate_run

    loaded = load_run(run, say)
    if overrides:
        fields = merge_fields(loaded.config.model_dump(mode="json"), overrides)
        loaded = dataclasses.replace(loaded, config=make_config(fields, "--set"))
    corpus = corpus_of(loaded)
    say("evaluating ...")
    result = evaluate_run(loaded, corpus, say)
    if not overrides:
        _keep_evaluation(run / "evaluation.json", result.to_json())
    return result, loaded


def show_evaluation(run: Path, as_json: bool, overrides: dict[str, Any] | None = None) -> None:
    """Evaluate and print."""
    result, loaded = evaluation_of(run, overrides)
    print(json.dumps(result.to_json())) if as_json else print_evaluation(result, loaded)


def print_evaluation(result: Any, loaded: Any) -> None:
    """The table of the five numbers, and the one by noise level where there is one."""
    out.print(_evaluation_table(result, loaded))
    if result.sigma_bins:
        out.print(_sigma_table(result))


def _keep_evaluation(path: Path, figures: dict[str, Any]) -> None:
    from blocktrain.serialization import write_bytes

    try:
        write_bytes(path, json.dumps(figures, indent=1).encode())
    except OSError as error:
        say(f"{path}: could not be written ({error.strerror}); the figures follow all the same")


def _evaluation_table(result: Any, loaded: Any) -> Table:
    draws = f", {result.noise_draws} noise draws" if result.noise_draws > 1 else ""
    title = f"Held-out cross entropy, nats per byte, lower is better ({result.windows} windows{draws})"
    table = Table(title=title, title_justify="left")
    table.add_column("number", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("what it is")
    if result.oracle_ce is None:
        table.add_row("1 oracle CE", "-", "no noisy target takes part (objective.denoise_weight = 0)")
    else:
        table.add_row(
            "1 oracle CE", " ".join(map(_number, result.oracle_ce)), "per block, state made from the true target: a diagnostic, not a score"
        )
    so_far = "mean of the votes so far" if loaded.config.objective.votes else "after each block of the sweep"
    table.add_row("2 rollout CE", " ".join(map(_number, result.rollout_ce)), f"{so_far}, target never seen")
    perplexity, bits = f"{result.to_json()['perplexity']:.3f}", f"{result.to_json()['bits_per_byte']:.3f}"
    table.add_row(
        "3 headline CE", _number(result.headline_ce), f"the model's score, as served; perplexity {perplexity}, {bits} bits per byte", style="bold"
    )
    table.add_row("4 composition gain", *_gain_cells(result, loaded.config))
    table.add_row("5 gap", *_gap_cells(result, loaded.folder))
    if result.window_ce is not None:
        table.add_row("window CE", _number(result.window_ce), f"the last {loaded.config.objective.window} positions, their context masked")
    verdict = "the model is better" if result.headline_ce < result.ngram_ce else "the model is not there yet"
    table.add_row("n-gram (order 5)", _number(result.ngram_ce), f"what counting reaches on {result.ngram_bytes:,} training bytes: {verdict}")
    flops = f"{result.training_flops:.3g}" + (f" (reference {result.reference_flops:.3g})" if result.reference_flops else "")
    other = result.reference_parameters not in (None, result.parameters)
    parameters = f"{result.parameters:,}" + (f" (reference {result.reference_parameters:,})" if other else "")
    table.add_row("trained on", f"{result.bytes_seen:,}", f"bytes; {flops} FLOPs; {parameters} parameters; seed {result.seed}")
    table.add_row("digests", "", f"config {result.config_digest[:16]}, model {result.model_digest[:16]}")
    return table


def _gap_cells(result: Any, folder: Path) -> tuple[str, str]:
    if result.gap is None:
        return "-", f"needs the reference: blocktrain train {folder} --reference"
    error = "" if result.gap_standard_error is None else f" (standard error {result.gap_standard_error:.4f})"
    return f"{result.gap:+.4f}", f"to the end-to-end Transformer of the same shape, {_number(result.reference_ce)}{error}"


def _gain_cells(result: Any, config: RunConfig) -> tuple[str, str]:
    if result.composition_gain is None:
        return "-", "one span over all blocks: nothing is composed"
    if config.objective.input == "independent":
        alone = "the best single block alone has"
    else:
        alone = "block 0 alone has" if config.objective.span == 1 else f"the first span alone (blocks 0-{config.objective.span - 1}) has"
    verdict = "" if result.composition_gain > 0 else ": the further blocks do not help"
    return f"{result.composition_gain:+.4f}", f"{alone} {_number(result.best_single_block_ce)}{verdict}"


def _sigma_table(result: Any) -> Table:
    table = Table(title="Oracle CE by noise level", title_justify="left")
    for name in ("sigma", "block", "CE"):
        table.add_column(name, justify="right")
    for row in result.sigma_bins:
        table.add_row(f"{row.low:.3f} - {row.high:.3f}", str(row.block), _number(row.ce))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
