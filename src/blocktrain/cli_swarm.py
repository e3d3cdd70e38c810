"""Commands of many workers: coordinator, worker, token, doctor, simulate. Like cli.py, a place that parses, prints and exits.

What the processes do stands in swarm/host.py and swarm/launch.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from blocktrain.cli_common import STOPPED, Json, Run, Settings, err, existing_run, out, run_settings, say
from blocktrain.cli_evaluation import evaluation_of, print_evaluation
from blocktrain.config import PRESETS
from blocktrain.errors import ConfigError

NewRun = Annotated[Path, Parameter(help="Run folder (made if it is not there).")]
Line = Annotated[str, Parameter(help="The line that `blocktrain coordinator` prints; `-` reads it from standard input.")]


def coordinator(
    run: NewRun,
    /,
    *,
    listen: Annotated[
        str, Parameter(help="HOST:PORT to serve at; port 0 takes a free one. Loopback unless you name another address.")
    ] = "127.0.0.1:7700",
    preset: Annotated[str | None, Parameter(help=f"One of {', '.join(PRESETS)}. Only for a new run.")] = None,
    config: Annotated[Path | None, Parameter(help="A run.toml to start from. Only for a new run.")] = None,
    data: Annotated[
        str | None, Parameter(help="wiki, python, wikitext-2, wikitext-103, or a path (sets data.corpus). Workers get the text from here.")
    ] = None,
    set_: Settings = (),
    public: Annotated[str | None, Parameter(help="HOST or HOST:PORT by which workers reach this machine, where it is not the one found.")] = None,
    plaintext: Annotated[
        bool, Parameter(negative=(), help="Plain HTTP on an address that is not loopback: secrets can then be read on the way.")
    ] = False,
    cert: Annotated[Path | None, Parameter(help="PEM file with your own key and certificate, in place of one made here.")] = None,
    evaluate: Annotated[bool, Parameter(help="Score the composed model now and then, on at most a tenth of the time.")] = True,
    stay: Annotated[bool, Parameter(negative=(), help="Keep the page up after the run has finished.")] = False,
    alone_min: Annotated[float | None, Parameter(help="End with exit code 1 after so many minutes without a worker.")] = None,
    status: Annotated[bool, Parameter(negative=(), help="Print the run's status and end; nothing is served.")] = False,
    json_: Json = False,
) -> int:
    """Own a run: hand out work, average what comes back, show the page. Prints the line by which workers join.

    May be killed at any moment; the same command goes on.
    """
    from blocktrain.report.accounting import advice
    from blocktrain.swarm.host import Host, read_status

    if status:
        existing_run(run)
        figures = read_status(run)
        print(json.dumps(figures)) if json_ else out.print(_status_table(figures))
        return 0
    settings = run_settings(run, preset, config, data, set_)
    for note in advice(settings):
        say(f"note: {note}")
    host = Host(
        run, settings, listen=listen, public=public, plaintext=plaintext, cert=cert, evaluate=evaluate, stay=stay, alone_min=alone_min, say=say
    )
    host.claim()
    host.open()
    host.claim()
    print(f"blocktrain worker {host.line}", flush=True)
    say(f"page: {host.page}")
    code = host.serve()
    figures = read_status(run)
    print(json.dumps(figures)) if json_ else out.print(_status_table(figures))
    return code


def worker(
    line: Line,
    /,
    *,
    name: Annotated[str | None, Parameter(help="What this worker is called (letters, digits, `.`, `-`, `_`); default: the machine's name.")] = None,
    folder: Annotated[Path | None, Parameter(help="Where its key and files are kept; default: one of its own in the user's cache.")] = None,
    memory: Annotated[str | None, Parameter(help="Memory it may use, for example 6GiB; default: what is free.")] = None,
    span: Annotated[int | None, Parameter(help="At most so many consecutive blocks.")] = None,
    device: Annotated[Literal["cpu", "cuda", "mps"] | None, Parameter(help="Default: CUDA, then MPS, then the CPU.")] = None,
    threads: Annotated[int | None, Parameter(help="CPU threads; default: what torch takes.")] = None,
    takeover: Annotated[bool, Parameter(negative=(), help="Take the place of another process with the same key.")] = False,
    wait: Annotated[float, Parameter(help="Minutes to wait for a coordinator that does not answer, at the start and later.")] = 60.0,
) -> int:
    """Join a run and train, until it is finished or Ctrl-C. The first Ctrl-C hands in what was trained so far; a second ends at once.

    Needs nothing but outbound connections to the coordinator.
    """
    from blocktrain.report.memory import worker_capacity
    from blocktrain.swarm.launch import launch, memory_bytes

    if threads is not None:
        if threads < 1:
            raise ConfigError(f"--threads: must be at least 1, got {threads}")
        import torch

        torch.set_num_threads(threads)
    if span is not None and span < 1:
        raise ConfigError(f"--span: must be at least 1, got {span}")
    if not 0 <= wait < 1e6:
        raise ConfigError(f"--wait: must be a number of minutes from 0 on, got {wait}")
    text = sys.stdin.read() if line == "-" else line
    budget = memory_bytes(memory) if memory else None
    with _WorkerProgress() as progress:
        running = launch(
            text,
            lambda settings: worker_capacity(settings, budget),
            name=name,
            folder=folder,
            span=span,
            device=device,
            takeover=takeover,
            patience_s=wait * 60,
            say=progress.say,
            report=progress.step,
        )
        outcome = asyncio.run(_until_stopped(running, progress.say))
    say(f"{running.worker.name}: {outcome}; {running.worker.updates} updates handed in")
    return STOPPED if outcome == "stopped" else 0


async def _until_stopped(running: Any, tell: Any) -> str:
    """Run the worker; the first signal asks it to stop, a second cancels it."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(running.worker.run())

    def stop() -> None:
        if running.worker.stopping:
            os._exit(STOPPED)
        running.worker.stop()
        tell("stopping: hands in what is trained after this step (again: at once)")

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows has no such handlers
            loop.add_signal_handler(number, stop)
    return await task


def token(
    action: Annotated[Literal["add", "revoke", "list"], Parameter(help="add a token, revoke one with all who joined by it, or list the names.")],
    run: Run,
    name: Annotated[str | None, Parameter(help="The token's name.")] = None,
    /,
    *,
    worker: Annotated[str | None, Parameter(help="With revoke: only this worker.")] = None,
) -> int:
    """Who may join a run. A coordinator that is running takes it up with the next request."""
    from blocktrain.swarm.host import add_token, list_tokens, revoke

    existing_run(run)
    if action == "list":
        for line in list_tokens(run):
            print(line)
        return 0
    if action == "add":
        if not name:
            raise ConfigError("token add: give the token a name: blocktrain token add RUN NAME")
        print(f"blocktrain worker {add_token(run, name)}")
        return 0
    if not name and not worker:
        raise ConfigError("token revoke: name a token (blocktrain token revoke RUN NAME) or a worker (--worker NAME)")
    for line in revoke(run, name, worker):
        print(line)
    return 0


def doctor(
    line: Annotated[str | None, Parameter(help="A join line, to try the way to its coordinator too.")] = None,
    /,
    *,
    json_: Json = False,
) -> int:
    """What is wrong with this machine, or with its way to a coordinator, and how to cure it. Exit code 1 if something is."""
    from blocktrain.report.memory import worker_memory
    from blocktrain.swarm.doctor import examine

    findings = examine(sys.stdin.read() if line == "-" else line, worker_memory)
    if json_:
        print(json.dumps([vars(finding) for finding in findings]))
    for finding in findings if not json_ else ():
        mark = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}[finding.verdict]
        print(f"{mark} {finding.check}: {finding.found}")
        if finding.cure:
            print(f"      {finding.cure}")
    return 1 if any(finding.verdict == "wrong" for finding in findings) else 0


def simulate(
    run: NewRun,
    /,
    *,
    regime: Annotated[Literal["lockstep", "soft", "wan"], Parameter(help="Machines, lines, absences and a deadline; participation follows.")],
    workers: Annotated[int, Parameter(help="How many take part.")] = 6,
    rounds: Annotated[int | None, Parameter(help="End after so many versions of each block; default: when train.steps are taken.")] = None,
    preset: Annotated[str | None, Parameter(help=f"One of {', '.join(PRESETS)}.")] = None,
    config: Annotated[Path | None, Parameter(help="A run.toml to start from.")] = None,
    data: Annotated[str | None, Parameter(help="wiki, python, wikitext-2, wikitext-103, or a path (sets data.corpus).")] = None,
    set_: Settings = (),
    seed: Annotated[int, Parameter(help="Of machines, lines and absences; weights and batches follow the run's own seed.")] = 0,
    stand_in: Annotated[bool, Parameter(negative=(), help="Nothing is trained: for thousands of workers. Needs --rounds.")] = False,
    drop_late: Annotated[bool, Parameter(negative=(), help="Updates that miss their round count nothing, even if their upload began in it.")] = False,
    json_: Json = False,
) -> int:
    """A whole run in this process and in virtual time: real coordinator, workers and training, made-up machines and lines.

    RUN becomes a run folder like any other. The regime sets the rules of rounds that go with it; --set has the last word.
    """
    from blocktrain.swarm.regimes import DROP_LATE, REGIMES
    from blocktrain.swarm.simulator import Plan, refuse_used
    from blocktrain.swarm.simulator import simulate as live
    from blocktrain.training.data import load_corpus

    refuse_used(run)
    chosen = REGIMES[regime]
    settings = run_settings(run, preset, config, data, (*chosen.settings(), *(DROP_LATE if drop_late else ()), *set_))
    plan = Plan(settings, chosen, workers, seed, rounds, stand_in)
    its = settings.data
    corpus = None if stand_in else load_corpus(its.corpus, heldout=its.heldout, heldout_fraction=its.heldout_fraction)
    say(f"{chosen.name}: {chosen.meaning}")
    outcome = live(plan, corpus, run, say)
    result, loaded = (None, None) if stand_in else evaluation_of(run)
    if json_:
        print(json.dumps({**outcome.to_json(), "evaluation": result.to_json() if result else None}))
        return 0
    out.print(_outcome_table(outcome))
    if result:
        print_evaluation(result, loaded)
    return 0


class _WorkerProgress:
    """A live line on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.live = err.is_terminal
        self.told = 0.0

    def __enter__(self) -> _WorkerProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def _clear(self) -> None:
        if self.live:
            sys.stderr.write("\r\033[K")

    def say(self, message: str) -> None:
        self._clear()
        err.print(message, markup=False)

    def step(self, report: Any) -> None:
        if self.live:
            sys.stderr.write(f"\r\033[K  step {report.step}/{report.steps}, CE {report.ce:.3f} nats/byte, {report.tokens_per_s:,.0f} bytes/s")
            sys.stderr.flush()


def _status_table(figures: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"{figures['run']}: {figures['state']}, {figures['reason']}", title_justify="left")
    for name in ("block", "version", "state", "participation", "CE nats/byte", "bytes trained", "bytes down", "bytes up", "why"):
        table.add_column(name, justify="left" if name in ("state", "why") else "right")
    for row in figures["blocks"]:
        share = "-" if row["participation"] is None else f"{row['participation']:.0%}"
        ce = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        table.add_row(
            str(row["block"]),
            str(row["version"]),
            row["state"],
            share,
            ce,
            f"{row['tokens']:,}",
            f"{row['bytes_down']:,}",
            f"{row['bytes_up']:,}",
            row["reason"],
        )
    return table


def _outcome_table(outcome: Any) -> Any:
    from rich.table import Table

    share = "-" if outcome.participation is None else f"{outcome.participation:.1%}"
    moved = sum(outcome.bytes.values())
    title = f"{outcome.regime}, {outcome.workers} workers: participation {share}, {outcome.late} late, {outcome.dropped} dropped"
    table = Table(title=f"{title}; {outcome.virtual_s:,.0f} virtual seconds, {moved:,} bytes moved", title_justify="left")
    for name in ("block", "version", "participation", "late", "CE nats/byte", "bytes trained"):
        table.add_column(name, justify="right")
    for block in outcome.blocks:
        share = "-" if block.participation is None else f"{block.participation:.1%}"
        ce = "-" if block.ce is None else f"{block.ce:.4f}"
        table.add_row(str(block.block), str(block.version), share, str(block.late), ce, f"{block.tokens:,}")
    return table
