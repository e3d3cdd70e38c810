"""Our batched Muon is torch's Muon; schedules and clipping do what their names say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blocktrain.training.optim import Muon, clip, orthogonalize
from tests.conftest import tiny_config


def test_muon_agrees_with_torch():
    """Same state and, up to torch's bfloat16 rounding, the same weights after several steps."""
    g = torch.Generator().manual_seed(0)
    shapes = [(32, 32), (64, 32), (32, 64), (32, 32)]
    start = [torch.randn(s, generator=g) for s in shapes]
    ours, theirs = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimizers = [
        Muon(ours, lr=0.02, weight_decay=0.1, momentum=0.95),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95),
    ]
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=g)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b, first in zip(ours, theirs, start, strict=True):
        moved = (b - first).norm()
        assert (a - b).norm() < 0.03 * moved
        assert torch.allclose(optimizers[0].state[a]["momentum_buffer"], optimizers[1].state[b]["momentum_buffer"], atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 16, 48), (3, 48, 16), (1, 20, 20)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int, int]):
    x = orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    values = torch.linalg.svdvals(x)
    assert x.shape == shape
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.4


def test_a_zero_gradient_stays_finite():
    p = nn.Parameter(torch.randn(8, 8))
    before = p.detach().clone()
    p.grad = torch.zeros(8, 8)
    Muon([p], lr=0.02, weight_decay=0.0).step()
    assert torch.equal(p, before)


def test_each_module_is_clipped_on_its_own():
    small, large = nn.Linear(4, 4), nn.Linear(4, 4)
    for module, size in ((small, 0.01), (large, 100.0)):
        for p in module.parameters():
            p.grad = torch.full_like(p, size)
    kept = small.weight.grad.clone()
    norms = clip([small, large], 1.0)
    assert norms == pytest.approx([0.01 * 20**0.5, 100 * 20**0.5], rel=1e-4)
    assert torch.equal(small.weight.grad, kept)
    assert float(torch.nn.utils.get_total_norm([p.grad for p in large.parameters()])) == pytest.approx(1.0, rel=1e-3)
    assert clip([large], 0.0) == pytest.approx([1.0], rel=1e-3)  # only measures


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    from blocktrain.model.transformer import BlockStack
    from blocktrain.training.optim import make_optimizers

    config = tiny_config()
    stack = BlockStack.of(config)
    adamw, muon = make_optimizers(stack, config.train, range(3), True)
    names = {id(p): name for name, p in stack.named_parameters()}
    by_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    by_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert by_muon | by_adamw == set(names.values())
    assert not by_muon & by_adamw
    assert all(".attention." in name or ".feed_forward." in name for name in by_muon)
    assert not any(".attention." in name or ".feed_forward." in name for name in by_adamw)
