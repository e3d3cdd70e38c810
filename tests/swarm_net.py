"""A coordinator of a tiny model behind a real socket, workers that make their updates up, and a TCP proxy that does to bytes what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch
import uvicorn
from torch import Tensor

from blocktrain.codecs import encode_update
from blocktrain.config import RunConfig
from blocktrain.streams import BytesSource
from blocktrain.swarm import identity
from blocktrain.swarm.coordinator import Coordinator, Session, Text
from blocktrain.swarm.link import HttpLink
from blocktrain.swarm.parts import INTERFACE, Entries, Layout
from blocktrain.swarm.protocol import (
    PROTOCOL,
    BeginRequest,
    BlobRef,
    CommitReply,
    CommitRequest,
    JoinLine,
    JoinRequest,
    Metrics,
    RunInfo,
    Work,
    join_text,
    part_of,
)
from blocktrain.swarm.server import Service
from blocktrain.swarm.store import Store, memory_store, open_store
from blocktrain.swarm.worker import Link, Trained, Worker
from blocktrain.web import serving
from tests.conftest import tiny_config

Shapes = dict[str, tuple[int, ...]]
SMALL: Shapes = {"frozen": (3,), "w": (40, 10)}


# --- Coordinators ---


def make_layout(blocks: int = 2, shapes: Shapes = SMALL, interface: bool = True) -> Layout:
    """A stand-in for a model: every block has the same tensors, and all but `frozen` learn."""
    entries: Entries = {name: (torch.float32, shape) for name, shape in shapes.items()}
    parts = [INTERFACE, *(part_of(b) for b in range(blocks))]

    def initial(part: str) -> Iterator[tuple[str, Tensor]]:
        seeded = torch.Generator().manual_seed(parts.index(part))
        yield from ((name, torch.randn(shapes[name], generator=seeded)) for name in sorted(shapes))

    learns = tuple(sorted(name for name in shapes if name != "frozen"))
    return Layout(blocks, dict.fromkeys(parts, entries), dict.fromkeys(parts, learns), initial, interface)


@dataclass
class Clock:
    """Seconds as the test wants them."""

    at: float = 1000.0

    def __call__(self) -> float:
        return self.at

    def pass_s(self, seconds: float) -> None:
        self.at += seconds


def make_config(blocks: int = 2, **sections: Any) -> RunConfig:
    return tiny_config(**{**sections, "model": {"blocks": blocks, **sections.get("model", {})}})


def make_coordinator(
    folder: Path | None = None,
    *,
    layout: Layout | None = None,
    clock: Callable[[], float] = time.monotonic,
    text: bytes = b"text" * 100,
    **sections: Any,
) -> Coordinator:
    layout = layout or make_layout()
    opened: Store = open_store(folder) if folder else memory_store()
    blob = opened.blobs.put_stream("text/train", ".txt", [text])
    ref = BlobRef(name=blob.name, size=blob.size, sha256=blob.sha256)
    return Coordinator("run", make_config(layout.blocks, **sections), layout, opened, Text(ref, blob.sha256, "a text"), clock=clock)


# --- Serving ---


@dataclass
class Served:
    """A coordinator at an address."""

    coordinator: Coordinator
    service: Service
    server: uvicorn.Server
    port: int
    token: str
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def line(self, *, port: int | None = None, token: str | None = None) -> JoinLine:
        mark = identity.fingerprint(identity.certificate_of(self.coordinator.pem))
        return JoinLine(self.scheme, "127.0.0.1", port or self.port, token or self.token, self.coordinator.run_id, mark)

    def link(self, name: str = "w", *, port: int | None = None, process: str = "p1", key: identity.WorkerKey | None = None, **more: Any) -> HttpLink:
        more = {"patience_s": 60.0, **more}
        return HttpLink(self.line(port=port), name, key or identity.new_worker_key(), process=process, **more)

    def http(self, session: str = "") -> httpx2.Client:
        headers = {"authorization": f"Bearer {session}"} if session else {}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def log(self) -> str:
        return "\n".join(text for _, text in self.coordinator.logged())


@contextlib.contextmanager
def serve(coordinator: Coordinator, *, port: int = 0, ticking: bool = True, files: dict[str, Any] | None = None) -> Iterator[Served]:
    """The coordinator over HTTP, in a thread, until the block ends."""
    service = Service(coordinator)
    server = uvicorn.Server(
        uvicorn.Config(service.app, host="127.0.0.1", port=port, **(serving() | {"timeout_graceful_shutdown": 1}), **(files or {}))
    )
    thread = threading.Thread(target=server.run, daemon=True)
    token = coordinator.token_named(f"first-{time.monotonic_ns()}") or ""
    if ticking:
        service.start()
    thread.start()
    try:
        wait_until(lambda: server.started)
        taken = server.servers[0].sockets[0].getsockname()[1]
        yield Served(coordinator, service, server, taken, token, "https" if files else "http")
    finally:
        server.should_exit = True
        thread.join(10)
        if ticking:
            service.stop()
        assert not thread.is_alive()


def wait_until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)
    return found


# --- Workers ---


def join(coordinator: Coordinator, name: str, token: str, *, key: identity.WorkerKey | None = None, process: str = "p1", **changes: Any) -> Any:
    """The reply to a right join, or to one with changes."""
    return coordinator.join(token, join_request(coordinator, name, key=key, process=process, **changes))


def join_request(coordinator: Coordinator, name: str, *, key: identity.WorkerKey | None = None, process: str = "p1", **changes: Any) -> JoinRequest:
    key = key or identity.new_worker_key()
    challenge = identity.challenge(coordinator.secret, coordinator.now())
    fields = {
        "protocol": PROTOCOL,
        "run_id": coordinator.run_id,
        "config_digest": coordinator.config_digest,
        "name": name,
        "public_key": key.public,
        "process": process,
        "challenge": challenge,
        "signature": key.sign(join_text(coordinator.run_id, challenge, key.public, process)),
        "capacity": 4,
    }
    return JoinRequest(**{**fields, **changes})


def member(coordinator: Coordinator, name: str) -> Session:
    """A joined worker, without HTTP."""
    token = coordinator.token_named(f"token-{time.monotonic_ns()}-{name}") or ""
    reply = join(coordinator, name, token, process=f"process-{name}")
    return coordinator.session(reply.session)


def make_update(
    layout: Layout, work: Work, *, scale: float = 0.01, seed: int | None = None, change: Callable[[Shapes], Shapes] = lambda s: s
) -> bytes:
    """An update for an assignment: the same for the same key, as a real one is."""
    seeded = torch.Generator().manual_seed(int(work.key) if seed is None else seed)
    shapes = change(dict(layout.update_shapes(work.first, work.stop)))
    return encode_update([(name, torch.randn(shape, generator=seeded) * scale) for name, shape in sorted(shapes.items())], work.codec).data


def hand_in(coordinator: Coordinator, who: Session, work: Work, data: bytes, *, num_samples: float | None = None, **metrics: Any) -> CommitReply:
    """Begin, parts and commit, without HTTP."""
    begin(coordinator, who, work, data)
    put_parts(coordinator, work, data)
    return commit(coordinator, who, work, data, num_samples=num_samples, **metrics)


def begin(coordinator: Coordinator, who: Session, work: Work, data: bytes) -> Any:
    return coordinator.begin(who, BeginRequest(key=work.key, size=len(data), sha256=sha256(data)))


def put_parts(coordinator: Coordinator, work: Work, data: bytes) -> None:
    for index, start in enumerate(range(0, len(data), coordinator.part_bytes)):
        writer = coordinator.open_part(work.key, sha256(data), index)
        writer.write(data[start : start + coordinator.part_bytes])
        coordinator.keep_part(work.key, writer)


def commit(coordinator: Coordinator, who: Session, work: Work, data: bytes, *, num_samples: float | None = None, **metrics: Any) -> CommitReply:
    leased = sum(stop - first for first, stop in work.steps) * coordinator.config.train.batch_size
    request = CommitRequest(
        key=work.key, size=len(data), sha256=sha256(data), num_samples=leased if num_samples is None else num_samples, metrics=Metrics(**metrics)
    )
    return coordinator.commit(who, request)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class MadeUpEngine:
    """Fetches what a real engine fetches, and makes its updates up."""

    layout: Layout
    folder: Path
    train_s: float = 0.0
    seen: list[Work] = field(default_factory=list)
    text: bytes = b""

    def configure(self, info: RunInfo) -> int:
        return 4

    async def prepare(self, info: RunInfo, link: Link) -> None:
        target = self.folder / "text"
        await link.fetch(info.text, target)
        self.text = target.read_bytes()

    async def fetch(self, work: Work, link: Link) -> None:
        self.seen.append(work)
        for part in work.parts:
            await link.fetch(part.full, self.folder / part.part)

    async def train(self, work: Work, seconds: float, stopped: Callable[[], bool]) -> Trained | None:
        await asyncio.sleep(self.train_s)
        data = make_update(self.layout, work)
        samples = sum(stop - first for first, stop in work.steps) * 4
        return Trained(BytesSource(data), sha256(data), samples, Metrics(ce=1.0))

    def settled(self, work: Work, accepted: bool) -> None:
        return


def made_up_worker(served: Served, folder: Path, name: str = "w", *, said: list[str] | None = None, train_s: float = 0.0, **link: Any) -> Worker:
    folder.mkdir(parents=True, exist_ok=True)
    said = said if said is not None else []
    return Worker(
        served.link(name, process=f"process-{name}", say=said.append, **link),
        MadeUpEngine(served.coordinator.layout, folder, train_s),
        say=said.append,
    )


async def until_updates(worker: Worker, count: int) -> str:
    """Run a worker until it has handed in so many."""
    task = asyncio.ensure_future(worker.run())
    while worker.updates < count and not task.done():
        await asyncio.sleep(0.01)
    worker.stop()
    return await task


def in_time(work: Coroutine[Any, Any, Any], limit_s: float = 120.0) -> Any:
    return asyncio.run(asyncio.wait_for(work, limit_s))


# --- The proxy ---


@dataclass
class Fault:
    """What happens to one connection; bytes are counted from its beginning."""

    delay_s: float = 0.0  # before anything passes
    cut_down: int | None = None  # the connection ends after so many bytes to the client
    cut_up: int | None = None
    stall_down: int | None = None  # after so many bytes nothing passes any more, and the connection stays
    flip_down: int | None = None  # the byte with this number arrives with its lowest bit changed
    flip_up: int | None = None
    idle_s: float | None = None  # the connection ends when nothing has passed for so long


class Proxy:
    """A TCP proxy in a thread of its own. The n-th connection suffers faults[n], later ones `rest`; bytes are counted, heads of requests kept."""

    def __init__(self, port: int, faults: list[Fault] | None = None, rest: Fault | None = None) -> None:
        self.target, self.faults, self.rest = port, list(faults or []), rest or Fault()
        self.up = self.down = self.connections = self.cuts = 0
        self.sent = bytearray()  # everything that clients have sent
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop).result(5)
        self.port = server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def heads(self) -> list[str]:
        """First line and headers of every request that went through, lower case."""
        pieces = bytes(self.sent).decode("latin-1").split(" HTTP/1.1\r\n")
        return [
            f"{pieces[i].rsplit(chr(10), 1)[-1]}\n{pieces[i + 1].partition(chr(13) + chr(10) * 1 + chr(13))[0]}".lower()
            for i in range(len(pieces) - 1)
        ]

    async def _serve(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        fault = self.faults.pop(0) if self.faults else self.rest
        self.connections += 1
        heard = [time.monotonic()]
        await asyncio.sleep(fault.delay_s)
        try:
            server_in, server_out = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            client_out.transport.abort()
            return
        ways = [
            asyncio.ensure_future(self._pass(client_in, server_out, "up", fault.cut_up, None, fault.flip_up, heard)),
            asyncio.ensure_future(self._pass(server_in, client_out, "down", fault.cut_down, fault.stall_down, fault.flip_down, heard)),
        ]
        if fault.idle_s:
            ways.append(asyncio.ensure_future(self._watch(heard, fault.idle_s)))
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (client_out, server_out):
                with contextlib.suppress(OSError):
                    end.transport.abort() if fault.cut_down or fault.cut_up or fault.idle_s else end.close()

    async def _watch(self, heard: list[float], idle_s: float) -> None:
        while time.monotonic() - heard[0] < idle_s:
            await asyncio.sleep(idle_s / 20)
        self.cuts += 1

    async def _pass(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        way: str,
        cut: int | None,
        stall: int | None,
        flip: int | None,
        heard: list[float],
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                heard[0] = time.monotonic()
                if flip is not None and passed <= flip < passed + len(data):
                    data = data[: flip - passed] + bytes([data[flip - passed] ^ 1]) + data[flip - passed + 1 :]
                ends = [n - passed for n in (cut, stall) if n is not None and n < passed + len(data)]
                data = data[: max(0, min(ends))] if ends else data
                passed += len(data)
                setattr(self, way, getattr(self, way) + len(data))
                if way == "up":
                    self.sent += data
                sink.write(data)
                await sink.drain()
                if ends and stall is not None:
                    await asyncio.sleep(3600)
                if ends:
                    self.cuts += 1
                    return
