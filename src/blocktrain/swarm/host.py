"""A coordinator process: one run folder, one address, and what goes on around the rounds.

RUN/run.toml             settings; rounds and limits are taken up when the file changes
RUN/swarm/state.db       journal, manifests, ledger
RUN/swarm/blobs/         versions, updates on their way, the text
RUN/swarm/join-line      the line workers join by, readable by its owner only
RUN/checkpoints/         the newest versions whenever every block has moved on, as `evaluate` and `generate` read them
RUN/coordinator.log      every decision with its reason
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import filelock
import sqlalchemy as sa
import uvicorn

from blocktrain.config import RunConfig, load_config, to_toml
from blocktrain.errors import BlockTrainError, CheckpointError, ConfigError
from blocktrain.serialization import write_bytes
from blocktrain.swarm import identity, store
from blocktrain.swarm.coordinator import Coordinator, Text
from blocktrain.swarm.export import export
from blocktrain.swarm.parts import layout_of
from blocktrain.swarm.protocol import BlobRef, JoinLine, parse_join_line
from blocktrain.swarm.server import Service
from blocktrain.swarm.state import ChangeRules
from blocktrain.swarm.status import status
from blocktrain.swarm.store import Store, open_store
from blocktrain.training.data import Corpus, load_corpus
from blocktrain.web import LOOPBACK, bind, parse_address, serving

EVERYWHERE = ("0.0.0.0", "::")
FIRST_TOKEN = "first"
EVALUATION_SHARE = 0.1  # of the time that evaluating may take
MMAP_THRESHOLD, TRIM_THRESHOLD, ARENA_MAX = (-3, 5 << 16), (-1, 1 << 22), (-8, 2)  # glibc's malloc.h: option, value
LINGER_S = 5.0  # after the end of a run, beyond the heartbeat limit, for workers to hear of it


class Host:
    """Serves a run until it is finished or stopped."""

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        *,
        listen: str = "127.0.0.1:0",
        public: str | None = None,
        plaintext: bool = False,
        cert: Path | None = None,
        evaluate: bool = True,
        stay: bool = False,
        alone_min: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.run, self.config = run, config
        self.host, self.port = parse_address(listen)
        self.public, self.cert = public, cert
        self.tls = bool(cert) or (self.host not in LOOPBACK and not plaintext)
        self.evaluate, self.stay, self.alone_min = evaluate, stay, alone_min
        self._tell = say
        self._log: Any = None
        self._only: Any = None  # the lock by which this is the folder's only coordinator
        self._exported, self._evaluated = -1, 0  # steps of the newest checkpoint, and of the one that was scored last
        self._evaluated_at, self._evaluation_s = 0.0, 0.0
        self._finished_at: float | None = None
        self._evaluation: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._code = 0

    # --- Opening ---

    def open(self) -> None:
        """Take the folder and the address, and write what a new run lacks."""
        if (self.run / "checkpoints").is_dir() and not (self.run / "swarm").is_dir():
            raise ConfigError(
                f"{self.run}: was trained on one machine (it has checkpoints and no swarm folder); use a new run folder for many workers"
            )
        layout = layout_of(self.config)
        self.socket = bind(self.host, self.port)
        self.port = self.socket.getsockname()[1]
        corpus = self._corpus()
        self.run.mkdir(parents=True, exist_ok=True)
        opened = open_store(self.run / "swarm")
        self._log = open(self.run / "coordinator.log", "a", encoding="utf-8")  # noqa: SIM115 (as long as the process)
        self.text = keep_text(opened, corpus, self.config.data.corpus)
        self.coordinator = Coordinator(self.run.resolve().name, self.config, layout, opened, self.text, say=self.say)
        if not (self.run / "run.toml").is_file() or load_config(self.run / "run.toml") != self.config:
            write_bytes(self.run / "run.toml", to_toml(self.config).encode())
        self.heldout_digest = corpus.heldout_digest
        pem = self.cert.read_text() if self.cert else self.coordinator.pem
        self.coordinator.pem = pem
        self.line = self._join_line(identity.fingerprint(identity.certificate_of(pem)))
        self.page = f"{self.line.url}/"
        self.service = Service(self.coordinator)
        self.say(f"run {self.coordinator.run_id}: {self.config.model.blocks} blocks, {self.config.train.steps} steps each, text {corpus.source}")

    def claim(self) -> None:
        """A folder is served by one process (several share a run by a database and an object store that are no folder). Raises ConfigError."""
        if self._only is not None or not (self.run / "swarm").is_dir():
            return
        lock = filelock.FileLock(self.run / "swarm" / "serving.lock", timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            line = self.run / "swarm" / "join-line"
            raise ConfigError(f"{self.run}: another coordinator is serving this run (see {line}); stop it first, or look with --status") from None
        self._only = lock

    def _corpus(self) -> Corpus:
        data = self.config.data
        return load_corpus(data.corpus, heldout=data.heldout, heldout_fraction=data.heldout_fraction)

    def _join_line(self, fingerprint: str) -> JoinLine:
        path = self.run / "swarm" / "join-line"
        token = self.coordinator.token_named(FIRST_TOKEN)
        if token is None:
            try:
                token = parse_join_line(path.read_text()).token
            except (OSError, ConfigError):  # somebody has removed it: a new token under a new name
                name = f"{FIRST_TOKEN}-{int(time.time())}"
                token = self.coordinator.token_named(name) or ""
        line = JoinLine("https" if self.tls else "http", *self._reachable(), token, self.coordinator.run_id, fingerprint)
        write_private(path, str(line))
        return line

    def _reachable(self) -> tuple[str, int]:
        """Host and port by which workers get here: never an address that only means something on this machine, unless it is all there is."""
        if self.public:
            return _public_address(self.public, self.port)
        if self.host not in EVERYWHERE:
            return self.host, self.port
        found = outward_address(self.host)
        if not found or found in LOOPBACK or found.startswith("127.") or found in EVERYWHERE:
            raise ConfigError(f"--listen {self.host}: this machine has no address that others could reach; name one with --public HOST")
        return found, self.port

    def say(self, text: str) -> None:
        """One sentence for people and for the log."""
        with contextlib.suppress(OSError, ValueError):
            self._log.write(f"{datetime.now().isoformat(timespec='milliseconds')} {text}\n")
            self._log.flush()
        self._tell(text)

    # --- Serving ---

    def serve(self) -> int:
        """Until the run is finished, or a signal; returns the exit code."""
        with self._tls_files() as files:
            steady_memory()
            server = make_server(self.service.app, **files)
            self.service.start()
            self._looking = threading.Thread(target=self._look_after, args=(server,), name="host", daemon=True)
            self._looking.start()
            previous = {number: signal.signal(number, lambda *_: self._stop(server, 0)) for number in (signal.SIGINT, signal.SIGTERM)}
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            try:
                asyncio.run(_serve(server, self.socket))
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)
                self._close()
        return self._code

    def _stop(self, server: uvicorn.Server, code: int) -> None:
        if self._stopping.is_set():
            server.force_exit = True
        self._code = code
        self._stopping.set()
        server.should_exit = True

    def _close(self) -> None:
        self._stopping.set()
        self.socket.close()
        self.service.stop()
        self._looking.join(60)  # it may be writing a checkpoint
        if self._evaluation:
            self._evaluation.terminate()
        self._export()
        self.say("stopped; the same command goes on" if not self.coordinator.finished else "the run is finished")
        self.coordinator.store.close()
        self._log.close()
        if self._only is not None:
            self._only.release()

    @contextlib.contextmanager
    def _tls_files(self) -> Iterator[dict[str, Any]]:
        """The certificate as files, which is how TLS libraries want it; gone when the server ends."""
        if not self.tls:
            yield {}
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "coordinator.pem"
            write_private(path, self.coordinator.pem)
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(path)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(f"--cert {self.cert}: not a PEM file with a key and its certificate ({error})") from None
            yield {"ssl_certfile": str(path), "ssl_keyfile": str(path)}

    def _look_after(self, server: uvicorn.Server) -> None:
        """Once a second: changed settings, checkpoints, evaluation, the end."""
        changed = self._modified()
        while not self._stopping.wait(1.0):
            try:
                if (now := self._modified()) != changed:
                    changed = now
                    self._take_up_settings()
                self._export_if_due()
                self._evaluate_if_due()
                self._end_if_due(server)
            except (BlockTrainError, OSError) as error:
                self.say(str(error))

    def _modified(self) -> float:
        try:
            return (self.run / "run.toml").stat().st_mtime
        except OSError:
            return 0.0

    def _take_up_settings(self) -> None:
        try:
            self.coordinator.take_up(load_config(self.run / "run.toml"))
        except BlockTrainError as error:
            self.say(f"run.toml was changed: {error}")

    def _steps_done(self) -> int:
        with self.coordinator.reading() as state:
            return min(block.tokens for block in state.blocks) // self.config.tokens_per_step

    def _export_if_due(self) -> None:
        steps = self._steps_done()
        if steps > self._exported and steps:
            self._export()

    def _export(self) -> None:
        try:
            if self._steps_done() > max(self._exported, 0):
                self._exported = export(self.coordinator, self.run, self.heldout_digest)
        except (CheckpointError, OSError) as error:
            self.coordinator.pause("checkpoint", str(error))
        else:
            self.coordinator.resume("checkpoint")

    def _evaluate_if_due(self) -> None:
        """In a process of its own: the coordinator never holds a model."""
        if self._evaluation:
            if self._evaluation.poll() is not None:
                self._read_evaluation()
            return
        rested = time.monotonic() - self._evaluated_at >= self._evaluation_s / EVALUATION_SHARE
        if not self.evaluate or self._exported <= 0 or self._exported == self._evaluated or not (rested or self.coordinator.finished):
            return
        self._evaluated, self._evaluated_at = self._exported, time.monotonic()
        command = [sys.executable, "-m", "blocktrain", "evaluate", str(self.run), "--json"]
        nice = {"preexec_fn": lambda: os.nice(10)} if os.name != "nt" else {}
        self._evaluation = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **nice)  # type: ignore[call-overload]

    def _read_evaluation(self) -> None:
        process, self._evaluation = self._evaluation, None
        assert process is not None and process.stdout is not None
        text = process.stdout.read()
        self._evaluation_s = time.monotonic() - self._evaluated_at
        self._evaluated_at = time.monotonic()
        if process.returncode:
            self.say(f"evaluation: ended with code {process.returncode}; try `blocktrain evaluate {self.run}`")
            return
        figures = json.loads(text)
        tokens = figures["bytes_seen"]
        with self.coordinator.store.transaction() as tx:
            tx.put(store.headlines, tokens=tokens, figures=json.dumps(figures))
        self.say(f"headline CE {figures['headline_ce']:.4f} nats/byte after {tokens:,} bytes a block (n-gram {figures['ngram_ce']:.4f})")

    def _everybody_knows(self) -> bool:
        """Whether no live worker is left that has not heard of the end; one that waits asks again within a quarter of the heartbeat limit."""
        if self._finished_at is None:
            self._finished_at = time.monotonic()
        with self.coordinator.reading():
            live = self.coordinator.machine.figures(self.coordinator.now()).live
        return not live or time.monotonic() - self._finished_at >= self.config.round.heartbeat_limit_s + LINGER_S

    def _end_if_due(self, server: uvicorn.Server) -> None:
        if self.coordinator.finished:
            if self._exported < self._steps_done():  # the disk refuses: the run has not ended before its result is there
                return
            evaluated = not self.evaluate or (self._evaluation is None and self._evaluated == self._exported)
            if not self.stay and evaluated and self._everybody_knows():
                self._stop(server, 0)
        elif self.alone_min is not None:
            with self.coordinator.reading():
                alone_s = self.coordinator.machine.figures(self.coordinator.now()).alone_s
            if alone_s >= self.alone_min * 60:
                rules = self.coordinator.machine.state.rules
                self.coordinator.record(lambda now: ChangeRules(now, rules))  # so the run's clock, by which --status counts, stands at this moment
                self.say(f"no workers for {alone_s / 60:.1f} min: ends with exit code 1 (--alone-min {self.alone_min:g})")
                self._stop(server, 1)


def make_server(app: Any, **files: Any) -> uvicorn.Server:
    """The HTTP server of a coordinator."""
    return uvicorn.Server(uvicorn.Config(app, **serving(), **files))


def steady_memory() -> None:
    """Have this process give back what it freed, so that it stays as small as what it holds. Does nothing where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for option, value in (MMAP_THRESHOLD, TRIM_THRESHOLD, ARENA_MAX):
        mallopt(option, value)


async def _serve(server: uvicorn.Server, bound: socket.socket) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await server.serve(sockets=[bound])


# --- Pieces ---


def _public_address(text: str, port: int) -> tuple[str, int]:
    """HOST, HOST:PORT, [HOST]:PORT or an IPv6 address alone."""
    match = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:]+):(\d+)|(.+)", text)
    host = match and (match[1] or match[3] or match[5])
    given = int(match[2] or match[4] or port) if match else 0
    if not host or not 0 < given < 65536 or re.search(r"[\s/@\[\]]", host):
        raise ConfigError(f"--public {text}: expected HOST or HOST:PORT, for example train.example.org:7700")
    return host, given


def outward_address(host: str) -> str:
    """The address with which this machine looks outward; nothing is sent."""
    family, far = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def write_private(path: Path, text: str) -> None:
    """A file that only its owner may read."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(scratch, path)


def keep_text(opened: Store, corpus: Corpus, name: str) -> Text:
    """The training text as a blob, stored once."""
    known = opened.fact("text_blob")
    if known is None:
        data = memoryview(corpus.train)  # type: ignore[arg-type]
        pieces = (data[start : start + (1 << 23)] for start in range(0, len(data), 1 << 23))
        blob = opened.blobs.put_stream("text/train", ".txt", pieces)
        known = opened.fact_once("text_blob", json.dumps(vars(blob)))
    return Text(BlobRef(**json.loads(known)), corpus.train_digest, name)


def _opened(run: Path) -> Coordinator:
    """The run's coordinator beside one that may be serving it: both read and append to one journal."""
    config = load_config(run / "run.toml")
    if not (run / "swarm" / "state.db").is_file():
        raise CheckpointError(f"{run}: has no coordinator's state; start one with `blocktrain coordinator {run}`")
    opened = open_store(run / "swarm")
    blob, digest = opened.fact("text_blob"), opened.fact("text")
    if blob is None or digest is None:
        raise CheckpointError(f"{run}: its coordinator has not started yet")
    text = Text(BlobRef(**json.loads(blob)), digest, config.data.corpus)
    return Coordinator(run.resolve().name, config, layout_of(config), opened, text, serving=False)


def read_status(run: Path) -> dict[str, Any]:
    """The status of a run folder, whether it is being served or not."""
    found = _opened(run)
    try:
        return status(found)
    finally:
        found.store.close()


def add_token(run: Path, name: str) -> JoinLine:
    """A further token; returns the line to join by it."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError(f"token {name!r}: a name has letters, digits, `.`, `-` and `_`, 64 at most")
    found = _opened(run)
    token = found.token_named(name)
    if token is None:
        raise ConfigError(f"token {name!r}: there is one of that name already, and only its hash is kept; take another name")
    line = parse_join_line((run / "swarm" / "join-line").read_text())
    return JoinLine(line.scheme, line.host, line.port, token, line.run_id, line.fingerprint)


def list_tokens(run: Path) -> list[str]:
    found = _opened(run)
    with found.store.transaction() as tx:
        rows = tx.rows(sa.select(store.tokens).order_by(store.tokens.c.name))
        joined = tx.rows(sa.select(store.sessions.c.token, store.sessions.c.worker).order_by(store.sessions.c.worker))
    lines = []
    for row in rows:
        workers = ", ".join(other["worker"] for other in joined if other["token"] == row["name"]) or "nobody"
        lines.append(f"{row['name']}{' (revoked)' if row['revoked'] else ''}: {workers}")
    return lines


def revoke(run: Path, token: str | None, worker: str | None) -> list[str]:
    """Withdraw a worker's right, or a token and everyone's who joined by it."""
    found = _opened(run)
    if worker:
        if worker not in found.machine.state.workers:
            raise ConfigError(f"--worker {worker}: the run has no worker of that name; they are listed by `blocktrain token list`")
        return [found.revoke(worker).reason]
    workers = found.revoke_token(token or "")
    return [f"token {token} is revoked", *(f"worker {name} may not take part any more" for name in workers)]
