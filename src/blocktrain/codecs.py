"""Updates as bytes: what a worker sends to be averaged, and what turns version v of a block into v + 1.

An encoded update is a safetensors file. Its metadata has one entry, `blocktrain: "update/1 CODEC"`; its tensors are the update's, by name:

  fp32   F32 values                                                      1.000 of float32
  bf16   BF16 values                                                     0.500
  int8   I8 values, and F32 `NAME:scale`, one for each 256 values        0.254

The int8 value of x in a group is round(x / scale), scale = max|x| / 127 over the group, and it stands for value * scale: one float32 product, so
every machine rebuilds the same bits from the same bytes. What a lossy codec leaves out is the sender's `residual`; it is added to the sender's
next update (error feedback), so that nothing is lost for ever.

A receiver knows names and shapes before it reads, hence the exact size of every codec's file. `read_update` compares the header
with that and raises ProtocolError before anything larger than the header is touched. A tensor is decoded when it is asked for, one at
a time, and refused if it holds what is not finite. Besides the bytes themselves that takes a copy of the header, and at most 9 bytes for
each value of the tensor asked for.

Left out on purpose: zstd (1.08x on float32 deltas), codecs of fewer than 8 bits, and any way to name a type that is not listed here.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from blocktrain.errors import ProtocolError

Codec = Literal["fp32", "bf16", "int8"]
CODECS: tuple[Codec, ...] = get_args(Codec)
FORMAT = "update/1"
GROUP = 256  # values that share a scale
SCALE = ":scale"
SCALE_MIN = torch.finfo(torch.float32).tiny  # a smaller scale would be subnormal, which some processors flush to zero
SCALE_MAX = torch.finfo(torch.float32).max / 128  # value * scale stays finite
HEADER_BYTES = 1024, 256  # room in the header: once, and for each tensor besides its name

Shapes = Mapping[str, tuple[int, ...]]
DTYPES = {"F32": (torch.float32, 4), "BF16": (torch.bfloat16, 2), "I8": (torch.int8, 1)}  # of the file format: dtype, bytes a value


@dataclass(frozen=True)
class EncodedUpdate:
    """The bytes, and what they leave out of the tensors that were given: by name, float32, empty for fp32."""

    data: bytes
    residual: dict[str, Tensor]


def encode_update(tensors: Iterable[tuple[str, Tensor]], codec: Codec, residual: Mapping[str, Tensor] | None = None) -> EncodedUpdate:
    """Encode tensors as they come, each with what its last update left out; raises ProtocolError naming one that is not finite."""
    parts: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    for name, tensor in tensors:
        _check_name(name, parts)
        wanted = tensor.detach().cpu().float()
        if residual and name in residual:
            wanted = wanted + residual[name]
        encoded = _encode_tensor(name, wanted, codec)
        if codec != "fp32":
            left[name] = wanted - _decode_tensor(name, tuple(tensor.shape), codec, encoded.__getitem__)
        parts |= encoded
    return EncodedUpdate(save(parts, metadata={"blocktrain": f"{FORMAT} {codec}"}), left)


def _check_name(name: str, parts: Mapping[str, Tensor]) -> None:
    if not name or name == "__metadata__" or name.endswith(SCALE) or name in parts:
        raise ProtocolError(f"tensor {name!r}: cannot be sent under this name (empty, reserved or used twice)")


def _encode_tensor(name: str, wanted: Tensor, codec: Codec) -> dict[str, Tensor]:
    """The file's tensors for one of the update's."""
    if not bool(torch.isfinite(wanted).all()):
        raise ProtocolError(f"tensor {name}: holds values that are not finite and is not sent")
    if codec == "fp32":
        return {name: wanted.contiguous()}
    if codec == "bf16":
        return {name: _finite(name, wanted.bfloat16().contiguous())}
    padded = torch.nn.functional.pad(wanted.reshape(-1), (0, -wanted.numel() % GROUP))
    groups = padded.view(padded.numel() // GROUP, GROUP)
    scale = groups.abs().amax(dim=1) / 127  # (groups,)
    if bool((scale > SCALE_MAX).any()):
        raise ProtocolError(f"tensor {name}: holds values beyond the range of int8 with a float32 scale and is not sent")
    scale = torch.where(scale < SCALE_MIN, 0, scale)
    values = torch.where(scale[:, None] > 0, groups / scale.clamp(min=SCALE_MIN)[:, None], 0).round().clamp(-127, 127).to(torch.int8)
    return {name: values.view(-1)[: wanted.numel()].reshape(wanted.shape).contiguous(), name + SCALE: scale}


def _decode_tensor(name: str, shape: tuple[int, ...], codec: Codec, part: Callable[[str], Tensor]) -> Tensor:
    """One of the update's tensors, float32, from the file's; raises ProtocolError where it is not finite."""
    if codec != "int8":
        return _finite(name, part(name)).float()
    scale = part(name + SCALE)
    if bool((~(scale <= SCALE_MAX) | (scale < SCALE_MIN) & (scale != 0)).any()):
        raise ProtocolError(f"tensor {name}: has a scale that is negative, subnormal, too large or not finite")
    values = part(name).reshape(-1)
    decoded = torch.empty(values.numel())
    whole = values.numel() // GROUP * GROUP
    torch.mul(values[:whole].view(-1, GROUP), scale[: whole // GROUP, None], out=decoded[:whole].view(-1, GROUP))
    torch.mul(values[whole:], scale[whole // GROUP :], out=decoded[whole:])
    return decoded.view(shape)


def _finite(name: str, values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise ProtocolError(f"tensor {name}: holds values that are not finite")
    return values


# --- The file ---


def _layout(shapes: Shapes, codec: Codec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor in the file."""
    if codec != "int8":
        return {name: ("F32" if codec == "fp32" else "BF16", tuple(shape)) for name, shape in shapes.items()}
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        layout[name] = "I8", tuple(shape)
        layout[name + SCALE] = "F32", (-(-math.prod(shape) // GROUP),)
    return layout


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return DTYPES[dtype][1] * math.prod(shape)


def _header_limit(names: Iterable[str]) -> int:
    once, each = HEADER_BYTES
    return once + sum(each + 6 * len(name.encode()) for name in names)  # six bytes is the longest escape of one in JSON


def max_encoded_bytes(shapes: Shapes, codec: Codec) -> int:
    """No file of this codec for these shapes is longer: for a host that refuses a body by its declared length."""
    layout = _layout(shapes, codec)
    return 8 + _header_limit(layout) + sum(_num_bytes(*entry) for entry in layout.values())


@dataclass(frozen=True)
class Update:
    """An encoded update whose header is right. Values are decoded, and checked, when they are asked for."""

    codec: Codec
    shapes: Shapes
    _payload: memoryview
    _parts: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]  # dtype, shape, first byte, one past the last

    def tensor(self, name: str) -> Tensor:
        """One tensor, float32, in memory of its own; raises ProtocolError if a value or scale is not finite."""
        return _decode_tensor(name, tuple(self.shapes[name]), self.codec, self._part)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in the order of names, one in memory at a time."""
        for name in sorted(self.shapes):
            yield name, self.tensor(name)

    def _part(self, name: str) -> Tensor:
        dtype, shape, begin, end = self._parts[name]
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(self._payload[begin:end]), dtype=dtype).view(shape)  # a copy: aligned and writable


def read_update(data: bytes | memoryview, shapes: Shapes, allowed: Iterable[Codec] = CODECS) -> Update:
    """Check everything that can be checked without the values; raises ProtocolError naming the tensor or field."""
    view = memoryview(data)
    header, payload = _split(view, max(max_encoded_bytes(shapes, codec) for codec in CODECS), _header_limit(_layout(shapes, "int8")))
    codec = _codec(header.pop("__metadata__", None), tuple(allowed))
    layout = _layout(shapes, codec)
    for name in sorted(layout.keys() ^ header.keys()):
        raise ProtocolError(f"tensor {name[:200]!r} is {'missing' if name in layout else 'not one of this update'}")
    parts = {name: _entry(name, header[name], *expected) for name, expected in layout.items()}
    _check_cover(parts, len(payload))
    return Update(codec, dict(shapes), payload, parts)


def _split(view: memoryview, limit: int, header_limit: int) -> tuple[dict[str, Any], memoryview]:
    if not 8 <= len(view) <= limit:
        raise ProtocolError(f"update: has {len(view)} bytes, an update of this shape has between 8 and {limit}")
    (length,) = struct.unpack("<Q", view[:8])
    if not 2 <= length <= min(header_limit, len(view) - 8):
        raise ProtocolError(f"update: declares a header of {length} bytes, at most {min(header_limit, len(view) - 8)} are possible")
    try:
        header = json.loads(bytes(view[8 : 8 + length]).decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"update: the header is not the JSON that was expected ({str(error)[:100]})") from None
    if not isinstance(header, dict):
        raise ProtocolError("update: the header is not a JSON object")
    return header, view[8 + length :]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name stands twice")
    return fields


def _codec(metadata: Any, allowed: tuple[Codec, ...]) -> Codec:
    for codec in allowed:
        if metadata == {"blocktrain": f"{FORMAT} {codec}"}:
            return codec
    raise ProtocolError(f"update: metadata is {repr(metadata)[:100]}, expected blocktrain: '{FORMAT} CODEC' with CODEC of {', '.join(allowed)}")


def _entry(name: str, entry: Any, dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ProtocolError(f"tensor {name}: its entry must have dtype, shape and data_offsets")
    if entry["dtype"] != dtype:
        raise ProtocolError(f"tensor {name}: has dtype {repr(entry['dtype'])[:20]}, expected {dtype}")
    if not _is_counts(entry["shape"]) or tuple(entry["shape"]) != shape:
        raise ProtocolError(f"tensor {name}: has shape {repr(entry['shape'])[:100]}, expected {list(shape)}")
    offsets = entry["data_offsets"]
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != _num_bytes(dtype, shape):
        raise ProtocolError(f"tensor {name}: data_offsets {repr(offsets)[:100]} are not those of {_num_bytes(dtype, shape)} bytes")
    return DTYPES[dtype][0], shape, offsets[0], offsets[1]


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _check_cover(parts: Mapping[str, tuple[torch.dtype, tuple[int, ...], int, int]], num_bytes: int) -> None:
    """Every byte of the payload belongs to exactly one tensor."""
    reached = 0
    for name, (_, _, begin, end) in sorted(parts.items(), key=lambda item: item[1][2:]):
        if begin != reached:
            raise ProtocolError(f"tensor {name}: begins at byte {begin} of the values, expected {reached}")
        reached = end
    if reached != num_bytes:
        raise ProtocolError(f"update: has {num_bytes} bytes of values, expected {reached}")


# --- From version v to v + 1 ---


def apply_delta(base: Callable[[str], Tensor], update: Update) -> Iterator[tuple[str, Tensor]]:
    """The tensors of v + 1 from those of v, one at a time, in v's dtype.

    Sender and receivers both take v + 1 from here, so a lossy codec cannot set them apart: what it left out is in the sender's residual.
    """
    for name, delta in update.tensors():
        tensor = base(name)
        yield name, (tensor.float() + delta).to(tensor.dtype)
