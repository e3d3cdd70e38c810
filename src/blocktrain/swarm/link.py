"""A worker's way to its coordinator over HTTP: outbound connections only, every request repeated until it is through or a stated limit has passed.

Lost connections, timeouts, a coordinator that restarts or has a full disk, a place in line: all are waited for, with growing pauses, for up
to `patience_s`. Repeats are safe, since every request has a key that the coordinator knows again. Files are resumed by range from where they broke
off, and not believed before their sha256 is right.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import httpcore2
import httpx2
from pydantic import ValidationError

from blocktrain.errors import ConfigError, MemoryLimitError, ProtocolError
from blocktrain.streams import Source
from blocktrain.swarm import identity
from blocktrain.swarm.protocol import (
    PROTOCOL,
    Answer,
    AskReply,
    AskRequest,
    BeginReply,
    BeginRequest,
    BlobRef,
    CommitReply,
    CommitRequest,
    GiveBackRequest,
    Hello,
    JoinLine,
    JoinReply,
    JoinRequest,
    Message,
    RunInfo,
    hello_text,
    join_text,
)
from blocktrain.swarm.replies import Again, heard
from blocktrain.swarm.worker import WorkerStopped

T = TypeVar("T")
M = TypeVar("M", bound=Message)
CHUNK = 1 << 20
PATIENCE_S = 3600.0
HURRY_S = 10.0
OUTAGE_S = 8.0  # of failures in a row, from which on they are an outage and no longer what this line is like
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TIMEOUT = httpx2.Timeout(connect=10.0, read=120.0, write=60.0, pool=None)
FILE_TIMEOUT = httpx2.Timeout(connect=10.0, read=10.0, write=10.0, pool=None)  # a stalled transfer is broken off and resumed
DAMAGED = 5  # times that a file may arrive with the wrong digest
UNREADABLE = 3  # answers in a row that are none
REPLY_BYTES = 1 << 26  # of the longest message


setattr(httpcore2.AsyncHTTP11Connection, "READ_NUM_BYTES", 1 << 18)  # noqa: B010 (typed as one number) as much as asyncio reads at once


class _Damaged(Exception):
    """An answer that is none: damaged on the way, or not from a coordinator."""


@dataclass(frozen=True)
class _Reply:
    """What came back."""

    path: str
    status: int
    content: bytes


class HttpLink:
    """One process of one worker at one coordinator."""

    def __init__(
        self,
        line: JoinLine,
        name: str,
        key: identity.WorkerKey,
        *,
        process: str,
        say: Callable[[str], None] = lambda _: None,
        patience_s: float = PATIENCE_S,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.line, self.name, self.key, self.process = line, name, key, process
        self.say, self.patience_s = say, patience_s
        self.transport = transport
        self._client: httpx2.AsyncClient | None = None
        self._session = ""
        self._last_moment = math.inf  # of waiting for a coordinator that does not answer, once the worker is to stop
        self._digest = ""
        self.away_s = 0.0  # in outages, each counted once however many requests met it
        self._away_until = 0.0

    # --- Connecting ---

    async def _http(self) -> httpx2.AsyncClient:
        if self._client is None:
            verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody
            if self.line.scheme == "https":
                verify = await asyncio.to_thread(self._pinned)
            limits = httpx2.Limits(max_connections=8, max_keepalive_connections=4, keepalive_expiry=60.0)
            self._client = httpx2.AsyncClient(
                base_url=self.line.url, verify=verify, timeout=TIMEOUT, limits=limits, transport=self.transport, trust_env=True
            )
        return self._client

    def _pinned(self) -> ssl.SSLContext:
        """TLS that takes the certificate of the join line's fingerprint and no other."""
        try:
            pem = ssl.get_server_certificate((self.line.host, self.line.port), timeout=10)
        except OSError as error:
            raise Again(f"cannot connect: {error}") from None
        self._check_fingerprint(pem)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cadata=pem)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    def _check_fingerprint(self, pem: str) -> None:
        found = identity.fingerprint(pem)
        if not found.startswith(self.line.fingerprint):
            raise ConfigError(f"join line: {self.line.url} shows the fingerprint {found}, the line says {self.line.fingerprint}: another coordinator")

    async def hello(self) -> Hello:
        """The coordinator's word and proof of who it is."""
        nonce = os.urandom(16).hex()

        async def once() -> Hello:
            reply = await _exchange(await self._http(), "GET", f"/v1/hello?nonce={nonce}", None, self._headers(""))
            _check_protocol(reply)
            return _read(reply, Hello)

        reply = await self._until_through(once, self.patience_s)
        if reply.run_id != self.line.run_id:
            raise ConfigError(f"join line: {self.line.url} has the run {reply.run_id}, the line says {self.line.run_id}")
        self._check_fingerprint(reply.certificate)
        if reply.signature or self.line.scheme == "http":
            identity.check_coordinator(reply.certificate, hello_text(nonce, reply.run_id, reply.challenge), reply.signature)
        return reply

    async def info(self) -> RunInfo:
        await self.hello()
        info = await self._get("/v1/run", RunInfo, secret=self.line.token)
        self._digest = info.config_digest
        return info

    async def join(self, capacity: int, takeover: bool) -> JoinReply:
        hello = await self.hello()
        text = join_text(self.line.run_id, hello.challenge, self.key.public, self.process)
        request = JoinRequest(
            protocol=PROTOCOL,
            run_id=self.line.run_id,
            config_digest=self._digest,
            name=self.name,
            public_key=self.key.public,
            process=self.process,
            challenge=hello.challenge,
            signature=self.key.sign(text),
            capacity=capacity,
            takeover=takeover,
        )
        reply = await self._post("/v1/join", request, JoinReply, secret=self.line.token)
        self._session = reply.session
        return reply

    # --- Requests ---

    async def beat(self) -> None:
        await self._post("/v1/beat", None, Answer, patience_s=5.0)

    async def ask(self, ask: str) -> AskReply:
        return await self._post("/v1/ask", AskRequest(ask=ask, config_digest=self._digest or None), AskReply)

    async def begin(self, request: BeginRequest) -> BeginReply:
        return await self._post("/v1/begin", request, BeginReply)

    async def commit(self, request: CommitRequest) -> CommitReply:
        return await self._post("/v1/commit", request, CommitReply)

    async def give_back(self, key: str, why: str) -> None:
        await self._post("/v1/give-back", GiveBackRequest(key=key, why=why), Answer)

    async def leave(self) -> None:
        await self._post("/v1/leave", None, Answer, patience_s=5.0)

    async def put_part(self, key: str, sha256: str, index: int, source: Source, start: int, stop: int) -> None:
        digest = await asyncio.to_thread(_digest, source, start, stop)
        path = f"/v1/updates/{key}/{sha256}/parts/{index}?part_sha256={digest}"

        async def once() -> Answer:
            async def body() -> AsyncIterator[bytes]:
                for at in range(start, stop, CHUNK):
                    yield source.read(at, min(stop, at + CHUNK))

            http = await self._http()
            headers = self._headers(self._session) | {"content-length": str(stop - start), "content-type": "application/octet-stream"}
            return _read(await _exchange(http, "PUT", path, body(), headers), Answer, damaged_is_again=True)

        await self._until_through(once, self.patience_s)

    async def _get(self, path: str, kind: type[M], secret: str) -> M:
        async def once() -> M:
            return _read(await _exchange(await self._http(), "GET", path, None, self._headers(secret)), kind)

        return await self._until_through(once, self.patience_s)

    async def _post(self, path: str, body: Message | None, kind: type[M], secret: str | None = None, patience_s: float | None = None) -> M:
        async def once() -> M:
            headers = self._headers(self._session if secret is None else secret)
            content = body.model_dump_json().encode() if body else b""
            return _read(await _exchange(await self._http(), "POST", path, content, headers | {"content-type": "application/json"}), kind)

        return await self._until_through(once, self.patience_s if patience_s is None else patience_s)

    def _headers(self, secret: str) -> dict[str, str]:
        return {"accept-encoding": "identity"} | ({"authorization": f"Bearer {secret}"} if secret else {})

    async def _until_through(self, once: Callable[[], Awaitable[T]], patience_s: float, got: Callable[[], int] = lambda: 0) -> T:
        """Repeat what failed on the way; a word of why, and of how long it will go on, whenever the reason changes.

        Where more of a file is here than before (`got`), patience begins anew.
        """
        loop, told, attempt, unreadable, had = asyncio.get_running_loop(), "", 0, 0, got()
        end, failing_since = loop.time() + patience_s, math.inf
        while True:
            after, began = None, loop.time()
            try:
                result = await once()
                self._note_outage(failing_since, began)
                return result
            except Again as error:
                reason, after = str(error), error.after_s
            except _Damaged as error:
                reason, unreadable = str(error), unreadable + 1
                if unreadable >= UNREADABLE:
                    raise ProtocolError(f"{self.line.url}: {reason}") from None
            except (httpx2.TransportError, OSError) as error:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
            if (here := got()) > had:
                had, attempt, end = here, 0, loop.time() + patience_s
            failing_since = min(failing_since, loop.time())
            left = min(end, self._last_moment) - loop.time()
            if left <= 0 and self._last_moment < end:
                raise WorkerStopped(f"{self.line.url}: {reason}; stopped without it, what was not handed in is given to others")
            if left <= 0:
                raise WorkerStopped(f"{self.line.url}: gave up after {patience_s:.0f} s ({reason})")
            if reason != told and patience_s > 5:
                self.say(f"{self.line.url}: {reason}; trying for up to {left:.0f} s more")
            told = reason
            pause = after if after is not None else PAUSES_S[min(attempt, len(PAUSES_S) - 1)] * random.uniform(0.8, 1.2)
            await asyncio.sleep(min(pause, max(0.0, left)))
            attempt += 1

    def _note_outage(self, since: float, until: float) -> None:
        if until - since > OUTAGE_S:
            self.away_s += max(0.0, until - max(since, self._away_until))
            self._away_until = max(until, self._away_until)

    def hurry(self) -> None:
        """Whoever waits for the coordinator waits for only a few seconds more."""
        self._last_moment = min(self._last_moment, asyncio.get_running_loop().time() + HURRY_S)

    async def close(self) -> None:
        if self._client:
            await self._client.aclose()
            self._client = None

    # --- Files ---

    async def fetch(self, blob: BlobRef, target: Path | None) -> None:
        """A file, whole and of the right digest, under the target's name or not at all."""
        assert target is not None, "over HTTP a file is fetched to somewhere"
        scratch = target.with_name(f"{target.name}.{blob.sha256[:16]}.part")
        scratch.parent.mkdir(parents=True, exist_ok=True)
        have = _size(scratch)
        free = shutil.disk_usage(scratch.parent).free
        if free < blob.size - have + (1 << 20):
            raise MemoryLimitError(f"{scratch.parent}: {blob.size - have:,} bytes are needed for {target.name}, {free:,} are free on this disk")
        for _ in range(DAMAGED):
            digest = _FileDigest(scratch)
            await self._until_through(partial(self._download, blob, digest), self.patience_s, lambda: _size(scratch))
            if await asyncio.to_thread(digest.hexdigest) == blob.sha256:
                os.replace(scratch, target)
                return
            scratch.unlink()
            self.say(f"{blob.name}: arrived damaged, fetching it again")
        raise ProtocolError(
            f"{blob.name}: arrived with a wrong sha256 {DAMAGED} times: the coordinator's copy is damaged, or something changes bytes on the way"
        )

    async def _download(self, blob: BlobRef, digest: _FileDigest) -> None:
        """Append what is still missing."""
        scratch = digest.path
        have = _size(scratch)
        if have > blob.size:
            scratch.unlink()
            have = 0
        if have == blob.size and have:
            return
        headers = self._headers(self._session or self.line.token)
        if have:
            headers |= {"range": f"bytes={have}-"}
        http = await self._http()
        async with http.stream("GET", f"/v1/blobs/{blob.name}", headers=headers, timeout=FILE_TIMEOUT) as response:
            if response.status_code not in (200, 206):
                _read(await _whole(response), Answer)
                raise Again(f"{blob.name}: status {response.status_code}")
            size = await self._append(response, digest, have if response.status_code == 206 else 0, blob.size)
        if size < blob.size:
            raise Again(f"{blob.name}: broke off at {size:,} of {blob.size:,} bytes, going on from there")
        if size > blob.size:
            scratch.unlink()
            raise Again(f"{blob.name}: is longer than the {blob.size:,} bytes that were announced")

    async def _append(self, response: httpx2.Response, digest: _FileDigest, size: int, limit: int) -> int:
        """Write what comes after the first `size` bytes, until there is no more or too much; returns how many bytes there are then."""
        pieces, gathered = list[bytes](), 0
        writing: asyncio.Future[None] | None = None
        with open(digest.path, "ab" if size else "wb", buffering=0) as file:
            try:
                async for piece in response.aiter_raw():
                    pieces.append(piece)
                    gathered += len(piece)
                    if gathered < CHUNK and size + gathered <= limit:
                        continue
                    if writing:
                        await writing
                    writing = asyncio.ensure_future(asyncio.to_thread(digest.write, file, size, pieces))  # while the next ones come
                    size, pieces, gathered = size + gathered, [], 0
                    if size > limit:
                        break
            finally:
                if writing:
                    await writing
                digest.write(file, size, pieces)
        return size + gathered


class _FileDigest:
    """The sha256 of a file that grows at its end, kept as it does so; what it has not seen is read."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.digest = path, 0, hashlib.sha256()

    def write(self, file: BinaryIO, at: int, pieces: list[bytes]) -> None:
        """Append to the file, which has `at` bytes."""
        self._catch_up(at)
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
            self.digest.update(piece)
            self.size += len(piece)

    def hexdigest(self) -> str:
        self._catch_up(self.path.stat().st_size)
        return self.digest.hexdigest()

    def _catch_up(self, size: int) -> None:
        if self.size > size:  # it was begun again
            self.size, self.digest = 0, hashlib.sha256()
        if self.size == size:
            return
        with open(self.path, "rb") as file:
            file.seek(self.size)
            while self.size < size and (piece := file.read(min(CHUNK, size - self.size))):
                self.digest.update(piece)
                self.size += len(piece)


def _digest(source: Source, start: int, stop: int) -> str:
    digest = hashlib.sha256()
    for at in range(start, stop, CHUNK):
        digest.update(source.read(at, min(stop, at + CHUNK)))
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


async def _exchange(http: httpx2.AsyncClient, method: str, path: str, content: Any, headers: dict[str, str]) -> _Reply:
    async with http.stream(method, path, content=content, headers=headers) as response:
        return await _whole(response)


async def _whole(response: httpx2.Response) -> _Reply:
    """A message as it came, not unpacked, and no longer than a message can be."""
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > REPLY_BYTES:
            raise ProtocolError(f"{response.url.path}: an answer of more than {REPLY_BYTES:,} bytes, not from a BlockTrain coordinator")
    return _Reply(response.url.path, response.status_code, bytes(content))


def _check_protocol(reply: _Reply) -> None:
    """Raises ConfigError for a coordinator of another version, whatever else it says."""
    try:
        spoken = json.loads(reply.content)["protocol"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if spoken != PROTOCOL:
        raise ConfigError(f"join line: the coordinator speaks protocol {str(spoken)[:20]}, this worker {PROTOCOL}; install the same version")


def _read(reply: _Reply, kind: type[M], *, damaged_is_again: bool = False) -> M:
    """A message from a reply; raises Again or _Damaged where it may be repeated, Told where the coordinator says no."""
    if reply.status == 200:
        try:
            return kind.model_validate_json(reply.content)
        except ValidationError as error:
            raise _Damaged(f"reply of {reply.path}: {error.errors()[0]['msg']}") from None
    try:
        answer = Answer.model_validate_json(reply.content)
    except ValidationError:
        if reply.status >= 500 or reply.status in (408, 425, 429):
            raise Again(f"status {reply.status}") from None
        raise _Damaged(f"{reply.path}: status {reply.status}, not from a BlockTrain coordinator") from None
    raise heard(reply.status, answer, damaged_is_again=damaged_is_again)
