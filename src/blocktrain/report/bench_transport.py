"""`blocktrain bench transport`: what moving updates through a coordinator costs, beside a raw copy of the same bytes.

Throughput: one worker pushes a block's update and pulls the block, over HTTP on loopback, to a coordinator in a process of its own. Beside it, in
the same run and by turns, the same bytes go over a bare TCP socket to a file, with SHA-256 on both ends. The figure is the median of the ratios of
neighbours. The gate (commit) and the closing of the round read every byte again and compute with it; their seconds are reported apart.

Memory: eight workers push at once and the round closes. The figure is the coordinator's highest resident memory over what it held before.

`python -m blocktrain.report.bench_transport` with a job on stdin is the other end: a coordinator, or a socket that writes to a file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from blocktrain.codecs import encode_stream
from blocktrain.config import RunConfig, make_config
from blocktrain.errors import BlockTrainError
from blocktrain.report.bench_training import Goal
from blocktrain.report.measure import Meter
from blocktrain.seeding import generator
from blocktrain.streams import FileSource, Source
from blocktrain.swarm import identity
from blocktrain.swarm.coordinator import Coordinator, Text
from blocktrain.swarm.host import make_server, steady_memory
from blocktrain.swarm.link import HttpLink
from blocktrain.swarm.parts import INTERFACE, Layout
from blocktrain.swarm.protocol import BeginRequest, BlobRef, CommitRequest, JoinLine, Work, parse_join_line
from blocktrain.swarm.server import Service
from blocktrain.swarm.store import open_store
from blocktrain.swarm.worker import Told, Trained, send_parts
from blocktrain.web import bind

MB = 1_000_000
TENSOR_MB = 4.0
WORKERS = 8
CHUNK = 1 << 20
WAIT_S = 600.0


# --- What is moved ---


def stand_in(size_mb: float) -> Layout:
    """One block of float32 tensors of 4 MB, and an interface that stays where it is."""
    each = int(min(TENSOR_MB, size_mb) * MB) // 4
    shapes = {f"tensor-{i:04d}": (torch.float32, (each,)) for i in range(max(1, round(size_mb / TENSOR_MB)))}
    entries = {INTERFACE: {"tensor": (torch.float32, (1,))}, "block-000": shapes}
    return Layout(1, entries, {INTERFACE: (), "block-000": tuple(shapes)}, lambda part: _zeros(entries[part]), False)


def _zeros(entries: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (dtype, shape) in sorted(entries.items()):
        yield name, torch.zeros(shape, dtype=dtype)


def settings() -> RunConfig:
    """Of a run whose rounds end when everyone has reported."""
    model = {"blocks": 1, "layers_per_block": 1, "width": 32, "heads": 2, "positions": 32, "embed_dim": 16, "noise_dim": 8}
    rounds = {"deadline": "fixed", "deadline_s": WAIT_S, "heartbeat_limit_s": WAIT_S, "quorum": 1}
    return make_config({"model": model, "round": rounds, "outer": {"interface": "frozen"}, "train": {"steps": 1_000_000}})


def write_update(path: Path, layout: Layout, seed: int) -> Trained:
    """An update as a worker has it before it is sent."""
    shapes, digest = layout.update_shapes(0, 1), hashlib.sha256()
    draw = generator(seed, "bench transport", 0)
    with open(path, "wb") as file:
        for chunk in encode_stream(shapes, ((name, torch.randn(shape, generator=draw)) for name, shape in sorted(shapes.items())), "fp32"):
            digest.update(chunk)
            file.write(chunk)
    return Trained(FileSource(path), digest.hexdigest(), 16, _metrics())


def _metrics() -> Any:
    return CommitRequest.model_fields["metrics"].default


# --- The other end ---


class TimedCoordinator(Coordinator):
    """Knows how long its rounds took to close."""

    closes: list[float]

    def tick(self) -> int:
        began = time.perf_counter()
        made = super().tick()
        if made:
            self.closes = [*getattr(self, "closes", []), time.perf_counter() - began]
        return made


def serve_coordinator(job: dict[str, Any]) -> None:
    """A coordinator on loopback with the settings of the real one; obeys lines on stdin."""
    steady_memory()
    opened = open_store(Path(job["folder"]))
    text = opened.blobs.put("text/none", b"none")
    layout = stand_in(job["size_mb"])
    coordinator = TimedCoordinator("bench", settings(), layout, opened, Text(BlobRef(**vars(text)), text.sha256, "none"))
    service = Service(coordinator)
    bound = bind("127.0.0.1", 0)
    print_of = identity.fingerprint(identity.certificate_of(coordinator.pem))
    line = JoinLine("http", "127.0.0.1", bound.getsockname()[1], coordinator.token_named("bench") or "", coordinator.run_id, print_of)
    server = make_server(service.app)
    threading.Thread(target=_obey, args=(coordinator, server), daemon=True).start()
    service.start()
    _tell({"line": str(line)})
    asyncio.run(server.serve(sockets=[bound]))
    service.stop()


def _obey(coordinator: TimedCoordinator, server: Any) -> None:
    meter = Meter(torch.device("cpu"))
    for order in sys.stdin:
        if order.strip() == "mark":
            meter = Meter(torch.device("cpu"))
        _tell({"baseline": meter.baseline, "peak": meter.peak(), "closes": getattr(coordinator, "closes", [])})
    server.should_exit = True


def serve_sink(job: dict[str, Any]) -> None:
    """What the raw copy goes to: a socket, a digest, a file."""
    bound = socket.create_server(("127.0.0.1", 0))
    _tell({"port": bound.getsockname()[1]})
    room = memoryview(bytearray(CHUNK))
    while True:
        connection, _ = bound.accept()
        digest = hashlib.sha256()
        with connection, open(job["path"], "wb") as file:
            while size := connection.recv_into(room):
                digest.update(room[:size])
                file.write(room[:size])
            connection.sendall(digest.digest())


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


class Other:
    """A process of this module: lines in, JSON lines out."""

    def __init__(self, **job: Any) -> None:
        command = [sys.executable, "-m", "blocktrain.report.bench_transport"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.first = self.ask(json.dumps(job))

    def ask(self, order: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise BlockTrainError(f"bench transport: the other process ended with code {self.process.wait()}")
        return json.loads(answer)

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def other(**job: Any) -> Iterator[Other]:
    started = Other(**job)
    try:
        yield started
    finally:
        started.end()


# --- This end ---


def raw_copy(port: int, source: Source, sha256: str) -> float:
    """Seconds from the first byte until the other end has them all, digest and file."""
    digest, began = hashlib.sha256(), time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for start in range(0, source.size, CHUNK):
            piece = source.read(start, min(source.size, start + CHUNK))
            digest.update(piece)
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(32, socket.MSG_WAITALL)
    assert answer == digest.digest() == bytes.fromhex(sha256), "the raw copy was damaged"
    return time.perf_counter() - began


def make_link(line: JoinLine, number: int = 0) -> HttpLink:
    return HttpLink(line, f"bench-{number}", identity.new_worker_key(), process=f"bench-{number}-{secrets.token_hex(4)}")


async def assignment(link: HttpLink) -> Work:
    """Join and ask."""
    await link.info()
    await link.join(1, False)
    reply = await link.ask(secrets.token_hex(8))
    if reply.work is None:
        raise Told(reply.kind, reply.reason)
    return reply.work


async def push(link: HttpLink, work: Work, update: Trained, sha256: str) -> float:
    """Seconds of begin and all parts."""
    began = time.perf_counter()
    reply = await link.begin(BeginRequest(key=work.key, size=update.source.size, sha256=sha256))
    await send_parts(link, work.key, update.source, sha256, reply)
    return time.perf_counter() - began


async def commit(link: HttpLink, work: Work, update: Trained) -> float:
    """Seconds of the gate."""
    began = time.perf_counter()
    await link.commit(CommitRequest(key=work.key, size=update.source.size, sha256=update.sha256, num_samples=update.num_samples))
    return time.perf_counter() - began


async def pull(link: HttpLink, work: Work, target: Path) -> float:
    """Seconds of fetching the block, digest checked."""
    target.unlink(missing_ok=True)
    began = time.perf_counter()
    await link.fetch(next(part.full for part in work.parts if part.part == "block-000"), target)
    return time.perf_counter() - began


def bench_throughput(folder: Path, size_mb: float, repeats: int) -> dict[str, Any]:
    """Push, pull and raw copy by turns; the last push is committed."""
    layout = stand_in(size_mb)
    update = write_update(folder / "update", layout, 0)
    with other(kind="coordinator", folder=str(folder / "store"), size_mb=size_mb) as host, other(kind="sink", path=str(folder / "raw")) as sink:
        port = sink.first["port"]

        async def measure() -> dict[str, Any]:
            link = make_link(parse_join_line(host.first["line"]))
            work = await assignment(link)
            times: dict[str, list[float]] = {"raw": [], "push": [], "pull": []}
            for repeat in range(repeats + 1):
                sha256 = update.sha256 if repeat == repeats else secrets.token_hex(32)
                times["raw"].append(raw_copy(port, update.source, update.sha256))
                times["push"].append(await push(link, work, update, sha256))
                times["pull"].append(await pull(link, work, folder / "pulled"))
            gate_s = await commit(link, work, update)
            close_s = (await _closed(host))["closes"][-1]
            await link.leave()
            await link.close()
            return _ratios(times, update.source.size) | {"gate_s": gate_s, "close_s": close_s, "repeats": repeats}

        return asyncio.run(measure())


def _ratios(times: dict[str, list[float]], size: int) -> dict[str, Any]:
    """Throughput of each, and of push and pull over the raw copy beside it; the first turn warms up and does not count."""
    rates = {f"{kind}_mb_per_s": size / MB / statistics.median(seconds[1:]) for kind, seconds in times.items()}
    ratios = {kind: [raw / own for raw, own in zip(times["raw"][1:], times[kind][1:], strict=True)] for kind in ("push", "pull")}
    return {"bytes": size, **rates, **{f"{kind}_ratio": statistics.median(found) for kind, found in ratios.items()}}


async def _closed(host: Other) -> dict[str, Any]:
    """Figures of the coordinator once it has closed a round."""
    end = time.monotonic() + WAIT_S
    while not (figures := await asyncio.to_thread(host.ask, "look"))["closes"]:
        if time.monotonic() > end:
            raise BlockTrainError(f"bench transport: the round was not closed within {WAIT_S:.0f} s")
        await asyncio.sleep(0.05)
    return figures


def bench_rss(folder: Path, size_mb: float, workers: int = WORKERS) -> dict[str, Any]:
    """The coordinator's memory while many push at once and the round closes."""
    layout = stand_in(size_mb)
    updates = [write_update(folder / f"update-{number}", layout, number) for number in range(workers)]
    with other(kind="coordinator", folder=str(folder / "store"), size_mb=size_mb) as host:
        line = parse_join_line(host.first["line"])

        async def one(link: HttpLink, work: Work, update: Trained) -> None:
            await push(link, work, update, update.sha256)
            await commit(link, work, update)

        async def measure() -> dict[str, Any]:
            links = [make_link(line, number) for number in range(workers)]
            works = [await assignment(link) for link in links]
            await asyncio.to_thread(host.ask, "mark")
            began = time.perf_counter()
            await asyncio.gather(*(one(*each) for each in zip(links, works, updates, strict=True)))
            committed_s = time.perf_counter() - began
            figures = await _closed(host)
            for link in links:
                await link.close()
            growth = figures["peak"] - figures["baseline"]
            sizes = {"workers": workers, "bytes_each": updates[0].source.size}
            return {**sizes, "seconds": committed_s, "close_s": figures["closes"][-1], "baseline": figures["baseline"], "growth": growth}

        return asyncio.run(measure())


# --- Together ---

Simulated = Callable[[bool], dict[str, Any]]  # quick -> figures with their own `goals`


def bench_transport(
    *,
    quick: bool = False,
    size_mb: float | None = None,
    repeats: int = 3,
    simulated: Simulated | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """All figures and their goals, as one JSON line's worth. `simulated` measures many simulated workers, for a table of its own."""
    size = size_mb or (64.0 if quick else 512.0)
    each = min(64.0, size / 4 if quick else 64.0)
    with tempfile.TemporaryDirectory(prefix="blocktrain-bench-") as folder:
        (Path(folder) / "rss").mkdir()
        say(f"one worker, {size:g} MB, by turns with a raw copy")
        throughput = bench_throughput(Path(folder), size, repeats)
        say(f"{WORKERS} workers at once, {each:g} MB each")
        memory = bench_rss(Path(folder) / "rss", each)
    goals = [Goal(f"{kind} over raw copy, bytes/s", throughput[f"{kind}_ratio"], ">=", 0.6) for kind in ("push", "pull")]
    goals.append(Goal(f"coordinator's memory, growth with {WORKERS} pushes, MB", memory["growth"] / MB, "<=", 64.0))
    result = {"bench": "transport", "quick": quick, "throughput": throughput, "memory": memory, "simulated": simulated(quick) if simulated else None}
    more = result["simulated"]["goals"] if result["simulated"] else []
    return {**result, "goals": [*(goal.to_json() for goal in goals), *more]}


def render(result: dict[str, Any]) -> list[Table]:
    """Throughput, memory, simulated workers where they were measured, and the goals."""
    t, m = result["throughput"], result["memory"]
    rates = Table("", "MB/s", "over raw", title=f"one worker, {t['bytes'] / MB:,.0f} MB; gate {t['gate_s']:.2f} s, close {t['close_s']:.2f} s")
    rates.add_row("raw copy", f"{t['raw_mb_per_s']:,.0f}", "1")
    for kind in ("push", "pull"):
        rates.add_row(kind, f"{t[f'{kind}_mb_per_s']:,.0f}", f"{t[f'{kind}_ratio']:.3f}")
    memory = Table("coordinator's memory", "MB", title=f"{m['workers']} workers push {m['bytes_each'] / MB:,.0f} MB each in {m['seconds']:.1f} s")
    for name in ("baseline", "growth"):
        memory.add_row(name, f"{m[name] / MB:,.1f}")
    tables = [rates, memory]
    if result["simulated"]:
        simulated = Table("simulated workers", "", title="simulated workers")
        for name, value in result["simulated"].items():
            if isinstance(value, int | float):
                simulated.add_row(name.replace("_", " "), f"{value:,.3f}")
        tables.append(simulated)
    goals = Table("figure", "value", "goal", "met", title="goals")
    for goal in result["goals"]:
        goals.add_row(goal["name"], f"{goal['value']:.3f}", f"{goal['sign']} {goal['goal']}", "yes" if goal["met"] else "[red]no[/red]")
    return [*tables, goals]


def main() -> None:
    job = json.loads(sys.stdin.readline())
    {"coordinator": serve_coordinator, "sink": serve_sink}[job["kind"]](job)


if __name__ == "__main__":
    main()
