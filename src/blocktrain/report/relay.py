"""The process behind `netlink`: sockets in, the same bytes out later. Orders come as JSON lines on stdin, each is answered with a line.

An asyncio loop over select, since the timeouts of epoll are whole milliseconds. Each connection is a `Pair` of sockets with a `Flow` each way; a flow
holds its bytes until they are due. What a link promises is in `netlink`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["up", "cut", "hole"]
PIECE = 16 << 10  # bytes that arrive together at most: a large frame comes little by little
HELD_LIMIT = 16 << 20  # bytes a direction of a connection holds before its sender is stopped
RESET = struct.pack("ii", 1, 0)  # linger for no time: closing is a reset


@dataclass
class Line:
    """One direction of a link: when its bandwidth is free again, and what it has relayed."""

    free_at: float = 0.0
    bytes: int = 0

    def arrival(self, now: float, size: int, delay_s: float, bit_s: float) -> float:
        """When `size` bytes that leave now are there."""
        if bit_s:
            self.free_at = max(now, self.free_at) + size * 8 / bit_s
        self.bytes += size
        return (self.free_at if bit_s else now) + delay_s


@dataclass
class Path:
    """A link as the process has it."""

    target: tuple[str, int]
    delay_s: float = 0.0
    bit_s: float = 0.0  # 0 is no limit
    state: State = "up"
    there: Line = field(default_factory=Line)
    back: Line = field(default_factory=Line)
    pairs: set[Pair] = field(default_factory=set)
    accepted: int = 0


class End(asyncio.Protocol):
    """One socket of a relayed connection."""

    def __init__(self, heard: Callable[[bytes | None, bool], None], ready: Callable[[], None]) -> None:
        self.heard, self.ready = heard, ready
        self.transport: asyncio.Transport | None = None
        self.full = False
        self._ends = 0  # directions that have ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard(data, False)

    def eof_received(self) -> bool:
        self.heard(None, False)
        self._ended()
        return True  # the other direction may go on

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.heard(None, True)

    def write_eof(self) -> None:
        if self.transport and not self.transport.is_closing():
            with contextlib.suppress(OSError):  # gone already
                self.transport.write_eof()
            self._ended()

    def write(self, data: bytes) -> None:
        if self.transport and not self.transport.is_closing():
            self.transport.write(data)

    def _ended(self) -> None:
        self._ends += 1
        if self._ends == 2 and self.transport:
            self.transport.close()

    def reset(self) -> None:
        if self.transport and not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.transport.abort()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self.ready()


class Flow:
    """What is under way in one direction of one connection."""

    def __init__(self, path: Path, line: Line) -> None:
        self.path, self.line = path, line
        self.loop = asyncio.get_running_loop()
        self.source: End | None = None
        self.sink: End | None = None
        self._held: deque[tuple[float, bytes | None, bool]] = deque()  # due at, bytes (None is the end), whether the end is a reset
        self._size = 0
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, data: bytes | None, reset: bool = False) -> None:
        now, path = self.loop.time(), self.path
        pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)] if data else [None]
        for piece in pieces:
            due = self.line.arrival(now, len(piece or b""), path.delay_s, path.bit_s)
            self._last = max(self._last, due)  # a delay that was made shorter does not let bytes overtake
            self._held.append((self._last, piece, reset))
            self._size += len(piece or b"")
        if self._size > HELD_LIMIT and self.source and self.source.transport:
            self.source.transport.pause_reading()
        self.deliver()

    def deliver(self) -> None:
        """Hand over what is due, and come back for the rest."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self.path.state == "hole" or self.sink is None or self.sink.transport is None or self.sink.full:
            return
        while self._held and self._held[0][0] <= self.loop.time() and not self.sink.full:
            _, data, reset = self._held.popleft()
            self._hand_over(self.sink, data, reset)
        if self._held and not self.sink.full:
            self._timer = self.loop.call_at(self._held[0][0], self.deliver)

    def _hand_over(self, sink: End, data: bytes | None, reset: bool) -> None:
        if data is not None:
            self._size -= len(data)
            sink.write(data)
            if self._size <= HELD_LIMIT // 2 and self.source and self.source.transport and not self.source.transport.is_closing():
                self.source.transport.resume_reading()
        elif reset:
            sink.reset()
        else:
            sink.write_eof()

    def stop(self) -> None:
        self._held.clear()
        if self._timer:
            self._timer.cancel()


class Pair:
    """A connection that was accepted, and the one to the target."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.there, self.back = Flow(path, path.there), Flow(path, path.back)
        self.near = End(self.there.send, self.back.deliver)
        self.far = End(self.back.send, self.there.deliver)
        self.there.source, self.back.sink = self.near, self.near
        self.back.source, self.there.sink = self.far, self.far

    async def run(self, accepted: socket.socket) -> None:
        """Dial as late as a SYN arrives, and read as late as its answer is back."""
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        dialled = False
        await asyncio.sleep(self.path.delay_s)
        await self._passable()
        with contextlib.suppress(OSError):
            await loop.create_connection(lambda: self.far, *self.path.target)
            dialled = True
        await asyncio.sleep(began + 2 * self.path.delay_s - loop.time())
        await self._passable()
        if not dialled or self.path.state == "cut":
            return _reset(accepted)
        await loop.connect_accepted_socket(lambda: self.near, accepted)
        self.back.deliver()

    async def _passable(self) -> None:
        while self.path.state == "hole":
            await asyncio.sleep(0.005)

    @property
    def over(self) -> bool:
        return all(end.transport is not None and end.transport.is_closing() for end in (self.near, self.far))

    def abort(self) -> None:
        self.there.stop()
        self.back.stop()
        self.near.reset()
        self.far.reset()


def _reset(accepted: socket.socket) -> None:
    """Close with a reset, as a port where nobody listens does."""
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    accepted.close()


class Relay:
    """All links of the process, and the orders that change them."""

    def __init__(self) -> None:
        self.paths: dict[int, Path] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        port = order.get("port", 0)
        if "target" in order and port not in self.paths:
            return {"port": self._open(port, order)}
        path = self.paths[port]
        if any(key != "port" for key in order):
            self._change(path, order)
        path.pairs = {pair for pair in path.pairs if not pair.over}
        return {"there": path.there.bytes, "back": path.back.bytes, "accepted": path.accepted, "connections": len(path.pairs), "state": path.state}

    def _open(self, port: int, order: dict[str, Any]) -> int:
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        listener.setblocking(False)
        port = listener.getsockname()[1]
        self.paths[port] = path = Path(tuple(order["target"]))
        self._change(path, order)
        self._start(self._accept(listener, path))
        return port

    def _change(self, path: Path, order: dict[str, Any]) -> None:
        path.target = tuple(order.get("target", path.target))
        path.delay_s, path.bit_s = order.get("delay_s", path.delay_s), order.get("bit_s", path.bit_s)
        path.state = order.get("state", path.state)
        for pair in list(path.pairs):
            if path.state == "cut":
                pair.abort()
            pair.there.deliver()
            pair.back.deliver()

    async def _accept(self, listener: socket.socket, path: Path) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(listener)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            path.accepted += 1
            if path.state == "cut":
                _reset(accepted)
                continue
            pair = Pair(path)
            path.pairs = {other for other in path.pairs if not other.over} | {pair}
            self._start(pair.run(accepted))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


async def serve() -> None:
    """Obey JSON lines on stdin until it ends; one line of answer each."""
    relay, loop, done = Relay(), asyncio.get_running_loop(), asyncio.Event()

    def answer(line: str) -> None:
        try:
            said = relay.obey(json.loads(line))
        except (OSError, ValueError, KeyError, TypeError) as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(answer, line)
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=read, daemon=True).start()
    await done.wait()


def main() -> None:
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(serve())


if __name__ == "__main__":
    main()
