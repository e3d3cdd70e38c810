"""The API that clients of OpenAI speak, over a chain of blocks. docs/serving.md has the fields and what is not supported.

  POST /v1/completions, /v1/chat/completions      text
  GET  /v1/models, /v1/models/{id}                the run, the only model there is
  GET  /v1/cluster                                stages, their blocks, what is up
  GET  /health, /metrics                          whether the blocks can answer; Prometheus
  GET  /                                          a page to chat on

`Door` stands before all of it: the key, the length and the kind of a body are looked at before anything is parsed. There is no CORS header, and
bodies must be declared as JSON, so a web page of somebody else's cannot ask on behalf of a browser on this machine.
(No postponed annotations here: the parameters of handlers are read when they are defined.)
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.seeding import fold
from blocktrain.serving import refusals
from blocktrain.serving.answers import ChatShape, Choice, CompletionShape
from blocktrain.serving.chat import add_page
from blocktrain.serving.compute import Settings
from blocktrain.serving.decoding import Plan
from blocktrain.serving.engine import Engine
from blocktrain.serving.fields import Asking, ChatAsking, CompletionAsking, StreamOptions
from blocktrain.serving.metrics import CONTENT_TYPE
from blocktrain.serving.refusals import Refused
from blocktrain.serving.replies import Reply, outcome_of
from blocktrain.serving.sampling import Sampling
from blocktrain.web import Passage

BODY_BYTES = 1 << 20
ALIAS = "blocktrain"  # is the run, whatever it is called
TEMPERATURE = 1.0
COUNTED = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
OPEN = ("/", "/health", "/static/")  # need no key


class Door:
    """ASGI middleware: limits and patience (web.py) for what comes in, the key, and the count of what became of each request."""

    def __init__(self, app: Any, engine: Engine, keys: Sequence[str]) -> None:
        self.app, self.engine = app, engine
        self.keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        passage, status = Passage(scope, receive, send, BODY_BYTES), 500
        state = scope.setdefault("state", {})

        async def watched(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await passage.send(message)

        try:
            if wrong := passage.wrong() or self._wrong(scope):
                await refusals.response(wrong)(scope, receive, watched)
            else:
                await self.app(scope, passage.receive, watched)
        finally:
            outcome = state.get("outcome") or outcome_of(status)
            self.engine.figures.requests.labels(COUNTED.get(scope["path"], "other"), outcome).inc()

    def _wrong(self, scope: Any) -> Exception | None:
        named = dict(scope["headers"])
        if self.keys and not self._may_enter(scope["path"], named.get(b"authorization", b"")):
            return Refused(401, "authorization: a header `Bearer KEY` with one of this server's keys is needed", code="invalid_api_key")
        kind = named.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            return HTTPException(415, "content-type: must be application/json")
        return None

    def _may_enter(self, path: str, header: bytes) -> bool:
        if path in OPEN or path.startswith(OPEN[-1]):
            return True
        scheme, _, key = header.partition(b" ")
        found = [hmac.compare_digest(_digest(key.strip()), known) for known in self.keys]  # all of them, whichever it is
        return scheme.lower() == b"bearer" and any(found)


def _digest(key: bytes) -> bytes:
    """Of one length, so that a comparison says nothing of a key's."""
    return hashlib.sha256(key).digest()


def create_app(engine: Engine, keys: Sequence[str] = ()) -> FastAPI:
    """The application; with `keys`, whoever asks must show one."""
    app = FastAPI(title="BlockTrain", version="1", openapi_url="/v1/openapi.json", docs_url=None, redoc_url=None)
    app.add_middleware(Door, engine=engine, keys=keys)
    for kind in (Refused, BlockTrainError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.exception_handler(kind)(_refuse)
    _add_text(app, engine)
    _add_facts(app, engine)
    add_page(app)
    return app


async def _refuse(_: Request, error: Any) -> Response:
    return refusals.response(Refused(400, "the sender went away") if isinstance(error, ClientDisconnect) else error)


def _add_text(app: FastAPI, engine: Engine) -> None:
    @app.post("/v1/completions", response_class=Response)
    async def completions(body: CompletionAsking) -> Response:
        """Text after a prompt."""
        prompt = body.prompt_bytes
        return _reply(engine, body, prompt, CompletionShape(body.model, prompt.decode("utf-8", "replace") if body.echo else ""))

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat(body: ChatAsking) -> Response:
        """The next turn of a conversation."""
        return _reply(engine, body, body.prompt_bytes, ChatShape(body.model))


def _reply(engine: Engine, body: Asking, prompt: bytes, shape: CompletionShape) -> Response:
    """Raises Refused or ConfigError for what cannot be had, before anything runs."""
    _known(engine, body.model)
    if len(prompt) > engine.positions:
        name = "messages" if isinstance(body, ChatAsking) else "prompt"
        message = f"{name}: {len(prompt)} bytes (with the template, in a chat), this model has {engine.positions} positions"
        raise Refused(400, message, param=name, code="context_length_exceeded")
    plans = plans_of(engine, body)
    engine.check(plans[0])
    choices = [Choice(i, plan, body.stops, body.top_logprobs_wanted) for i, plan in enumerate(plans)]
    return Reply(engine, prompt, choices, shape, (body.stream_options or StreamOptions()) if body.stream else None)


def plans_of(engine: Engine, body: Asking) -> list[Plan]:
    """One plan a choice: the first has the request's seed, the others seeds that follow from it; a seed that is not given is drawn."""
    seed = secrets.randbits(62) if body.seed is None else body.seed
    temperature, top_p = (TEMPERATURE if body.temperature is None else body.temperature), (1.0 if body.top_p is None else body.top_p)
    seeds = [seed if i == 0 else fold(seed, "choice", i) for i in range(body.n or 1)]
    mode, settings = body.mode or engine.mode, Settings(body.wire or engine.wire)
    for field, value, its in (("window", body.window, "sweep"), ("draft_bytes", body.draft_bytes, "speculative")):
        if value is not None and mode != its:
            raise ConfigError(f"{field}: only with mode {its}, this request is answered in {mode}")
    return [Plan(mode, Sampling(temperature, top_p, s), body.max_bytes, settings, body.draft_bytes, body.window) for s in seeds]


def _known(engine: Engine, model: str) -> None:
    if model not in (engine.run_name, ALIAS):
        message = f"The model `{model[:100]}` does not exist; this server has `{engine.run_name}` (or `{ALIAS}`)"
        raise Refused(404, message, param="model", code="model_not_found")


def _add_facts(app: FastAPI, engine: Engine) -> None:
    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "blocktrain"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The run, by its folder's name."""
        return {"object": "list", "data": [described(engine.run_name)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The run, by its name or as `blocktrain`."""
        _known(engine, name)
        return described(name)

    @app.get("/v1/cluster")
    async def cluster() -> dict[str, Any]:
        """Where the blocks are, and whether they can answer."""
        status = engine.chain.status()
        trouble, config = engine.trouble(status), engine.chain.config
        facts = {"model": engine.run_name, "healthy": not trouble, "reason": trouble, "blocks": config.model.blocks, "missing": status.missing}
        room = {"streams": engine.streams, "max_streams": engine.max_streams, "positions": engine.positions}
        stages = [asdict(stage) | {"blocks": list(range(*stage.blocks)), "up": stage.state == "up"} for stage in status.stages]
        return facts | room | {"modes": engine.modes, "mode": engine.mode, "stalled_s": round(status.stalled_s, 3), "stages": stages}

    @app.get("/health")
    async def health() -> Response:
        """200 while the blocks can answer, 503 with the reason while they cannot."""
        trouble = engine.trouble()
        return JSONResponse({"status": "unhealthy" if trouble else "ok", "reason": trouble}, 503 if trouble else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        engine.figures.healthy.set(not engine.trouble())
        return Response(engine.figures.text(), headers={"content-type": CONTENT_TYPE})
