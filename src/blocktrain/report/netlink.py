"""A user-space network link: TCP between two places on this machine, as late and as slow as over a distance.

One process carries many links. Each listens on a port of 127.0.0.1 and relays to a target:

  bytes      arrive after size / bandwidth + one-way delay, in order; all connections of a link share its bandwidth, each direction has its own
  connect    takes a round trip before the first byte moves
  the end    of a connection (FIN or reset) comes as late as bytes do
  cut        resets its connections and refuses new ones, at once on both sides
  hole       swallows everything: nobody hears anything. When it is up again what was held goes on, as TCP would send it again

`Links` starts the process (`relay`) and talks to it in JSON lines over its pipes; what a link does can be changed while bytes are under way. Bytes
are counted as they are relayed, so traffic is read from here and not computed.

Not modelled: loss, jitter, reordering, a slow start after idle (congestion control sees loopback), headers of IP and TCP, and a full queue (a sender
that is ahead is stopped at `HELD_LIMIT` held bytes, so latency under overload grows up to that). Times are exact to about a millisecond while the
machine has a core to spare; `accuracy` measures that.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from blocktrain.errors import BlockTrainError
from blocktrain.report.relay import State

MS, MBIT = 1e-3, 1e6


@dataclass(frozen=True)
class Traffic:
    """Bytes that a link has relayed so far."""

    there: int  # from those who dialled
    back: int
    accepted: int  # connections so far
    connections: int  # open now
    state: State

    @property
    def bytes(self) -> int:
        return self.there + self.back


class Link:
    """One link; its port is what is dialled instead of the target."""

    def __init__(self, links: Links, port: int) -> None:
        self.links, self.port = links, port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def change(
        self, *, rtt_ms: float | None = None, mbit_s: float | None = None, state: State | None = None, target: tuple[str, int] | None = None
    ) -> None:
        """What is given changes at once, also for bytes that have yet to leave; what is under way keeps its time."""
        self.links.ask({"port": self.port} | _order(rtt_ms, mbit_s, state, target))

    def traffic(self) -> Traffic:
        return Traffic(**self.links.ask({"port": self.port}))


def _order(rtt_ms: float | None, mbit_s: float | None, state: State | None, target: tuple[str, int] | None) -> dict[str, Any]:
    delay_s = None if rtt_ms is None else rtt_ms / 2 * MS
    order = {"delay_s": delay_s, "bit_s": None if mbit_s is None else mbit_s * MBIT, "state": state, "target": target}
    return {key: value for key, value in order.items() if value is not None}


class Links:
    """The process that carries links. Ends with the `with` block, and with whoever started it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "blocktrain.report.relay"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._lock = threading.Lock()

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, target: tuple[str, int], *, rtt_ms: float = 0.0, mbit_s: float = 0.0, port: int = 0) -> Link:
        """A link to `target`. Half of `rtt_ms` passes each way; 0 `mbit_s` (a direction) is no limit; port 0 takes a free one."""
        order = {"port": port} | _order(rtt_ms, mbit_s, None, target)
        return Link(self, self.ask(order)["port"])

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._lock:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            raise BlockTrainError(f"netlink: its process ended with code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise BlockTrainError(f"netlink: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


# --- How good it is ---


class Echo:
    """Answers each `size` bytes with one byte; in threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.target: tuple[str, int] = self.listener.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, contextlib.suppress(OSError):
            while receive(connection, self.size):
                connection.sendall(b"k")

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes, or fewer where the connection ended."""
    parts = bytearray()
    while len(parts) < size and (part := connection.recv(size - len(parts))):
        parts += part
    return bytes(parts)


def ping(address: tuple[str, int], size: int, repeats: int) -> list[float]:
    """Seconds from the first byte of `size` until the answer of one byte, each time; the first does not count."""
    taken = []
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(repeats + 1):
            began = time.perf_counter()
            connection.sendall(bytes(size))
            assert receive(connection, 1), "the link lost its connection"
            taken.append(time.perf_counter() - began)
    return taken[1:]


def accuracy(links: Links, rtt_ms: float, mbit_s: float = 0.0, size: int = 64, repeats: int = 20) -> dict[str, float]:
    """A ping of `size` bytes through a link, beside what the link promises and what it takes without one; milliseconds."""
    echo = Echo(size)
    try:
        plain = ping(echo.target, size, repeats)
        linked = ping(("127.0.0.1", links.open(echo.target, rtt_ms=rtt_ms, mbit_s=mbit_s).port), size, repeats)
    finally:
        echo.close()
    promised = rtt_ms + ((size + 1) * 8 / (mbit_s * MBIT) / MS if mbit_s else 0.0)
    median, direct = statistics.median(linked) / MS, statistics.median(plain) / MS
    figures = {"rtt_ms": rtt_ms, "mbit_s": mbit_s, "bytes": size, "promised_ms": promised, "median_ms": median, "worst_ms": max(linked) / MS}
    return {**figures, "direct_ms": direct, "late_ms": median - direct - promised}
