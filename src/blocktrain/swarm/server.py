"""The coordinator over HTTP.

Every request but hello, status and the page shows a secret: a token to join, a session after that. Before a body is parsed its length is
limited; before a session is looked up its address or worker is held to a rate. Bytes are counted as they pass, headers included, and booked on the
worker and part they belong to. Files are served in ranges to a limited number at a time; who comes later is told its place in line.

Handlers are thin: they translate between HTTP and `Coordinator`, whose answers carry kind and reason; STATUS says which code a kind becomes.
(No postponed annotations here: the parameters of handlers are read when they are defined.)
"""

import asyncio
import contextlib
import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import limits as rate
from fastapi import Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from blocktrain.errors import BlockTrainError
from blocktrain.swarm.coordinator import Coordinator, Refused, Session
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
from blocktrain.swarm.status import status

STATUS = {
    **dict.fromkeys(("ok", "assigned", "wait", "finished", "fresh", "late"), 200),
    **{"revoked": 401, "forbidden": 403, "unknown": 404, "conflict": 409, "resend": 409, "too_old": 410, "returned": 410},
    **{"unfit": 422, "invalid": 422, "suspended": 429},
}
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": Answer} for code in (400, 401, 403, 404, 405, 408, 409, 410, 411, 413, 422, 429, 500, 503, 507)
}
BLOB = re.compile(r"(versions|text)/[A-Za-z0-9._/-]{1,200}")
CHUNK = 1 << 20
PART_STALL_S = 60.0  # without a byte of a part
LINE_S = 15.0  # a place in line is kept for so long without a request
ASK_WAIT_S = 5.0  # an ask that finds nothing waits so long for a round to end

FileResponse.chunk_size = CHUNK


class Door:
    """ASGI middleware: body limits, and bytes counted as moved."""

    def __init__(self, app: Any, coordinator: Coordinator) -> None:
        self.app, self.coordinator = app, coordinator

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        account = scope.setdefault("state", {}).setdefault("account", {"worker": "", "part": "", "kind": "control"})
        up = sum(len(name) + len(value) + 4 for name, value in scope["headers"]) + len(scope["path"]) + 20
        down, limit = 0, self._limit(scope)
        too_long = _number(dict(scope["headers"]).get(b"content-length", b"0")) > limit

        async def counted_receive() -> Any:
            nonlocal up
            message = await receive()
            up += len(message.get("body", b""))
            if up > limit + (1 << 16) + len(scope["path"]):
                raise HTTPException(413, f"body: longer than the {limit} bytes that are allowed here")
            return message

        async def counted_send(message: Any) -> None:
            nonlocal down
            if message["type"] == "http.response.start":
                down += sum(len(name) + len(value) + 4 for name, value in message.get("headers", ())) + 17
            await send(message)
            down += len(message.get("body", b""))

        try:
            if too_long:
                answer = Answer(kind="invalid", reason=f"body: longer than the {limit} bytes that are allowed here")
                await JSONResponse(answer.model_dump(), 413, headers={"connection": "close"})(scope, receive, counted_send)
                return
            await self.app(scope, counted_receive, counted_send)
        finally:
            for direction, count in (("up", up), ("down", down)):
                self.coordinator.count(account["worker"], account["part"], account["kind"], direction, count)

    def _limit(self, scope: Any) -> int:
        is_part = scope["method"] == "PUT" and "/parts/" in scope["path"]
        return self.coordinator.part_bytes if is_part else self.coordinator.config.limits.json_kb * 1024


class Line:
    """A limited number of places, and a fair queue before them: first come, first served."""

    def __init__(self, places: int) -> None:
        self.places, self.inside = places, 0
        self.waiting: OrderedDict[str, float] = OrderedDict()  # who -> last heard

    def enter(self, who: str, now: float) -> int:
        """0: inside, leave later; else the place in line, from 1."""
        for other, heard in list(self.waiting.items()):
            if now - heard > LINE_S:
                del self.waiting[other]
        ahead = list(self.waiting).index(who) if who in self.waiting else len(self.waiting)
        if self.inside + ahead < self.places:
            self.waiting.pop(who, None)
            self.inside += 1
            return 0
        self.waiting[who] = now
        return ahead + 1

    def leave(self) -> None:
        self.inside -= 1


def _bearer(request: Request) -> str:
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
                self.coordinator.log(f"error: {type(error).__name__}: {error}")
                import traceback

                traceback.print_exc()
            self._due.wait(wait)
            self._due.clear()

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
        app.exception_handler(BlockTrainError)(_wrong)
        app.exception_handler(OSError)(_no_room)
        app.exception_handler(RequestValidationError)(_invalid)
        app.exception_handler(HTTPException)(_http_error)
        app.exception_handler(ClientDisconnect)(_gone)
        self._add_door(app)
        self._add_work(app)
        self._add_files(app)
        add_page(app, self.status)
        return app

    def _add_door(self, app: FastAPI) -> None:
        coordinator = self.coordinator

        @app.get("/health")
        def health() -> Answer:
            """Whether the run can go on."""
            if coordinator.problem:
                raise HTTPException(503, coordinator.problem)
            return Answer(kind="ok", reason="the run goes on")

        @app.get("/v1/status")
        def get_status() -> dict[str, Any]:
            """The run as its page shows it."""
            return self.status()

        @app.get("/v1/hello")
        def hello(request: Request, nonce: Annotated[str, Query(pattern=r"^[0-9a-f]{8,64}$")]) -> Hello:
            """Who this coordinator is, proved by a signature over the caller's nonce."""
            self._limit(f"door {_address(request)}", self.coordinator.config.limits.joins_per_minute, 60)
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
            return _answered(coordinator.beat(session))

        @app.post("/v1/ask")
        async def ask(body: AskRequest, session: who) -> AskReply:  # type: ignore[valid-type]
            """Work. Waits a few seconds where a round is about to end."""
            reply = await run_in_threadpool(coordinator.ask, session, body.ask)
            if reply.kind == "wait":
                await self._new_version(min(ASK_WAIT_S, reply.retry_after_s))
                reply = await run_in_threadpool(coordinator.ask, session, body.ask)
            if STATUS[reply.kind] != 200:
                raise Refused(reply)  # type: ignore[arg-type]
            return reply

        @app.post("/v1/begin")
        def begin(request: Request, body: BeginRequest, session: who) -> BeginReply:  # type: ignore[valid-type]
            """An upload is about to start: from here on it may finish late and still counts."""
            reply = coordinator.begin(session, body)
            if STATUS[reply.kind] != 200:
                raise Refused(reply)  # type: ignore[arg-type]
            return reply

        @app.post("/v1/commit")
        def commit(body: CommitRequest, session: who) -> CommitReply:  # type: ignore[valid-type]
            """An update is here whole."""
            reply = coordinator.commit(session, body)
            if STATUS[reply.kind] != 200:
                raise Refused(reply)  # type: ignore[arg-type]
            return reply

        @app.post("/v1/give-back")
        def give_back(body: GiveBackRequest, session: who) -> Answer:  # type: ignore[valid-type]
            """An assignment will not be finished."""
            answer = coordinator.give_back(session, body.key, body.why)
            if answer.kind not in ("returned", "too_old"):
                raise Refused(answer)
            return Answer(kind="ok", reason=answer.reason, key=body.key)

        @app.post("/v1/leave")
        def leave(session: who) -> Answer:  # type: ignore[valid-type]
            """The worker stops; its open work is given to others."""
            return _answered(coordinator.leave(session))

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

    def _session(self, request: Request, secret: Annotated[str, Depends(_bearer)]) -> Session:
        """Whose session this is; also a sign of life, and the account its bytes are booked on."""
        session = self.coordinator.session(secret)
        request.state.account["worker"] = session.worker
        self._limit(f"worker {session.worker}", self.coordinator.config.limits.requests_per_s * 10, 10)
        return session

    def _limit(self, who: str, amount: int, seconds: int) -> None:
        item = rate.RateLimitItemPerSecond(amount, seconds)
        if not self.window.hit(item, who):
            reset = self.window.get_window_stats(item, who).reset_time - time.time()
            raise Refused(Answer(kind="suspended", reason=f"more than {amount} requests in {seconds} s", retry_after_s=max(0.1, reset)))  # type: ignore[arg-type]

    async def _take_part(self, request: Request, session: Session, key: str, sha256: str, index: int, part_sha256: str) -> Answer:
        coordinator = self.coordinator
        request.state.account.update(kind="updates", part=coordinator.part_booked_on(key))
        length = await run_in_threadpool(coordinator.part_length, session, key, index)
        await run_in_threadpool(coordinator.beat, session)
        writer = await run_in_threadpool(coordinator.open_part, key, sha256, index)
        digest, size = hashlib.sha256(), 0
        try:
            async for piece in _pieces(request):
                size += len(piece)
                if size > length:
                    raise HTTPException(413, f"part {index}: longer than its {length} bytes")
                await run_in_threadpool(_write, writer, digest, piece)
            if size != length:
                raise HTTPException(400, f"part {index}: has {size} bytes, it must have {length}")
            if digest.hexdigest() != part_sha256:
                raise HTTPException(409, f"part {index}: its sha256 is not the one that was announced; it was damaged on the way, send it again")
        except BaseException:
            await run_in_threadpool(writer.discard)
            raise
        await run_in_threadpool(writer.keep)
        return Answer(kind="ok", reason=f"part {index} is here", key=key)

    async def _give_blob(self, request: Request, session: Session, name: str) -> Response:
        coordinator = self.coordinator
        size = await run_in_threadpool(coordinator.store.blobs.size, name) if BLOB.fullmatch(name) and ".." not in name else None
        if size is None:
            raise HTTPException(404, f"blob {name[:100]}: there is none of that name, or not any more")
        if problem := await run_in_threadpool(coordinator.damage_of, name):
            raise HTTPException(503, f"the coordinator's copy of {name} is damaged, its owner is told how to mend it: {problem}"[:300])
        kind, part = ("text", "text") if name.startswith("text/") else ("weights", name.split("/")[1])
        place = self.line.enter(session.worker, time.monotonic())
        if place:
            reason = f"{self.line.inside} downloads are served, place {place} of {len(self.line.waiting)} in line"
            return JSONResponse(Answer(kind="wait", reason=reason, retry_after_s=1.0, place=place).model_dump(), 503, headers={"retry-after": "1"})
        request.state.account.update(kind=kind, part=part)
        return self._leaving(_file_response(coordinator, name, size, request.headers.get("range")))

    def _leaving(self, response: Response) -> Response:
        """The same response, which leaves the line when it has been sent or has failed."""
        inner = response.__call__

        class Leaving(Response):
            async def __call__(_, scope: Any, receive: Any, send: Any) -> None:
                try:
                    await inner(scope, receive, send)
                finally:
                    self.line.leave()

        return Leaving()


# --- Pieces ---


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body in pieces of about a MiB; a stall of a minute ends it."""
    stream = request.stream().__aiter__()
    gathered, size = [], 0
    while True:
        try:
            chunk = await asyncio.wait_for(stream.__anext__(), PART_STALL_S)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise HTTPException(408, f"part: no byte for {PART_STALL_S:.0f} s") from None
        gathered.append(chunk)
        size += len(chunk)
        if size >= CHUNK:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


def _write(writer: Any, digest: Any, piece: bytes) -> None:
    digest.update(piece)
    writer.write(piece)


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


def _number(text: bytes) -> int:
    """A declared length; what is not a number is as bad as one that is too large."""
    return int(text) if text.isdigit() and len(text) < 19 else 1 << 62


def _address(request: Request) -> str:
    return request.client.host if request.client else "?"


def _answered(answer: Any) -> Answer:
    if STATUS[answer.kind] != 200:
        raise Refused(answer)
    return Answer(kind=answer.kind, reason=answer.reason, key=answer.key)


def _reply(code: int, kind: str, reason: str, **more: Any) -> JSONResponse:
    headers = {"retry-after": str(max(1, round(more["retry_after_s"])))} if more.get("retry_after_s") else {}
    if code == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(Answer(kind=kind, reason=reason, **more).model_dump(), code, headers)  # type: ignore[arg-type]


async def _refused(_: Request, error: Any) -> Response:
    answer = error.answer
    left = getattr(answer, "retry_after_s", 0.0) or getattr(answer, "time_left_s", 0.0)
    code = 503 if answer.kind == "wait" else STATUS[answer.kind]
    return _reply(code, answer.kind, answer.reason, key=answer.key, retry_after_s=left)


async def _wrong(_: Request, error: Any) -> Response:
    return _reply(422, "invalid", str(error))


async def _no_room(_: Request, error: Any) -> Response:
    return _reply(507, "wait", f"the coordinator cannot write: {error}"[:300], retry_after_s=5.0)


async def _invalid(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return _reply(422, "invalid", f"{place}: {first['msg']}"[:300])


async def _http_error(_: Request, error: Any) -> Response:
    kinds = {401: "revoked", 403: "forbidden", 404: "unknown", 409: "resend", 503: "wait"}
    return _reply(error.status_code, kinds.get(error.status_code, "invalid"), str(error.detail))


async def _gone(_: Request, __: Any) -> Response:
    return _reply(400, "invalid", "the sender went away")
