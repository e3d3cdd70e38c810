"""What every HTTP server here must not put up with: bodies without end, connections on which nothing comes, readers who stopped reading.

Two layers. `Passage` is the application's: the limit on a body before it is parsed, and patience with one request and its answer. `PatientProtocol`
is below it, since uvicorn has limits only between two requests: a head (request line and headers) has to be whole after HEAD_S, what is neither body
nor the end of something may be HEAD_BYTES long (heads, trailers, extensions of chunks), and the rest of a body that was answered early has REST_S to
pass. And the address: HOST:PORT as a person writes it, and a socket that listens there. And the headers of the pages that are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import Any

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from blocktrain.errors import ConfigError

HEAD_S = 20.0
HEAD_BYTES = 64 * 1024
REST_S = 120.0
SILENT_MS = 120_000  # after which unacknowledged bytes end a connection
HEADERS_BYTES = 32 * 1024  # of one request
STALL_S = 60.0  # without a byte, either way
SLOWEST = 1024  # bytes a second
LOOPBACK = ("127.0.0.1", "::1", "localhost")
SPARE_FILES = 256  # descriptors that are not for connections
# Of a page and its files: nothing in it comes from anywhere else, and no style or script is written into it.
PAGE_POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
    ]
)
PAGE_HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Passage:
    """One request on its way in and its answer on the way out.

    A body must come without a stall of STALL_S, and after that time at SLOWEST bytes a second on average. An answer that is given before the
    body was heard to its end closes the connection, unless what is left is known to be short: else it would be read for as long as its sender likes.
    """

    def __init__(self, scope: Any, receive: Any, send: Any, limit: int) -> None:
        self._receive, self._send, self.limit = receive, send, limit
        headers = scope["headers"]
        self.head = sum(len(name) + len(value) + 4 for name, value in headers)
        self.up = self.head + len(scope["method"]) + len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"]) + 14
        self.down, self.body, self.began = 0, 0, time.monotonic()
        named = dict(headers)
        self.declared = _number(named.get(b"content-length", b"0"))
        self.whole = not self.declared and b"transfer-encoding" not in named
        self.closes = self.declared > limit or b"transfer-encoding" in named or b"expect" in named
        self.coding = named.get(b"content-encoding", b"identity")

    def wrong(self) -> HTTPException | None:
        """What is refused before anything is read."""
        if self.declared > self.limit:
            return self._too_long()
        if self.head > HEADERS_BYTES:
            return HTTPException(431, f"headers: longer than the {HEADERS_BYTES} bytes that are allowed")
        if self.coding.lower() != b"identity":
            return HTTPException(415, "content-encoding: bodies are taken as they are, not packed")
        return None

    def _too_long(self) -> HTTPException:
        return HTTPException(413, f"body: longer than the {self.limit} bytes that are allowed here")

    async def receive(self) -> Any:
        if self.whole:  # only its sender's going away is still to be heard
            return await self._receive()
        left = self.began + STALL_S + self.body / SLOWEST - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, min(STALL_S, left))):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, "body: came too slowly, or not at all") from None
        count = len(message.get("body", b""))
        self.up, self.body = self.up + count, self.body + count
        self.whole = not message.get("more_body", False)
        if self.body > self.limit:
            raise self._too_long()
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if self.closes and not self.whole:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            self.down += sum(len(name) + len(value) + 4 for name, value in message.get("headers", ())) + 19
        async with asyncio.timeout(STALL_S):  # for a reader who has stopped reading
            await self._send(message)
        self.down += len(message.get("body", b""))


class PatientProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on what is not yet a request."""

    _timer: asyncio.TimerHandle | None = None
    _quiet = 0  # bytes since anything came of them

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._quiet += len(data)
        super().data_received(data)
        if self._quiet > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431)
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._wait(HEAD_S)  # bytes that began nothing have ended uvicorn's own wait

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait(HEAD_S)

    def on_headers_complete(self) -> None:
        self._quiet = 0
        self._wait(None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._quiet = 0
        if self.cycle.body or self.cycle.response_complete:
            super().on_body(body)
            return
        self.cycle.body = body  # type: ignore[assignment]  # what waits alone is neither copied nor a reason to stop reading
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._quiet = 0
        self._wait(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._wait(REST_S)

    def _wait(self, seconds: float | None) -> None:
        """For the next thing to come, for so long."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._too_slow) if seconds else None

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:  # an answer is on its way, and until then no more is read: who waits is us
            self._wait(HEAD_S)
        elif self._quiet:
            self._refuse(408)
        else:
            self.transport.abort()

    def _refuse(self, code: int) -> None:
        self.transport.write(STATUS_LINE[code] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()


def serving(*, connections: int | None = None) -> dict[str, Any]:
    """uvicorn's settings. `connections` is how many there may be at once; default: what the system lets this process have."""
    return {
        "http": PatientProtocol,
        "ws": "none",
        "proxy_headers": False,  # X-Forwarded-For is whatever a client on this machine, or behind a tunnel to it, likes
        "lifespan": "off",
        "log_level": "critical",  # the application tells of errors itself
        "access_log": False,
        "server_header": False,
        "date_header": False,
        "timeout_keep_alive": 75,
        "timeout_graceful_shutdown": 3,
        "limit_concurrency": connections or _most_connections(),
    }


def _most_connections() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(64, min(soft, 1 << 16) - SPARE_FILES) if soft != resource.RLIM_INFINITY else None


def mind_the_silent(bound: socket.socket) -> None:
    """Connections of this listening socket end when the other side is gone without a word, or does not read."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)


# --- Addresses ---


def parse_address(text: str, example: str = "127.0.0.1:7700") -> tuple[str, int]:
    """HOST:PORT, [HOST]:PORT for IPv6; raises ConfigError that names --listen."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    written = bare == host if ":" not in bare else host == f"[{bare}]"
    if not (colon and bare and written and port.isascii() and port.isdigit() and int(port) <= 65535 and bare.isprintable() and " " not in bare):
        raise ConfigError(f"--listen {text}: expected HOST:PORT, for example {example} or [::1]:{example.rpartition(':')[2]}")
    return bare, int(port)


def url_host(host: str) -> str:
    """A host as it stands in a URL: IPv6 in brackets, the zone's % escaped."""
    return f"[{host.replace('%', '%25')}]" if ":" in host else host


def bind(host: str, port: int) -> socket.socket:
    """A listening socket at the first address of a name that can be had; raises ConfigError that names --listen.

    Its protocol is named, or asyncio leaves Nagle's algorithm on and each reply waits 40 ms for an acknowledgement.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a name"
        raise ConfigError(f"--listen {host}:{port}: the host is not known here ({reason})") from None
    problem = ""
    for family, kind, protocol, _, address in found:
        try:
            return _listening(socket.socket(family, kind, protocol), address)
        except OSError as error:
            problem = problem or str(error.strerror)
    raise ConfigError(f"--listen {host}:{port}: {problem}; is another server running there? Port 0 takes a free one")


def _listening(bound: socket.socket, address: Any) -> socket.socket:
    try:
        if os.name != "nt":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        mind_the_silent(bound)
        bound.bind(address)
        bound.listen(512)
    except OSError:
        bound.close()
        raise
    return bound


def _number(text: bytes) -> int:
    """A declared length; what is not a number is as bad as one that is too large."""
    return int(text) if text.isdigit() and len(text) < 19 else 1 << 62
