"""The files the page asks for: its own, revalidated on every visit, and plotly.min.js from the installed wheel, kept for good under its version."""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from fastapi import Response

TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
PLOTLY = "plotly.min.js"
FOR_GOOD = "public, max-age=31536000, immutable"
STYLE_ID = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')
SMALL = 1000  # bytes that are not worth packing


@dataclass(frozen=True)
class Asset:
    """One file, read and packed once."""

    content: bytes
    packed: bytes | None
    tag: str
    media_type: str
    cache: str

    def answer(self, request: Mapping[str, str], headers: Mapping[str, str]) -> Response:
        """The file, gzip where it helps and is welcome, or 304 to a reader who has it."""
        sent = {**headers, "Cache-Control": self.cache, "ETag": self.tag, "Vary": "Accept-Encoding"}
        if self.tag in request.get("if-none-match", ""):
            return Response(status_code=304, headers=sent)
        content = self.content
        if self.packed is not None and "gzip" in request.get("accept-encoding", ""):
            content = self.packed
            sent["Content-Encoding"] = "gzip"
        return Response(content, headers=sent, media_type=self.media_type)


class Assets:
    """Files by name; only what lies in the folder, and plotly, can be named."""

    def __init__(self, folder: Path) -> None:
        self._paths = {path.name: path for path in folder.iterdir() if path.suffix in TYPES}
        self._assets: dict[str, Asset] = {}
        self._lock = threading.Lock()
        self.plotly_version = version("plotly")
        self.plotly_styles = sorted({found.decode() for found in STYLE_ID.findall(_plotly())})

    def get(self, name: str) -> Asset | None:
        with self._lock:
            if name not in self._assets and (name == PLOTLY or name in self._paths):
                self._assets[name] = self._read(name)
            return self._assets.get(name)

    def _read(self, name: str) -> Asset:
        content = _plotly() if name == PLOTLY else self._paths[name].read_bytes()
        packed = gzip.compress(content, 6, mtime=0) if len(content) > SMALL else None
        tag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
        return Asset(content, packed, tag, TYPES[Path(name).suffix], FOR_GOOD if name == PLOTLY else "no-cache")


def _plotly() -> bytes:
    return (files("plotly") / "package_data" / PLOTLY).read_bytes()
