"""The benches on the command line: tables with each figure beside its goal, then one JSON line, and exit code 1 where a goal is missed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from blocktrain.cli_common import Json, existing_run, out, say
from blocktrain.errors import ConfigError

Quick = Annotated[bool, Parameter(negative=(), help="Smaller shapes.")]
bench = App(name="bench", help="Measure, print tables with each figure beside its goal, then one JSON line. Exit code 1 if a goal is missed.")


@bench.command
def training(*, quick: Quick = False, json_: Json = False) -> int:
    """Our trainer against a plain PyTorch loop, and peak memory against the accounting."""
    from blocktrain.report.bench_training import bench_training, render

    _noisy("training")
    return _show(bench_training(quick=quick), render, json_)


@bench.command
def transport(*, quick: Quick = False, json_: Json = False) -> int:
    """A coordinator's throughput against a raw copy of the same bytes, and its memory."""
    from blocktrain.report.bench_transport import bench_transport, render

    _noisy("transport")
    return _show(bench_transport(quick=quick, say=say), render, json_)


@bench.command
def serving(
    run: Annotated[Path | None, Parameter(help="Run folder; its reference is the baseline. Not needed with --logical-params.")] = None,
    /,
    *,
    quick: Quick = False,
    hosts: Annotated[int, Parameter(help="Stage processes that the blocks are spread over.")] = 3,
    rtt: Annotated[str, Parameter(help="Round-trip times of every way in ms, with commas.")] = "0,20,50,100",
    mbit: Annotated[str, Parameter(help="Bandwidths in Mbit/s and direction, with commas; 0 is no limit.")] = "20,0",
    prompts: Annotated[int, Parameter(help="Held-out prompts.")] = 4,
    max_bytes: Annotated[int, Parameter("--bytes", help="Bytes generated after each.")] = 64,
    temperature: Annotated[float, Parameter(help="0 takes the most likely byte.")] = 0.8,
    draft_blocks: Annotated[int | None, Parameter(help="First blocks that draft; default: up to the first with a read-out.")] = None,
    window_run: Annotated[Path | None, Parameter(help="Run folder with objective.window for the sweep row; default: RUN where it has one.")] = None,
    failovers: Annotated[int, Parameter(help="Times that a stage is killed during a text, two stages holding its block.")] = 0,
    logical_params: Annotated[float | None, Parameter(help="Instead: a logical shape of so many parameters, such as 75.8e9.")] = None,
    dtype: Annotated[str, Parameter(help="--logical-params: float32 or bfloat16.")] = "float32",
    json_: Json = False,
) -> int:
    """Text over stages in processes of their own, on links with delay: speculative and sweep against the plain pipeline.

    Every layer of a logical shape is one physical layer, so its compute and traffic are real and its memory is one layer a host.
    """
    rtts, mbits = _numbers("--rtt", rtt), _numbers("--mbit", mbit)
    if logical_params is not None:
        if run is not None:
            raise ConfigError("RUN: cannot be given with --logical-params, which makes a shape of its own")
        from blocktrain.report.bench_logical import bench_logical
        from blocktrain.report.bench_logical import render as render_logical

        _noisy("serving")
        return _show(bench_logical(logical_params, hosts, dtype, rtts[-1], mbits[0], say), render_logical, json_)
    if run is None:
        raise ConfigError("RUN: needed, a run folder (or give --logical-params)")
    existing_run(run)
    from blocktrain.report.bench_serving import Options, bench_serving
    from blocktrain.report.serving_tables import render

    options = Options(
        quick=quick,
        hosts=hosts,
        rtts_ms=rtts,
        mbits_s=mbits,
        prompts=prompts,
        max_bytes=max_bytes,
        temperature=temperature,
        draft_blocks=draft_blocks,
        window_run=window_run,
        failovers=failovers,
    )
    _noisy("serving")
    return _show(bench_serving(run, options, say), render, json_)


def _noisy(what: str) -> None:
    say(f"bench {what}: takes minutes; other work on this machine makes it noisy")


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag}: expected numbers with commas, for example 0,50, got {text!r}") from None


def _show(result: dict[str, Any], render: Callable[[dict[str, Any]], list[Any]], as_json: bool) -> int:
    if not as_json:
        for table in render(result):
            out.print(table)
    print(json.dumps(result))
    return 0 if all(goal["met"] for goal in result["goals"]) else 1
