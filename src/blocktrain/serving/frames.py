"""The bytes between a client and stages, and between stages: one frame a message.

All numbers little-endian. A frame is

    4s magic "BTS1" | u8 kind | u8 number of tensors | u16 0 | 16s text | u32 epoch | u32 step | u32 length of JSON
    | STEP and ANSWER only: u32 keep | u64 offset | u32 count | u32 want | u16 enter | u16 0 | u32 remaining ms
    | JSON | tensors: u8 name | u8 dtype | u16 0 | u32 rows | u32 columns | rows x columns numbers

A reader knows what each frame may hold before it looks at a tensor: which names, which dtype, how many rows and columns. What is not exactly that is
a ProtocolError, and nothing is allocated for it. JSON is for what is sent once a text; a step has none. Nothing here names code or a type to make.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.errors import ProtocolError
from blocktrain.model.transformer import VOCABULARY
from blocktrain.serving.compute import Wire, from_int8, to_int8

PROTOCOL = (1, 0)  # major: who differs is refused; minor: who knows less ignores what it does not know
MAGIC = b"BTS1"
MAX_JSON = 1 << 14
MAX_POSITION = 1 << 40
TARGET = r"(?:\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[A-Za-z0-9_.-]+):[0-9]{1,5}"  # HOST:PORT or [IPv6]:PORT; nothing else is ever dialled

_HEAD = struct.Struct("<4sBBH16sIII")
_STEP = struct.Struct("<IQIIHHI")
_TENSOR = struct.Struct("<BBHII")


class Kind(IntEnum):
    OPEN = 1  # client -> each stage of a route: JSON
    OPENED = 2
    STEP = 3  # client -> first stage -> ... -> last stage
    ANSWER = 4  # last stage -> client
    CLOSE = 5  # client -> each stage
    ERROR = 6  # any stage -> client: JSON
    PING = 7  # client -> stage, answered at once even while it computes
    PONG = 8  # JSON


class Name(IntEnum):
    IDS = 1
    STATE = 2
    STATE_SCALE = 3
    Z = 4
    Z_SCALE = 5
    LOGITS = 6
    HOPS = 7  # one row a stage: first block, microseconds waited, microseconds computed
    VOTES = 8  # of the wanted positions, where all blocks vote: sum of log-probabilities so far, in units of 2^-16 nats


DTYPES = {1: torch.int16, 2: torch.float32, 3: torch.bfloat16, 4: torch.int8, 5: torch.int32}
CODES = {dtype: code for code, dtype in DTYPES.items()}
WIRE_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class Message(BaseModel):
    """JSON of a frame or of Hello. Fields that are not known are ignored: a newer minor version may have more."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class OpenRequest(Message):
    """A text on one stage: which blocks of it, how states are rounded, and where to go from here."""

    wire: Wire
    skip: list[int] = Field(default=[], max_length=4096)
    first: int = Field(ge=0, le=4096)  # blocks first ... stop of the text run here
    stop: int = Field(ge=1, le=4096)
    next: str = Field(default="", max_length=300, pattern=f"^(?:{TARGET})?$")  # address of the stage after this one; "" answers the client


class Refusal(Message):
    """Why a text cannot go on here."""

    kind: str  # refused: the request is wrong; full; unknown: the text is not here; unreachable: the next stage; failed: a fault here
    reason: str
    address: str = ""  # of the stage that could not be reached


class Pong(Message):
    """How a stage is, and where the text that was asked about is."""

    texts: int
    stalled_s: float  # for how long the blocks have been at what they compute now
    epoch: int = -1  # of the text that was asked about; -1: it is not here
    step: int = -1  # the last one that came in
    forwarded: int = -1  # the last one that left


class HelloRequest(Message):
    protocol: list[int] = Field(min_length=2, max_length=2)


class HelloReply(Message):
    """Who a stage is. `digests` are the sha256 of the weight files it serves from."""

    protocol: list[int] = Field(min_length=2, max_length=2)
    node: str
    state: str  # loading, up, failed
    reason: str = ""
    config_digest: str = ""
    first: int = 0
    stop: int = 0
    digests: dict[str, str] = {}
    checkpoint: str = ""  # one digest of all the weights of the checkpoint, those of other stages too
    step: int = 0  # at which it was made
    dtype: str = ""
    max_texts: int = 0
    texts: int = 0
    free_memory: int = 0


@dataclass
class Frame:
    """One message. What a kind does not have is at its default."""

    kind: Kind
    text: bytes = bytes(16)
    epoch: int = 0
    step: int = 0
    keep: int = 0
    offset: int = 0
    count: int = 0  # new positions T
    want: int = 0
    enter: int = 0  # block whose input comes along
    remaining_ms: int = 0  # 0: no deadline
    json: bytes = b""
    tensors: dict[Name, Tensor] = field(default_factory=dict)

    def encode(self) -> bytes:
        parts = [_HEAD.pack(MAGIC, self.kind, len(self.tensors), 0, self.text, self.epoch, self.step, len(self.json))]
        if self.kind in (Kind.STEP, Kind.ANSWER):
            parts.append(_STEP.pack(self.keep, self.offset, self.count, self.want, self.enter, 0, self.remaining_ms))
        parts.append(self.json)
        for name, tensor in self.tensors.items():
            rows, columns = tensor.shape
            parts.append(_TENSOR.pack(name, CODES[tensor.dtype], 0, rows, columns))
            parts.append(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return b"".join(parts)

    def message(self, model: type[Any]) -> Any:
        """The JSON as a message; raises ProtocolError naming the field."""
        return read_message(self.json, model)


def message_frame(kind: Kind, text: bytes, message: Message, epoch: int = 0, step: int = 0) -> Frame:
    return Frame(kind, text, epoch, step, json=message.model_dump_json().encode())


def read_message(data: bytes, model: type[Any]) -> Any:
    """Raises ProtocolError naming the first field that is wrong."""
    if len(data) > MAX_JSON:
        raise ProtocolError(f"message: {len(data)} bytes, at most {MAX_JSON} are read")
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ProtocolError(f"{'.'.join(map(str, first['loc'])) or 'message'}: {first['msg'][:200]}") from None


@dataclass(frozen=True)
class Shape:
    """What tensors of a run's frames may be."""

    positions: int
    width: int
    embed_dim: int
    vocabulary: int
    blocks: int

    @classmethod
    def of(cls, config: RunConfig) -> Shape:
        """Of a run."""
        model = config.model
        return cls(model.positions, model.width, model.embed_dim, VOCABULARY, model.blocks)

    @property
    def max_bytes(self) -> int:
        """Of a frame."""
        row = 2 + 4 * (self.width + self.embed_dim + 2) + 4 * self.vocabulary
        return self.positions * row + 12 * self.blocks + MAX_JSON + 1024


def text_of(data: bytes) -> bytes:
    """The text that bytes are about, where they begin like a frame."""
    return data[8:24] if len(data) >= _HEAD.size and data[:4] == MAGIC else b""


def decode(data: bytes, shape: Shape) -> Frame:
    """Read a frame; raises ProtocolError saying what is wrong with it."""
    if len(data) < _HEAD.size:
        raise ProtocolError(f"frame: {len(data)} bytes, a head has {_HEAD.size}")
    if len(data) > shape.max_bytes:
        raise ProtocolError(f"frame: {len(data)} bytes, this run's have at most {shape.max_bytes}")
    magic, kind, num_tensors, zero, text, epoch, step, json_length = _HEAD.unpack_from(data)
    if magic != MAGIC or zero:
        raise ProtocolError(f"frame: does not begin like one (magic {magic!r})")
    try:
        frame = Frame(Kind(kind), text, epoch, step)
    except ValueError:
        raise ProtocolError(f"frame: kind {kind} is not known") from None
    at = _HEAD.size
    if frame.kind in (Kind.STEP, Kind.ANSWER):
        if len(data) < at + _STEP.size:
            raise ProtocolError("frame: ends in the middle of its head")
        frame.keep, frame.offset, frame.count, frame.want, frame.enter, _, frame.remaining_ms = _STEP.unpack_from(data, at)
        at += _STEP.size
        _check_step(frame, shape)
    if json_length > min(MAX_JSON, len(data) - at):
        raise ProtocolError(f"frame: JSON of {json_length} bytes, at most {min(MAX_JSON, len(data) - at)} can be there")
    frame.json = data[at : at + json_length]
    at = _read_tensors(frame, data, at + json_length, num_tensors, shape)
    if at != len(data):
        raise ProtocolError(f"frame: {len(data) - at} bytes after its end")
    return frame


def _check_step(frame: Frame, shape: Shape) -> None:
    if not 1 <= frame.count <= shape.positions or frame.keep + frame.count > shape.positions:
        raise ProtocolError(f"keep, count: {frame.count} positions after {frame.keep} do not fit into the {shape.positions} of this run")
    if not frame.want < frame.count:
        raise ProtocolError(f"want: {frame.want} is not below count {frame.count}")
    if frame.offset > MAX_POSITION:
        raise ProtocolError(f"offset: {frame.offset} is beyond {MAX_POSITION}")
    if not frame.enter < shape.blocks:
        raise ProtocolError(f"enter: {frame.enter}, the run has {shape.blocks} blocks")


def _expected(frame: Frame, shape: Shape) -> dict[Name, tuple[tuple[torch.dtype, ...], int, int]]:
    """name -> (dtypes, rows, columns) of what a frame may hold; rows 0 is any number up to the run's blocks."""
    states = tuple(WIRE_DTYPES.values())
    t = frame.count
    if frame.kind == Kind.STEP:
        return {
            Name.IDS: ((torch.int16,), 1, t),
            Name.STATE: (states, t, shape.width),
            Name.STATE_SCALE: ((torch.float32,), t, 1),
            Name.Z: (states, t, shape.embed_dim),
            Name.Z_SCALE: ((torch.float32,), t, 1),
            Name.HOPS: ((torch.int32,), 0, 3),
            Name.VOTES: ((torch.int32,), t - frame.want, shape.vocabulary),
        }
    if frame.kind == Kind.ANSWER:
        found = t - frame.want, shape.vocabulary
        return {Name.LOGITS: ((torch.float32,), *found), Name.VOTES: ((torch.int32,), *found), Name.HOPS: ((torch.int32,), 0, 3)}
    return {}


def _read_tensors(frame: Frame, data: bytes, at: int, number: int, shape: Shape) -> int:
    expected = _expected(frame, shape)
    for _ in range(number):
        if len(data) < at + _TENSOR.size:
            raise ProtocolError("frame: ends in the middle of a tensor's head")
        name, code, zero, rows, columns = _TENSOR.unpack_from(data, at)
        at += _TENSOR.size
        known = name in Name.__members__.values() and Name(name) in expected
        if not known or zero:
            raise ProtocolError(f"tensor {name}: not part of a {frame.kind.name} frame")
        label = Name(name)
        dtypes, want_rows, want_columns = expected[label]
        if label in frame.tensors:
            raise ProtocolError(f"{label.name}: twice in one frame")
        if code not in DTYPES or DTYPES[code] not in dtypes:
            raise ProtocolError(f"{label.name}: dtype {code} is not one of {[CODES[d] for d in dtypes]}")
        if columns != want_columns or (rows != want_rows if want_rows else not 1 <= rows <= shape.blocks):
            raise ProtocolError(f"{label.name}: shape {rows} x {columns}, expected {want_rows or 'some'} x {want_columns}")
        size = rows * columns * DTYPES[code].itemsize
        if len(data) - at < size:
            raise ProtocolError(f"{label.name}: {len(data) - at} bytes are left, {size} are needed")
        frame.tensors[label] = torch.frombuffer(bytearray(memoryview(data)[at : at + size]), dtype=DTYPES[code]).view(rows, columns)
        at += size
    return at


def put_state(frame: Frame, name: Name, x: Tensor | None, wire: Wire) -> None:
    """A rounded float32 state (T, n) into a frame; what is read out again has the same bits."""
    if x is None:
        return
    if wire == "int8":
        frame.tensors[name], frame.tensors[Name(name + 1)] = to_int8(x)
    else:
        frame.tensors[name] = x.to(WIRE_DTYPES[wire])


def take_state(frame: Frame, name: Name, wire: Wire) -> Tensor | None:
    """(T, n) float32, or None where it did not come; raises ProtocolError where it came in another form than the text's."""
    x, scale = frame.tensors.get(name), frame.tensors.get(Name(name + 1))
    if x is None:
        return None
    if x.dtype != WIRE_DTYPES[wire] or (scale is not None) != (wire == "int8"):
        raise ProtocolError(f"{name.name}: {x.dtype}, this text's states are {wire}")
    x = x.float() if scale is None else from_int8(x, scale)
    if not bool(x.isfinite().all()):
        raise ProtocolError(f"{name.name}: holds a number that is not finite")
    return x


def ids_tensor(ids: Any) -> Tensor:
    return torch.tensor([list(ids)], dtype=torch.int16)
