"""The coordinator's status page: one HTML page that stays live, the events it lives on, and the same figures for Prometheus.

  GET /                      the page
  GET /v1/events             server-sent events: the status as JSON, at once and then whenever it changed
  GET /metrics               the status as Prometheus text
  GET /static/NAME           the page's own files, and plotly.min.js out of the plotly wheel

Everything comes from one function that returns the status as a dict; the page knows nothing else of the swarm. Names and reasons in it may have been
chosen by a worker: the template escapes them, the script writes them as text, and the Content-Security-Policy lets in no script or style
from anywhere else, nor any that is written into the page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from blocktrain.swarm.dashboard.assets import Assets
from blocktrain.swarm.dashboard.metrics import CONTENT_TYPE, prometheus_text
from blocktrain.swarm.dashboard.stream import Listening, Watch
from blocktrain.web import PAGE_HEADERS

FILES = Path(__file__).parent / "files"
NO_STATUS = "the coordinator could not make its status; its log says why"
FRESH = PAGE_HEADERS | {"Cache-Control": "no-store"}


def add_page(app: FastAPI, status: Callable[[], dict[str, Any]], *, interval_s: float = 1.0) -> Watch:
    """Add the page's routes to `app`; returns what takes the looks.

    `status` is called in a thread, at most once every interval_s however many are looking.

    An open page is a response that never ends: start uvicorn with `timeout_graceful_shutdown`, or it waits for every reader to leave.
    """
    watch, assets = Watch(status, interval_s), Assets(FILES)
    template = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined).get_template("page.html")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> Response:
        look = await watch.look()
        return HTMLResponse(template.render(status=look.status or {}, assets=assets), headers=FRESH)

    @app.get("/v1/events", include_in_schema=False)
    async def events() -> Response:
        return Listening(watch, FRESH | {"X-Accel-Buffering": "no"})

    @app.get("/metrics", response_class=PlainTextResponse, include_in_schema=False)
    async def metrics() -> Response:
        look = await watch.look()
        if look.status is None:
            return PlainTextResponse(f"{NO_STATUS}\n", 503, headers=FRESH)
        return Response(prometheus_text(look.status), headers=FRESH | {"Content-Type": CONTENT_TYPE})

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str, request: Request) -> Response:
        asset = assets.get(name)
        if asset is None:
            return JSONResponse({"error": "no such file"}, 404, headers=FRESH)
        return asset.answer(request.headers, PAGE_HEADERS)

    return watch
