"""Where a run's state and bytes lie: one database and one object store behind one small interface.

Database (SQLAlchemy Core; SQLite beside the blobs by default)
  events     the journal: every event of the rules in the order in which it was applied; `seq` is what several coordinators agree by
  snapshots  the state after an event, so that the journal before it may go
  versions   one manifest per (part, version), written in the transaction that closes the round
  updates    what each assignment brought: size, digest, norm, metrics, answer
  tokens, sessions, facts, ledger, headlines, notes

Blobs (obstore; a folder, memory, or an object store by URL) have their content's digest in their names, so a coordinator that loses a race
overwrites nothing.

Nothing here assumes that one process owns a run: what must happen once happens in a transaction that first reads the events it has not seen
(`Transaction.events_after`) and then appends its own under the next `seq`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import obstore
import sqlalchemy as sa
from obstore.store import LocalStore, MemoryStore, from_url
from sqlalchemy import event, exc, pool
from sqlalchemy.dialects import postgresql, sqlite

from blocktrain.errors import CheckpointError
from blocktrain.serialization import sync_folder

CHUNK = 1 << 20
Row = Mapping[str, Any]
ObjectStore = Any  # obstore's stores share no public base class

_tables = sa.MetaData()
_text, _big = sa.Text, sa.BigInteger
facts = sa.Table("facts", _tables, sa.Column("name", _text, primary_key=True), sa.Column("value", _text, nullable=False))
events = sa.Table("events", _tables, sa.Column("seq", _big, primary_key=True, autoincrement=False), sa.Column("event", _text, nullable=False))
snapshots = sa.Table("snapshots", _tables, sa.Column("seq", _big, primary_key=True, autoincrement=False), sa.Column("state", _text, nullable=False))
versions = sa.Table(
    "versions",
    _tables,
    sa.Column("part", _text, primary_key=True),
    sa.Column("version", _big, primary_key=True, autoincrement=False),
    sa.Column("seq", _big, nullable=False),  # of the event that made it
    sa.Column("manifest", _text, nullable=False),
)
updates = sa.Table(
    "updates",
    _tables,
    sa.Column("key", _text, primary_key=True),
    sa.Column("worker", _text, nullable=False),
    sa.Column("blocks", _text, nullable=False),  # JSON list
    sa.Column("codec", _text, nullable=False),
    sa.Column("size", _big, nullable=False),
    sa.Column("parts", _text, nullable=False),  # JSON list of blob names, in order
    sa.Column("sha256", _text, nullable=False, index=True),
    sa.Column("num_samples", _big, nullable=False),
    sa.Column("taken_by", _text, nullable=False),  # JSON list of the blocks that count it
    sa.Column("steps", _text, nullable=False),  # JSON list of ranges: of its lease, those it was trained on
    sa.Column("norm", sa.Float, nullable=False),
    sa.Column("metrics", _text, nullable=False),  # JSON
    sa.Column("kind", _text, nullable=False),  # of the answer
    sa.Column("reason", _text, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)
tokens = sa.Table(
    "tokens",
    _tables,
    sa.Column("name", _text, primary_key=True),
    sa.Column("hash", _text, nullable=False, unique=True),
    sa.Column("revoked", sa.Boolean, nullable=False),
)
sessions = sa.Table(
    "sessions",
    _tables,
    sa.Column("worker", _text, primary_key=True),
    sa.Column("process", _text, nullable=False),
    sa.Column("hash", _text, nullable=False),
    sa.Column("token", _text, nullable=False),
    sa.Column("public_key", _text, nullable=False),
)
ledger = sa.Table(
    "ledger",
    _tables,
    sa.Column("worker", _text, primary_key=True),
    sa.Column("part", _text, primary_key=True),  # interface, block-000, text, or empty for control
    sa.Column("kind", _text, primary_key=True),  # weights, updates, text, control
    sa.Column("direction", _text, primary_key=True),  # down, up
    sa.Column("bytes", _big, nullable=False),
)
headlines = sa.Table(
    "headlines", _tables, sa.Column("tokens", _big, primary_key=True, autoincrement=False), sa.Column("figures", _text, nullable=False)
)
notes = sa.Table(
    "notes",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", _text, nullable=False),  # log, refusal
    sa.Column("worker", _text, nullable=False),
    sa.Column("block", sa.Integer),
    sa.Column("text", _text, nullable=False),
)


@dataclass(frozen=True)
class Blob:
    """A stored blob as a manifest names it."""

    name: str
    size: int
    sha256: str


class Transaction:
    """One atomic change of the database."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection

    def events_after(self, seq: int) -> list[tuple[int, str]]:
        return [(row[0], row[1]) for row in self.connection.execute(_EVENTS_AFTER, {"seq": seq}).all()]

    def append(self, seq: int, event: str) -> None:
        """The journal's next event; fails where another process has appended one under this `seq`."""
        self.connection.execute(_APPEND, {"seq": seq, "event": event})

    def put(self, table: sa.Table, **values: Any) -> None:
        """Insert a row, or replace the one with the same key."""
        self.connection.execute(_put_statement(self.connection.dialect.name, table, tuple(values)), values)

    def rows(self, query: Any) -> list[Row]:
        return [dict(row._mapping) for row in self.connection.execute(query)]

    def execute(self, statement: Any) -> int:
        """The number of rows it changed."""
        return self.connection.execute(statement).rowcount

    def add_bytes(self, counts: Mapping[tuple[str, str, str, str], int]) -> None:
        """Add to the ledger: (worker, part, kind, direction) -> bytes."""
        if counts:
            rows = [{"worker": w, "part": p, "kind": k, "direction": d, "bytes": count} for (w, p, k, d), count in counts.items()]
            self.connection.execute(_add_statement(self.connection.dialect.name), rows)


_EVENTS_AFTER = sa.select(events.c.seq, events.c.event).where(events.c.seq > sa.bindparam("seq")).order_by(events.c.seq)
_APPEND = events.insert()


def _insert(dialect: str, table: sa.Table) -> Any:
    """An insert that can say what to do with a row that is there: what SQLite and PostgreSQL share beyond the standard."""
    if dialect not in ("sqlite", "postgresql"):
        raise CheckpointError(f"database: {dialect} is not known to work; use SQLite or PostgreSQL")
    return (sqlite if dialect == "sqlite" else postgresql).insert(table)


@cache
def _put_statement(dialect: str, table: sa.Table, names: tuple[str, ...]) -> Any:
    keys = [column.name for column in table.primary_key.columns if column.name in names]
    statement = _insert(dialect, table)
    return statement.on_conflict_do_update(index_elements=keys, set_={name: statement.excluded[name] for name in names}) if keys else statement


@cache
def _add_statement(dialect: str) -> Any:
    statement = _insert(dialect, ledger)
    return statement.on_conflict_do_update(
        index_elements=["worker", "part", "kind", "direction"], set_={"bytes": ledger.c.bytes + statement.excluded.bytes}
    )


@contextmanager
def _as_os_error() -> Iterator[None]:
    """A disk that is full or refuses is an OSError everywhere here, whatever the library calls it."""
    try:
        yield
    except obstore.exceptions.NotFoundError as error:
        raise FileNotFoundError(_first_line(error)) from None
    except obstore.exceptions.BaseError as error:
        raise OSError(_first_line(error)) from None


class Blobs:
    """Named bytes. A blob appears whole or not at all, and is on the disk before anything names it. Names are of letters, digits, `.`, `-` and `/`.

    What can go wrong with the store raises OSError; a blob that is not there, FileNotFoundError.
    """

    def __init__(self, store: ObjectStore, folder: Path | None = None) -> None:
        self.store = store
        self.folder = folder  # of a local store, to look at the disk's room

    def put(self, name: str, data: bytes | memoryview) -> Blob:
        writer = self.writer()
        try:
            writer.write(data)
        except BaseException:
            writer.discard()
            raise
        writer.keep(name)
        return Blob(name, len(data), hashlib.sha256(data).hexdigest())

    def writer(self) -> BlobWriter | FileWriter:
        """For a blob whose bytes come from outside, piece by piece."""
        return FileWriter(self.folder) if self.folder else BlobWriter(self)

    def put_stream(self, prefix: str, suffix: str, chunks: Iterable[bytes | memoryview]) -> Blob:
        """Write chunks as they come and name the blob PREFIX-<first 16 digits of its sha256>SUFFIX."""
        digest, size, writer = hashlib.sha256(), 0, self.writer()
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                for start in range(0, len(view), 8 * CHUNK):
                    piece = view[start : start + 8 * CHUNK]
                    digest.update(piece)
                    writer.write(piece)
                size += len(view)
        except BaseException:
            writer.discard()
            raise
        blob = Blob(f"{prefix}-{digest.hexdigest()[:16]}{suffix}", size, digest.hexdigest())
        writer.keep(blob.name)
        return blob

    def size(self, name: str) -> int | None:
        """Of a blob, None where there is none."""
        try:
            with _as_os_error():
                return int(obstore.head(self.store, name)["size"])
        except (FileNotFoundError, ValueError):  # ValueError: nothing can have that name
            return None

    def read(self, name: str, start: int, stop: int) -> bytes:
        if self.folder and stop > start:
            with open(self.folder / name, "rb", buffering=0) as file:
                file.seek(start)
                return file.read(stop - start)
        with _as_os_error():
            return bytes(obstore.get_range(self.store, name, start=start, end=stop)) if stop > start else b""

    def chunks(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        for at in range(start, stop, CHUNK):
            yield self.read(name, at, min(stop, at + CHUNK))

    def names(self, prefix: str) -> list[str]:
        with _as_os_error():
            return [str(entry["path"]) for page in obstore.list(self.store, prefix) for entry in page]

    def digest(self, name: str, size: int) -> str:
        """sha256 of a blob that should have `size` bytes; empty where it is missing or of another length."""
        if self.size(name) != size:
            return ""
        digest = hashlib.sha256()
        for chunk in self.chunks(name, 0, size):
            digest.update(chunk)
        return digest.hexdigest()

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError), _as_os_error():
                obstore.delete(self.store, name)
            if self.folder and name.startswith("updates/"):  # each update has folders of its own
                with suppress(OSError):
                    for place in list((self.folder / name).parents)[:2]:
                        place.rmdir()

    def settle(self, names: Iterable[str]) -> None:
        """Blobs that were kept unsettled are on the disk after this."""
        paths = [self.folder / name for name in names] if self.folder else []
        for path in paths:
            with open(path, "r+b", buffering=0) as file:
                os.fsync(file.fileno())
        for folder in {path.parent for path in paths}:
            sync_folder(folder)

    def path(self, name: str) -> Path | None:
        """Where a local store keeps a blob, for whoever can serve files faster than bytes."""
        return self.folder / name if self.folder else None

    def free_bytes(self) -> int | None:
        """Room on a local store's disk."""
        return shutil.disk_usage(self.folder).free if self.folder else None


class BlobWriter:
    """A blob in the making: it gets its name when it is whole, or is dropped."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs, self.scratch = blobs, f"scratch/{secrets.token_hex(8)}"
        with _as_os_error():
            self.writer = obstore.open_writer(blobs.store, self.scratch, buffer_size=2 * CHUNK)

    def write(self, piece: bytes | memoryview) -> None:
        with _as_os_error():
            self.writer.write(bytes(piece))

    def keep(self, name: str, *, settled: bool = True) -> None:
        """Raises OSError, with nothing under the name, where there is no room."""
        try:
            with _as_os_error():
                self.writer.close()
                obstore.rename(self.blobs.store, self.scratch, name)
        except OSError:
            self.discard()
            raise

    def discard(self) -> None:
        """Also after a write that failed."""
        with suppress(OSError), _as_os_error():
            self.writer.close()
        with suppress(OSError):
            self.blobs.delete([self.scratch])


class FileWriter:
    """The same where blobs are files: nothing is held in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch = folder, folder / "scratch" / secrets.token_hex(8)
        self.scratch.parent.mkdir(exist_ok=True)
        self.file = open(self.scratch, "wb", buffering=0)  # noqa: SIM115 (until keep or discard)

    def write(self, piece: bytes | memoryview) -> None:
        view = memoryview(piece)
        while view:
            view = view[self.file.write(view) :]

    def keep(self, name: str, *, settled: bool = True) -> None:
        """Bytes are on the disk before the name that promises them, unless it promises nothing before `Blobs.settle`.

        Raises OSError, with nothing under the name, where there is no room.
        """
        target = self.folder / name
        try:
            if settled:
                os.fsync(self.file.fileno())
            self.file.close()
            made: list[Path] = []
            for _ in range(10):
                made = [place for place in target.parents if not place.exists()]
                target.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # somebody has just removed the folder, which was empty
                    os.replace(self.scratch, target)
                    break
            else:
                os.replace(self.scratch, target)
            for place in made:  # the names of new folders are on the disk too
                sync_folder(place.parent)
        except OSError:
            self.discard()
            raise
        if settled:
            sync_folder(target.parent)

    def discard(self) -> None:
        """Also after a write that failed."""
        with suppress(OSError):
            self.file.close()
        with suppress(OSError):
            self.scratch.unlink(missing_ok=True)


class BlobSource:
    """One or more blobs read as one run of bytes (a `Source`)."""

    def __init__(self, blobs: Blobs, parts: Iterable[tuple[str, int]]) -> None:
        self.blobs, self.parts = blobs, list(parts)  # (name, size)

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)

    def read(self, start: int, stop: int) -> bytes:
        pieces, at = [], 0
        for name, size in self.parts:
            low, high = max(start, at), min(stop, at + size)
            if low < high:
                pieces.append(self.blobs.read(name, low - at, high - at))
            at += size
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Store:
    """A run's database and blobs."""

    def __init__(self, database_url: str, blobs: Blobs) -> None:
        self.blobs = blobs
        in_memory = database_url in ("sqlite://", "sqlite:///:memory:")
        more: dict[str, Any] = {"poolclass": pool.StaticPool} if in_memory else {}
        self._alone: AbstractContextManager[Any] = threading.Lock() if in_memory else nullcontext()  # in memory all share one connection
        arguments = {"check_same_thread": False, "timeout": 30} if database_url.startswith("sqlite") else {}
        if not database_url.startswith("sqlite"):
            more["isolation_level"] = "SERIALIZABLE"
        self.engine = sa.create_engine(database_url, connect_args=arguments, **more)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _prepare_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)
        try:
            _tables.create_all(self.engine)
        except exc.SQLAlchemyError as error:
            raise CheckpointError(f"{self.engine.url.render_as_string()}: cannot be opened ({_first_line(error)})") from None

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """All or nothing; raises OSError where the disk is full or cannot be written."""
        try:
            with self._alone, self.engine.begin() as connection:
                yield Transaction(connection)
        except (exc.OperationalError, exc.DatabaseError) as error:
            raise OSError(f"database: {_first_line(error)}") from error

    def fact(self, name: str) -> str | None:
        with self.transaction() as tx:
            found = tx.rows(sa.select(facts.c.value).where(facts.c.name == name))
        return found[0]["value"] if found else None

    def fact_once(self, name: str, value: str) -> str:
        """The fact of that name: `value`, unless somebody has written another one before."""
        with self.transaction() as tx:
            found = tx.rows(sa.select(facts.c.value).where(facts.c.name == name))
            if not found:
                tx.put(facts, name=name, value=value)
        return found[0]["value"] if found else value

    def manifest(self, part: str, version: int) -> dict[str, Any] | None:
        with self.transaction() as tx:
            found = tx.rows(sa.select(versions.c.manifest).where(versions.c.part == part, versions.c.version == version))
        return json.loads(found[0]["manifest"]) if found else None

    def close(self) -> None:
        self.engine.dispose()


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where we say so
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=30000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    """Writers wait for each other here, and not when they have read what is about to change."""
    try:
        connection.connection.cursor().execute("BEGIN IMMEDIATE")
    except sqlite3.Error as error:
        raise exc.OperationalError("BEGIN IMMEDIATE", None, error) from error


def _first_line(error: Exception) -> str:
    return str(getattr(error, "orig", error)).splitlines()[0][:200]


def open_store(folder: Path) -> Store:
    """The default: SQLite and a folder of blobs."""
    try:
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # it holds the run's private key
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made ({error.strerror})") from None
    blobs = Blobs(LocalStore(folder / "blobs", automatic_cleanup=False), folder / "blobs")
    return Store(f"sqlite:///{folder / 'state.db'}", blobs)


def open_store_by_url(database: str, blobs: str) -> Store:
    """Any database and object store that the libraries know, for example postgresql://... and s3://..."""
    return Store(database, Blobs(from_url(blobs)))


def memory_store() -> Store:
    """Nothing outlives the process: for simulations and tests."""
    return Store("sqlite://", Blobs(MemoryStore()))
