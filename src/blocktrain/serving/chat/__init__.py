"""A page to chat on: plain files, read once, that know of the run only what the API tells them.

No style, script or image comes from anywhere else, and none is written into the page: the Content-Security-Policy holds this. What the model or the
user says is put into the page as text.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from blocktrain.web import PAGE_HEADERS

FILES = Path(__file__).parent / "files"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
HEADERS = PAGE_HEADERS | {"Cache-Control": "no-cache"}


def add_page(app: FastAPI) -> None:
    """Add the page at / and its files at /static/NAME; only what lies in the folder can be named."""
    files = {path.name: path.read_bytes() for path in FILES.iterdir() if path.suffix in TYPES}

    def answer(name: str) -> Response:
        return Response(files[name], headers=HEADERS | {"Content-Type": TYPES[Path(name).suffix]})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return answer("chat.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        return answer(name) if name in files else JSONResponse({"error": {"message": "no such file"}}, 404, headers=HEADERS)
