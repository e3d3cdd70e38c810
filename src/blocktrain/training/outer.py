"""The outer step: many workers' updates of one block become its next version, one tensor at a time.

A worker sends its pseudo-gradient, the change new - base of each trainable tensor since the version it began from. The round's updates are averaged,
weighted by tokens and staleness, and the outer optimizer adds the mean d to the block:

  sgd        w <- w + lr d                        lr = 1 is the paper's mean of replicas
  nesterov   m <- mu m + d,  w <- w + lr (d + mu m)   DiLoCo (arXiv 2311.08105): lr 0.7, mu 0.9

(DiLoCo writes the gradient as base - new and subtracts; the signs cancel.) Nesterov needs replicas whose noise averages out: with fewer than
two fresh updates the step is the plain mean, and the momentum stays as it was.

Nothing here holds a model: tensors are loaded by name, used and let go, so memory is a few times the largest tensor whatever the number of workers.
Sums run in float32 in the order of the updates' keys, so the result does not depend on the order in which updates arrived. Tensors
that are not trainable are passed on unread by any buffer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Loader = Callable[[str], Tensor]
MIN_FRESH = 2  # replicas that Nesterov needs
MIN_NORMS = 3  # updates that a median needs


@dataclass(frozen=True)
class OuterRule:
    """How the mean of a round is applied."""

    optimizer: Literal["sgd", "nesterov"] = "sgd"
    lr: float = 1.0
    momentum: float = 0.9  # of nesterov

    def uses_momentum(self, fresh: int) -> bool:
        return self.optimizer == "nesterov" and fresh >= MIN_FRESH


DILOCO = OuterRule("nesterov", lr=0.7, momentum=0.9)


@dataclass(frozen=True)
class NormRule:
    """What happens to an update whose norm is more than `limit` times the median of its round; a limit of 0 lets every finite norm pass."""

    limit: float = 3.0
    beyond: Literal["clip", "refuse"] = "clip"


@dataclass(frozen=True)
class Contribution:
    """One update as the outer step reads it: `load` gives its pseudo-gradient of a tensor."""

    key: str  # decides the order of sums
    weight: float  # tokens x staleness factor
    load: Loader
    scale: float = 1.0  # below 1 where the norm was clipped


@dataclass(frozen=True)
class NormVerdict:
    """Whether an update's norm is in keeping with its round, and the factor to scale it by."""

    refused: bool
    scale: float
    reason: str


@dataclass(frozen=True)
class OuterTensor:
    """One tensor of the next version; `momentum` is its new buffer, or None where this step has none."""

    name: str
    value: Tensor
    momentum: Tensor | None


def pseudo_gradients(new: Loader, base: Loader, trainable: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """new - base of each trainable tensor, float32, one at a time."""
    for name in sorted(trainable):
        yield name, new(name).detach().cpu().float() - base(name).detach().cpu().float()


def weighted_mean(contributions: Sequence[Contribution], name: str) -> Tensor:
    """Sum of weight x scale x pseudo-gradient over the sum of weights, in the order of keys."""
    ordered = sorted(contributions, key=lambda c: c.key)
    total = math.fsum(c.weight for c in ordered)
    assert total > 0 and math.isfinite(total), "rounds close with positive weights"
    mean: Tensor | None = None
    for c in ordered:
        term = c.load(name).float() * (c.weight * c.scale / total)
        mean = term if mean is None else mean.add_(term)
        del term  # the next one is loaded into its room
    assert mean is not None
    return mean


def outer_step(
    names: Iterable[str],
    trainable: Collection[str],
    base: Loader,
    contributions: Sequence[Contribution],
    rule: OuterRule,
    *,
    fresh: int,
    momentum: Loader | None = None,
) -> Iterator[OuterTensor]:
    """The next version's tensors in the order of names; `momentum` loads the buffers of the version before, None where there are none yet.

    `fresh` counts the updates that were trained from `base` itself. Every value keeps its tensor's dtype; sums and momentum are float32.
    """
    for name in sorted(names):
        if name not in trainable:
            yield OuterTensor(name, base(name), None)
            continue
        yield _next_tensor(name, base, contributions, rule, rule.uses_momentum(fresh), momentum)


def _next_tensor(
    name: str, base: Loader, contributions: Sequence[Contribution], rule: OuterRule, nesterov: bool, momentum: Loader | None
) -> OuterTensor:
    """A function of its own, so that nothing of one tensor is alive when the next is read."""
    step = weighted_mean(contributions, name)
    buffer: Tensor | None = None
    if nesterov:
        buffer = step.clone() if momentum is None else momentum(name).float() * rule.momentum + step
        step.add_(buffer, alpha=rule.momentum)
    if rule.optimizer == "sgd" or nesterov:
        step.mul_(rule.lr)
    before = base(name)
    return OuterTensor(name, (before.float() + step).to(before.dtype), buffer)


def update_norm(tensors: Iterable[tuple[str, Tensor]]) -> float:
    """Euclidean norm over all tensors of an update, summed in float64, one tensor at a time."""
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for _, tensor in tensors))


def judge_norm(norm: float, others: Iterable[float], rule: NormRule) -> NormVerdict:
    """Compare an update's norm with the median over the updates of its round, itself included; fewer than three say nothing."""
    return judge_norms([norm, *others], rule)[0]


def judge_norms(norms: Sequence[float], rule: NormRule) -> list[NormVerdict]:
    """The verdict on each update of a round."""
    median = statistics.median(norms) if norms else 0.0
    return [_verdict(norm, median, len(norms), rule) for norm in norms]


def _verdict(norm: float, median: float, count: int, rule: NormRule) -> NormVerdict:
    if not math.isfinite(norm):
        return NormVerdict(True, 0.0, f"norm {norm} is not finite")
    if not rule.limit or count < MIN_NORMS or not median or norm <= rule.limit * median:
        return NormVerdict(False, 1.0, f"norm {norm:.4g} is in keeping with {count} updates of median {median:.4g}")
    sentence = f"norm {norm:.4g} is more than {rule.limit:g} times the median {median:.4g} of {count} updates"
    if rule.beyond == "refuse":
        return NormVerdict(True, 0.0, f"{sentence} and is refused")
    return NormVerdict(False, rule.limit * median / norm, f"{sentence} and is clipped to it")
