"""The command line: one function a subcommand, and the only place that parses, prints and exits.

Figures go to standard output; progress and notes to standard error, so `--json` output can be piped. Exit codes: 0 done, 1 a goal was missed,
2 a mistake in what was asked (one line names it), 130 stopped by Ctrl-C with a checkpoint written.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import App, CoercionError, CycloptsError, Parameter, convert

from blocktrain import __version__, cli_bench, cli_reports, cli_serving, cli_swarm
from blocktrain.cli_common import STOPPED, Json, Run, Settings, err, existing_run, out, run_settings, say, stop_on_signal
from blocktrain.cli_evaluation import show_evaluation
from blocktrain.config import (
    PRESETS,
    RunConfig,
    load_config,
    make_config,
    merge_fields,
    parse_assignment,
    preset_fields,
    read_toml,
    reference_config,
    without_effect,
)
from blocktrain.errors import BlockTrainError, ConfigError

# torch takes seconds to import: the modules that need it are imported inside the commands, so `--help` answers at once.


def _converted(kind: Any, tokens: Any) -> Any:
    """As cyclopts converts, but for whole numbers: it would round 1.5 to 2."""
    if kind is int or int in get_args(kind):
        for token in tokens:
            with contextlib.suppress(ValueError):
                if not float(token.value).is_integer():
                    raise CoercionError(msg=f"needs a whole number, got {token.value}.", token=token)
    return convert(kind, tokens)


app = App(
    name="blocktrain",
    default_parameter=Parameter(converter=_converted),
    help="Train and serve one language model on machines that each hold only one block of it.",
    version=__version__,
    suppress_keyboard_interrupt=False,  # `run` says that it was stopped
)
for command in (
    cli_serving.generate,
    cli_serving.serve,
    cli_serving.stage,
    cli_swarm.coordinator,
    cli_swarm.worker,
    cli_swarm.token,
    cli_swarm.doctor,
    cli_swarm.simulate,
    cli_reports.report,
    cli_reports.reproduce,
):
    app.command(command)
app.command(cli_bench.bench)


def run(tokens: list[str]) -> int:
    """Parse and run; returns the exit code. A user's mistake is one line on standard error."""
    try:
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except BlockTrainError as error:
        err.print(f"blocktrain: {error}", markup=False)
        return error.exit_code
    except CycloptsError as error:
        err.print(f"blocktrain: {' '.join(str(error).split())} See `blocktrain --help`.", markup=False)
        return 2
    except KeyboardInterrupt:
        err.print("blocktrain: stopped")
        return STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a path that is too long, a disk that is full, a terminal that is gone
        err.print(f"blocktrain: {error.filename or 'output'}: {error.strerror or error}", markup=False)
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails again as it closes it
        return 2
    return result if isinstance(result, int) else 0


@app.command
def train(
    run: Annotated[Path, Parameter(help="Run folder (made if it is not there).")],
    /,
    *,
    preset: Annotated[str | None, Parameter(help=f"One of {', '.join(PRESETS)}. Only for a new run.")] = None,
    config: Annotated[Path | None, Parameter(help="A run.toml to start from. Only for a new run.")] = None,
    data: Annotated[str | None, Parameter(help="wiki, python, wikitext-2, wikitext-103, or a path (sets data.corpus).")] = None,
    set_: Settings = (),
    reference: Annotated[bool, Parameter(negative=(), help="Also train the end-to-end Transformer of the same shape into RUN/reference.")] = False,
    json_: Json = False,
) -> int:
    """Train all blocks on this machine, or go on from the newest checkpoint.

    Ends with sample text and the five numbers. Ctrl-C writes a checkpoint; the same command goes on from it.
    """
    swarm = (run / "swarm").is_dir()  # its blocks are its coordinator's; the reference may be trained here
    if swarm and not reference:
        raise ConfigError(f"{run}: is trained by many workers; go on with `blocktrain coordinator {run}`, or use a new run folder")
    if swarm and set_:
        raise ConfigError(f"--set: {run} is trained by many workers and the reference has its settings; change them with `blocktrain coordinator`")
    settings = run_settings(run, preset, config, data, set_)
    from blocktrain.report.accounting import advice
    from blocktrain.report.memory import require_memory
    from blocktrain.training.data import load_corpus

    for note in (*without_effect(settings), *advice(settings)):
        say(f"note: {note}")
    jobs = ([] if swarm else [("blocks", run, settings)]) + ([("reference", run / "reference", reference_config(settings))] if reference else [])
    for _, _, its in jobs:
        require_memory(its)
    corpus = load_corpus(settings.data.corpus, heldout=settings.data.heldout, heldout_fraction=settings.data.heldout_fraction)
    say(f"text: {corpus.source}; {len(corpus.train):,} training bytes, {len(corpus.heldout):,} held out")
    with stop_on_signal() as stopped:
        for name, folder, its in jobs:
            if not _train_folder(folder, its, corpus, name, stopped):
                say(f"stopped; a checkpoint is in {folder / 'checkpoints'}. The same command goes on from it.")
                return STOPPED
    show_evaluation(run, json_)
    if not json_:
        _show_sample(run, corpus)
    return 0


@app.command
def evaluate(
    run: Run,
    /,
    *,
    set_: Annotated[
        tuple[str, ...],
        Parameter("--set", negative=(), consume_multiple=False, help="objective.start, .readout, .combine or evaluate.*, for this one only."),
    ] = (),
    stages: cli_serving.Stages = None,
    wire: cli_serving.WireOption = "bfloat16",
    allow_missing_blocks: cli_serving.AllowMissing = False,
    wait: cli_serving.Wait = cli_serving.READY_S,
    key_file: cli_serving.KeyFile = None,
    tls_ca: cli_serving.Authority = None,
    json_: Json = False,
) -> int:
    """The five numbers of a trained run on its held-out text (CE in nats per byte).

    With --stages only the headline, as those hosts serve it: one traversal for each held-out window.
    """
    settings = load_config(existing_run(run))
    if stages is not None:
        if set_:
            raise ConfigError("--set: cannot be given with --stages, which serve the run as it was trained")
        reach = cli_serving.Reach(allow_missing_blocks, key_file, tls_ca, wait)
        return cli_serving.evaluate_stages(run, settings, cli_serving.Source(run, stages, reach=reach), wire, json_)
    overrides: dict[str, Any] = {}
    for text in set_:
        fields = parse_assignment(text)
        ((section, values),) = fields.items()
        name = f"{section}.{next(iter(values))}" if isinstance(values, dict) else section
        if section != "evaluate" and name not in ("objective.start", "objective.readout", "objective.combine"):
            raise ConfigError(f"--set {text}: evaluate can change objective.start, .readout, .combine and evaluate.*; {name} is fixed by training")
        overrides = merge_fields(overrides, fields)
    show_evaluation(run, json_, overrides)
    return 0


@app.command
def memory(
    run: Annotated[Path | None, Parameter(help="Run folder whose run.toml gives the shape.")] = None,
    /,
    *,
    preset: Annotated[str | None, Parameter(help=f"Shape of a preset: {', '.join(PRESETS)}.")] = None,
    params: Annotated[float | None, Parameter(help="Only a number of parameters, such as 75.8e9; needs --blocks.")] = None,
    blocks: Annotated[int | None, Parameter(help="Blocks the parameters are cut into evenly.")] = None,
    dtype: Annotated[str | None, Parameter(help="float32, bfloat16, float16 or mixed; default: what training would take here.")] = None,
    optimizer: Annotated[Literal["adamw", "muon"] | None, Parameter(help="For --params; a run has its own.")] = None,
    set_: Settings = (),
    measure: Annotated[bool, Parameter(negative=(), help="Also run real steps in fresh processes and print their peaks.")] = False,
    paper: Annotated[bool, Parameter(negative=(), help="Also the arithmetic of the paper's two figures.")] = False,
    json_: Json = False,
) -> int:
    """What one active worker holds, and what the end-to-end stack would: weights, gradients, moments, activations."""
    from blocktrain.report import memory as accounting

    if params is not None:
        for flag, value in (("RUN", run), ("--preset", preset), ("--set", set_), ("--measure", measure)):
            if value:
                raise ConfigError(f"{flag}: cannot be given with --params, which is a bare number of parameters")
        if blocks is None:
            raise ConfigError("--blocks: needed with --params, for example --params 75.8e9 --blocks 8")
        report = accounting.shape_report(params, blocks, dtype or "float32", optimizer or "adamw")
    else:
        for flag, value in (("--blocks", blocks), ("--optimizer", optimizer)):
            if value is not None:
                raise ConfigError(f"{flag}: goes with --params; for a run or preset use --set model.blocks=N or --set train.optimizer=NAME")
        if run is not None and preset is not None:
            raise ConfigError("--preset: give a run folder or a preset, not both")
        fields = read_toml(existing_run(run)) if run is not None else preset_fields(preset or "default")
        for text in set_:
            fields = merge_fields(fields, parse_assignment(text))
        report = accounting.memory_report(make_config(fields, "--set" if set_ else str(run or preset)), dtype=dtype, measure=measure)
    figures = accounting.paper_figures() if paper else []
    if json_:
        print(json.dumps(report.to_json() | ({"paper": [figure.to_json() for figure in figures]} if paper else {})))
        return 0
    out.print(accounting.render(report))
    for figure in figures:
        out.print(_paper_line(figure), markup=False)
    return 0


def _paper_line(figure: Any) -> str:
    low, high = figure.lowest_and_highest
    shape = f"{figure.model.blocks} blocks x {figure.model.layers_per_block} layers, width {figure.model.width}"
    return (
        f"paper: {figure.name} {figure.paper_gib} GiB. At {figure.bytes_per_parameter} B a parameter that is {low:,} to {high:,} parameters. "
        f"Our reconstruction: {shape}, {figure.num_parameters:,} parameters = {figure.gib:.3f} GiB ({figure.note})."
    )


def _train_folder(folder: Path, settings: RunConfig, corpus: Any, name: str, stopped: list[int]) -> bool:
    """Train one run folder with progress; False if it was stopped."""
    from blocktrain.training.run import TrainingRun

    with _Progress(name) as progress:
        training = TrainingRun(folder, settings, corpus, report=progress.step, say=progress.say, stopped=lambda: bool(stopped))
        progress.say(f"{name}: {settings.model.blocks} blocks x {settings.model.layers_per_block} layers on {training.hardware}, into {folder}")
        return training.train() and not stopped


class _Progress:
    """A live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, name: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.name = name
        self.bar = Progress(*columns, console=err) if err.is_terminal else None
        self.task = self.bar.add_task(name, total=None, note="") if self.bar else None
        self.last = 0.0

    def __enter__(self) -> _Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, message: str) -> None:
        err.print(message, markup=False)

    def step(self, report: Any) -> None:
        ce = " ".join(f"{value:.3f}" for value in report.figures.ce)
        note = f"CE {ce} nats/byte, {report.tokens_per_s:,.0f} bytes/s"
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=report.updates, total=report.total_updates, note=note)
        elif report.seconds - self.last >= 10 or report.updates in (1, report.total_updates):
            self.last = report.seconds
            err.print(f"{self.name}: step {report.updates}/{report.total_updates}, {note}", markup=False)


def _show_sample(run: Path, corpus: Any) -> None:
    from blocktrain.training.checkpoint import load_run

    prompt = bytes(corpus.heldout[:64])
    text = cli_serving.sample(load_run(run, say), prompt, 200)
    print("\nsample, prompt from the held-out text:\n" + prompt.decode("utf-8", "replace"))
    print("\nsample, 200 bytes generated after it:\n" + text)
