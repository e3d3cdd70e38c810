"""What the server below the application must not put up with: connections on which nothing comes, heads without end, readers who stopped reading.

uvicorn has limits only between two requests. `PatientProtocol` adds them within one: a head (request line and headers) has to be whole after HEAD_S,
what is neither body nor the end of something may be HEAD_BYTES long (heads, trailers, extensions of chunks), and the rest of a body that was
answered early has REST_S to pass. Bodies themselves are the application's (server.py), which knows who sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_S = 20.0
HEAD_BYTES = 64 * 1024
REST_S = 120.0
SILENT_MS = 120_000  # after which unacknowledged bytes end a connection
SPARE_FILES = 256  # descriptors that are not for connections


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
        if not self.transport.is_closing():
            self._refuse(408) if self._quiet and (self.cycle is None or self.cycle.response_complete) else self.transport.abort()

    def _refuse(self, code: int) -> None:
        self.transport.write(STATUS_LINE[code] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()


def serving(*, connections: int | None = None) -> dict[str, Any]:
    """uvicorn's settings for a coordinator. `connections` is how many there may be at once; default: what the system lets this process have."""
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
