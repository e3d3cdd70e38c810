"""What is wrong with a machine, or with its way to a coordinator, and how to cure it: `blocktrain doctor [LINE]`.

Every check ends in a finding; one that cannot be made because an earlier one failed says so. Nothing of the model moves: the machine is looked at,
and the coordinator is asked what it tells any worker before the join. Wall clocks that differ are only noted, since nothing in a run depends on them.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import filelock
import httpx2
from pydantic import ValidationError

from blocktrain.config import RunConfig, make_config
from blocktrain.errors import BlockTrainError, ConfigError, DataError, ProtocolError
from blocktrain.swarm import identity
from blocktrain.swarm.launch import workers_folder
from blocktrain.swarm.protocol import PROTOCOL, Answer, Hello, JoinLine, RunInfo, hello_text, parse_join_line

Memory = Callable[[RunConfig | None], tuple[int, int]]  # (bytes that a block of this run needs, bytes that are free)
TIMEOUT_S = 5.0
PINGS = 5
LEAST_MEMORY = 1 << 30
LEAST_DISK = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do about it."""

    check: str
    verdict: Literal["ok", "note", "wrong"]
    found: str
    cure: str = ""


class Wrong(Exception):
    """A check that failed."""

    def __init__(self, found: str, cure: str) -> None:
        super().__init__(found)
        self.found, self.cure = found, cure


class Noted(Wrong):
    """Something to know that stops nobody."""


def examine(line: str | None, memory: Memory | None = None, folder: Path | None = None) -> list[Finding]:
    """Everything about this machine, and with a join line the way to its coordinator. `folder` is where a worker keeps its files."""
    machine = _Machine(folder or workers_folder(), memory)
    findings = [_made(check, act) for check, act in machine.checks()]
    return findings if line is None else findings + _Way(line, machine).findings()


def _made(check: str, act: Callable[[], str]) -> Finding:
    """A check is a function that returns what is well, or raises."""
    try:
        return Finding(check, "ok", act())
    except Noted as noted:
        return Finding(check, "note", noted.found, noted.cure)
    except Wrong as wrong:
        return Finding(check, "wrong", wrong.found, wrong.cure)
    except Exception as error:  # the doctor must not fall ill
        return Finding(check, "wrong", f"{type(error).__name__}: {error}"[:300], "this should not happen; the message says what failed")


# --- The machine ---


class _Machine:
    """Checks that need no network."""

    def __init__(self, folder: Path, memory: Memory | None) -> None:
        self.folder, self.memory = folder, memory

    def checks(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("python", self.python),
            ("packages", self.packages),
            ("torch", self.torch),
            ("device", self.device),
            ("memory", self.free_memory),
            ("folder", self.writable),
            ("locks", self.locks),
            ("disk", self.disk),
            ("threads", self.threads),
            ("clock", self.clock),
            ("texts", self.texts),
        ]

    def python(self) -> str:
        if sys.version_info < (3, 11):  # noqa: UP036 (that is what is being checked)
            raise Wrong(f"Python {platform.python_version()}", "install Python 3.11 or later and make the environment with it")
        return f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"

    def packages(self) -> str:
        wrong = [text for requirement in requirements() if (text := _lacking(*requirement))]
        if wrong:
            raise Wrong("; ".join(wrong), "pip install --upgrade blocktrain, in the environment that this command runs in")
        return f"{len(requirements())} packages are there in the versions that are needed"

    def torch(self) -> str:
        import torch

        there = ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
        for name in there:
            product = torch.ones(8, 8, device=name) @ torch.ones(8, 8, device=name)
            if not bool((product == 8).all()):
                raise Wrong(
                    f"a product of ones on {name} is not what it should be", f"install another build of torch, or use another device than {name}"
                )
        return f"torch {torch.__version__} computes on {', '.join(there)}"

    def device(self) -> str:
        from blocktrain.training.hardware import BFLOAT16_WIDTH, choose_hardware, has_bfloat16_units

        device = choose_hardware(RunConfig()).device
        wide = f" for layers at least {BFLOAT16_WIDTH} wide, float32 for others" if device.type == "cpu" else ""
        arithmetic = f"bfloat16{wide}" if has_bfloat16_units(device) else "float32 (bfloat16 is not fast here)"
        return f"a worker would take {device.type}, {arithmetic}"

    def free_memory(self) -> str:
        if self.memory is None:
            raise Noted("not known", "")
        _, free = self.memory(None)
        if free < LEAST_MEMORY:
            raise Noted(f"{_size(free)} free", "a small block may still fit; end other programs for a larger one")
        return f"{_size(free)} free"

    def writable(self) -> str:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".doctor-{os.getpid()}"
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as error:
            cure = "give the worker another place with --folder, or set XDG_CACHE_HOME to a folder of your own"
            raise Wrong(f"{self.folder}: cannot be written ({error.strerror})", cure) from None
        return f"{self.folder} can be written"

    def locks(self) -> str:
        path = self.folder / f".doctor-{os.getpid()}.lock"
        cure = "take a folder on a local disk with --folder: this file system knows no locks, so two workers could take one folder"
        try:
            with filelock.FileLock(path, timeout=0), suppress(filelock.Timeout), filelock.FileLock(path, timeout=0):
                raise Wrong(f"{self.folder}: a lock can be taken twice", cure)
        except (OSError, NotImplementedError) as error:
            raise Wrong(f"{self.folder}: locks do not work ({error})", cure) from None
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return "locks work there"

    def free_disk(self) -> int:
        place = self.folder
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def disk(self) -> str:
        free = self.free_disk()
        if free < LEAST_DISK:
            raise Noted(f"{_size(free)} free at {self.folder}", "enough for a small model; make room, or give the worker another --folder")
        return f"{_size(free)} free at {self.folder}"

    def threads(self) -> str:
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        found = f"{torch.get_num_threads()} threads on {cores} cores"
        found += "".join(f", {name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ)
        if torch.get_num_threads() > cores:
            raise Noted(found, f"more threads than cores are slow; give the worker --threads {cores}, or unset OMP_NUM_THREADS")
        return found

    def clock(self) -> str:
        steps = [time.monotonic()]
        for _ in range(5):
            time.sleep(0.002)
            steps.append(time.monotonic())
        if any(later <= earlier for earlier, later in zip(steps, steps[1:], strict=False)):
            raise Wrong("the monotonic clock does not go forward", "this is a fault of the system or its virtual machine; restart it")
        today = datetime.now(UTC)
        if today.year < 2024:
            raise Noted(f"the wall clock says {today:%Y-%m-%d}", "it only stands in logs; set it if you read them")
        return "goes forward"

    def texts(self) -> str:
        from blocktrain.training.data import WIKI_PACKAGE, default_cache_dir

        there = ["python"]
        with suppress(metadata.PackageNotFoundError):
            there.insert(0, f"wiki ({WIKI_PACKAGE} {metadata.version(WIKI_PACKAGE)})")
        cache = default_cache_dir()
        there += [name for name in ("wikitext-2", "wikitext-103") if cache.is_dir() and any(cache.glob(f"{name}-*"))]
        return f"{', '.join(there)} without a download; others come from the coordinator"


def requirements() -> list[tuple[str, tuple[int, ...]]]:
    """(package, least version) of what this program declares that it needs."""
    with suppress(metadata.PackageNotFoundError):
        declared = [text for text in metadata.requires("blocktrain") or [] if "extra ==" not in text]
        matches = [re.match(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)", text) for text in declared]
        return [(match[1], _version(match[2])) for match in matches if match]
    return []


def _lacking(name: str, least: tuple[int, ...]) -> str:
    """What is wrong with a package; empty if nothing is."""
    wanted = ".".join(map(str, least))
    try:
        have = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is missing, {wanted} or later is needed"
    return f"{name} is {have}, {wanted} or later is needed" if _version(have) < least else ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3])


# --- The way to a coordinator ---


class _Way:
    """Checks along the way, each of which needs those before it."""

    line: JoinLine
    hello: Hello
    info: RunInfo
    config: RunConfig

    def __init__(self, text: str, machine: _Machine) -> None:
        self.text, self.machine = text, machine
        self.pem = ""
        self.date = ""
        self.offset_s = 0.0

    def findings(self) -> list[Finding]:
        way = [
            ("join line", self.parse),
            ("name", self.resolve),
            ("connection", self.connect),
            ("coordinator", self.answers),
            ("protocol", self.protocol),
            ("run", self.run),
            ("fingerprint", self.fingerprint),
            ("token", self.token),
        ]
        ends = [
            ("health", self.health),
            ("latency", self.latency),
            ("coordinator's clock", self.clock),
            ("memory for a block", self.memory),
            ("disk for its files", self.disk),
            ("text", self.its_text),
        ]
        found: list[Finding] = []
        failed = ""
        for needed, checks in ((True, way), (False, ends)):
            for check, act in checks:
                found.append(Finding(check, "note", f"not tried: {failed} comes first") if failed else _made(check, act))
                if needed and found[-1].verdict == "wrong":
                    failed = failed or check
        with suppress(AttributeError):
            self.http.close()
        return found

    def parse(self) -> str:
        try:
            self.line = parse_join_line(self.text)
        except ConfigError as error:
            raise Wrong(str(error), "copy the whole line that `blocktrain coordinator` prints, in quotes") from None
        return f"{self.line.url}, run {self.line.run_id}"

    def resolve(self) -> str:
        if self._proxied():
            return f"{self.line.host} is looked up by the proxy"
        try:
            found = socket.getaddrinfo(self.line.host, self.line.port, type=socket.SOCK_STREAM)
        except OSError as error:
            cure = "check the name, or use the address in its place; the coordinator puts one in its line with --public ADDRESS"
            raise Wrong(f"{self.line.host}: is not known here ({error.strerror or error})", cure) from None
        self.addresses = sorted({str(entry[4][0]) for entry in found})
        return f"{self.line.host} is {', '.join(self.addresses)}"

    def connect(self) -> str:
        if proxy := self._proxied():
            return f"goes through the proxy {proxy}"
        try:
            socket.create_connection((self.line.host, self.line.port), TIMEOUT_S).close()
        except OSError as error:
            raise Wrong(*self._no_connection(error)) from None
        return f"{self.line.host}:{self.line.port} takes connections"

    def _proxied(self) -> str:
        """The proxy that stands in the way of the first connection; a certificate is looked at directly."""
        return _proxy(self.line) if self.line.scheme == "http" else ""

    def _no_connection(self, error: OSError) -> tuple[str, str]:
        """Why there is none, and what to do."""
        where = f"{self.line.host}:{self.line.port}"
        if isinstance(error, TimeoutError):
            return (
                f"{where}: no answer in {TIMEOUT_S:g} s",
                "a firewall drops it, or the machine is off: open the port on the coordinator's machine and router",
            )
        if isinstance(error, ConnectionRefusedError):
            if all(address.startswith("127.") or address == "::1" for address in self.addresses):
                return f"{where}: refused, and it is an address of this very machine", (
                    "start the coordinator here; if it runs elsewhere, start it with --listen 0.0.0.0:PORT and take the line it then prints"
                )
            return f"{where}: refused", "the coordinator is down, or listens on another port: start it again and take the line it then prints"
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL):
            return (
                f"{where}: no route ({error.strerror})",
                "connect this machine to the coordinator's network (or VPN), or let it name another address with --public",
            )
        return f"{where}: {error.strerror or error}", "check the network and the address in the line"

    def answers(self) -> str:
        try:
            self.http = self._client()
            reply = self._hello()
        except httpx2.TimeoutException:
            raise self._stranger(f"takes the connection but says nothing for {TIMEOUT_S:g} s") from None
        except (httpx2.TransportError, OSError) as error:
            raise self._stranger(f"does not speak {self.line.scheme.upper()} ({str(error) or type(error).__name__})") from None
        if reply.status_code == 429:
            raise Wrong("too many attempts from this address", "wait a minute and try again")
        try:
            self.plain: dict[str, Any] = reply.json()
            assert isinstance(self.plain, dict) and "run_id" in self.plain and "protocol" in self.plain
        except (ValueError, AssertionError):
            server = reply.headers.get("server", "it does not say which")
            raise self._stranger(f"is another server than a coordinator (status {reply.status_code}, {server})") from None
        return f"{self.line.url} is a BlockTrain coordinator"

    def _client(self) -> httpx2.Client:
        verify: Any = True
        if self.line.scheme == "https":
            verify = self._pinned()
        return httpx2.Client(base_url=self.line.url, verify=verify, timeout=TIMEOUT_S, trust_env=True)

    def _pinned(self) -> Any:
        """TLS that takes the certificate that is shown; whether it is the right one is a check of its own."""
        import ssl

        self.pem = ssl.get_server_certificate((self.line.host, self.line.port), timeout=TIMEOUT_S)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cadata=self.pem)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    def _hello(self) -> httpx2.Response:
        self.nonce, began = os.urandom(16).hex(), time.time()
        reply = self.http.get("/v1/hello", params={"nonce": self.nonce})
        with suppress(KeyError, ValueError, TypeError):
            self.offset_s = parsedate_to_datetime(reply.headers["date"]).timestamp() + 0.5 - (began + time.time()) / 2
            self.date = reply.headers["date"]
        return reply

    def _stranger(self, found: str) -> Wrong:
        proxy = _proxy(self.line)
        if proxy:
            return Wrong(f"{self.line.url} {found}, through the proxy {proxy}", f"let {self.line.host} go past the proxy: add it to NO_PROXY")
        return Wrong(f"{self.line.url} {found}", "check scheme, host and port of the line; take the line that the coordinator prints now")

    def protocol(self) -> str:
        if self.plain["protocol"] != PROTOCOL:
            raise Wrong(
                f"the coordinator speaks protocol {self.plain['protocol']}, this machine {PROTOCOL}", "install the same version of BlockTrain on both"
            )
        try:
            self.hello = Hello.model_validate(self.plain)
        except ValidationError as error:
            raise Wrong(f"hello: {error.errors()[0]['msg']}", "install the same version of BlockTrain on both") from None
        return f"version {PROTOCOL}"

    def run(self) -> str:
        if self.hello.run_id != self.line.run_id:
            raise Wrong(
                f"the coordinator has the run {self.hello.run_id}, the line says {self.line.run_id}", "take the line that the coordinator prints now"
            )
        return self.hello.run_id

    def fingerprint(self) -> str:
        shown = {identity.fingerprint(pem) for pem in (self.hello.certificate, self.pem) if pem}
        if other := [mark for mark in sorted(shown) if not mark.startswith(self.line.fingerprint)]:
            cure = "take the line that the coordinator prints now; if it is the same, somebody stands between you and it: do not join"
            raise Wrong(f"the certificate is {other[0]}, the line says {self.line.fingerprint}", cure)
        try:
            if self.hello.signature or self.line.scheme == "http":
                text = hello_text(self.nonce, self.hello.run_id, self.hello.challenge)
                identity.check_coordinator(self.hello.certificate, text, self.hello.signature)
        except ProtocolError as error:
            raise Wrong(str(error), "somebody else answers in the coordinator's name: do not join") from None
        return self.line.fingerprint

    def token(self) -> str:
        reply = self.http.get("/v1/run", headers={"authorization": f"Bearer {self.line.token}"})
        if reply.status_code == 401:
            raise Wrong("the token is unknown or revoked", "ask for a line with a new token: blocktrain token add RUN NAME")
        if reply.status_code != 200:
            raise Wrong(f"status {reply.status_code}: {_reason(reply)}", "try again; the coordinator's log says more")
        try:
            self.info = RunInfo.model_validate_json(reply.content)
            self.config = make_config(self.info.config, "the coordinator's run.toml")
        except (ValidationError, BlockTrainError) as error:
            raise Wrong(f"the run's settings are not understood here: {error}"[:300], "install the same version of BlockTrain on both") from None
        return f"is taken; the run is called {self.info.run}"

    def health(self) -> str:
        reply = self.http.get("/health")
        if reply.status_code != 200:
            raise Noted(_reason(reply), "a worker waits until that is cured at the coordinator")
        return _reason(reply)

    def latency(self) -> str:
        times = []
        for _ in range(PINGS):
            began = time.perf_counter()
            self.http.get("/health")
            times.append(time.perf_counter() - began)
        return f"{statistics.median(times) * 1000:.1f} ms (median of {PINGS})"

    def clock(self) -> str:
        if not self.date:
            raise Noted("the coordinator does not tell its time", "")
        if abs(self.offset_s) > 2:
            raise Noted(
                f"is {abs(self.offset_s):,.0f} s {'ahead of' if self.offset_s > 0 else 'behind'} this machine's", "nothing depends on it; logs differ"
            )
        return "agrees with this machine's to 2 s"

    def memory(self) -> str:
        if self.machine.memory is None:
            raise Noted("not known", "")
        need, free = self.machine.memory(self.config)
        if need > free:
            cure = "end other programs, use a machine or device with more memory, or a run with smaller blocks or batches"
            raise Wrong(f"one block of this run needs {_size(need)}, {_size(free)} are free", cure)
        return f"one block of this run needs {_size(need)}, {_size(free)} are free"

    def disk(self) -> str:
        need, free = files_size(self.config) + self.info.text.size, self.machine.free_disk()
        if need > free:
            raise Wrong(
                f"a worker of this run keeps {_size(need)}, {_size(free)} are free at {self.machine.folder}", "make room, or give another --folder"
            )
        return f"a worker of this run keeps {_size(need)}, {_size(free)} are free"

    def its_text(self) -> str:
        info = self.info
        if (self.machine.folder / info.run_id / "texts" / f"{info.text_digest[:32]}.txt").exists():
            return f"{info.corpus}: fetched before"
        if info.corpus in ("wiki", "python") and _local_digest(info.corpus, self.config) == info.text_digest:
            return f"{info.corpus}: this machine has the same"
        return f"{info.corpus}: {_size(info.text.size)} will be fetched from the coordinator"


def files_size(config: RunConfig) -> int:
    """Bytes of what a worker of one block keeps on disk, besides the text: the parts it fetches and its update."""
    from blocktrain.codecs import encoded_size
    from blocktrain.streams import stream_size
    from blocktrain.swarm.parts import INTERFACE, layout_of

    layout = layout_of(config)
    sizes = {part: stream_size(entries) for part, entries in layout.entries.items()}
    blocks = [size for part, size in sizes.items() if part != INTERFACE]
    parts = sizes[INTERFACE] + (sum(blocks) if config.objective.input == "upstream" else max(blocks))
    return parts + max(encoded_size(layout.update_shapes(b, b + 1), config.outer.up_codec) for b in range(layout.blocks))


def _local_digest(corpus: str, config: RunConfig) -> str:
    from blocktrain.training.data import load_corpus

    with suppress(DataError):
        return load_corpus(corpus, heldout=config.data.heldout, heldout_fraction=config.data.heldout_fraction).train_digest
    return ""


def _proxy(line: JoinLine) -> str:
    """The proxy that requests to a coordinator go through, and the variable that says so; empty without one."""
    proxies = urllib.request.getproxies()
    found = proxies.get(line.scheme) or proxies.get("all")
    if not found or urllib.request.proxy_bypass(line.host):
        return ""
    names = (f"{line.scheme}_proxy", "all_proxy")
    variable = next((name.upper() for name in names if name in os.environ or name.upper() in os.environ), "the system's settings")
    return f"{re.sub(r'//[^@/]*@', '//', found)} ({variable})"


def _reason(reply: httpx2.Response) -> str:
    try:
        return Answer.model_validate_json(reply.content).reason
    except ValidationError:
        return f"status {reply.status_code}"


def _size(count: int) -> str:
    return f"{count / (1 << 30):,.2f} GiB" if count >= 1 << 30 else f"{count / MIB:,.1f} MiB"
