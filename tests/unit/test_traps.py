"""Every mistake that is easily made with this objective and hard to see in a loss curve, as a test."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from blocktrain.config import MAX_VOTERS, RunConfig
from blocktrain.diffusion.edm import edm_weight
from blocktrain.diffusion.noise import make_partition
from blocktrain.diffusion.sampling import euler_step, expected_embedding
from blocktrain.errors import ConfigError
from blocktrain.model.transformer import BlockStack
from blocktrain.training import composition, trainer
from blocktrain.training.composition import Composer, mean_of, span_state, vote
from blocktrain.training.data import Batches, load_corpus
from blocktrain.training.evaluate import Evaluator
from blocktrain.training.hardware import Hardware
from blocktrain.training.objective import SpanBatches, SpanObjective, draw_noise, make_views, spans_of
from blocktrain.training.optim import make_optimizers, optimizer_tensors, restore_optimizers, schedule
from blocktrain.training.trainer import BlockTrainer
from tests.conftest import CLEAN, PAPER, tiny_config

CPU = Hardware(torch.device("cpu"), torch.float32)


def make_stack(config: RunConfig, scramble: bool = True) -> BlockStack:
    """A stack whose zero-initialised weights are random too, so that nothing is trivially zero."""
    stack = BlockStack.of(config)
    if scramble:
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in stack.parameters():
                if not p.any():
                    p.copy_(0.2 * torch.randn(p.shape, generator=g))
    return stack


def make_batch(config: RunConfig, seed: int = 0) -> torch.Tensor:
    shape = (config.train.batch_size, config.model.positions + 1)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def objective_of(config: RunConfig, stack: BlockStack, batch: torch.Tensor, seed: int = 3) -> SpanObjective:
    partition = make_partition(config.noise, config.model.blocks)
    return SpanObjective(stack, config, make_views(config, partition, batch[:, :-1], batch[:, 1:], seed))


def test_reported_ce_is_not_the_weighted_loss_and_weights_are_per_sample():
    """Mean of w_i ce_i: not mean(w) mean(ce), and no [N] x [N, 1] blow-up."""
    config = tiny_config(objective=PAPER, noise={"sigma_min": 0.1, "sigma_max": 10.0})
    result = objective_of(config, make_stack(config), make_batch(config)).loss((2, 3))
    assert result.sigma is not None
    weight = edm_weight(result.sigma, config.noise.sigma_data)
    assert weight.shape == result.ce_per_sample.shape == (config.train.batch_size,)
    loss = float(result.loss.detach())
    assert loss == pytest.approx(float((weight * result.ce_per_sample).mean()), rel=1e-5)
    assert loss != pytest.approx(float(weight.mean() * result.ce_per_sample.mean()), rel=1e-3)
    assert float(result.ce) == pytest.approx(float(result.ce_per_sample.mean()), rel=1e-5)


@pytest.mark.parametrize("objective", [PAPER, {**PAPER, "input": "upstream"}])
def test_training_and_sampling_use_the_same_normalised_embedding(objective: dict):
    """The length of the raw target vectors must not matter anywhere."""
    config = tiny_config(objective=objective)
    stack, batch = make_stack(config), make_batch(config)
    composer = Composer(stack, config, make_partition(config.noise, 3))
    start = composer.start((4, 32), 0)

    def figures() -> tuple[float, torch.Tensor]:
        loss = float(objective_of(config, stack, batch).loss((0, 1)).loss.detach())
        return loss, list(composer.sweep(batch[:, :-1], start))[-1].detach()

    loss, logits = figures()
    with torch.no_grad():
        stack.interface.targets.weight.mul_(torch.rand(256, 1) * 9 + 1)
    scaled_loss, scaled_logits = figures()
    assert scaled_loss == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(scaled_logits, logits, atol=1e-4)


class Watched(Composer):
    """Records what each block is asked at."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.calls: list[tuple[int, torch.Tensor, composition.BlockOutput]] = []

    def step(self, block, x, upstream, z, tile=None, read=True):  # type: ignore[no-untyped-def]
        output = super().step(block, x, upstream, z, tile, read)
        self.calls.append((block, z, output))
        return output


def test_blocks_run_in_falling_sigma_and_the_last_is_read_at_its_upper_boundary(monkeypatch: pytest.MonkeyPatch):
    config = tiny_config(objective=PAPER, noise={"sigma_min": 0.0, "sigma_max": 2.0})
    partition = make_partition(config.noise, 3)
    asked: list[float] = []
    monkeypatch.setattr(composition, "c_noise", lambda sigma: asked.append(float(sigma[0])) or sigma.log() / 4)
    composer = Watched(make_stack(config), config, partition)
    logits = list(composer.sweep(make_batch(config)[:, :-1], composer.start((4, 32), 0)))
    assert [block for block, _, _ in composer.calls] == [0, 1, 2]
    assert asked == pytest.approx(list(partition.boundaries[:3]))
    assert asked[0] == 2.0
    assert asked[-1] > 0  # never evaluated at sigma_min
    assert all(torch.isfinite(each).all() for each in logits)


def test_euler_steps_are_taken_on_expected_embeddings():
    config = tiny_config(objective={**PAPER, "input": "upstream"})
    stack, partition = make_stack(config), make_partition(config.noise, 3)
    composer = Watched(stack, config, partition)
    list(composer.sweep(make_batch(config)[:, :-1], composer.start((4, 32), 0)))
    for (block, z, output), (_, z_next, _) in zip(composer.calls, composer.calls[1:], strict=False):
        denoised = expected_embedding(output.logits, stack.interface.target_embeddings())
        expected = euler_step(z, denoised, partition.boundaries[block], partition.boundaries[block + 1])
        assert torch.allclose(z_next, expected, atol=1e-6)
        assert denoised.norm(dim=-1).max() <= 1 + 1e-5  # inside the hull of unit embeddings


def test_target_is_the_next_byte(monkeypatch: pytest.MonkeyPatch):
    config = tiny_config(objective=CLEAN)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    real = trainer.make_views

    def spy(config, partition, x, y, seed):  # type: ignore[no-untyped-def]
        seen.append((x, y))
        return real(config, partition, x, y, seed)

    monkeypatch.setattr(trainer, "make_views", spy)
    batch = make_batch(config)
    BlockTrainer(make_stack(config), config, make_partition(config.noise, 3), spans_of(3, 1), CPU).step(batch, 0)
    ((x, y),) = seen
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y[:, -1], batch[:, -1])


def test_a_counting_sequence_is_learnt():
    """After 0, 1, 2, ... comes the next number: a wrong shift would learn the identity instead."""
    config = tiny_config(objective=CLEAN, train={"steps": 60, "lr": 0.01})
    stack = BlockStack.of(config)
    partition = make_partition(config.noise, 3)
    learner = BlockTrainer(stack, config, partition, spans_of(3, 1), CPU)
    for step in range(60):
        first = torch.randint(0, 256, (4, 1), generator=torch.Generator().manual_seed(step))
        learner.step((first + torch.arange(33)) % 256, step)
    ids = torch.arange(100, 132)[None]
    last = list(Composer(stack, config, partition).sweep(ids, None))[-1]
    assert (last.argmax(-1) == ids + 1).float().mean() > 0.9


@pytest.mark.parametrize("objective", [PAPER, {**PAPER, "input": "upstream"}, {**PAPER, "input": "upstream", "private_layers": 1}])
def test_a_position_never_depends_on_a_later_one(objective: dict):
    """d logits_i / d z_j = 0 and d logits_i / d x_j = 0 for j > i, through a block and through a whole sweep."""
    config = tiny_config(objective=objective)
    stack, partition = make_stack(config), make_partition(config.noise, 3)
    x = make_batch(config)[:1, :-1]
    z = torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    i = 10
    for run in ("block", "sweep"):
        logits = (
            Composer(stack, config, partition).step(0, x, None, z).logits
            if run == "block"
            else list(Composer(stack, config, partition).sweep(x, z))[-1]
        )
        (grad,) = torch.autograd.grad(logits[0, i].square().sum(), z)
        assert grad[0, : i + 1].abs().sum() > 0
        assert grad[0, i + 1 :].abs().max() == 0
    other = x.clone()
    other[0, i + 1 :] = (other[0, i + 1 :] + 7) % 256
    a, b = (list(Composer(stack, config, partition).sweep(ids, z))[-1][0, : i + 1] for ids in (x, other))
    assert torch.allclose(a, b, atol=1e-6)


def test_a_rollout_does_not_see_the_targets(monkeypatch: pytest.MonkeyPatch):
    """Permuting y among positions leaves every rollout logit as it is; an oracle figure it must change."""
    for member in ("start", "step", "sweep"):
        assert not {"y", "target", "targets"} & set(inspect.signature(getattr(Composer, member)).parameters)
    from pathlib import Path

    from blocktrain.training.checkpoint import LoadedRun
    from blocktrain.training.objective import View

    config = tiny_config(objective=PAPER)
    stack, partition = make_stack(config), make_partition(config.noise, 3)
    run = LoadedRun(Path("."), config, config, None, stack, partition)  # type: ignore[arg-type]
    batch = make_batch(config).numpy().astype("uint8")
    evaluator = Evaluator(run, batch)
    logits: list[torch.Tensor] = []
    monkeypatch.setattr("blocktrain.training.evaluate._ce", lambda each, y: logits.append(each) or torch.zeros(4))
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    for permuted in (False, True):
        pairs = [(x, y[:, order] if permuted else y) for x, y in Evaluator._batches(evaluator)]
        monkeypatch.setattr(evaluator, "_batches", lambda pairs=pairs: iter(pairs))
        evaluator._rollout_once(0, 0, None)
        monkeypatch.undo()
        monkeypatch.setattr("blocktrain.training.evaluate._ce", lambda each, y: logits.append(each) or torch.zeros(4))
    assert len(logits) == 6
    assert all(torch.equal(a, b) for a, b in zip(logits[:3], logits[3:], strict=True))
    ids = torch.from_numpy(batch).long()
    levels = draw_noise(config, partition, 4, 0)
    oracle = [
        float(SpanObjective(stack, config, [View(ids[:, :-1], y, levels, None, 1.0)]).loss((2, 3)).ce) for y in (ids[:, 1:], ids[:, 1:][:, order])
    ]
    assert oracle[0] != pytest.approx(oracle[1], rel=1e-6)


def test_chained_noise_gives_no_second_look_at_the_target():
    """Blocks of one chain see z_hi = z_lo + fresh noise: given z_lo, z_hi says nothing more about e_y, and no pair solves for it."""
    config = tiny_config(objective={**PAPER, "input": "upstream"}, train={"batch_size": 64})
    partition = make_partition(config.noise, 3)
    levels = draw_noise(config, partition, 64, 0)
    target = torch.randn(64, 400, 16)
    z = [levels.state(b, target) for b in range(3)]
    assert (levels.sigma[0] >= levels.sigma[1]).all()
    assert (levels.sigma[1] >= levels.sigma[2]).all()
    for b in range(3):  # the right level at every block
        measured = (z[b] - target).flatten(1).std(dim=1)
        assert torch.allclose(measured, levels.sigma[b], rtol=0.05)
    added = (z[0] - z[2]).flatten()  # independent of the noise already in z_lo
    assert abs(float(torch.corrcoef(torch.stack((added, (z[2] - target).flatten())))[0, 1])) < 0.02


def test_upstream_gradient_stops_at_the_span():
    config = tiny_config(objective=CLEAN)
    stack = make_stack(config)
    objective_of(config, stack, make_batch(config)).loss((2, 3)).loss.backward()
    assert all(p.grad is None for b in (0, 1) for p in stack.block(b).parameters())
    assert all(p.grad is not None for p in stack.block(2).layers.parameters() if p.ndim == 2 and p.size(1) != 8)
    assert stack.interface.tokens.weight.grad is None


def test_span_gradients_are_averaged_over_the_spans_that_hold_a_block():
    config = tiny_config(objective={**CLEAN, "span": 2})
    batch = make_batch(config)
    together = make_stack(config)
    BlockTrainer(together, config, make_partition(config.noise, 3), [(0, 2), (1, 3)], CPU).gradients(batch, 0)
    parts = []
    for span in ((0, 2), (1, 3)):
        stack = make_stack(config)
        BlockTrainer(stack, config, make_partition(config.noise, 3), [span], CPU).gradients(batch, 0)
        parts.append(stack)
    got, first, second = (s.block(1).layers[0].attention.query.weight.grad for s in (together, *parts))
    assert torch.allclose(got, (first + second) / 2, atol=1e-7)
    outer = [s.block(0).layers[0].attention.query.weight.grad for s in (together, parts[0])]
    assert torch.allclose(outer[0], outer[1], atol=1e-7)  # held by one span only


def test_end_to_end_is_the_span_over_all_blocks():
    """w = B has the gradient of one forward and one backward pass through the whole stack."""
    config = tiny_config(objective={**CLEAN, "span": 3})
    batch, stack = make_batch(config), make_stack(config)
    BlockTrainer(stack, config, make_partition(config.noise, 3), [(0, 3)], CPU).gradients(batch, 0)
    got = stack.block(0).layers[0].attention.query.weight.grad.clone()
    stack.zero_grad()
    state = stack.interface.tokens(batch[:, :-1])
    for b in range(3):
        state = stack.block(b)(state, None)
    logits = stack.block(2).read(stack.interface.head, state, None)
    F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    assert torch.allclose(got, stack.block(0).layers[0].attention.query.weight.grad, atol=1e-7)


@pytest.mark.parametrize("own", [0.0, 0.25])
def test_blocks_that_learn_from_their_vote_have_its_gradient(own: float):
    """A block's is that of B times the cross entropy of the mean of log-probabilities (own = 0), mixed with that of its own."""
    config = tiny_config(objective={"vote_weight": 1 - own})
    batch, stack = make_batch(config), make_stack(config)
    trainer = BlockTrainer(stack, config, make_partition(config.noise, 3), spans_of(3, 1), CPU)
    for step in range(3):
        trainer.step(batch, step)
    trainer.gradients(batch, 3)
    got = {name: p.grad.clone() for name, p in stack.named_parameters() if p.grad is not None}
    stack.zero_grad()
    x, y = batch[:, :-1], batch[:, 1:].flatten()
    spoken = [F.log_softmax(stack.block(b).read(stack.interface.head, stack.block(b)(stack.interface.tokens(x), None), None), -1) for b in range(3)]
    alone = torch.stack([F.cross_entropy(each.flatten(0, 1), y) for each in spoken]).sum()
    vote = 3 * F.cross_entropy(torch.stack(spoken).mean(0).flatten(0, 1), y)
    (own * alone + (1 - own) * vote).backward()
    for name, p in stack.named_parameters():
        if p.grad is not None:
            share = 1 / 3 if name.startswith("interface") else 1
            assert torch.allclose(got[name], share * p.grad, atol=1e-7, rtol=1e-4), name


def test_a_vote_that_begins_late_leaves_blocks_alone_until_then(text: Path):
    """Half of eight steps with an order of the text for each block and its own loss; then one batch for all, and the gradient of their vote."""
    late = tiny_config(objective={"vote_weight": 0.75, "vote_from": 0.5}, train={"steps": 8})
    batches, spans = SpanBatches(load_corpus(str(text)).train, late), spans_of(3, 1)
    assert [batches.batch(spans, step).ndim for step in range(8)] == [3] * 4 + [2] * 4
    assert [batches.batch([(1, 2)], 100, schedule_step=at).ndim for at in (3, 4)] == [3, 2], "a worker's samples are anywhere in the text"

    def gradients(config: RunConfig, step: int) -> torch.Tensor:
        stack = make_stack(config)
        trainer = BlockTrainer(stack, config, make_partition(config.noise, 3), spans, CPU)
        trainer.step(make_batch(config), 0)  # heads begin at zero, and nothing would pass through them
        trainer.gradients(make_batch(config), step)
        return stack.block(0).layers[0].attention.query.weight.grad

    alone, always = tiny_config(objective={"vote_weight": 0.0}, train={"steps": 8}), tiny_config(objective={"vote_weight": 0.75}, train={"steps": 8})
    assert torch.equal(gradients(late, 3), gradients(alone, 3))
    stack = make_stack(late)
    trainer = BlockTrainer(stack, late, make_partition(late.noise, 3), spans, CPU)
    trainer.step(make_batch(late), 0)
    trainer.gradients(make_batch(late), 0, schedule_step=4)
    voting = stack.block(0).layers[0].attention.query.weight.grad
    assert not torch.allclose(voting, gradients(alone, 0), rtol=1e-2)
    assert torch.equal(gradients(alone, 0), gradients(late, 0)) and not torch.equal(gradients(always, 0), gradients(late, 0))


def test_a_worker_learns_from_the_vote_of_frozen_copies_as_if_all_blocks_moved_with_its_own():
    """Others stand where they were; the block's own part of the vote is what it had then, and has moved B times as far as one of B would."""
    config = tiny_config(objective={"vote_weight": 1.0})
    batch, peers = make_batch(config), make_stack(config).requires_grad_(False)
    alone = BlockStack.of(config, [1])
    alone.load_state_dict({name: tensor for name, tensor in peers.state_dict().items() if name in alone.state_dict()})
    trainer = BlockTrainer(alone, config, make_partition(config.noise, 3), [(1, 2)], CPU, peers=peers)
    before = {name: tensor.clone() for name, tensor in peers.named_parameters()}
    for step in range(3):
        trainer.step(batch, step)
    trainer.gradients(batch, 3)
    got = {name: p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None}
    alone.zero_grad()
    x, y = batch[:, :-1], batch[:, 1:].flatten()

    def spoken(stack: BlockStack, b: int) -> torch.Tensor:
        return F.log_softmax(stack.block(b).read(stack.interface.head, stack.block(b)(stack.interface.tokens(x), None), None), -1)

    own = [spoken(peers, b) for b in range(3)]
    vote = torch.stack(own).mean(0) - own[1] + spoken(alone, 1)
    F.cross_entropy(vote.flatten(0, 1), y).backward()
    for name, p in alone.named_parameters():
        if p.grad is not None:
            assert torch.allclose(got[name], p.grad, atol=1e-7, rtol=1e-4), name
    assert all(torch.equal(before[name], tensor) and tensor.grad is None for name, tensor in peers.named_parameters())


def test_learning_rate_counts_a_blocks_own_updates():
    config = tiny_config(train={"steps": 100, "warmup_steps": 10, "cooldown": 0.5})
    assert schedule(0, config.train) == pytest.approx(0.1)
    assert schedule(9, config.train) == schedule(50, config.train) == 1
    assert schedule(75, config.train) == pytest.approx(0.5)
    assert 0 < schedule(99, config.train) < 0.05


def test_low_precision_optimizer_state_survives_a_round_trip():
    config = tiny_config(objective=CLEAN)
    stack = make_stack(config).to(torch.bfloat16)
    optimizers = make_optimizers(stack, config.train, range(3), True)
    for p in stack.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in optimizers:
        optimizer.step()
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(stack, optimizers).items()}
    assert any(name.endswith("momentum_buffer") and t.dtype == torch.bfloat16 for name, t in saved.items())
    fresh = make_optimizers(stack, config.train, range(3), True)
    restore_optimizers(stack, fresh, saved)
    again = optimizer_tensors(stack, fresh)
    assert again.keys() == saved.keys()
    assert all(again[name].dtype == t.dtype and torch.equal(again[name], t) for name, t in saved.items())


def test_embedding_mse_and_cross_entropy_agree_on_two_symbols():
    """With two targets the best denoised embedding is p e_0 + (1 - p) e_1, which is cross entropy's posterior mean."""
    g = torch.Generator().manual_seed(0)
    e = F.normalize(torch.randn(2, 8, generator=g, dtype=torch.float64), dim=-1)
    prior, sigma = torch.tensor([0.7, 0.3], dtype=torch.float64), 0.6
    y = torch.multinomial(prior, 200_000, replacement=True, generator=g)
    z = e[y] + sigma * torch.randn(200_000, 8, generator=g, dtype=torch.float64)
    from blocktrain.diffusion.sampling import evidence

    ce_mean = expected_embedding(prior.log() + evidence(z, e, sigma), e)
    # The MSE optimum is E[e_y | z]: in bins of the sufficient statistic the mean of e_y must equal the mean of CE's estimate.
    statistic = z @ (e[0] - e[1])
    for low, high in zip(torch.linspace(-1.5, 1.5, 7), torch.linspace(-1.5, 1.5, 7)[1:], strict=False):
        inside = (statistic >= low) & (statistic < high)
        assert inside.sum() > 500
        assert torch.allclose(e[y][inside].mean(0), ce_mean[inside].mean(0), atol=0.03)


def test_embedding_mse_trains_the_denoiser_but_not_the_targets():
    config = tiny_config(objective={**PAPER, "loss": "embedding_mse"})
    stack = make_stack(config)
    result = objective_of(config, stack, make_batch(config)).loss((0, 1))
    result.loss.backward()
    assert stack.interface.targets.weight.grad is None  # a learnt target would collapse
    assert stack.interface.denoised.weight.grad.abs().sum() > 0
    assert stack.interface.log_sharpness.grad.abs() > 0
    assert stack.interface.head.weight.grad is None


def test_window_masks_context_but_never_the_target():
    config = tiny_config(objective={**PAPER, "input": "upstream", "anchor_weight": 1.0, "window": 8, "window_share": 0.5}, train={"batch_size": 64})
    batch = make_batch(config)
    noisy, clean = make_views(config, make_partition(config.noise, 3), batch[:, :-1], batch[:, 1:], 1)
    masked = (noisy.x == 256).any(1)
    assert 0.25 < masked.float().mean() < 0.75
    cells = noisy.x.reshape(-1, 16)  # two in each sequence of 32 positions
    widths = (cells == 256).sum(1)
    assert set(widths.tolist()) == set(range(9)), "from none to all eight"
    for row, width in zip(cells, widths.tolist(), strict=True):
        assert (row[16 - width :] == 256).all(), "the last positions of each cell and no others"
    assert torch.equal(noisy.y, batch[:, 1:])
    assert torch.equal(clean.x, noisy.x)  # a sweep starts without z and masked


def test_state_enters_at_its_own_noise_level():
    """The block reads c_in(sigma) z: scaling z and sigma_data together must not change what it sees apart from c_noise."""
    config = tiny_config(objective=PAPER)
    stack = make_stack(config)
    g = torch.Generator().manual_seed(0)
    state, z = torch.randn(2, 32, 32, generator=g), torch.randn(2, 32, 16, generator=g)
    out, noise = span_state(stack, config, 0, state, z, torch.tensor([2.0, 2.0]))
    expected = stack.block(0)(
        state + stack.interface.enter(z / (4 + 0.25) ** 0.5), stack.interface.noise(torch.tensor([2.0, 2.0]).log() / 4)[:, None]
    )
    assert noise is not None
    assert noise.shape == (2, 1, 8)
    assert torch.allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("objective", [{**CLEAN, "input": "independent"}, {**PAPER, "start": "zero", "readout": "evidence_free"}, CLEAN])
def test_the_mean_of_the_blocks_is_that_of_their_log_probabilities(objective: dict):
    """Not of logits, whose level is arbitrary, nor of probabilities; after each block that of those so far."""
    config, mean = (tiny_config(objective={**objective, "combine": name}) for name in ("last", "mean"))
    stack, partition, x = make_stack(config), make_partition(config.noise, 3), make_batch(config)[:, :-1]
    z = Composer(stack, config, partition).start((4, 32), 0)
    each = [F.log_softmax(logits, dim=-1) for logits in Composer(stack, config, partition).sweep(x, z)]
    for count, logits in enumerate(Composer(stack, mean, partition).sweep(x, z), 1):
        assert torch.allclose(F.log_softmax(logits, -1), F.log_softmax(torch.stack(each[:count]).mean(0), -1), atol=1e-5)
    (alone,) = Composer(stack, mean, partition).sweep(x, z, only=1)
    (own,) = Composer(stack, config, partition).sweep(x, z, only=1)
    assert torch.allclose(F.log_softmax(alone, -1), F.log_softmax(own, -1), atol=1e-5)


def test_the_votes_of_many_blocks_do_not_overflow():
    surely_not = torch.tensor([[[0.0, -1e30]]])
    votes = None
    for _ in range(MAX_VOTERS):
        votes = vote(votes, surely_not)
    assert mean_of(votes, MAX_VOTERS)[0, 0].tolist() == [0.0, -64.0]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"objective\.combine: mean is for at most 255 blocks"):
        tiny_config(objective={**CLEAN, "combine": "mean"}, model={"blocks": MAX_VOTERS + 1})


def test_inside_a_span_nobody_votes():
    config = tiny_config(objective={**CLEAN, "span": 2, "combine": "mean"})
    stack = make_stack(config)
    composer = Composer(stack, config, make_partition(config.noise, 3))
    assert composer.voters == [1, 2]
    first, second, third = list(composer.sweep(make_batch(config)[:, :-1], None))
    last = Composer(stack, tiny_config(objective={**CLEAN, "span": 2}), make_partition(config.noise, 3))
    *_, own = last.sweep(make_batch(config)[:, :-1], None)
    assert torch.allclose(third, (second.log_softmax(-1) + own.log_softmax(-1)) / 2, atol=1e-5)
    assert not torch.allclose(first.log_softmax(-1), second, atol=1e-2)


def test_blocks_that_stand_alone_read_the_text_in_orders_of_their_own(text: Path):
    """Each block's order is over the whole text, and a block has the gradient that a worker of its own would have."""
    config, data = tiny_config(), load_corpus(str(text)).train
    batches, spans = SpanBatches(data, config), spans_of(3, 1)
    together, batch = make_stack(config), batches.batch(spans, 0)
    assert batch.shape == (3, 4, 33)
    assert len({part.numpy().tobytes() for part in batch}) == 3
    epoch = Batches(data, 4, 32, 0).windows_per_epoch
    assert {part.windows_per_epoch for part in batches._batches} == {epoch}
    assert torch.equal(batch[0], torch.from_numpy(Batches(data, 4, 32, 0).batch(0))), "the first block's order is that of a run that shares it"
    trainer = BlockTrainer(together, config, make_partition(config.noise, 3), spans, CPU)
    trainer.gradients(batch, 0)
    tokens = torch.zeros_like(together.interface.tokens.weight)
    for b, span in enumerate(spans):
        alone = make_stack(config)
        BlockTrainer(alone, config, make_partition(config.noise, 3), [span], CPU).gradients(batches.batch([span], 0), 0)
        got, expected = (s.block(b).layers[0].attention.query.weight.grad for s in (together, alone))
        assert torch.allclose(got, expected, atol=1e-7)
        tokens += alone.interface.tokens.weight.grad / 3
    assert torch.allclose(together.interface.tokens.weight.grad, tokens, atol=1e-7)


@pytest.mark.parametrize("objective", [CLEAN, PAPER])
def test_other_blocks_share_their_batches(objective: dict, text: Path):
    batch = SpanBatches(load_corpus(str(text)).train, tiny_config(objective=objective)).batch(spans_of(3, 1), 5)
    assert batch.shape == (4, 33)
