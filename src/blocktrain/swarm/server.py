"""The coordinator over HTTP.

Every request but hello, status and the page shows a secret: a token to join, a session after that. Before a body is parsed its length is
limited; before a session is looked up its address or worker is held to a rate. Bytes are counted as they pass, headers included, and booked on the
worker and part they belong to. Files are served in ranges to a limited number at a time; who comes later is told its place in line.

Handlers are thin: they translate between HTTP and `Coordinator`, whose answers carry kind and reason; replies.py says which code a kind becomes.
(No postponed annotations here: the parameters of handlers are read when they are defined.)
"""

import asyncio
import contextlib
import hashlib
import re
import threading
import time
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Annotated, Any

import anyio
import limits as rate
from fastapi import Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from blocktrain.errors import BlockTrainError
from blocktrain.swarm.coordinator import Coordinator, PartWriter, Refused, Session
from blocktrain.swarm.dashboard import add_page
from blocktrain.swarm.protocol import (
    Answer,
    AskReply,
    AskRequest,
    BeginReply,
    BeginRequest,
    CommitReply,
    CommitRequest,
    GiveBackRequest,
    Hello,
    JoinReply,
    JoinRequest,
    RunInfo,
)
from blocktrain.swarm.replies import ASK_WAIT_S, answered, find_blob, given_back, granted, refusal
from blocktrain.swarm.status import status
from blocktrain.web import Passage

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": Answer} for code in (400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 422, 429, 431, 500, 503, 507)
}
CHUNK = 1 << 20
BATCH = 1 << 19  # bytes of a part that are written at once
DISK_THREADS = 4  # that write parts
GATES = 2  # updates that are inspected at once: each takes a few tensors' memory
EACH = 2  # downloads, or parts that come in, of one worker at once
LINE_S = 15.0  # a place in line is kept for so long without a request

SECRET = HTTPBearer(auto_error=False, description="A session's secret; a token to join")

FileResponse.chunk_size = CHUNK


class Door:
    """ASGI middleware: limits and patience (web.py) for what comes in, and bytes counted as moved."""

    def __init__(self, app: Any, coordinator: Coordinator) -> None:
        self.app, self.coordinator = app, coordinator

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        account = scope.setdefault("state", {}).setdefault("account", {"worker": "", "part": "", "kind": "control"})
        passage = Passage(scope, receive, send, self._limit(scope))
        try:
            if wrong := passage.wrong():
                await _reply(wrong.status_code, "invalid", wrong.detail)(scope, receive, passage.send)
            else:
                await self.app(scope, passage.receive, passage.send)
        finally:
            for direction, count in (("up", passage.up), ("down", passage.down)):
                self.coordinator.count(account["worker"], account["part"], account["kind"], direction, count)

    def _limit(self, scope: Any) -> int:
        is_part = scope["method"] == "PUT" and "/parts/" in scope["path"]
        return self.coordinator.part_bytes if is_part else self.coordinator.config.limits.json_kb * 1024


class Line:
    """A limited number of places, few of them for any one, and a fair queue before them: first come, first served."""

    def __init__(self, places: int) -> None:
        self.places, self.inside = places, Counter[str]()
        self.waiting: OrderedDict[str, float] = OrderedDict()  # who -> last heard

    def enter(self, who: str, now: float) -> int:
        """0: inside, leave later; else the place in line, from 1."""
        for other, heard in list(self.waiting.items()):
            if now - heard > LINE_S:
                del self.waiting[other]
        before = list(self.waiting)[: list(self.waiting).index(who)] if who in self.waiting else self.waiting
        ahead = sum(self.inside[other] < EACH for other in before)  # who has all it may have keeps nobody from a place that is free
        if self.inside.total() + ahead < self.places and self.inside[who] < EACH:
            self.waiting.pop(who, None)
            self.inside[who] += 1
            return 0
        self.waiting[who] = now
        return ahead + 1

    def leave(self, who: str) -> None:
        self.inside[who] -= 1
        self.inside += Counter()  # drops zeros


class Sink:
    """Digests and writes a part in a thread, while more of it comes; holds little of it."""

    def __init__(self, writer: PartWriter, pool: ThreadPoolExecutor) -> None:
        self.writer, self.pool, self.digest = writer, pool, hashlib.sha256()
        self.chunks = deque[bytes]()
        self.size, self.written = 0, 0  # the first is counted by the event loop, the second by the thread
        self.job: asyncio.Future[None] | None = None

    async def put(self, chunk: bytes) -> None:
        """Take a chunk; waits where too much is held already."""
        self.chunks.append(chunk)
        self.size += len(chunk)
        if self.size - self.written >= BATCH and (self.job is None or self.job.done()):
            await self._begin()
        if self.size - self.written >= 2 * BATCH and self.job:
            await asyncio.shield(self.job)

    async def _begin(self) -> None:
        if self.job:
            await self.job  # for its error, if it had one
        self.job = asyncio.get_running_loop().run_in_executor(self.pool, self._drain)

    async def finish(self) -> None:
        """Until everything is written."""
        while self.chunks:
            await self._begin()
        if self.job:
            await self.job

    def _drain(self) -> None:
        while self.chunks:
            chunk = self.chunks.popleft()
            self.digest.update(chunk)
            self.writer.write(chunk)
            self.written += len(chunk)


class InLine(Response):
    """A file for whoever has a place, the place in line for whoever has none.

    A place is taken when the answer begins and given back however it ends.
    """

    def __init__(self, line: Line, who: str, has_place: Callable[[], Response]) -> None:
        super().__init__()
        self.line, self.who, self.has_place = line, who, has_place

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        line = self.line
        if place := line.enter(self.who, time.monotonic()):
            reason = f"{line.inside.total()} downloads are served, place {place} of {len(line.waiting)} in line"
            await _reply(503, "wait", reason, retry_after_s=1.0, place=place)(scope, receive, send)
            return
        try:
            await self.has_place()(scope, receive, send)
        except TimeoutError:
            return  # the reader has stopped reading; returning with the answer unfinished ends the connection
        except RuntimeError as error:
            if "does not exist" not in str(error):
                raise
            await _reply(404, "unknown", "blob: it is not here any more")(scope, receive, send)
        finally:
            line.leave(self.who)


async def _bearer(request: Request, _: Annotated[Any, Depends(SECRET)]) -> str:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret or len(secret) > 200:
        raise HTTPException(401, "authorization: a header `Bearer SECRET` is needed")
    return secret


class Service:
    """One coordinator's HTTP application and the thread that does what is due."""

    def __init__(self, coordinator: Coordinator, *, extra_status: Callable[[], dict[str, Any]] = dict) -> None:
        self.coordinator = coordinator
        self.extra_status = extra_status
        self.line = Line(coordinator.config.limits.parallel_transfers)
        self.incoming = Counter[str]()  # worker -> parts on their way
        self.disk = ThreadPoolExecutor(DISK_THREADS, "disk")
        self.gates = asyncio.Semaphore(GATES)
        self.window = rate.strategies.MovingWindowRateLimiter(rate.storage.MemoryStorage())
        self._due, self._stopping = threading.Event(), False
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self.thread = threading.Thread(target=self._run, name="rounds", daemon=True)
        coordinator.changed = self._due.set
        coordinator.closed = self._wake_askers
        self.app = self._make_app()

    # --- The thread ---

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._due.set()
        self.thread.join(timeout=60)
        self.disk.shutdown()

    def _run(self) -> None:
        while not self._stopping:
            wait = 1.0
            try:
                self.coordinator.tick()
                wake = self.coordinator.wake_at()
                wait = 1.0 if wake is None else min(1.0, max(0.01, wake - self.coordinator.now()))
            except OSError:
                pass  # the coordinator has said why it is paused
            except Exception as error:  # a bug must not end the run in silence
                self._tell_of(error)
            self._due.wait(wait)
            self._due.clear()

    def _tell_of(self, error: Exception) -> None:
        self.coordinator.log(f"error: {type(error).__name__}: {error}")
        traceback.print_exception(error)

    async def _bug(self, _: Request, error: Exception) -> Response:
        """Nothing that comes from outside should get here."""
        self._tell_of(error)
        return _reply(500, "wait", "the coordinator made a mistake; its log says which")

    def _wake_askers(self) -> None:
        for loop, event in list(self._waiting):
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    async def _new_version(self, timeout: float) -> None:
        entry = asyncio.get_running_loop(), asyncio.Event()
        self._waiting.add(entry)
        try:
            await asyncio.wait_for(entry[1].wait(), timeout)
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(entry)

    # --- The application ---

    def status(self) -> dict[str, Any]:
        return status(self.coordinator) | self.extra_status()

    def _make_app(self) -> FastAPI:
        app = FastAPI(title="BlockTrain coordinator", version="1", openapi_url="/v1/openapi.json", docs_url=None, redoc_url=None, responses=ERRORS)
        app.add_middleware(Door, coordinator=self.coordinator)
        app.exception_handler(Refused)(_refused)
        app.exception_handler(BlockTrainError)(_refused)
        app.exception_handler(OSError)(_refused)
        app.exception_handler(RequestValidationError)(_invalid)
        app.exception_handler(HTTPException)(_http_error)
        app.exception_handler(ClientDisconnect)(_gone)
        app.exception_handler(Exception)(self._bug)
        self._add_door(app)
        self._add_work(app)
        self._add_files(app)
        watch = add_page(app, self.status)

        @app.get("/v1/status")
        async def get_status() -> dict[str, Any]:
            """The run as its page shows it, at most a second old."""
            look = await watch.look()
            if look.status is None:
                raise HTTPException(503, "the status could not be made; the coordinator's log says why")
            return look.status

        return app

    def _add_door(self, app: FastAPI) -> None:
        coordinator = self.coordinator

        @app.get("/health")
        def health() -> Answer:
            """Whether the run can go on."""
            if coordinator.problem:
                raise HTTPException(503, coordinator.problem)
            return Answer(kind="ok", reason="the run goes on")

        @app.get("/v1/hello")
        def hello(request: Request, response: Response, nonce: Annotated[str, Query(pattern=r"^[0-9a-f]{8,64}$")]) -> Hello:
            """Who this coordinator is, proved by a signature over the caller's nonce."""
            self._limit(f"door {_address(request)}", self.coordinator.config.limits.joins_per_minute, 60)
            response.headers["date"] = formatdate(usegmt=True)  # for people who compare logs; nothing depends on it
            return coordinator.hello(nonce)

        @app.get("/v1/run")
        def run_info(request: Request, token: Annotated[str, Depends(_bearer)]) -> RunInfo:
            """Settings and text of the run, for the holder of a token."""
            self._limit(f"door {_address(request)}", self.coordinator.config.limits.joins_per_minute, 60)
            if coordinator.token_name(token) is None:
                raise HTTPException(401, "token: unknown or revoked")
            return coordinator.info()

        @app.post("/v1/join")
        def join(request: Request, body: JoinRequest, token: Annotated[str, Depends(_bearer)]) -> JoinReply:
            """A process becomes the voice of a worker."""
            self._limit(f"door {_address(request)}", self.coordinator.config.limits.joins_per_minute, 60)
            reply = coordinator.join(token, body)
            request.state.account["worker"] = reply.worker
            return reply

    def _add_work(self, app: FastAPI) -> None:
        coordinator = self.coordinator
        who = Annotated[Session, Depends(self._session)]

        @app.post("/v1/beat")
        def beat(session: who) -> Answer:  # type: ignore[valid-type]
            """A sign of life."""
            return answered(coordinator.beat(session))

        @app.post("/v1/ask")
        async def ask(body: AskRequest, session: who) -> AskReply:  # type: ignore[valid-type]
            """Work. Waits a few seconds where a round is about to end."""
            reply = await run_in_threadpool(coordinator.ask, session, body.ask, body.config_digest)
            if reply.kind == "wait":
                await self._new_version(min(ASK_WAIT_S, reply.retry_after_s))
                reply = await run_in_threadpool(coordinator.ask, session, body.ask, body.config_digest)
            return granted(reply)

        @app.post("/v1/begin")
        def begin(request: Request, body: BeginRequest, session: who) -> BeginReply:  # type: ignore[valid-type]
            """An upload is about to start: from here on it may finish late and still counts."""
            return granted(coordinator.begin(session, body))

        @app.post("/v1/commit")
        async def commit(body: CommitRequest, session: who) -> CommitReply:  # type: ignore[valid-type]
            """An update is here whole."""
            async with self.gates:
                return granted(await run_in_threadpool(coordinator.commit, session, body))

        @app.post("/v1/give-back")
        def give_back(body: GiveBackRequest, session: who) -> Answer:  # type: ignore[valid-type]
            """An assignment will not be finished."""
            return given_back(coordinator.give_back(session, body.key, body.why), body.key)

        @app.post("/v1/leave")
        def leave(session: who) -> Answer:  # type: ignore[valid-type]
            """The worker stops; its open work is given to others."""
            return answered(coordinator.leave(session))

    def _add_files(self, app: FastAPI) -> None:
        who = Annotated[Session, Depends(self._session)]
        part_body = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}

        @app.put("/v1/updates/{key}/{sha256}/parts/{index}", openapi_extra=part_body)
        async def put_part(
            request: Request,
            session: who,  # type: ignore[valid-type]
            key: Annotated[str, Path(pattern=r"^[0-9]{1,20}$")],
            sha256: Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")],
            index: Annotated[int, Path(ge=0, le=1 << 31)],
            part_sha256: Annotated[str, Query(pattern=r"^[0-9a-f]{64}$")],
        ) -> Answer:
            """One part of an update, with its own digest."""
            return await self._take_part(request, session, key, sha256, index, part_sha256)

        @app.get("/v1/blobs/{name:path}", response_class=Response)
        async def get_blob(request: Request, name: str, session: who) -> Response:  # type: ignore[valid-type]
            """A file of a version, or the text; whole or a range of it."""
            return await self._give_blob(request, session, name)

    async def _session(self, request: Request, secret: Annotated[str, Depends(_bearer)]) -> Session:
        """Whose session this is; also a sign of life, and the account its bytes are booked on."""
        if self.coordinator.knows(secret):
            session = self.coordinator.session(secret)
        else:
            self._limit(f"door {_address(request)}", self.coordinator.config.limits.joins_per_minute, 60)
            session = await run_in_threadpool(self.coordinator.session, secret)
        request.state.account["worker"] = session.worker
        self._limit(f"worker {session.worker}", self.coordinator.config.limits.requests_per_s * 10, 10)
        return session

    def _limit(self, who: str, amount: int, seconds: int) -> None:
        item = rate.RateLimitItemPerSecond(amount, seconds)
        if not self.window.hit(item, who):
            reset = self.window.get_window_stats(item, who).reset_time - time.time()
            raise Refused(Answer(kind="suspended", reason=f"more than {amount} requests in {seconds} s", retry_after_s=max(0.1, reset)))

    def _admit_part(self, session: Session, key: str, sha256: str, index: int) -> tuple[int, PartWriter]:
        """How long a part must be, and where it goes."""
        length = self.coordinator.part_length(session, key, index)
        self.coordinator.beat(session)
        return length, self.coordinator.open_part(key, sha256, index)

    async def _take_part(self, request: Request, session: Session, key: str, sha256: str, index: int, part_sha256: str) -> Answer:
        coordinator, who = self.coordinator, session.worker
        request.state.account.update(kind="updates", part=coordinator.part_booked_on(key))
        if self.incoming[who] >= EACH:
            raise Refused(Answer(kind="suspended", reason=f"more than {EACH} parts of one worker at once", retry_after_s=1.0))
        self.incoming[who] += 1
        try:
            length, writer = await run_in_threadpool(self._admit_part, session, key, sha256, index)
            try:
                await self._receive_part(request, writer, index, length, part_sha256)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await run_in_threadpool(writer.discard)
                raise
            await run_in_threadpool(coordinator.keep_part, key, writer)
        finally:
            self.incoming[who] -= 1
            self.incoming += Counter()  # drops zeros
        return Answer(kind="ok", reason=f"part {index} is here", key=key)

    async def _receive_part(self, request: Request, writer: PartWriter, index: int, length: int, sha256: str) -> None:
        """The body into the writer, if it is what was announced."""
        sink = Sink(writer, self.disk)
        try:
            async for chunk in request.stream():
                if sink.size + len(chunk) > length:
                    raise HTTPException(413, f"part {index}: longer than its {length} bytes")
                await sink.put(chunk)
        finally:
            with anyio.CancelScope(shield=True):
                await sink.finish()
        if sink.size != length:
            raise HTTPException(400, f"part {index}: has {sink.size} bytes, it must have {length}")
        if sink.digest.hexdigest() != sha256:
            raise HTTPException(409, f"part {index}: its sha256 is not the one that was announced; it was damaged on the way, send it again")

    async def _give_blob(self, request: Request, session: Session, name: str) -> Response:
        coordinator = self.coordinator
        size, kind, part = await run_in_threadpool(find_blob, coordinator, name)
        try:
            problem = await run_in_threadpool(coordinator.damage_of, name)
        except FileNotFoundError:
            raise HTTPException(404, f"blob {name[:100]}: it is not here any more") from None
        if problem:
            raise HTTPException(503, f"the coordinator's copy of {name} is damaged, its owner is told how to mend it: {problem}"[:300])

        def file() -> Response:
            request.state.account.update(kind=kind, part=part)
            return _file_response(coordinator, name, size, request.headers.get("range"))

        return InLine(self.line, session.worker, file)


# --- Pieces ---


def _file_response(coordinator: Coordinator, name: str, size: int, ranged: str | None) -> Response:
    etag = f'"{hashlib.sha256(name.encode()).hexdigest()[:32]}"'  # names carry their content's digest
    headers = {"etag": etag, "cache-control": "private, immutable", "accept-ranges": "bytes"}
    path = coordinator.store.blobs.path(name)
    if path is not None:
        return FileResponse(path, media_type="application/octet-stream", headers=headers)
    start, stop = _range(ranged, size)
    if ranged and start is not None:
        headers |= {"content-range": f"bytes {start}-{stop - 1}/{size}"}
    headers |= {"content-length": str(stop - (start or 0))}
    chunks = coordinator.store.blobs.chunks(name, start or 0, stop)
    return StreamingResponse(chunks, 206 if start is not None and ranged else 200, headers, "application/octet-stream")


def _range(text: str | None, size: int) -> tuple[int | None, int]:
    """(first byte or None for the whole, one past the last) of one plain range; anything else is the whole."""
    match = re.fullmatch(r"bytes=(\d{1,18})-(\d{0,18})", text or "")
    if not match or int(match[1]) >= size:
        return None, size
    return int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)


def _address(request: Request) -> str:
    return request.client.host if request.client else "?"


def _reply(code: int, kind: str, reason: str, **more: Any) -> JSONResponse:
    headers = {"retry-after": str(max(1, round(more["retry_after_s"])))} if more.get("retry_after_s") else {}
    if code == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(Answer(kind=kind, reason=reason, **more).model_dump(), code, headers)  # type: ignore[arg-type]


async def _refused(_: Request, error: Any) -> Response:
    code, answer = refusal(error)
    return _reply(code, answer.kind, answer.reason, key=answer.key, retry_after_s=answer.retry_after_s)


async def _invalid(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    code = 400 if first["type"] == "json_invalid" else 422  # what is not JSON was perhaps damaged on the way: it may be sent again
    place = ".".join(str(part) for part in first["loc"])
    return _reply(code, "invalid", f"{place}: {first['msg']}"[:300])


async def _http_error(_: Request, error: Any) -> Response:
    kinds = {401: "revoked", 403: "forbidden", 404: "unknown", 409: "resend", 503: "wait"}
    reply = _reply(error.status_code, kinds.get(error.status_code, "invalid"), str(error.detail))
    reply.headers.update(error.headers or {})
    return reply


async def _gone(_: Request, __: Any) -> Response:
    return _reply(400, "invalid", "the sender went away")
