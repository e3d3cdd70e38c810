"""A worker's way to its coordinator over HTTP: outbound connections only, every request repeated until it is through or a stated limit has passed.

Lost connections, timeouts, a coordinator that restarts or has a full disk, a place in line: all are waited for, with growing pauses, for up
to `patience_s`. Repeats are safe, since every request has a key that the coordinator knows again. Files are resumed by range from where they broke
off, and not believed before their sha256 is right.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

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
from blocktrain.swarm.worker import Told, WorkerStopped

T = TypeVar("T")
M = TypeVar("M", bound=Message)
CHUNK = 1 << 20
PATIENCE_S = 3600.0
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TIMEOUT = httpx2.Timeout(connect=10.0, read=120.0, write=60.0, pool=None)
FILE_TIMEOUT = httpx2.Timeout(connect=10.0, read=10.0, write=10.0, pool=None)  # a stalled transfer is broken off and resumed
DAMAGED = 5  # times that a file may arrive with the wrong digest


class _Again(Exception):
    """A request to repeat, after so many seconds if that is known."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


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
        self._digest = ""

    # --- Connecting ---

    async def _http(self) -> httpx2.AsyncClient:
        if self._client is None:
            verify: Any = True
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
            raise _Again(f"cannot connect: {error}") from None
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
        reply = await self._get(f"/v1/hello?nonce={nonce}", Hello, secret="")
        if reply.protocol != PROTOCOL:
            raise ConfigError(f"join line: the coordinator speaks protocol {reply.protocol}, this worker {PROTOCOL}; install the same version")
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
        return await self._post("/v1/ask", AskRequest(ask=ask), AskReply)

    async def begin(self, request: BeginRequest) -> BeginReply:
        return await self._post("/v1/begin", request, BeginReply)

    async def commit(self, request: CommitRequest) -> CommitReply:
        return await self._post("/v1/commit", request, CommitReply)

    async def give_back(self, key: str, why: str) -> None:
        await self._post("/v1/give-back", GiveBackRequest(key=key, why=why), Answer)

    async def leave(self) -> None:
        await self._post("/v1/leave", None, Answer, patience_s=5.0)

    async def put_part(self, key: str, sha256: str, index: int, source: Source, start: int, stop: int) -> None:
        digest = hashlib.sha256()
        for at in range(start, stop, CHUNK):
            digest.update(source.read(at, min(stop, at + CHUNK)))
        path = f"/v1/updates/{key}/{sha256}/parts/{index}?part_sha256={digest.hexdigest()}"

        async def once() -> Answer:
            async def body() -> AsyncIterator[bytes]:
                for at in range(start, stop, CHUNK):
                    yield source.read(at, min(stop, at + CHUNK))

            http = await self._http()
            headers = self._headers(self._session) | {"content-length": str(stop - start), "content-type": "application/octet-stream"}
            reply = _read(await http.put(path, content=body(), headers=headers), Answer, damaged_is_again=True)
            return reply

        await self._until_through(once, self.patience_s)

    async def _get(self, path: str, kind: type[M], secret: str) -> M:
        async def once() -> M:
            return _read(await (await self._http()).get(path, headers=self._headers(secret)), kind)

        return await self._until_through(once, self.patience_s)

    async def _post(self, path: str, body: Message | None, kind: type[M], secret: str | None = None, patience_s: float | None = None) -> M:
        async def once() -> M:
            headers = self._headers(self._session if secret is None else secret)
            content = body.model_dump_json().encode() if body else b""
            return _read(await (await self._http()).post(path, content=content, headers=headers | {"content-type": "application/json"}), kind)

        return await self._until_through(once, self.patience_s if patience_s is None else patience_s)

    def _headers(self, secret: str) -> dict[str, str]:
        return {"authorization": f"Bearer {secret}"} if secret else {}

    async def _until_through(self, once: Callable[[], Awaitable[T]], patience_s: float) -> T:
        """Repeat what failed on the way; a word of why, and of how long it will go on, whenever the reason changes."""
        loop, told, attempt = asyncio.get_running_loop(), "", 0
        end = loop.time() + patience_s
        while True:
            after = None
            try:
                return await once()
            except _Again as error:
                reason, after = str(error), error.after_s
            except (httpx2.TransportError, OSError) as error:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
            left = end - loop.time()
            if left <= 0:
                raise WorkerStopped(f"{self.line.url}: gave up after {patience_s:.0f} s ({reason})")
            if reason != told and patience_s > 5:
                self.say(f"{self.line.url}: {reason}; trying for up to {left:.0f} s more")
            told = reason
            pause = after if after is not None else PAUSES_S[min(attempt, len(PAUSES_S) - 1)] * random.uniform(0.8, 1.2)
            await asyncio.sleep(min(pause, max(0.0, left)))
            attempt += 1

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
        have = scratch.stat().st_size if scratch.exists() else 0
        free = shutil.disk_usage(scratch.parent).free
        if free < blob.size - have + (1 << 20):
            raise MemoryLimitError(f"{scratch.parent}: {blob.size - have:,} bytes are needed for {target.name}, {free:,} are free on this disk")
        for _ in range(DAMAGED):
            await self._until_through(lambda: self._download(blob, scratch), self.patience_s)
            if await asyncio.to_thread(_sha256, scratch) == blob.sha256:
                os.replace(scratch, target)
                return
            scratch.unlink()
            self.say(f"{blob.name}: arrived damaged, fetching it again")
        raise ProtocolError(
            f"{blob.name}: arrived with a wrong sha256 {DAMAGED} times: the coordinator's copy is damaged, or something changes bytes on the way"
        )

    async def _download(self, blob: BlobRef, scratch: Path) -> None:
        """Append what is still missing."""
        have = scratch.stat().st_size if scratch.exists() else 0
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
                await response.aread()
                _read(response, Answer)
                raise _Again(f"{blob.name}: status {response.status_code}")
            with open(scratch, "ab" if response.status_code == 206 else "wb") as file:
                size = have if response.status_code == 206 else 0
                async for chunk in response.aiter_raw(CHUNK):
                    size += len(chunk)
                    if size > blob.size:
                        break
                    await asyncio.to_thread(file.write, chunk)
        if size < blob.size:
            raise _Again(f"{blob.name}: broke off at {size:,} of {blob.size:,} bytes, going on from there")
        if size > blob.size:
            scratch.unlink()
            raise _Again(f"{blob.name}: is longer than the {blob.size:,} bytes that were announced")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(response: httpx2.Response, kind: type[M], *, damaged_is_again: bool = False) -> M:
    """A message from a reply; raises _Again where it may be repeated, Told where the coordinator says no."""
    if response.status_code == 200:
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise ProtocolError(f"reply of {response.url.path}: {error.errors()[0]['msg']}") from None
    try:
        answer = Answer.model_validate_json(response.content)
    except ValidationError:
        if response.status_code >= 500 or response.status_code in (408, 425, 429):
            raise _Again(f"status {response.status_code}") from None
        raise ProtocolError(f"{response.url.path}: status {response.status_code}, not from a BlockTrain coordinator") from None
    busy = response.status_code >= 500 or response.status_code in (400, 408)
    too_many = response.status_code == 429 and answer.reason.startswith("more than")
    if busy or too_many or (damaged_is_again and answer.kind == "resend"):
        raise _Again(answer.reason, answer.retry_after_s or None)
    raise Told(answer.kind, answer.reason, answer.retry_after_s)
