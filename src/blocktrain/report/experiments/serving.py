"""Serving: one sweep, speculative and exact over stages with a delayed link, against the plain autoregressive pipeline of the reference.

The stages are processes of their own on this machine, one a block, over TCP; every way takes half of the round-trip time. The sweep needs a run that
was trained with `objective.window`; the others serve the default run of `long-run`.
"""

from __future__ import annotations

import json
from typing import Any

from blocktrain.config import RunConfig
from blocktrain.report.bench_serving import Options, bench_serving
from blocktrain.report.experiments.lab import Lab
from blocktrain.report.experiments.result import Experiment, Result, Row
from blocktrain.report.experiments.scale import WINDOW
from blocktrain.serialization import write_bytes

PAPER_SAYS = "one traversal an output, up to a logical shape of 75.80B (speed not stated)"
BENCH = "serving/bench.json"


def window_config(lab: Lab) -> RunConfig:
    return lab.config({**WINDOW, "window": lab.scale.serving.window})


def options_of(lab: Lab) -> Options:
    """A link without delay and one with, both without a limit of bandwidth."""
    serving = lab.scale.serving
    return Options(
        hosts=lab.default_config().model.blocks,
        rtts_ms=(0.0, serving.rtt_ms),
        mbits_s=(0.0,),
        prompts=serving.prompts,
        prompt_bytes=serving.prompt_bytes,
        max_bytes=serving.max_bytes,
        window_run=lab.out / "serving" / "window",
        streams=2,
        repeats=serving.repeats,
    )


def key(lab: Lab) -> str:
    options = {name: value for name, value in vars(options_of(lab)).items() if name != "window_run"}
    return lab.key(lab.default_config(), window_config(lab), more=options)


def run(lab: Lab) -> Result:
    """Trains the window run, then measures all rows by turns."""
    lab.reference_run()
    default = lab.default_run()
    lab.train("serving/window", window_config(lab))
    result = bench_serving(default, options_of(lab), lab.say)
    write_bytes(lab.out / BENCH, json.dumps(result).encode())
    table = result["tables"][-1]  # the one with delay
    found = {row["name"]: row for row in table["rows"]}
    differs = f"{lab.differs()}; {result['hosts']} stages on this machine, RTT {table['rtt_ms']:g} ms; the 75.80B shape was not run"
    rows = [
        Row(f"serving, {name}", PAPER_SAYS if name == "sweep" else "not stated", _line(row, result["quality"]), differs)
        for name, row in found.items()
    ]
    return Result(rows, result, benches=(BENCH,))


def _line(row: dict[str, Any], quality: dict[str, Any]) -> str:
    text = f"{row['bytes_per_s']:.1f} bytes/s ({row['ratio']:.2f} of baseline), {row['bytes_per_traversal']:.2f} bytes a traversal"
    told = quality.get(row["name"], {})
    return f"{text}, held-out CE of its bytes {told['ce']:.2f}" if "ce" in told else text


EXPERIMENT = Experiment("serving", key, run)
