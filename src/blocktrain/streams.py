"""safetensors files of any size, read and written one tensor at a time.

Reading goes through a `Source`, which gives ranges of bytes: of memory, of a local file, of an object in a store. `TensorFile` asks it for the
header, checks everything that can be checked without the values, and then for one tensor at a time. Writing is an iterator of bytes whose exact
length is known before the first of them, as an upload wants it.

    8 bytes, little-endian     length of the header
    header                     JSON, padded with spaces to a multiple of 8; for each tensor its dtype, shape, first byte, one past the last
    values                     every byte belongs to exactly one tensor

What is written here has its tensors in the order of their names, hence the same bytes for the same tensors. What is read may have them in any
order. Whatever the bytes are, reading ends in tensors of the types and shapes that the header gives or in a ProtocolError that names the tensor.
A tensor costs its own size and a slice of 16 MiB; the header costs a few times its length, which is limited before it is read.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from blocktrain.errors import ProtocolError

Entry = tuple[torch.dtype, tuple[int, ...]]
Entries = Mapping[str, Entry]
Metadata = Mapping[str, str]

DTYPES = {  # by their names in the file format; no others are read or written
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
SLICE_BYTES = 1 << 24  # of values, read or given at once
HEADER_BYTES = 100_000_000  # the longest header of a file of which nothing is known; the format's own limit
METADATA_BYTES = 1 << 16  # room for metadata in the header of a file whose tensors are known
ENTRY_BYTES = 256  # room in the header for a tensor, besides its name
MOST = 1 << 63  # counts and sizes are below


# --- Where bytes come from ---


class Source(Protocol):
    """Bytes that can be read in ranges."""

    @property
    def size(self) -> int:
        """How many bytes there are."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Exactly stop - start bytes."""
        ...


class BytesSource:
    """Bytes in memory."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def size(self) -> int:
        return len(self._view)

    def read(self, start: int, stop: int) -> bytes:
        return bytes(self._view[start:stop])


class FileSource:
    """A local file, open for as long as this object lives. Threads may share it: no reader sees another's position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with this object)
        self._size = os.fstat(self._file.fileno()).st_size
        self._lock = threading.Lock()  # only where there is no pread

    @property
    def size(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> bytes:
        parts: list[bytes] = []
        while start < stop:
            part = self._read_at(stop - start, start)
            if not part:
                raise ProtocolError(f"{self.path}: ends at byte {start}, expected {self._size} bytes")
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_at(self, count: int, start: int) -> bytes:
        """Some of the bytes from there on, at least one unless the file ends."""
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), count, start)
        with self._lock:  # Windows
            self._file.seek(start)
            return self._file.read(count)


# --- Reading ---


class TensorFile:
    """A safetensors file whose header is right, read one tensor at a time; messages name it `what`.

    `expected` is what it must hold, or a function that tells this from the file's metadata; without it, anything of the types listed here.
    Raises ProtocolError where the file is not that, or does not read like what it said.
    """

    entries: dict[str, Entry]
    metadata: dict[str, str]

    def __init__(
        self,
        source: Source,
        what: str,
        expected: Entries | Callable[[dict[str, str]], Entries] | None = None,
        max_header: int | None = None,
    ) -> None:
        if max_header is None:
            max_header = header_limit(expected) if isinstance(expected, Mapping) else HEADER_BYTES
        self._source, self._what = source, what
        header, self._values_begin = _read_header(source, what, max_header)
        self.metadata = _metadata(what, header.pop(METADATA, {}))
        wanted = expected(self.metadata) if callable(expected) else expected
        if wanted is not None:
            _check_names(what, header.keys(), wanted.keys())
        parts = {name: _entry(f"{what}: tensor {_shown(name)}", entry, wanted[name] if wanted else None) for name, entry in header.items()}
        self.entries = {name: entry for name, (entry, _, _) in parts.items()}
        self._begins = {name: begin for name, (_, begin, _) in parts.items()}
        _check_cover(what, {name: (begin, end) for name, (_, begin, end) in parts.items()}, source.size - self._values_begin)

    def tensor(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        _, shape = self.entries[name]
        return self.values(name, 0, math.prod(shape)).view(shape)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in the order of names, one in memory at a time."""
        for name in sorted(self.entries):
            yield name, self.tensor(name)

    def values(self, name: str, begin: int, end: int) -> Tensor:
        """Some of a tensor's values, as they lie, in memory of their own."""
        dtype, _ = self.entries[name]
        raw = torch.empty((end - begin) * dtype.itemsize, dtype=torch.uint8)
        room, start = memoryview(raw.numpy()), self._values_begin + self._begins[name] + begin * dtype.itemsize  # type: ignore[arg-type]
        for low in range(0, len(room), SLICE_BYTES):
            high = min(low + SLICE_BYTES, len(room))
            room[low:high] = read_exactly(self._source, start + low, start + high, f"{self._what}: tensor {_shown(name)}")
        if dtype == torch.bool and bool((raw > 1).any()):
            raise ProtocolError(f"{self._what}: tensor {_shown(name)}: holds bytes that are neither true nor false")
        return raw.view(dtype)


def read_exactly(source: Source, start: int, stop: int, what: str) -> bytes:
    """A range of a source that may not keep its promise."""
    data = source.read(start, stop)
    if len(data) != stop - start:
        raise ProtocolError(f"{what}: got {len(data)} bytes from byte {start} of the file, expected {stop - start}")
    return data


def header_limit(names: Iterable[str], metadata: int = METADATA_BYTES) -> int:
    """No header for these tensors, and so many bytes of metadata, is longer."""
    return metadata + sum(ENTRY_BYTES + 6 * len(name.encode()) for name in names)  # six bytes is the longest escape of one in JSON


def _read_header(source: Source, what: str, limit: int) -> tuple[dict[str, Any], int]:
    """The header's fields, and where the values begin."""
    if source.size < 8:
        raise ProtocolError(f"{what}: has {source.size} bytes, expected at least 8")
    (length,) = struct.unpack("<Q", read_exactly(source, 0, 8, what))
    limit = min(limit, source.size - 8)
    if not 2 <= length <= limit:
        raise ProtocolError(f"{what}: declares a header of {length} bytes, at most {limit} are possible")
    try:
        header = json.loads(read_exactly(source, 8, 8 + length, what).decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what}: the header is not the JSON that was expected ({str(error)[:100]})") from None
    if not isinstance(header, dict):
        raise ProtocolError(f"{what}: the header is not a JSON object")
    return header, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name stands twice")
    "".join(text for pair in pairs for text in pair if isinstance(text, str)).encode()  # half a surrogate pair is no text
    return fields


def _metadata(what: str, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ProtocolError(f"{what}: metadata is {repr(metadata)[:100]}, expected texts by their names")
    return metadata


def _check_names(what: str, given: Iterable[str], expected: Iterable[str]) -> None:
    wanted = set(expected)
    for name in sorted(wanted.symmetric_difference(given)):
        raise ProtocolError(f"{what}: tensor {_shown(name)} is {'missing' if name in wanted else 'not one of those expected'}")


def _shown(name: str) -> str:
    """A name from outside, as it can stand in a message of one line."""
    return name if name.isprintable() and 0 < len(name) <= 200 else repr(name[:100])


def _entry(where: str, entry: Any, expected: Entry | None) -> tuple[Entry, int, int]:
    """Type, shape, first byte and one past the last."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ProtocolError(f"{where}: its entry must have dtype, shape and data_offsets")
    dtypes = list(DTYPES) if expected is None else [NAMES[expected[0]]]
    if entry["dtype"] not in dtypes:
        raise ProtocolError(f"{where}: has dtype {repr(entry['dtype'])[:20]}, expected {' or '.join(dtypes)}")
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    if expected is not None and (not _is_counts(shape) or tuple(shape) != tuple(expected[1])):
        raise ProtocolError(f"{where}: has shape {repr(shape)[:100]}, expected {list(expected[1])}")
    if not _is_counts(shape) or len(shape) > 64 or math.prod(max(1, n) for n in shape) * dtype.itemsize >= MOST:
        raise ProtocolError(f"{where}: has shape {repr(shape)[:100]}, which is none of a tensor that fits any memory")
    offsets, num_bytes = entry["data_offsets"], dtype.itemsize * math.prod(shape)
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
        raise ProtocolError(f"{where}: data_offsets {repr(offsets)[:100]} are not those of {num_bytes} bytes")
    return (dtype, tuple(shape)), offsets[0], offsets[1]


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < MOST for number in value)


def _check_cover(what: str, ranges: Mapping[str, tuple[int, int]], num_bytes: int) -> None:
    """Every byte of the values belongs to exactly one tensor."""
    reached = 0
    for name, (begin, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if begin != reached:
            raise ProtocolError(f"{what}: tensor {_shown(name)}: begins at byte {begin} of the values, expected {reached}")
        reached = end
    if reached != num_bytes:
        raise ProtocolError(f"{what}: has {num_bytes} bytes of values, expected {reached}")


# --- Writing ---


def tensor_stream(entries: Entries, tensors: Iterable[tuple[str, Tensor]], metadata: Metadata | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file. The tensors come in the order of sorted names, and each is let go before the next is asked for.

    A chunk is to be used before the next is asked for: it may be the memory of the tensor itself.
    """
    ordered = {name: entries[name] for name in sorted(entries)}
    yield header_bytes(ordered, metadata)
    for name, tensor in in_order(ordered, tensors):
        assert (tensor.dtype, tuple(tensor.shape)) == (entries[name][0], tuple(entries[name][1])), f"tensor {name} is not what was announced"
        yield from bytes_of(tensor)
        del tensor


def stream_size(entries: Entries, metadata: Metadata | None = None) -> int:
    """The length of what `tensor_stream` writes."""
    return len(header_bytes({name: entries[name] for name in sorted(entries)}, metadata)) + values_size(entries)


def in_order(names: Iterable[str], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, held to be those of the names and to come in their sorted order."""
    expected = iter(sorted(names))
    for name, tensor in tensors:
        assert name == (wanted := next(expected, None)), f"tensor {name} came where {wanted} was announced"
        yield name, tensor
        del tensor
    assert (wanted := next(expected, None)) is None, f"tensor {wanted} did not come"


def header_bytes(entries: Entries, metadata: Metadata | None = None) -> bytes:
    """What stands before the values when these lie in the order of `entries`."""
    header: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    assert METADATA not in entries, f"no tensor can be called {METADATA}"
    begin = 0
    for name, (dtype, shape) in entries.items():
        end = begin + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    assert len(raw) <= min(header_limit(entries), HEADER_BYTES), f"a header of {len(raw)} bytes would be refused by who reads it"
    return struct.pack("<Q", len(raw)) + raw


def values_size(entries: Entries) -> int:
    """Bytes of all values."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in entries.values())


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """A tensor's values in slices; on a CPU they are the tensor's own memory."""
    raw = memoryview(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    for begin in range(0, len(raw), SLICE_BYTES):
        yield raw[begin : begin + SLICE_BYTES]
