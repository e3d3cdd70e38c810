"""Layers and stack: identity at the start, what is remembered agrees with the whole pass, weights depend on (seed, block) alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from blocktrain.config import ORDINARY, ModelConfig
from blocktrain.errors import CheckpointError
from blocktrain.model.fused import LOGITS, gate_project, head_loss, heads_project, mixed, norm_rotate, project, rotate, square_project
from blocktrain.model.layers import rotary_table
from blocktrain.model.memory import TILE, BlockMemory, BlockTile, Segment
from blocktrain.model.transformer import BlockStack, layer_flops, parameter_count
from blocktrain.training.checkpoint import load_module

SHAPE = ModelConfig(blocks=3, layers_per_block=2, width=32, heads=2, positions=16, embed_dim=8, noise_dim=8, **ORDINARY)


def scrambled(mlp: str = "relu2", private: int = 0, short_conv: int = 0) -> BlockStack:
    stack = BlockStack(SHAPE.model_copy(update={"mlp": mlp, "short_conv": short_conv}), seed=0, private_layers=private)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in stack.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return stack.eval()


def test_a_fresh_block_is_the_identity():
    stack = BlockStack(SHAPE, seed=0)
    x = torch.randn(2, 16, 32)
    assert torch.equal(stack.block(1)(x, None), x)
    assert torch.equal(stack.block(1)(x, torch.randn(2, 1, 8)), x)


@pytest.mark.parametrize("mlp", ["relu2", "swiglu"])
@pytest.mark.parametrize("chunks", [[16], [1] * 16, [5, 1, 10]])
def test_remembered_steps_equal_the_whole_pass(mlp: str, chunks: list[int]):
    block = scrambled(mlp, private=1).block(0)
    memory, head = BlockMemory(block.config, 1), torch.nn.Linear(32, 256, bias=False)
    x, noise = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(2)), torch.randn(1, 1, 8)
    states, logits, position = [], [], 0
    for part in x.split(chunks, dim=1):
        count = part.size(1)
        rows = torch.cat((part, torch.zeros(1, TILE - count, 32)), dim=1)
        tile = BlockTile([Segment(memory, position, 0, count)], x.device)
        state = block(rows, noise, tile)
        states.append(state[:, :count])
        logits.append(block.read(head, state, noise, tile)[:, :count])
        position += count
    whole = block(x, noise)
    assert torch.allclose(torch.cat(states, dim=1), whole, atol=1e-5)
    assert torch.allclose(torch.cat(logits, dim=1), block.read(head, whole, noise), atol=1e-5)


def test_rotary_scores_depend_on_distance_only():
    cos, sin = rotary_table(32, 8)
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8, generator=g), torch.randn(1, 1, 1, 8, generator=g)

    def score(i: int, j: int) -> float:
        return float((rotate(q, cos[i : i + 1], sin[i : i + 1]) * rotate(k, cos[j : j + 1], sin[j : j + 1])).sum())

    assert score(5, 2) == pytest.approx(score(25, 22), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_a_block_has_the_same_weights_whoever_makes_it():
    whole, alone = BlockStack(SHAPE, seed=7), BlockStack(SHAPE, seed=7, blocks=[2])
    assert alone.held == [2]
    for name, p in alone.state_dict().items():
        assert torch.equal(p, whole.state_dict()[name]), name
    other = BlockStack(SHAPE, seed=8, blocks=[2])
    assert not torch.equal(other.block(2).layers[0].attention.query.weight, whole.block(2).layers[0].attention.query.weight)


def test_making_a_stack_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    BlockStack(SHAPE, seed=0)
    assert torch.equal(torch.rand(1), before)


def test_private_layers_are_in_every_block_but_the_last():
    stack = BlockStack(SHAPE, seed=0, private_layers=2)
    assert [len(stack.block(b).private) for b in range(3)] == [2, 2, 0]


def test_without_a_noisy_target_the_weights_for_it_are_left_out_and_nothing_else_changes():
    full, clean = (BlockStack(SHAPE, seed=0, private_layers=1, noisy=noisy).state_dict() for noisy in (True, False))
    assert all(torch.equal(full[name], tensor) for name, tensor in clean.items())
    gone = {name.split(".", 2)[-1] if name.startswith("blocks") else name for name in full.keys() - clean.keys()}
    layers = {f"layers.{i}.modulation.weight" for i in (0, 1)} | {"private.0.modulation.weight"}
    entry = {f"interface.{name}.weight" for name in ("targets", "enter", "noise.mix", "denoised")}
    assert gone == layers | entry | {"interface.noise.mix.bias", "interface.log_sharpness"}


def test_a_file_from_before_may_hold_weights_that_a_run_does_without():
    full, clean = (BlockStack(SHAPE, seed=seed, noisy=noisy) for seed, noisy in ((1, True), (0, False)))
    load_module("block-000.safetensors", clean.block(0), dict(full.block(0).state_dict()))
    assert torch.equal(clean.block(0).layers[0].attention.query.weight, full.block(0).layers[0].attention.query.weight)
    with pytest.raises(CheckpointError, match="tensor other is not part of this model"):
        load_module("interface.safetensors", clean.interface, {**full.interface.state_dict(), "other": torch.zeros(1)})


def test_swiglu_has_about_the_parameters_of_relu2():
    a, b = (parameter_count(BlockStack(ModelConfig(mlp=kind), seed=0)) for kind in ("relu2", "swiglu"))
    assert a == pytest.approx(b, rel=0.02)


def test_layer_flops_count_two_per_weight_and_causal_attention():
    width, hidden, t = 32, 128, 16
    assert layer_flops(SHAPE) == 2 * (4 * width**2 + 2 * width * hidden) + 2 * width * t
    narrow = SHAPE.model_copy(update={"heads": 3, "attention_ratio": 0.375})  # three heads of four channels
    assert layer_flops(narrow) == 2 * (4 * width * 12 + 2 * width * hidden) + 2 * 12 * t


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("positions", [1, 3, 7])
def test_a_short_convolution_is_the_sum_it_says(positions: int):
    h, taps = drawn(2, positions, 4), drawn(3, 4)
    assert torch.equal(mixed(h, torch.zeros_like(taps)), h)
    wanted = [sum((h[:, t - k] * taps[k - 1] for k in range(1, 4) if t >= k), h[:, t]) for t in range(positions)]
    assert torch.allclose(mixed(h, taps), torch.stack(wanted, 1))


@pytest.mark.parametrize("positions", [1, 5])
@pytest.mark.parametrize("modulation", [(4,), (2, 1, 4)])
def test_what_is_computed_again_has_the_gradients_of_the_plain_expressions(positions: int, modulation: tuple[int, ...]):
    """Each function of model/fused.py: its value is the plain expression's, its gradient that of finite differences in float64."""
    x, gain, shift, taps, wide, narrow = drawn(2, positions, 4), drawn(*modulation), drawn(*modulation), drawn(3, 4), drawn(6, 4), drawn(3, 4)
    normed = F.rms_norm(x, (4,), eps=1e-6)
    for args in ((gain, shift, taps), (gain, None, taps), (gain, shift, None), (gain, None, None)):
        read = mixed(normed * gain if args[1] is None else normed * gain + shift, args[2])
        got = project(x, *args, wide, narrow)
        assert all(torch.allclose(one, read @ w.T) for one, w in zip(got, (wide, narrow), strict=True))
        assert torch.autograd.gradcheck(project, (x, *args, wide, narrow))
    q, (cos, sin) = drawn(2, 3, positions, 4), (table.double() for table in rotary_table(positions, 4))
    assert torch.allclose(norm_rotate(q, cos, sin), rotate(F.rms_norm(q, (4,), eps=1e-6), cos, sin))
    assert torch.autograd.gradcheck(norm_rotate, (q, cos, sin))
    y, out = drawn(2, 3, positions, 4), drawn(5, 12)
    assert torch.allclose(heads_project(y, out), y.transpose(1, 2).reshape(2, positions, 12) @ out.T)
    assert torch.autograd.gradcheck(heads_project, (y, out))
    gate, up, down = drawn(2, positions, 5), drawn(2, 5, positions).transpose(1, 2), drawn(4, 5)
    assert torch.allclose(square_project(up, down), up.relu().square() @ down.T)
    assert torch.autograd.gradcheck(square_project, (up, down))
    assert torch.allclose(gate_project(gate, up, down), (F.silu(gate) * up) @ down.T)
    assert torch.autograd.gradcheck(gate_project, (gate, up, down))


@pytest.mark.parametrize("logits", [7, 20, 1 << 18])
def test_the_loss_of_a_head_that_is_never_whole_is_the_plain_one(logits: int, monkeypatch: pytest.MonkeyPatch):
    """Values and gradients, with one row, a few rows and all rows of logits at a time."""
    monkeypatch.setitem(LOGITS, "cpu", logits)
    x, gain, head, weight = drawn(2, 5, 4), drawn(4), drawn(7, 4), torch.tensor([0.5, 3.0], dtype=torch.float64)
    y = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(0))
    wanted = F.cross_entropy(((F.rms_norm(x, (4,), eps=1e-6) * gain) @ head.T).flatten(0, 1), y.flatten(), reduction="none").view(2, 5).mean(1)
    loss, ce = head_loss(x, gain, head, y, weight)
    assert torch.allclose(ce, wanted)
    assert torch.allclose(loss, (weight * wanted).mean())
    assert not ce.requires_grad
    assert torch.autograd.gradcheck(lambda *args: head_loss(*args, y, weight)[0], (x, gain, head))
    with torch.no_grad():
        assert torch.equal(head_loss(x, gain, head, y, weight)[1], ce)


@pytest.mark.parametrize("mlp", ["relu2", "swiglu"])
def test_gradients_under_bfloat16_autocast_are_those_of_float32_nearly(mlp: str):
    stack = scrambled(mlp, short_conv=3)
    x = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(3))

    def gradients(bfloat16: bool) -> dict[str, torch.Tensor]:
        stack.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            noise = stack.interface.noise(torch.tensor([0.5, 2.0]))[:, None, :]
            state = stack.block(0)(stack.interface.tokens(x), noise)
            loss, _ = stack.block(0).loss(stack.interface.head, state, noise, x, torch.ones(2))
        loss.backward()
        return {name: p.grad.clone() for name, p in stack.named_parameters() if p.grad is not None}

    exact, rough = gradients(False), gradients(True)
    assert exact.keys() == rough.keys()
    for name, gradient in exact.items():
        assert rough[name].dtype == torch.float32
        assert F.cosine_similarity(gradient.flatten(), rough[name].flatten(), dim=0) > 0.995, name


def test_taps_are_no_hidden_matrices_and_cost_what_is_counted():
    shape = SHAPE.model_copy(update={"short_conv": 3})
    block, plain = BlockStack(shape, seed=0).block(0), BlockStack(SHAPE, seed=0).block(0)
    taps = [p for name, p in block.named_parameters() if name.endswith("taps")]
    assert len(taps) == 4 and not {id(p) for p in taps} & {id(p) for p in block.matrices()}
    assert parameter_count(block) - parameter_count(plain) == 4 * 3 * 32
    assert layer_flops(shape) - layer_flops(SHAPE) == 2 * 2 * 3 * 32
    assert all(torch.equal(dict(block.named_parameters())[name], p) for name, p in plain.named_parameters()), "the other weights are drawn as before"
