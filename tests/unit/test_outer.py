"""The outer step: agrees with a plain reference and with torch's optimizer, in any order of arrival, with one tensor in memory."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from blocktrain.codecs import encode_update, read_update
from blocktrain.serialization import tensor_digest
from blocktrain.training.outer import (
    DILOCO,
    Contribution,
    Loader,
    NormRule,
    OuterRule,
    judge_norm,
    outer_step,
    pseudo_gradients,
    update_norm,
    weighted_mean,
)

PAPER = OuterRule()
SHAPES = {"layers.0.weight": (12, 16), "layers.1.weight": (16, 12), "gain": (16,)}


def make_tensors(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def make_contributions(weights: list[float]) -> list[Contribution]:
    return [Contribution(f"{i:08d}", weight, make_tensors(100 + i).__getitem__) for i, weight in enumerate(weights)]


def step(
    base: Mapping[str, Tensor], contributions: list[Contribution], rule: OuterRule = PAPER, fresh: int = 9, momentum: Loader | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values and momentum buffers of the next version."""
    made = list(outer_step(base, set(base), base.__getitem__, contributions, rule, fresh=fresh, momentum=momentum))
    return {t.name: t.value for t in made}, {t.name: t.momentum for t in made if t.momentum is not None}


def test_lr_1_is_the_weighted_mean_of_the_replicas():
    """The paper: the new block is the mean of what the workers hold, weighted by tokens."""
    base, weights = make_tensors(0), [100.0, 300.0, 50.0]
    replicas = [make_tensors(1 + i) for i in range(3)]
    changes = [dict(pseudo_gradients(replica.__getitem__, base.__getitem__, base)) for replica in replicas]
    contributions = [Contribution(str(i), weights[i], changes[i].__getitem__) for i in range(3)]
    values, buffers = step(base, contributions)
    assert buffers == {}
    for name in SHAPES:
        expected = sum(w * replica[name].double() for w, replica in zip(weights, replicas, strict=True)) / sum(weights)
        assert torch.allclose(values[name].double(), expected, atol=1e-6)


def test_one_update_is_taken_as_it_is():
    base, new = make_tensors(0), make_tensors(1)
    change = dict(pseudo_gradients(new.__getitem__, base.__getitem__, base))
    values, _ = step(base, [Contribution("a", 7.0, change.__getitem__)], DILOCO, fresh=1)
    assert all(torch.allclose(values[name], new[name], atol=1e-6) for name in SHAPES)


@pytest.mark.parametrize("rule", [OuterRule(lr=0.5), DILOCO])
def test_ten_rounds_agree_with_torch(rule: OuterRule):
    """DiLoCo is torch's SGD, nesterov, on the gradient base - new."""
    base = make_tensors(0)
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in base.items()}
    nesterov = rule.optimizer == "nesterov"
    reference = torch.optim.SGD(parameters.values(), lr=rule.lr, momentum=rule.momentum if nesterov else 0.0, nesterov=nesterov)
    momentum: dict[str, Tensor] | None = None
    for r in range(10):
        changes = [make_tensors(10 * r + i + 1) for i in range(2)]
        base, buffers = step(
            base, [Contribution(str(i), 1.0, changes[i].__getitem__) for i in range(2)], rule, momentum=momentum and momentum.__getitem__
        )
        momentum = buffers or None
        for name, p in parameters.items():
            p.grad = -(changes[0][name] + changes[1][name]) / 2
        reference.step()
        for name, p in parameters.items():
            assert torch.allclose(base[name], p.detach(), atol=1e-4)


def test_diloco_by_hand():
    one = {"w": torch.tensor([1.0])}
    contributions = [Contribution(key, 1.0, lambda _: torch.tensor([2.0])) for key in "ab"]
    values, buffers = step(one, contributions, DILOCO)
    assert float(buffers["w"]) == 2.0
    assert float(values["w"]) == pytest.approx(1 + 0.7 * (2 + 0.9 * 2))
    values, buffers = step(values, contributions, DILOCO, momentum=buffers.__getitem__)
    assert float(buffers["w"]) == pytest.approx(0.9 * 2 + 2)
    assert float(values["w"]) == pytest.approx(3.66 + 0.7 * (2 + 0.9 * 3.8))


@pytest.mark.parametrize("fresh", [0, 1])
def test_fewer_than_two_fresh_replicas_leave_the_momentum_alone(fresh: int):
    base, contributions = make_tensors(0), make_contributions([1.0, 0.7])

    def never(name: str) -> Tensor:
        raise AssertionError(f"momentum of {name} was read")

    values, buffers = step(base, contributions, DILOCO, fresh=fresh, momentum=never)
    assert buffers == {}
    assert tensor_digest(values) == tensor_digest(step(base, contributions)[0])


@pytest.mark.parametrize("rule", [OuterRule(), DILOCO])
def test_result_does_not_depend_on_the_order_of_arrival(rule: OuterRule):
    base, contributions = make_tensors(0), make_contributions([3.0, 1e6, 0.1, 17.0])
    digests = {tensor_digest(step(base, list(order), rule)[0]) for order in itertools.permutations(contributions)}
    assert len(digests) == 1


def test_weights_count_only_by_their_ratios():
    few, many = make_contributions([1.0, 2.0]), make_contributions([512.0, 1024.0])
    assert torch.equal(weighted_mean(few, "gain"), weighted_mean(many, "gain"))


def test_frozen_tensors_pass_unread_and_get_no_buffer():
    base = make_tensors(0)
    loaded: list[str] = []

    def load(name: str) -> Tensor:
        loaded.append(name)
        return torch.ones(SHAPES[name])

    made = list(outer_step(base, {"gain"}, base.__getitem__, [Contribution(k, 1.0, load) for k in "ab"], DILOCO, fresh=2))
    assert loaded == ["gain", "gain"]
    assert [t.name for t in made if t.momentum is not None] == ["gain"]
    assert all(t.value is base[t.name] for t in made if t.name != "gain")
    assert [name for name, _ in pseudo_gradients(base.__getitem__, base.__getitem__, {"gain"})] == ["gain"]


def test_a_value_keeps_its_dtype_and_sums_are_float32():
    base = {"w": torch.ones(4, dtype=torch.bfloat16)}
    changes = [Contribution(f"{i:03d}", 1.0, lambda _: torch.full((4,), 2**-9, dtype=torch.bfloat16)) for i in range(300)]
    assert torch.allclose(weighted_mean(changes, "w"), torch.full((4,), 2.0**-9))
    assert step(base, changes)[0]["w"].dtype == torch.bfloat16


class CountingStore:
    """Loads tensors and knows how many of them are alive."""

    def __init__(self, num_values: int) -> None:
        self.num_values, self.alive, self.peak, self.loads = num_values, 0, 0, 0

    def load(self, name: str) -> Tensor:
        tensor = torch.full((self.num_values,), float(len(name)))
        self.alive += 1
        self.loads += 1
        self.peak = max(self.peak, self.alive)
        weakref.finalize(tensor, self._freed)
        return tensor

    def _freed(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("workers", [2, 40])
def test_memory_is_a_few_tensors_whatever_the_number_of_workers_and_tensors(workers: int):
    store = CountingStore(1000)
    names = [f"layer.{i:03d}" for i in range(30)]
    contributions = [Contribution(f"{i:03d}", 1.0, store.load) for i in range(workers)]
    gc.collect()
    for made in outer_step(names, set(names), store.load, contributions, DILOCO, fresh=workers, momentum=store.load):
        del made
    assert store.loads == len(names) * (workers + 2)  # each tensor of each worker once, base, momentum
    assert store.peak <= 2


def test_decoded_updates_are_averaged_as_they_lie():
    """A lazily decoded file is a loader."""
    base = make_tensors(0)
    files = [encode_update(make_tensors(1 + i).items(), "int8").data for i in range(3)]
    contributions = [Contribution(str(i), 1.0, read_update(data, SHAPES).tensor) for i, data in enumerate(files)]
    values, _ = step(base, contributions)
    for name in SHAPES:
        expected = base[name] + sum(make_tensors(1 + i)[name] for i in range(3)) / 3
        assert torch.allclose(values[name], expected, atol=0.02)


def test_norm_is_over_all_tensors():
    tensors = make_tensors(0)
    assert update_norm(tensors.items()) == pytest.approx(float(torch.cat([t.flatten() for t in tensors.values()]).double().norm()), rel=1e-12)


def test_an_outlier_is_clipped_to_the_limit_or_refused():
    clipped = judge_norm(100.0, [1.0, 1.2, 0.9], NormRule(limit=3.0))
    assert not clipped.refused
    assert clipped.scale * 100 == pytest.approx(3 * 1.1)
    assert "clipped" in clipped.reason
    refused = judge_norm(100.0, [1.0, 1.2, 0.9], NormRule(limit=3.0, beyond="refuse"))
    assert refused.refused and "3 times the median 1.1 of 4 updates and is refused" in refused.reason
    assert judge_norm(3.2, [1.0, 1.2, 0.9], NormRule()).scale == 1.0


@pytest.mark.parametrize("others", [[], [1.0], [0.0, 0.0, 0.0]])
def test_too_few_updates_or_a_median_of_zero_say_nothing(others: list[float]):
    assert judge_norm(100.0, others, NormRule()).scale == 1.0


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_always_refused(norm: float):
    assert judge_norm(norm, [], NormRule(limit=0.0)).refused


def test_a_clipped_update_loses_size_but_not_its_weight():
    change = {"w": torch.tensor([10.0])}
    contributions = [Contribution("a", 1.0, change.__getitem__, scale=0.1), Contribution("b", 1.0, lambda _: torch.tensor([2.0]))]
    assert float(weighted_mean(contributions, "w")) == pytest.approx((1 + 2) / 2)
