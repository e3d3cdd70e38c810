"""Hostile updates: any bytes at all end in the right tensors or in a ProtocolError, and never cost more memory than is stated."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.codecs import CODECS, Codec, encode_update, max_encoded_bytes, read_update
from blocktrain.errors import ProtocolError

SHAPES = {"a.weight": (20, 30), "b.gain": (17,)}
TENSORS = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in SHAPES.items()}
GOOD = {codec: encode_update(TENSORS.items(), codec).data for codec in CODECS}
quick = settings(max_examples=150, deadline=None)


def read_all(data: bytes) -> None:
    """As a receiver does; whatever is accepted has the right shapes and only finite values."""
    for name, tensor in read_update(data, SHAPES).tensors():
        assert tensor.shape == SHAPES[name]
        assert bool(torch.isfinite(tensor).all())


def survives(data: bytes) -> None:
    message = ""
    try:
        read_all(data)
    except ProtocolError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000


def rebuilt(codec: Codec, change: Any) -> bytes:
    """The good file with its header changed and everything else consistent."""
    data = GOOD[codec]
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data[8 + length :]


@quick
@given(codec=st.sampled_from(CODECS), places=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8))
def test_changed_bytes(codec: Codec, places: list[tuple[int, int]]):
    data = bytearray(GOOD[codec])
    for place, value in places:
        data[place % len(data)] = value
    survives(bytes(data))


@quick
@given(codec=st.sampled_from(CODECS), place=st.integers(0, 400), junk=st.binary(max_size=40), cut=st.integers(0, 40))
def test_inserted_and_removed_bytes_of_the_header(codec: Codec, place: int, junk: bytes, cut: int):
    data = GOOD[codec]
    survives(data[:place] + junk + data[place + cut :])


@quick
@given(data=st.binary(max_size=300))
def test_any_bytes(data: bytes):
    survives(data)


@settings(max_examples=40, deadline=None)
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_json_as_header(header: Any):
    raw = json.dumps(header).encode()
    survives(struct.pack("<Q", len(raw)) + raw + b"\0" * 64)


@pytest.mark.parametrize("codec", CODECS)
def test_cut_anywhere(codec: Codec):
    data = GOOD[codec]
    for length in (*range(0, 420, 7), *range(len(data) - 9, len(data))):
        with pytest.raises(ProtocolError):
            read_all(data[:length])


@pytest.mark.parametrize("codec", CODECS)
def test_longer_than_it_should_be(codec: Codec):
    for extra in (1, 8, 1 << 20):
        with pytest.raises(ProtocolError, match="bytes"):
            read_all(GOOD[codec] + b"\0" * extra)


def drop(name: str) -> Any:
    return lambda header: header.pop(name)


def put(name: str, **fields: Any) -> Any:
    return lambda header: header[name].update(fields)


HEADERS = {
    "missing tensor": ("a.weight", drop("a.weight")),
    "extra tensor": ("c.extra", lambda header: header.update({"c.extra": dict(header["a.weight"])})),
    "transposed": (r"a.weight: has shape \[30, 20\]", put("a.weight", shape=[30, 20])),
    "flattened": ("a.weight: has shape", put("a.weight", shape=[600])),
    "huge": ("a.weight: has shape", put("a.weight", shape=[1 << 40, 1 << 40])),
    "negative": ("a.weight: has shape", put("a.weight", shape=[-20, -30])),
    "float shape": ("a.weight: has shape", put("a.weight", shape=[20.0, 30])),
    "boolean": ("b.gain: data_offsets", put("b.gain", data_offsets=[True, False])),
    "text shape": ("a.weight: has shape", put("a.weight", shape="20, 30")),
    "other dtype": ("a.weight: has dtype 'F64'", put("a.weight", dtype="F64")),
    "object dtype": ("a.weight: has dtype", put("a.weight", dtype={"pickle": 1})),
    "offsets past the end": ("b.gain: data_offsets", put("b.gain", data_offsets=[0, 1 << 60])),
    "three offsets": ("b.gain: data_offsets", put("b.gain", data_offsets=[0, 4, 8])),
    "overlap": ("begins at byte", lambda header: [h.update(data_offsets=[0, h["data_offsets"][1] - h["data_offsets"][0]]) for h in entries(header)]),
    "further field": ("a.weight: its entry", put("a.weight", code="x")),
    "no entry": ("a.weight: its entry", lambda header: header.update({"a.weight": [1, 2]})),
    "no metadata": (r"metadata is \{\}", drop("__metadata__")),
    "lines in metadata": (r"metadata is 'a\\nb'", lambda header: header.update({"__metadata__": "a\nb"})),
    "more metadata": ("metadata is", lambda header: header["__metadata__"].update(x="y")),
    "unknown codec": ("metadata is .*int2", lambda header: header["__metadata__"].update(blocktrain="update/1 int2")),
}


def entries(header: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for name, entry in header.items() if name != "__metadata__"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("attack", HEADERS)
def test_each_lie_of_a_header_is_named(codec: Codec, attack: str):
    message, change = HEADERS[attack]
    with pytest.raises(ProtocolError, match=message):
        read_all(rebuilt(codec, change))


def with_values(codec: Codec, name: str, raw: bytes) -> bytes:
    """The good file with the first bytes of one tensor's values replaced."""
    data = bytearray(GOOD[codec])
    (length,) = struct.unpack("<Q", data[:8])
    begin = 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    data[begin : begin + len(raw)] = raw
    return bytes(data)


@pytest.mark.parametrize(
    ("codec", "name", "raw"),
    [
        ("fp32", "a.weight", struct.pack("<f", float("nan"))),
        ("fp32", "a.weight", struct.pack("<f", float("-inf"))),
        ("bf16", "a.weight", b"\x80\x7f"),
        ("int8", "a.weight:scale", struct.pack("<f", float("nan"))),
        ("int8", "a.weight:scale", struct.pack("<f", float("inf"))),
        ("int8", "a.weight:scale", struct.pack("<f", -1.0)),
        ("int8", "a.weight:scale", struct.pack("<f", 3e38)),
        ("int8", "a.weight:scale", struct.pack("<f", 1e-40)),
    ],
)
def test_values_and_scales_that_are_not_finite_are_refused_by_name(codec: Codec, name: str, raw: bytes):
    update = read_update(with_values(codec, name, raw), SHAPES)
    assert torch.equal(update.tensor("b.gain"), read_update(GOOD[codec], SHAPES).tensor("b.gain"))  # the others can still be read
    with pytest.raises(ProtocolError, match=r"tensor a\.weight"):
        update.tensor("a.weight")


def test_a_pickle_and_a_bomb_of_brackets_are_refused():
    pickle = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
    deep = b"[" * 1500
    for data in (pickle, struct.pack("<Q", len(deep)) + deep, struct.pack("<Q", 1 << 63) + b"{}" * 50, b""):
        with pytest.raises(ProtocolError):
            read_all(data)


def test_a_name_that_stands_twice_is_refused():
    data = GOOD["fp32"]
    (length,) = struct.unpack("<Q", data[:8])
    raw = data[8 : 8 + length].rstrip()[:-1] + b',"b.gain":{"dtype":"F32","shape":[17],"data_offsets":[0,68]}}'
    with pytest.raises(ProtocolError, match="twice"):
        read_all(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def test_reading_costs_the_header_and_one_tensor():
    """A file of 64 tensors: checking it allocates kilobytes, reading all one after another the room of one."""
    shapes = {f"layer.{i}": (256, 256) for i in range(64)}
    data = encode_update([(name, torch.ones(shape)) for name, shape in shapes.items()], "int8").data
    tracemalloc.start()  # counts the bytes copied out of the file; torch's own are 4 a value
    try:
        for _, _ in read_update(data, shapes).tensors():
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 600_000 < len(data) / 6


def test_the_limit_is_known_before_a_byte_is_read():
    for codec in CODECS:
        payload = len(GOOD[codec])
        assert payload <= max_encoded_bytes(SHAPES, codec) <= payload + 4096
