"""WikiText over a bad network: a local server cuts, corrupts, refuses and forgets, and the right bytes arrive or one line says why."""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blocktrain.errors import DataError
from blocktrain.training import data as data_module
from blocktrain.training import download as download_module
from blocktrain.training.data import load_corpus
from blocktrain.training.download import RemoteFile, download


def parquet(rows: list[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), out, row_group_size=100, compression="none")
    return out.getvalue()


TRAIN_ROWS = [f" = Heading {i} = \n" if i % 5 == 0 else f"line {i} of the text\n" for i in range(1000)]
TRAIN, VALIDATION = parquet(TRAIN_ROWS), parquet(["held out\n"] * 50)
HALF = len(TRAIN) // 2


@dataclass
class Fault:
    """How one answer goes wrong; the default is a right answer."""

    status: int = 0
    cut_at: int = 10**9  # the connection closes after so many bytes of the body
    flip: bool = False
    ignore_range: bool = False
    shift_range: int = 0
    extra: bytes = b""
    hang: bool = False


@dataclass
class Site:
    """What the server holds and has been asked; faults befall the first requests for the training file, one each."""

    files: dict[str, bytes]
    faults: list[Fault] = field(default_factory=list)
    etag: str = '"one"'
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # file name, Range, If-Range
    url: str = ""
    closing: threading.Event = field(default_factory=threading.Event)

    def ranges(self) -> list[str]:
        return [asked for name, asked, _ in self.requests if name.startswith("train")]


class Handler(BaseHTTPRequestHandler):
    site: Site

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.site.requests.append((name, self.headers.get("Range", ""), self.headers.get("If-Range", "")))
        fault = self.site.faults.pop(0) if self.site.faults and name.startswith("train") else Fault()
        if fault.hang:
            self.site.closing.wait(10)
        if fault.status or name not in self.site.files:
            self.send_error(fault.status or 404)
            return
        self.answer(self.site.files[name], fault)

    def answer(self, content: bytes, fault: Fault) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        partial = wanted is not None and self.headers.get("If-Range") == self.site.etag and not fault.ignore_range
        start = int(wanted[1]) + fault.shift_range if partial else 0
        body = bytearray(content[start:] + fault.extra)
        if fault.flip:
            body[len(body) // 2] ^= 1
        self.send_response(206 if partial else 200)
        self.send_header("ETag", self.site.etag)
        self.send_header("Content-Length", str(len(body)))
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(body[: fault.cut_at])


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server that stands in for the Hugging Face Hub, and pins that are those of its files."""
    site = Site({"train.parquet": TRAIN, "validation.parquet": VALIDATION})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("SiteHandler", (Handler,), {"site": site}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", site.url + "/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download_module, "BACKOFF_S", 0.0)
    monkeypatch.setitem(data_module.WIKITEXT, ("wikitext-2", "train"), (pinned("train.parquet", TRAIN),))
    monkeypatch.setitem(data_module.WIKITEXT, ("wikitext-2", "heldout"), (pinned("validation.parquet", VALIDATION),))
    yield site
    site.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


def pinned(name: str, content: bytes) -> RemoteFile:
    return RemoteFile(name, len(content), hashlib.sha256(content).hexdigest())


def assert_arrives(cache: Path) -> None:
    corpus = load_corpus("wikitext-2", cache_dir=cache)
    assert corpus.train.tobytes().decode() == "".join(TRAIN_ROWS)
    assert corpus.train_digest == hashlib.sha256("".join(TRAIN_ROWS).encode()).hexdigest()
    assert corpus.heldout.tobytes() == b"held out\n" * 50
    assert "CC BY-SA" in corpus.source
    assert {path.suffix for path in cache.iterdir()} == {".bin", ".json", ".lock"}  # no part, ETag or parquet stays


def refused(cache: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_corpus("wikitext-2", cache_dir=cache)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_sound_network_brings_both_splits_and_is_asked_once(site: Site, tmp_path: Path) -> None:
    assert_arrives(tmp_path)
    assert_arrives(tmp_path)
    assert [name for name, _, _ in site.requests] == ["train.parquet", "validation.parquet"]


def test_a_connection_cut_halfway_is_resumed_at_the_byte_where_it_broke(site: Site, tmp_path: Path) -> None:
    site.faults = [Fault(cut_at=HALF), Fault(cut_at=100)]
    assert_arrives(tmp_path)
    assert site.ranges() == ["", f"bytes={HALF}-", f"bytes={HALF + 100}-"]
    assert site.requests[1][2] == '"one"'


def test_a_later_process_resumes_what_an_earlier_one_left(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.faults = [Fault(cut_at=HALF)]
    with monkeypatch.context() as patch:
        patch.setattr(download_module, "ATTEMPTS", 1)
        assert f"closed after {HALF} of {len(TRAIN)} bytes" in refused(tmp_path)
    assert_arrives(tmp_path)
    assert site.ranges() == ["", f"bytes={HALF}-"]


def test_a_server_that_ignores_ranges_sends_the_whole_again(site: Site, tmp_path: Path) -> None:
    site.faults = [Fault(cut_at=HALF), Fault(ignore_range=True)]
    assert_arrives(tmp_path)


def test_a_file_that_changed_between_two_attempts_is_fetched_from_the_start(site: Site, tmp_path: Path) -> None:
    site.files["train.parquet"] = bytes(len(TRAIN))
    site.faults = [Fault(cut_at=HALF)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download_module, "ATTEMPTS", 1)
        refused(tmp_path)
    site.files["train.parquet"], site.etag = TRAIN, '"two"'
    assert_arrives(tmp_path)
    assert site.ranges() == ["", f"bytes={HALF}-"]


def test_a_weak_etag_is_no_promise_and_the_file_is_fetched_from_the_start(site: Site, tmp_path: Path) -> None:
    site.etag = 'W/"one"'
    site.faults = [Fault(cut_at=HALF)]
    assert_arrives(tmp_path)
    assert site.ranges() == ["", ""]


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(flip=True)],
        [Fault(cut_at=HALF, flip=True), Fault()],
        [Fault(extra=b"more")],
        [Fault(cut_at=HALF), Fault(shift_range=7)],
        [Fault(cut_at=HALF), Fault(status=416)],
        [Fault(status=503), Fault(status=429), Fault(status=500)],
        [Fault(cut_at=0), Fault(cut_at=1)],
    ],
    ids=["flipped byte", "flipped half", "too long", "another range", "416", "server errors", "empty"],
)
def test_faults_that_pass_are_outlived(site: Site, tmp_path: Path, faults: list[Fault]) -> None:
    site.faults = faults
    assert_arrives(tmp_path)


def test_a_server_that_hangs_is_left_after_the_timeout(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "TIMEOUT_S", 0.2)
    site.faults = [Fault(hang=True)]
    assert_arrives(tmp_path)


def test_a_file_that_is_not_the_pinned_one_is_refused_and_not_kept(site: Site, tmp_path: Path) -> None:
    site.files["train.parquet"] = TRAIN[:-1] + b"?"
    message = refused(tmp_path)
    assert "are not the" in message
    assert len(site.ranges()) == download_module.ATTEMPTS
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_404_is_not_asked_again_and_the_line_says_what_to_do(site: Site, tmp_path: Path) -> None:
    site.faults = [Fault(status=404)]
    message = refused(tmp_path)
    assert len(site.requests) == 1
    assert f"{site.url}/datasets/Salesforce/wikitext/resolve/" in message
    assert "/wikitext-2-raw-v1/train.parquet: the server answered 404" in message
    assert "give its path as --data" in message


def test_without_a_server_the_line_gives_the_url_and_the_cause(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    message = refused(tmp_path)
    assert "http://127.0.0.1:1/datasets/Salesforce/wikitext" in message
    assert "refused" in message


@pytest.mark.parametrize("endpoint", ["ftp://127.0.0.1", "file:///etc", "127.0.0.1", "http://127.0.0.1:port", "http://[", "http://a b"])
def test_an_endpoint_that_cannot_be_one_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr(download_module, "BACKOFF_S", 0.0)
    assert endpoint in refused(tmp_path)


def test_attempts_wait_twice_as_long_each_time(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "BACKOFF_S", 0.5)
    site.faults = [Fault(status=503)] * 9
    waits: list[float] = []
    with pytest.raises(DataError, match="503 Service Unavailable, in 5 attempts"):
        download(f"{site.url}/train.parquet", tmp_path / "train.parquet", pinned("train.parquet", TRAIN), sleep=waits.append)
    assert waits == [0.5, 1.0, 2.0, 4.0]


def test_a_full_disk_is_not_mistaken_for_a_bad_network(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> Iterator[bytes]:
        yield b"some"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download_module, "_pieces", full)
    assert "No space left on device" in refused(tmp_path)
    assert len(site.requests) == 1
