"""`blocktrain bench serving --logical-params N`: what a traversal of a model of N parameters takes over real stages, on this machine's arithmetic.

The shape is logical (`logical`): real compute and real traffic, one layer's memory a host. Two ways to get 64 bytes are compared: one sweep of 64
positions, and 64 steps of the plain pipeline, of which a few are timed. Nothing is said about quality: these weights are random.

A smaller shape can be measured first; the projection scales its compute by parameters and its traffic by width.

`python -m blocktrain.report.bench_logical JOB` is a stage; JOB is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from rich.table import Table

from blocktrain.config import RunConfig
from blocktrain.errors import ConfigError
from blocktrain.model.transformer import MASK_ID
from blocktrain.report.bench_training import Goal
from blocktrain.report.logical import GIB, choose_shape, logical_config, logical_run, require_memory, sizes_of
from blocktrain.report.netlink import MBIT, Links
from blocktrain.report.serving_fleet import Command, Fleet, split
from blocktrain.report.serving_rows import Traversal, Watched, WatchedText, traffic
from blocktrain.serving.chain import Step
from blocktrain.serving.compute import BlockRunner, Settings
from blocktrain.serving.frames import PROTOCOL, HelloReply
from blocktrain.serving.pipeline import Expected
from blocktrain.serving.server import Secrets, StageServer
from blocktrain.serving.stage import Stage

SWEEP = 64  # positions of the sweep
PROMPT = 16
STEPS = 3
PROJECTED = 75.8e9


# --- A stage ---


async def serve(job: dict[str, Any]) -> None:
    """Until it is ended."""
    config = RunConfig.model_validate_json(job["config"])
    server, blocks = StageServer(Secrets()), range(job["first"], job["stop"])
    run = await asyncio.to_thread(logical_run, config, blocks)
    stage = Stage(BlockRunner(run, blocks.start, blocks.stop))
    server.stage = stage
    server.hello = lambda: HelloReply(
        protocol=list(PROTOCOL), node=server.node, state="up", config_digest=config.digest, first=blocks.start, stop=blocks.stop
    )
    await server.start(f"127.0.0.1:{job['port']}", stage.shape.max_bytes)
    await asyncio.Event().wait()


def logical_command(config: RunConfig) -> Command:
    def command(blocks: range, port: int) -> list[str]:
        job = {"config": config.model_dump_json(), "first": blocks.start, "stop": blocks.stop, "port": port}
        return ["-m", "blocktrain.report.bench_logical", json.dumps(job)]

    return command


# --- The measurement ---


def bench_logical(
    parameters: float, hosts: int, dtype: str, rtt_ms: float, mbit_s: float, say: Callable[[str], None], steps: int = STEPS
) -> dict[str, Any]:
    """Figures as one JSON line's worth. Raises ConfigError, MemoryLimitError and ServingError."""
    if not 1 <= hosts <= 64:
        raise ConfigError(f"--hosts: must be between 1 and 64 with --logical-params, got {hosts}")
    config = logical_config(parameters, hosts, dtype, SWEEP - 1)
    require_memory(config, hosts)
    sizes, model = sizes_of(config), config.model
    say(f"logical: {sizes.parameters:,} parameters, {model.layers} layers of width {model.width} over {hosts} hosts, {dtype}")
    with Links() as links:
        measured = asyncio.run(_measure(config, hosts, links, rtt_ms, mbit_s, say, steps))
    shape = {"parameters": sizes.parameters, "physical_per_host": sizes.physical, "layers": model.layers, "width": model.width}
    result = {"bench": "serving logical", "hosts": hosts, "dtype": dtype, "rtt_ms": rtt_ms, "mbit_s": mbit_s, **shape, **measured}
    ratio = SWEEP * measured["step"]["seconds"] / measured["sweep"]["seconds"]
    goals = [Goal(f"bytes/s of a sweep of {SWEEP} over single steps", ratio, ">=", 1.0)]
    return {**result, "ratio": ratio, "projected": project(result, PROJECTED), "goals": [goal.to_json() for goal in goals]}


async def _measure(
    config: RunConfig, hosts: int, links: Links, rtt_ms: float, mbit_s: float, say: Callable[[str], None], steps: int
) -> dict[str, Any]:
    threads = os.cpu_count() or 1  # one text, so one host computes at a time
    fleet = Fleet(Expected(config, config.digest, {}), logical_command(config), split(config.model.blocks, hosts), links, threads)
    fleet.start()
    try:
        watched = Watched(await fleet.connect())
        fleet.change(rtt_ms, mbit_s)
        text = await watched.open(Settings("bfloat16"))
        say(f"a prompt of {PROMPT}, {steps} single steps, one sweep of {SWEEP}")
        await text.step(Step(0, 0, [0] * PROMPT, PROMPT - 1))
        singles = [await _one(fleet, watched, text, PROMPT + i, [0]) for i in range(steps)]
        sweep = await _one(fleet, watched, text, PROMPT, [0] + [MASK_ID] * (SWEEP - 1))
        await text.close()
    finally:
        await fleet.close()
    middle = sorted(singles, key=lambda found: found["seconds"])[len(singles) // 2]
    return {"step": {**middle, "seconds": median(found["seconds"] for found in singles), "timed": steps}, "sweep": sweep}


async def _one(fleet: Fleet, watched: Watched, text: WatchedText, keep: int, ids: list[int]) -> dict[str, float]:
    before = traffic(fleet.links)
    await text.step(Step(keep, 0, ids))
    seen: Traversal = watched.seen[-1]
    return {"seconds": seen.wall_s, "compute_s": sum(map(sum, seen.hops)), "network_s": seen.network_s, "wire_bytes": traffic(fleet.links) - before}


def project(result: dict[str, Any], parameters: float) -> dict[str, float]:
    """Seconds at another number of parameters: compute in proportion, traffic in proportion to the width, over the same link."""
    scale, width = parameters / result["parameters"], choose_shape(parameters, result["hosts"]).width
    more = (width / result["width"] - 1) * 8 / (result["mbit_s"] * MBIT) if result["mbit_s"] else 0.0  # seconds a byte
    step, sweep = (row["compute_s"] * scale + row["network_s"] + row["wire_bytes"] * more for row in (result["step"], result["sweep"]))
    return {"parameters": parameters, "step_s": step, "sweep_s": sweep, "ratio": SWEEP * step / sweep}


def render(result: dict[str, Any]) -> list[Table]:
    """Measured and projected, each said to be logical."""
    shape = f"{result['parameters'] / 1e9:.3g}e9 parameters, {result['layers']} layers of width {result['width']}, {result['dtype']}"
    held = result["physical_per_host"] * (2 if result["dtype"] == "bfloat16" else 4) / GIB
    link = f"RTT {result['rtt_ms']:g} ms" + (f", {result['mbit_s']:g} Mbit/s" if result["mbit_s"] else "")
    table = Table(
        "traversal", "s", "compute s", "network s", "wire KB", title=f"logical: {shape}; {result['hosts']} hosts hold {held:.2f} GiB each; {link}"
    )
    for name, row in (("one byte", result["step"]), (f"sweep of {SWEEP}", result["sweep"])):
        cells = [f"{row[key]:,.3f}" for key in ("seconds", "compute_s", "network_s")]
        table.add_row(name, *cells, f"{row['wire_bytes'] / 1024:,.1f}")
    projected = result["projected"]
    rows = Table(f"{SWEEP} bytes", "by single steps, s", "by one sweep, s", "ratio", title="logical")
    rows.add_row("measured", f"{SWEEP * result['step']['seconds']:,.1f}", f"{result['sweep']['seconds']:,.1f}", f"{result['ratio']:.1f}")
    name = f"projected to {projected['parameters'] / 1e9:g}e9"
    rows.add_row(name, f"{SWEEP * projected['step_s']:,.1f}", f"{projected['sweep_s']:,.1f}", f"{projected['ratio']:.1f}")
    return [table, rows]


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
