"""The bytes of serving frames as version 1.0 has them, and that any bytes at all are a frame or a ProtocolError."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.errors import ProtocolError
from blocktrain.serving.compute import Wire, round_as_sent
from blocktrain.serving.frames import (
    CODES,
    Frame,
    HelloReply,
    HelloRequest,
    Kind,
    Name,
    OpenRequest,
    Pong,
    Refusal,
    Shape,
    decode,
    ids_tensor,
    message_frame,
    put_state,
    read_message,
    take_state,
)

SHAPE = Shape(positions=8, width=4, embed_dim=3, vocabulary=5, blocks=3)
TEXT = bytes(range(16))
quick = settings(max_examples=200, deadline=None)

STEP_HEX = (
    "4254533103030000000102030405060708090a0b0c0d0e0f020000000700000000000000"  # BTS1, STEP, 3 tensors, text, epoch 2, step 7, no JSON
    "03000000640000000000000002000000010000000100000088130000"  # keep 3, offset 100, count 2, want 1, enter 1, 5000 ms
    "01010000010000000200000041000001"  # IDS int16 (1, 2): 65, 256
    "020300000200000004000000803f00c0003f0000803f803f803f803f"  # STATE bfloat16 (2, 4)
    "070500000100000003000000000000000a00000014000000"  # HOPS int32 (1, 3): block 0, 10 us, 20 us
)
ANSWER_HEX = (
    "4254533104010000000102030405060708090a0b0c0d0e0f020000000700000000000000"
    "03000000640000000000000002000000010000000200000000000000"
    "0602000001000000050000000000803f00000040000040400000804000000000"  # LOGITS float32 (1, 5): 1, 2, 3, 4, 0
)
OPEN_JSON = b'{"wire":"int8","skip":[1],"first":0,"stop":1,"next":"10.0.0.2:9000"}'
OPEN_HEX = "4254533101000000000102030405060708090a0b0c0d0e0f010000000000000044000000" + OPEN_JSON.hex()


def step_frame() -> Frame:
    frame = Frame(Kind.STEP, TEXT, 2, 7, keep=3, offset=100, count=2, want=1, enter=1, remaining_ms=5000)
    frame.tensors[Name.IDS] = ids_tensor([65, 256])
    frame.tensors[Name.STATE] = torch.tensor([[1.0, -2.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0]]).bfloat16()
    frame.tensors[Name.HOPS] = torch.tensor([[0, 10, 20]], dtype=torch.int32)
    return frame


def answer_frame() -> Frame:
    frame = Frame(Kind.ANSWER, TEXT, 2, 7, keep=3, offset=100, count=2, want=1, enter=2)
    frame.tensors[Name.LOGITS] = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0]])
    return frame


def open_frame() -> Frame:
    return message_frame(Kind.OPEN, TEXT, OpenRequest(wire="int8", skip=[1], first=0, stop=1, next="10.0.0.2:9000"), 1)


def same(a: Frame, b: Frame) -> bool:
    plain = [{k: v for k, v in vars(frame).items() if k != "tensors"} for frame in (a, b)]
    alike = a.tensors.keys() == b.tensors.keys() and all(torch.equal(a.tensors[k], b.tensors[k]) for k in a.tensors)
    return plain[0] == plain[1] and alike and all(a.tensors[k].dtype == b.tensors[k].dtype for k in a.tensors)


@pytest.mark.parametrize(("frame", "pinned"), [(step_frame(), STEP_HEX), (answer_frame(), ANSWER_HEX), (open_frame(), OPEN_HEX)])
def test_the_bytes_of_frames_are_those_of_version_1_0(frame: Frame, pinned: str):
    assert frame.encode().hex() == pinned
    assert same(decode(bytes.fromhex(pinned), SHAPE), frame)


JSON_1_0: list[tuple[type, str, dict[str, Any]]] = [
    (OpenRequest, OPEN_JSON.decode(), {"wire": "int8", "skip": [1], "first": 0, "stop": 1, "next": "10.0.0.2:9000"}),
    (OpenRequest, '{"wire":"bfloat16","first":1,"stop":3}', {"skip": [], "next": ""}),
    (Refusal, '{"kind":"full","reason":"64 texts are open here","address":""}', {"kind": "full"}),
    (Pong, '{"texts":3,"stalled_s":0.25,"epoch":2,"step":7,"forwarded":6}', {"epoch": 2, "step": 7, "forwarded": 6}),
    (Pong, '{"texts":0,"stalled_s":0}', {"epoch": -1, "step": -1}),
    (HelloRequest, '{"protocol":[1,0]}', {"protocol": [1, 0]}),
    (HelloReply, '{"protocol":[1,0],"node":"a1","state":"loading"}', {"state": "loading", "stop": 0}),
    (
        HelloReply,
        '{"protocol":[1,0],"node":"a1","state":"up","reason":"","config_digest":"c","first":0,"stop":2,"digests":{"interface.safetensors":"d"},'
        '"checkpoint":"e","step":600,"dtype":"float32","max_texts":64,"texts":1,"free_memory":1000}',
        {"stop": 2, "digests": {"interface.safetensors": "d"}, "checkpoint": "e", "step": 600, "texts": 1},
    ),
]


@pytest.mark.parametrize(("model", "text", "fields"), JSON_1_0)
def test_messages_as_version_1_0_wrote_them_are_read_and_newer_fields_ignored(model: type, text: str, fields: dict[str, Any]):
    for data in (text, json.dumps({**json.loads(text), "colour": {"of": ["a", "newer", "minor"]}})):
        read = read_message(data.encode(), model).model_dump()
        assert {name: read[name] for name in fields} == fields


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_states_arrive_with_the_bits_that_were_sent(wire: Wire):
    x = round_as_sent(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), wire)
    frame = Frame(Kind.STEP, TEXT, count=5)
    put_state(frame, Name.STATE, x, wire)
    read = take_state(decode(frame.encode(), SHAPE), Name.STATE, wire)
    assert read is not None and torch.equal(read, x)
    for other in {"float32", "bfloat16", "int8"} - {wire}:
        with pytest.raises(ProtocolError, match="this text's states are"):
            take_state(frame, Name.STATE, other)  # type: ignore[arg-type]


@st.composite
def any_frame(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(list(Kind)))
    text, epoch, number = draw(st.binary(min_size=16, max_size=16)), *draw(st.tuples(*[st.integers(0, 2**32 - 1)] * 2))
    if kind not in (Kind.STEP, Kind.ANSWER):
        return Frame(kind, text, epoch, number, json=draw(st.binary(max_size=50)))
    count = draw(st.integers(1, 8))
    frame = Frame(kind, text, epoch, number, draw(st.integers(0, 8 - count)), draw(st.integers(0, 1 << 40)), count)
    frame.want, frame.enter, frame.remaining_ms = draw(st.integers(0, count - 1)), draw(st.integers(0, 2)), draw(st.integers(0, 2**32 - 1))
    state = st.sampled_from([torch.float32, torch.bfloat16, torch.int8])
    shapes = {Name.LOGITS: (torch.float32, count - frame.want, 5), Name.HOPS: (torch.int32, draw(st.integers(1, 3)), 3)}
    if kind == Kind.STEP:
        shapes = {
            Name.IDS: (torch.int16, 1, count),
            Name.HOPS: shapes[Name.HOPS],
            Name.STATE: (draw(state), count, 4),
            Name.Z: (draw(state), count, 3),
            Name.VOTES: (torch.int32, count - frame.want, 5),
        }
        shapes |= {Name.STATE_SCALE: (torch.float32, count, 1), Name.Z_SCALE: (torch.float32, count, 1)}
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    for name in draw(st.lists(st.sampled_from(list(shapes)), unique=True)):
        dtype, rows, columns = shapes[name]
        frame.tensors[name] = torch.randint(-128, 127, (rows, columns), generator=g).to(dtype)
    return frame


@quick
@given(frame=any_frame())
def test_a_frame_that_is_written_is_read(frame: Frame):
    assert same(decode(frame.encode(), SHAPE), frame)


def survives(data: bytes) -> None:
    """Whatever is wrong with bytes is a ProtocolError of one line that is not long."""
    message = ""
    try:
        frame = decode(data, SHAPE)
        for name, wire in ((Name.STATE, "float32"), (Name.Z, "int8"), (Name.STATE, "bfloat16")):
            take_state(frame, name, wire)  # type: ignore[arg-type]
        for model in (OpenRequest, Refusal, Pong, HelloReply):
            frame.message(model)
    except ProtocolError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 400


@quick
@given(frame=any_frame(), places=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=6), cut=st.integers(0, 30))
def test_changed_bytes_are_a_frame_or_a_protocol_error(frame: Frame, places: list[tuple[int, int]], cut: int):
    data = bytearray(frame.encode())
    for place, value in places:
        data[place % len(data)] = value
    survives(bytes(data))
    survives(bytes(data[: len(data) - cut]))
    survives(bytes(data) + bytes(cut))


@quick
@given(data=st.binary(max_size=200), kind=st.integers(0, 9), json_=st.text(max_size=80))
def test_any_bytes_are_a_frame_or_a_protocol_error(data: bytes, kind: int, json_: str):
    survives(data)
    survives(b"BTS1" + bytes([kind]) + data)
    survives(Frame(Kind.OPEN, TEXT, json=json_.encode()).encode())


def test_every_dtype_has_its_code():
    assert sorted(CODES.values()) == [1, 2, 3, 4, 5]
    assert {kind.name: int(kind) for kind in Kind} == {"OPEN": 1, "OPENED": 2, "STEP": 3, "ANSWER": 4, "CLOSE": 5, "ERROR": 6, "PING": 7, "PONG": 8}
