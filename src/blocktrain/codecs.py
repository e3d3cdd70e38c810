"""Updates as bytes: what a worker sends to be averaged, and what turns version v of a block into v + 1.

An encoded update is a safetensors file. Its metadata has one entry, `blocktrain: "update/1 CODEC"`; its tensors are the update's, by name:

  fp32   F32 values                                                      1.000 of float32
  bf16   BF16 values                                                     0.500
  int8   I8 values, and F32 `NAME:scale`, one for each 256 values        0.254

The int8 value of x in a group is round(x / scale), scale = max|x| / 127 over the group, and it stands for value * scale: one float32 product, so
every machine rebuilds the same bits from the same bytes. What a lossy codec leaves out is the sender's `residual`; it is added to the sender's
next update (error feedback), so that nothing is lost for ever.

A sender writes the tensors in the order of their names, each followed by its scale, and knows the file's length before its first byte. It holds one
tensor and its residual at a time; besides these, encoding takes about 10 bytes for each value of a slice of at most 8 Mi values.

A receiver knows names and shapes before it reads, hence the exact size of every codec's values. `read_update` compares the header with that and
raises ProtocolError before anything larger than the header is touched; the file's tensors may lie in any order. A tensor is decoded when it is asked
for, one at a time, and refused if it holds what is not finite. Besides the float32 result that takes its scales and a slice of 8 Mi values.

Left out on purpose: zstd (1.08x on float32 deltas), codecs of fewer than 8 bits, and any way to name a type that is not listed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from blocktrain.errors import ProtocolError
from blocktrain.streams import METADATA, BytesSource, Entries, Entry, Source, TensorFile, bytes_of, header_bytes, header_limit, in_order, values_size

Codec = Literal["fp32", "bf16", "int8"]
CODECS: tuple[Codec, ...] = get_args(Codec)
FORMAT = "update/1"
GROUP = 256  # values that share a scale
SLICE = 1 << 23  # values that are encoded or decoded at once, a whole number of groups
SCALE = ":scale"
SCALE_MIN = torch.finfo(torch.float32).tiny  # a smaller scale would be subnormal, which some processors flush to zero
SCALE_MAX = torch.finfo(torch.float32).max / 128  # value * scale stays finite
METADATA_BYTES = 1024  # room for metadata in the header

Shapes = Mapping[str, tuple[int, ...]]
STORED: dict[Codec, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


# --- The file ---


def _layout(shapes: Shapes, codec: Codec) -> Entries:
    """Type and shape of every tensor in the file, in the order in which a sender writes them."""
    layout: dict[str, Entry] = {}
    for name, shape in sorted(shapes.items()):
        layout[name] = STORED[codec], tuple(shape)
        if codec == "int8":
            layout[name + SCALE] = torch.float32, (-(-math.prod(shape) // GROUP),)
    return layout


def _header(shapes: Shapes, codec: Codec) -> bytes:
    return header_bytes(_layout(shapes, codec), {"blocktrain": f"{FORMAT} {codec}"})


def encoded_size(shapes: Shapes, codec: Codec) -> int:
    """The length of what `encode_stream` writes."""
    return len(_header(shapes, codec)) + values_size(_layout(shapes, codec))


def max_encoded_bytes(shapes: Shapes, codec: Codec) -> int:
    """No file of this codec for these shapes is longer, whoever wrote it: for a host that refuses a body by its declared length."""
    layout = _layout(shapes, codec)
    return 8 + header_limit(layout, METADATA_BYTES) + values_size(layout)


# --- Writing ---


def _nothing(name: str) -> None:
    """No residual."""


def encode_stream(
    shapes: Shapes,
    tensors: Iterable[tuple[str, Tensor]],
    codec: Codec,
    residual: Callable[[str], Tensor | None] = _nothing,
    keep: Callable[[str, Tensor], None] | None = None,
) -> Iterator[bytes | memoryview]:
    """The file's bytes, from tensors that come in the order of sorted names.

    Each is sent with `residual(name)`, what its last update left out; `keep` then gets what this one leaves out, float32, unless the codec is fp32.
    A chunk is to be used before the next is asked for. Raises ProtocolError naming a tensor that cannot be sent; what was written is to be dropped.
    """
    for name in shapes:
        _check_name(name)
    yield _header(shapes, codec)
    for name, tensor in in_order(shapes, tensors):
        assert tuple(tensor.shape) == tuple(shapes[name]), f"tensor {name} is not of the shape that was announced"
        left = torch.empty(tensor.shape) if keep and codec != "fp32" else None
        yield from _encode_tensor(name, tensor, codec, residual(name), left)
        if keep and left is not None:
            keep(name, left)
        del tensor, left


@dataclass(frozen=True)
class EncodedUpdate:
    """The bytes, and what they leave out of the tensors that were given: by name, float32, empty for fp32."""

    data: bytes
    residual: dict[str, Tensor]


def encode_update(tensors: Iterable[tuple[str, Tensor]], codec: Codec, residual: Mapping[str, Tensor] | None = None) -> EncodedUpdate:
    """`encode_stream` for what fits in memory, given in any order."""
    given: dict[str, Tensor] = {}
    for name, tensor in tensors:
        _check_name(name, given)
        given[name] = tensor
    left: dict[str, Tensor] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    data = b"".join(encode_stream(shapes, sorted(given.items()), codec, (residual or {}).get, left.__setitem__))
    return EncodedUpdate(data, left)


def _check_name(name: str, taken: Iterable[str] = ()) -> None:
    if not name or name == METADATA or name.endswith(SCALE) or name in taken:
        raise ProtocolError(f"tensor {name!r}: cannot be sent under this name (empty, reserved or used twice)")


def _encode_tensor(name: str, tensor: Tensor, codec: Codec, residual: Tensor | None, left: Tensor | None) -> Iterator[memoryview]:
    """One tensor's values, then its scales; fills `left` with what they leave out."""
    flat = tensor.detach().reshape(-1)
    scales: list[Tensor] = []
    for begin in range(0, flat.numel(), SLICE):
        part = slice(begin, begin + SLICE)
        wanted = flat[part].cpu().float()
        if residual is not None:
            wanted = wanted + residual.reshape(-1)[part].cpu()
        values, scale = _encode_values(name, wanted, codec)
        if left is not None:
            rest = left.view(-1)[part]
            _decode_values(values, scale, rest)
            torch.sub(wanted, rest, out=rest)
        yield from bytes_of(values)
        if scale is not None:
            scales.append(scale)
    for scale in scales:
        yield from bytes_of(scale)


def _encode_values(name: str, wanted: Tensor, codec: Codec) -> tuple[Tensor, Tensor | None]:
    """The values to be stored for some of a tensor's, and the scales of their groups."""
    if not bool(torch.isfinite(wanted).all()):
        raise ProtocolError(f"tensor {name}: holds values that are not finite and is not sent")
    if codec != "int8":
        return _finite(name, wanted.to(STORED[codec])), None
    short = -wanted.numel() % GROUP
    groups = (torch.nn.functional.pad(wanted, (0, short)) if short else wanted).view(-1, GROUP)
    scale = torch.maximum(groups.amax(dim=1), groups.amin(dim=1).neg()) / 127  # (groups,)
    if bool((scale > SCALE_MAX).any()):
        raise ProtocolError(f"tensor {name}: holds values beyond the range of int8 with a float32 scale and is not sent")
    scale = torch.where(scale < SCALE_MIN, 0, scale)
    values = groups / scale.clamp(min=SCALE_MIN)[:, None]
    values = values.masked_fill_((scale == 0)[:, None], 0).round_().clamp_(-127, 127).to(torch.int8)
    return values.view(-1)[: wanted.numel()], scale


def _finite(name: str, values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise ProtocolError(f"tensor {name}: holds values that are not finite")
    return values


# --- Reading ---


@dataclass(frozen=True)
class Update:
    """An encoded update whose header is right. Values are read, decoded and checked when they are asked for."""

    codec: Codec
    shapes: Shapes
    _file: TensorFile

    def tensor(self, name: str) -> Tensor:
        """One tensor, float32, in memory of its own; raises ProtocolError if a value or scale is not finite."""
        shape = tuple(self.shapes[name])
        decoded = torch.empty(math.prod(shape))
        scales = _checked_scales(name, self._file.tensor(name + SCALE)) if self.codec == "int8" else None
        for begin in range(0, decoded.numel(), SLICE):
            end = min(begin + SLICE, decoded.numel())
            values = self._file.values(name, begin, end)
            if scales is None:
                _decode_values(_finite(name, values), None, decoded[begin:end])
            else:
                _decode_values(values, scales[begin // GROUP : -(-end // GROUP)], decoded[begin:end])
        return decoded.view(shape)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in the order of names, one in memory at a time."""
        for name in sorted(self.shapes):
            yield name, self.tensor(name)


def read_update(data: bytes | memoryview | Source, shapes: Shapes, allowed: Iterable[Codec] = CODECS) -> Update:
    """Check everything that can be checked without the values; raises ProtocolError naming the tensor or field."""
    source = BytesSource(data) if isinstance(data, bytes | bytearray | memoryview) else data
    limit = max(max_encoded_bytes(shapes, codec) for codec in CODECS)
    if not 8 <= source.size <= limit:
        raise ProtocolError(f"update: has {source.size} bytes, an update of this shape has between 8 and {limit}")
    accepted = tuple(allowed)
    max_header = header_limit(_layout(shapes, "int8"), METADATA_BYTES)
    file = TensorFile(source, "update", lambda metadata: _layout(shapes, _codec(metadata, accepted)), max_header)
    return Update(_codec(file.metadata, accepted), dict(shapes), file)


def _codec(metadata: Mapping[str, str], allowed: tuple[Codec, ...]) -> Codec:
    for codec in allowed:
        if metadata == {"blocktrain": f"{FORMAT} {codec}"}:
            return codec
    raise ProtocolError(f"update: metadata is {repr(metadata)[:100]}, expected blocktrain: '{FORMAT} CODEC' with CODEC of {', '.join(allowed)}")


def _checked_scales(name: str, scale: Tensor) -> Tensor:
    if bool((~(scale <= SCALE_MAX) | (scale < SCALE_MIN) & (scale != 0)).any()):
        raise ProtocolError(f"tensor {name}: has a scale that is negative, subnormal, too large or not finite")
    return scale


def _decode_values(values: Tensor, scale: Tensor | None, out: Tensor) -> None:
    """What stored values stand for."""
    if scale is None:
        out.copy_(values)
        return
    whole = values.numel() // GROUP * GROUP
    torch.mul(values[:whole].view(-1, GROUP), scale[: whole // GROUP, None], out=out[:whole].view(-1, GROUP))
    torch.mul(values[whole:], scale[whole // GROUP :], out=out[whole:])


# --- From version v to v + 1 ---


def apply_delta(base: Callable[[str], Tensor], update: Update) -> Iterator[tuple[str, Tensor]]:
    """The tensors of v + 1 from those of v, one at a time, in v's dtype.

    Sender and receivers both take v + 1 from here, so a lossy codec cannot set them apart: what it left out is in the sender's residual.
    """
    for name, delta in update.tensors():
        tensor = base(name)
        yield name, (tensor.float() + delta).to(tensor.dtype)
