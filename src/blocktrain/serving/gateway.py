"""The process that serves: its address, keys and certificate, and how it ends.

Loopback asks for nothing. Any other address needs a key (whoever reaches the port can use the machine) and TLS, unless plain HTTP is asked for by
name. On SIGINT or SIGTERM nothing new is taken; what runs may go on for CUT_S seconds, then its reader is told and the process ends with code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from blocktrain.errors import ConfigError
from blocktrain.serving.engine import Engine
from blocktrain.serving.openai import create_app
from blocktrain.web import bind, parse_address, serving, url_host

GRACE_S = 4  # of which the engine's CUT_S are for texts, the rest for the last bytes on their way
MOST_KEYS = 1000
KEY_BYTES = 64 * 1024


@dataclass(frozen=True)
class Door:
    """Where to listen, and who may come in."""

    listen: str = "127.0.0.1:8000"
    key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    plaintext: bool = False

    def open(self, say: Callable[[str], None]) -> Opened:
        """Take the address. Raises ConfigError that names the flag."""
        host, port = parse_address(self.listen, "127.0.0.1:8000")
        self._check(host)
        files = self._tls_files()
        keys = read_keys(self.key_file, say) if self.key_file else []
        bound = bind(host, port)
        return Opened(host, bound, keys, files)

    def _check(self, host: str) -> None:
        tls = self.tls_cert is not None
        if self.tls_key is not None and not tls:
            raise ConfigError("--tls-key: goes with --tls-cert")
        if is_loopback(host):
            return
        if self.key_file is None:
            raise ConfigError(f"--listen {self.listen}: off loopback whoever reaches it could use it; add --key-file FILE (made if it is not there)")
        if not tls and not self.plaintext:
            raise ConfigError(
                f"--listen {self.listen}: off loopback keys and texts could be read on the way; add --tls-cert and --tls-key or --plaintext"
            )

    def _tls_files(self) -> dict[str, Any]:
        if self.tls_cert is None:
            return {}
        files = {"ssl_certfile": str(self.tls_cert), "ssl_keyfile": str(self.tls_key) if self.tls_key else None}
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files.values(), password=lambda: "")  # type: ignore[arg-type]  # asks nobody
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigError(f"--tls-cert {self.tls_cert}: no certificate and key that go together ({reason})") from None
        return files


@dataclass
class Opened:
    """A bound address."""

    host: str
    bound: socket.socket
    keys: list[str]
    files: dict[str, Any]

    @property
    def url(self) -> str:
        """By which this machine reaches it."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        host = url_host(anywhere.get(self.host, self.host))
        return f"{'https' if self.files else 'http'}://{host}:{self.bound.getsockname()[1]}"

    async def serve(self, engine: Engine) -> None:
        """Until SIGINT or SIGTERM; then the chain is closed, too."""
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}  # uvicorn hands them back at the end
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await make_server(engine, self.keys, **self.files).serve(sockets=[self.bound])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await engine.chain.close()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.bound.close()


class Server(uvicorn.Server):
    """uvicorn, which has the engine end what it does as it stops."""

    engine: Engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.stop()
        await super().shutdown(sockets)


def make_server(engine: Engine, keys: list[str], **files: Any) -> Server:
    settings: dict[str, Any] = serving() | {"timeout_graceful_shutdown": GRACE_S} | files
    server = Server(uvicorn.Config(create_app(engine, keys), **settings))
    server.engine = engine
    return server


def is_loopback(host: str) -> bool:
    """A name other than localhost is not, whatever it leads to today."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_keys(path: Path, say: Callable[[str], None]) -> list[str]:
    """The keys of a file, one a line; a file that is not there is made with a new key. Raises ConfigError."""
    try:
        if not path.exists():
            _make_key(path)
            say(f"{path}: made, with a new key; only you can read it")
        if os.name != "nt" and path.stat().st_mode & 0o077:
            say(f"note: {path} can be read by others on this machine; chmod 600 {path}")
        with open(path, "rb") as file:
            text = file.read(KEY_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"--key-file {path}: cannot be used ({reason})") from None
    keys = [key for line in text.splitlines() if (key := line.strip())]
    if not keys or len(keys) > MOST_KEYS or not all(key.isascii() and key.isprintable() and " " not in key and len(key) >= 16 for key in keys):
        raise ConfigError(f"--key-file {path}: needs one key a line, each of 16 or more ASCII characters without spaces")
    return keys


def _make_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"bt-{secrets.token_urlsafe(24)}\n")
