"""Updates become the next version of a part, and the gate that each update passes first. Memory is a few times the largest tensor.

A version is a manifest (JSON in the database) and its blobs:

  file      every tensor, as in a checkpoint
  delta     with a lossy `outer.down_codec`: the encoded step from the version before. The version is *defined* as that one plus the decoded
            delta, so whoever holds the one before rebuilds the same bits
  residual  what the delta left out; the next delta carries it
  momentum  of the outer optimizer

Files are read by ranges and written as streams. Where two files follow from one outer step it is computed twice rather than held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blocktrain.codecs import CODECS, Codec, Update, encode_stream, read_update
from blocktrain.errors import ProtocolError
from blocktrain.streams import TensorFile, tensor_stream
from blocktrain.swarm.parts import INTERFACE, Layout
from blocktrain.swarm.state import Share
from blocktrain.swarm.store import Blob, Blobs, BlobSource
from blocktrain.training.outer import Contribution, NormRule, OuterRule, judge_norm, judge_norms, outer_step

Manifest = dict[str, Any]
NORM_MAX = 1e15  # of a part of an update: far beyond any training, and sums of thousands of such updates are finite


@dataclass(frozen=True)
class Arrived:
    """An update that is here: how to read it, and what the gate measured."""

    key: str
    first: int  # block
    stop: int
    source: BlobSource
    sha256: str
    norms: Mapping[str, float]  # part -> Euclidean norm


# --- The gate ---


def inspect(source: BlobSource, layout: Layout, first: int, stop: int, codec: Codec) -> dict[str, float]:
    """Look at names, shapes, dtypes and values of an update, one tensor at a time; returns the norm of each part. Raises ProtocolError."""
    update = read_update(source, layout.update_shapes(first, stop), [codec])
    squares: dict[str, list[float]] = {part: [] for part in layout.parts_of(first, stop)}
    for name, tensor in update.tensors():
        squares[name.partition("/")[0]].append(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2)
    norms = {part: math.sqrt(math.fsum(values)) for part, values in squares.items()}
    for part, norm in norms.items():
        if not norm <= NORM_MAX:
            raise ProtocolError(f"{part}: the norm of its update is {norm:.4g}, more than {NORM_MAX:g}")
    return norms


def norm_fault(norms: Mapping[str, float], others: Iterable[Mapping[str, float]], rule: NormRule) -> str:
    """Why an update is refused beside the others of its round; empty if it is not."""
    others = list(others)
    for part, norm in norms.items():
        verdict = judge_norm(norm, [other[part] for other in others if part in other], rule)
        if verdict.refused:
            return f"{part}: {verdict.reason}"
    return ""


# --- The next version ---


def first_version(blobs: Blobs, layout: Layout, part: str) -> Manifest:
    """Version 0 of a part."""
    file = blobs.put_stream(f"versions/{part}/{0:08d}", ".safetensors", tensor_stream(layout.entries[part], layout.initial(part)))
    return {"part": part, "version": 0, "file": vars(file), "delta": None, "residual": None, "momentum": None, "updates": []}


def contributions(
    part: str, block: int, layout: Layout, shares: Sequence[Share], arrived: Mapping[str, Arrived], rule: NormRule
) -> list[Contribution]:
    """The round's updates as the outer step reads them, each with its norm judged beside the others; those beyond reason are left out.

    An update's change of the interface is counted once, in the round of its first block.
    """
    found = []
    counted = [share for share in shares if part != INTERFACE or arrived[share.key].first == block]
    verdicts = judge_norms([arrived[share.key].norms[part] for share in counted], rule)
    for share, verdict in zip(counted, verdicts, strict=True):
        mine = arrived[share.key]
        if verdict.refused:
            continue
        update = read_update(mine.source, layout.update_shapes(mine.first, mine.stop), CODECS)
        found.append(Contribution(share.key, share.weight, _loader(update, part), verdict.scale))
    return found


def _loader(update: Update, part: str) -> Callable[[str], Tensor]:
    return lambda name: update.tensor(f"{part}/{name}")


@dataclass(frozen=True)
class Step:
    """What turns a version of a part into the next."""

    blobs: Blobs
    layout: Layout
    part: str
    block: int  # whose round it is
    before: Manifest
    contributions: Sequence[Contribution]
    rule: OuterRule
    ages: Mapping[str, int]  # of the round's updates by key: versions behind
    down_codec: Codec

    @property
    def fresh(self) -> int:
        """Updates from the version itself that are in the mean; those left out as damaged or beyond reason are not."""
        return sum(self.ages[c.key] == 0 for c in self.contributions)

    def base(self) -> TensorFile:
        return _open(self.blobs, self.before["file"], self.part)

    def tensors(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """(name, value, momentum) of every tensor of the exact next version, in the order of names."""
        base, momentum = self.base(), self.before["momentum"]
        load = _open(self.blobs, momentum, self.part).tensor if momentum else None
        learns = set(self.layout.moved_by(self.block, self.part))
        for name in sorted(self.layout.entries[self.part]):
            rule = replace(self.rule, lr=self.rule.lr / self.layout.num_starts(name)) if self.part == INTERFACE else self.rule
            for tensor in outer_step([name], learns, base.tensor, self.contributions, rule, fresh=self.fresh, momentum=load):
                yield tensor.name, tensor.value, tensor.momentum

    def name(self, kind: str = "") -> str:
        return f"versions/{self.part}/{self.before['version'] + 1:08d}{kind}"


def next_version(step: Step) -> Manifest:
    """Write the next version of a part and return its manifest, not yet recorded anywhere."""
    part, before, blobs = step.part, step.before, step.blobs
    manifest = {**before, "version": before["version"] + 1, "delta": None, "updates": [], "parent": before["file"]["sha256"]}
    if not step.contributions or not step.layout.trainable[part]:
        return manifest  # nothing to move it: the same file under the next number
    learns = step.layout.trainable[part]
    if step.rule.uses_momentum(step.fresh):
        entries = {name: (torch.float32, step.layout.entries[part][name][1]) for name in learns}
        kept = ((name, momentum) for name, _, momentum in step.tensors() if momentum is not None)
        manifest["momentum"] = vars(blobs.put_stream(step.name("-momentum"), ".safetensors", tensor_stream(entries, kept)))
    if step.down_codec == "fp32":
        values = ((name, value) for name, value, _ in step.tensors())
    else:
        manifest |= _lossy(step)
        values = _after_delta(step, manifest["delta"])
    file = blobs.put_stream(step.name(), ".safetensors", tensor_stream(step.layout.entries[part], values))
    return manifest | {"file": vars(file), "updates": [c.key for c in step.contributions]}


def _lossy(step: Step) -> dict[str, Any]:
    """The encoded delta, and what it leaves out."""
    shapes, residual = step.layout.part_shapes(step.part), step.before["residual"]
    left = _open(step.blobs, residual, step.part).tensor if residual else None

    def wanted() -> Iterator[tuple[str, Tensor]]:
        base = step.base()
        for name, value, _ in step.tensors():
            if name in shapes:
                yield name, value.float() - base.tensor(name).float()

    chunks = encode_stream(shapes, wanted(), step.down_codec, left or (lambda _: None))
    delta = step.blobs.put_stream(step.name("-delta"), ".safetensors", chunks)
    update = read_update(BlobSource(step.blobs, [(delta.name, delta.size)]), shapes)

    def still_left() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in wanted():
            yield name, (tensor + left(name) if left else tensor) - update.tensor(name)

    entries = {name: (torch.float32, shape) for name, shape in shapes.items()}
    kept = step.blobs.put_stream(step.name("-residual"), ".safetensors", tensor_stream(entries, still_left()))
    return {"delta": vars(delta) | {"codec": step.down_codec}, "residual": vars(kept)}


def _after_delta(step: Step, delta: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    base, shapes = step.base(), step.layout.part_shapes(step.part)
    update = read_update(BlobSource(step.blobs, [(delta["name"], delta["size"])]), shapes)
    yield from moved(base, update, shapes)


def moved(base: TensorFile, update: Update, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a part after a delta, in the order of names: the one sum by which sender and receivers take v + 1 from v."""
    for name in sorted(base.entries):
        tensor = base.tensor(name)
        yield name, (tensor.float() + update.tensor(name)).to(tensor.dtype) if name in shapes else tensor


def encoded_part(blobs: Blobs, layout: Layout, part: str, manifest: Manifest, codec: Codec) -> Blob:
    """A version as a frozen upstream block travels: every tensor of it, encoded."""
    file = _open(blobs, manifest["file"], part)
    shapes = {name: shape for name, (_, shape) in layout.entries[part].items()}
    chunks = encode_stream(shapes, ((name, file.tensor(name)) for name in sorted(shapes)), codec)
    return blobs.put_stream(f"versions/{part}/{manifest['version']:08d}-{codec}", ".safetensors", chunks)


def _open(blobs: Blobs, blob: Mapping[str, Any], part: str) -> TensorFile:
    return TensorFile(BlobSource(blobs, [(blob["name"], blob["size"])]), f"{part} ({blob['name']})")
