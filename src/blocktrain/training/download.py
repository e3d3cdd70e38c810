"""Files that must exist before a corpus can be mapped: what is fetched, and what is kept.

`download` brings one file of known size and SHA-256 over HTTP. An interrupted transfer leaves `NAME.part` and its ETag, and the
next attempt, in this process or a later one, asks for the rest with Range and If-Range (RFC 9110, section 13.1.5): a server
whose file has changed, or that knows no ranges, answers with the whole file and the part starts afresh. Nothing is trusted
before its digest agrees.

`keep` is the cache: one text file and a small JSON beside it, which says what it is. Both appear by `os.replace`, so that a
reader sees a whole file or none; a lock per name makes a second process wait for the first; a kept file whose size or digest
disagrees with its JSON is made again. The map is opened before the lock is released, so that cleaning up after a corpus
that has changed never takes a file from under a reader.

Left out on purpose: parallel connections, credentials, and the datasets library, which would be larger than this program.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import logging
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from blocktrain.errors import DataError

try:
    import fcntl
except ImportError:  # Windows: no lock, and two processes may do the same work twice; `os.replace` still keeps the result whole
    fcntl = None

ATTEMPTS = 5
BACKOFF_S = 0.5  # before the second attempt, then twice as long each time
TIMEOUT_S = 30.0
PIECE_BYTES = 1 << 20
USER_AGENT = "blocktrain"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFile:
    """One file as its publisher had it on the day it was pinned."""

    name: str
    size_bytes: int
    sha256: str


class Interrupted(Exception):
    """The network failed in a way that another attempt may cure."""


def sha256_of(data: np.ndarray) -> str:
    """Hex SHA-256 over bytes of any length, a piece at a time."""
    digest = hashlib.sha256()
    for start in range(0, len(data), PIECE_BYTES):
        digest.update(data[start : start + PIECE_BYTES].data)
    return digest.hexdigest()


def map_bytes(path: Path) -> np.ndarray:
    """A file of at least one byte as a read-only (num_bytes,) array of uint8; its pages are read when touched."""
    return np.memmap(path, dtype=np.uint8, mode="r")


def download(url: str, target: Path, file: RemoteFile, sleep: Callable[[float], None] = time.sleep) -> None:
    """Bring `url` to `target`, resuming what an earlier attempt left, and check size and digest before it gets that name."""
    if not url.startswith(("http://", "https://")):
        raise DataError(f"cannot fetch {url!r}: HF_ENDPOINT must begin with http:// or https://")
    part = target.with_name(target.name + ".part")
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            _attempt(url, part, file)
            os.replace(part, target)
            _etag_path(part).unlink(missing_ok=True)
            return
        except Interrupted as error:
            reason = str(error)
            log.info("attempt %d to fetch %s: %s", attempt + 1, url, reason)
    raise _give_up(url, f"{reason}, in {ATTEMPTS} attempts")


def _give_up(url: str, reason: str) -> DataError:
    return DataError(f"cannot fetch {url}: {reason}; fetch it by other means and give its path as --data, or use --data python")


def _attempt(url: str, part: Path, file: RemoteFile) -> None:
    """Add to `part` what it lacks; returns only if it is then whole and right."""
    if _size(part) < file.size_bytes:
        _transfer(url, part, file.size_bytes)
    size = _size(part)
    if size < file.size_bytes:
        raise Interrupted(f"the connection closed after {size} of {file.size_bytes} bytes")
    if size > file.size_bytes or sha256_of(map_bytes(part)) != file.sha256:
        _discard(part)
        raise Interrupted(f"the {size} bytes that came are not the {file.size_bytes} with SHA-256 {file.sha256[:16]}…")


def _transfer(url: str, part: Path, size_bytes: int) -> None:
    """One request, appended to `part` where the server continues the same file, else written from the start."""
    offset, etag = _size(part), _read_etag(part)
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if offset and etag:
        headers |= {"Range": f"bytes={offset}-", "If-Range": etag}
    with _open(url, headers, part) as response:
        continues = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
        if response.status == 206 and not continues:
            _discard(part)
            raise Interrupted(f"the server sent the range {response.headers.get('Content-Range')!r}, not the one asked for")
        _etag_path(part).write_text(response.headers.get("ETag", ""), encoding="latin-1")
        left = size_bytes - (offset if continues else 0) + 1  # one more byte than right is enough to know that it is wrong
        with part.open("ab" if continues else "wb") as out:
            for piece in _pieces(response, left):
                out.write(piece)


def _open(url: str, headers: dict[str, str], part: Path) -> http.client.HTTPResponse:
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        reason = f"the server answered {error.code} {error.reason}"
        error.close()
        if error.code == 416:  # what `part` holds is longer than the file is now
            _discard(part)
        if error.code in (408, 416, 429) or error.code >= 500:
            raise Interrupted(reason) from error
        raise _give_up(url, reason) from error
    except (ValueError, http.client.InvalidURL) as error:  # a port that is no number and the like
        raise _give_up(url, str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(str(getattr(error, "reason", error)) or type(error).__name__) from error


def _pieces(response: http.client.HTTPResponse, left: int) -> Iterator[bytes]:
    """The body, at most `left` bytes of it; network errors become Interrupted, errors of the disk do not pass here."""
    while left > 0:
        try:
            piece = response.read(min(PIECE_BYTES, left))
        except (OSError, http.client.HTTPException) as error:
            raise Interrupted(str(error) or type(error).__name__) from error
        if not piece:
            return
        left -= len(piece)
        yield piece


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _etag_path(part).unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _etag_path(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _read_etag(part: Path) -> str:
    """The strong ETag of what `part` began as; a weak one (W/"...") promises no equal bytes and counts as none."""
    path = _etag_path(part)
    etag = path.read_text(encoding="latin-1") if path.exists() else ""
    return etag if etag.startswith('"') else ""


def keep(cache_dir: Path, name: str, fingerprint: str, source: str, pieces: Callable[[], Iterable[bytes]]) -> np.ndarray:
    """The kept text `name`, mapped; made from `pieces` where it is absent, damaged, or of another `fingerprint`."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    path = cache_dir / f"{name}-{fingerprint[:16]}.bin"
    with _locked(cache_dir / f"{name}.lock"):
        kept = _verified(path)
        if kept is not None:
            return kept
        size_bytes, sha256 = _write_atomically(path, pieces())
        if not size_bytes:
            path.unlink()
            raise DataError(f"corpus {name!r} holds no text: {source}")
        facts = {"source": source, "fingerprint": fingerprint, "size_bytes": size_bytes, "sha256": sha256}
        _write_atomically(path.with_suffix(".json"), [json.dumps(facts, indent=1).encode() + b"\n"])
        kept = map_bytes(path)
        _forget_others(path, name)
        return kept


def _verified(path: Path) -> np.ndarray | None:
    """The kept bytes, if size and digest are those in the JSON beside them."""
    try:
        facts = json.loads(path.with_suffix(".json").read_bytes())
        if path.stat().st_size != facts["size_bytes"]:
            return None
        data = map_bytes(path)
        return data if sha256_of(data) == facts["sha256"] else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _write_atomically(path: Path, pieces: Iterable[bytes]) -> tuple[int, str]:
    """Write beside `path`, then rename onto it; returns size and SHA-256. A failure leaves what was there before."""
    size_bytes, digest = 0, hashlib.sha256()
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("xb") as out:
            for piece in pieces:
                size_bytes += out.write(piece)
                digest.update(piece)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return size_bytes, digest.hexdigest()


def _forget_others(path: Path, name: str) -> None:
    """Remove what earlier contents of the same corpus, or a killed process, left behind."""
    for other in path.parent.glob(f"{name}-*"):
        if other.stem != path.stem:
            with contextlib.suppress(OSError):
                other.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO | None]:
    """Hold an exclusive lock; a cache that cannot be written needs none, for nothing in it changes."""
    try:
        file = path.open("ab")
    except OSError:
        yield None
        return
    with file:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield file
