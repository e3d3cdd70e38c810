"""The local objective: what one span of blocks learns from one batch.

N batch, T positions, E target-embedding width, V vocabulary.

A span is trained through the read-out of its last block; everything before it is a detached state. Two views of a batch may carry loss:

  noisy   z = e_y + sigma * eps enters every block; cross entropy (or embedding MSE) times the EDM weight of each sample's sigma
  clean   the target information is absent (z = 0, or no z at all where `denoise_weight` is 0); plain cross entropy: the `anchor`

Where blocks are chained (`input = upstream`) the states z of one sample at different blocks are coupled as a forward diffusion: a higher
level is the lower one plus fresh noise. Sharing one eps would let two blocks' states be solved for the target; independent draws would give a block
more evidence than a sweep ever has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.diffusion.edm import edm_weight
from blocktrain.diffusion.noise import SIGMA_FLOOR, Partition
from blocktrain.model.transformer import MASK_ID, VOCABULARY, BlockStack
from blocktrain.seeding import generator
from blocktrain.training.composition import enter, read_out, span_state
from blocktrain.training.data import Batches

Span = tuple[int, int]  # first block, one past the last block


def spans_of(blocks: int, width: int) -> list[Span]:
    """Every run of `width` consecutive blocks; none is shorter."""
    return [(first, first + width) for first in range(blocks - width + 1)]


class SpanBatches:
    """What each span of a run learns from at each step.

    The same batch for all; or, where blocks have samples of their own, each block's from an order of its own over the same text, so that blocks
    which vote differ in more than their first weights, and the interface that they share has a gradient of as many batches.
    """

    def __init__(self, data: np.ndarray, config: RunConfig) -> None:
        """Raises DataError where the text is too short for one batch."""
        self._config = config
        orders = config.model.blocks if config.own_samples else 1
        self._batches = [Batches(data, config.train.batch_size, config.model.positions, config.seed, order=order) for order in range(orders)]

    def batch(self, spans: Sequence[Span], step: int, schedule_step: int | None = None) -> Tensor:
        """Batch `step` (from 0), byte ids (N, T + 1), or (spans, N, T + 1) where blocks have their own. Raises DataError if the text has changed.

        Where many workers share a block's steps, `schedule_step` is how far the block's training is.
        """
        if not self._config.own_samples_at(step if schedule_step is None else schedule_step):
            return torch.from_numpy(self._batches[0].batch(step))
        return torch.from_numpy(np.stack([self._batches[first].batch(step) for first, _ in spans]))


@dataclass(frozen=True)
class NoiseLevels:
    """The noise of one batch at every block: sigma (B, N) and the standard-normal draws that make z."""

    sigma: Tensor  # (B, N), falling along B where blocks are chained
    seed: int
    chained: bool

    def state(self, block: int, target: Tensor) -> Tensor:
        """z of a block for target embeddings (N, T, E): e_y + sum of the noise of this block and, where chained, of all below it."""
        z, above = target, torch.zeros_like(self.sigma[0])
        for b in range(self.sigma.size(0) - 1, block - 1, -1) if self.chained else (block,):
            scale = (self.sigma[b] ** 2 - above**2).clamp(min=0).sqrt().view(-1, 1, 1).to(target.device)
            eps = torch.randn(target.shape, generator=generator(self.seed, "eps", b)).to(target.device)
            z, above = z + scale * eps, self.sigma[b]
        return z


def draw_noise(config: RunConfig, partition: Partition, count: int, seed: int) -> NoiseLevels:
    """Noise levels of `count` samples for every block; a pure function of the seed."""
    sigma = torch.stack([partition.draw(b, count, generator(seed, "sigma", b)) for b in range(partition.blocks)])
    chained = config.objective.input == "upstream"
    if chained:  # ranges overlap: a block above may not be less noisy than the one below it
        sigma = sigma.flip(0).cummax(0).values.flip(0)
    return NoiseLevels(sigma, seed, chained)


@dataclass(frozen=True)
class View:
    """One reading of a batch: context ids, and the noise that carries the target."""

    x: Tensor  # (N, T) context ids, some masked in a window run
    y: Tensor  # (N, T) target ids
    levels: NoiseLevels | None
    clean_sigma: tuple[float, ...] | None  # sigma at which a block reads z = 0; None where no z takes part
    weight: float  # of this view's loss


@dataclass
class SpanLoss:
    """Loss of one span on one batch. `loss` is what is back-propagated; the rest are figures, never mixed up with it."""

    loss: Tensor  # scalar: weighted, with the anchor
    ce: Tensor  # scalar: plain cross entropy in nats per byte, of the noisy view where there is one
    anchor_ce: Tensor | None  # scalar: cross entropy of the clean view beside it
    sigma: Tensor | None  # (N,) noise levels of the last block
    ce_per_sample: Tensor  # (N,) plain cross entropy of each sample


def make_views(config: RunConfig, partition: Partition, x: Tensor, y: Tensor, seed: int) -> list[View]:
    """The views of a batch that carry loss, the one that is reported first."""
    objective = config.objective
    views, x = [], _mask_window(config, x, seed)
    if objective.noisy:
        levels = draw_noise(config, partition, x.size(0), seed)
        views.append(View(x, y, levels, None, objective.denoise_weight))
    if objective.anchor_weight:
        sigma = partition.boundaries[:-1] if objective.noisy else None
        views.append(View(x, y, None, sigma, objective.anchor_weight))
    return views


def _mask_window(config: RunConfig, x: Tensor, seed: int) -> Tensor:
    """Hide the context of 1 to W positions at the end of every 2 W, in a share of the sequences: windows that begin anywhere, as many as fit.

    What follows a window in its sequence sees a hole in its context. A sweep never does, but one window a sequence is too few to learn from.
    """
    objective = config.objective
    if not objective.window:
        return x
    g = generator(seed, "window")
    chosen = torch.rand(x.size(0), generator=g) < objective.window_share
    from_end = torch.arange(x.size(1) - 1, -1, -1)  # (T,)
    widths = torch.randint(1, objective.window + 1, (x.size(0), x.size(1)), generator=g) * chosen[:, None]
    hidden = from_end % (2 * objective.window) < widths[:, from_end // (2 * objective.window)]  # (N, T)
    return x.masked_fill(hidden.to(x.device), MASK_ID)


class SpanObjective:
    """The loss of spans on one batch, span after span, each from the detached state the one before left.

    Spans are asked for in rising order; the state in front of a span is computed once, without gradient where no earlier span has
    already passed there.
    """

    def __init__(self, stack: BlockStack, config: RunConfig, views: list[View], *, vote_weight: float = 0.0, peers: BlockStack | None = None) -> None:
        """`vote_weight`: share of the loss that is the common vote's. `peers`: all blocks as they were at the last merge, frozen, for that vote.

        Without peers `stack` holds all voters, and the first loss runs them all: what is asked for later has been computed then.
        """
        self.stack = stack
        self.config = config
        self.views = views
        self._vote_weight = vote_weight
        self._peers = peers
        self._ahead: list[dict[int, Tensor]] = [{} for _ in views]  # per view: states of blocks whose loss is still to come
        self._rest: list[dict[int, Tensor] | None] = [None] * len(views)  # per view and block: the vote without it, log-probabilities (N, T, V)
        self._front: list[tuple[int, Tensor | None]] = [(0, None) for _ in self.views]  # per view: block, state in front of it

    def loss(self, span: Span) -> SpanLoss:
        """Loss of blocks span[0] .. span[1] - 1, with gradient through all of them and the interface, and none before."""
        results = [self._view_loss(i, view, span) for i, view in enumerate(self.views)]
        total = torch.stack([view.weight * loss for view, (loss, _, _) in zip(self.views, results, strict=True)]).sum()
        _, ce, sigma = results[0]
        anchor = results[1][1].mean().detach() if len(results) > 1 else None
        return SpanLoss(total, ce.mean().detach(), anchor, sigma, ce.detach())

    def _view_loss(self, index: int, view: View, span: Span) -> tuple[Tensor, Tensor, Tensor | None]:
        """(loss, cross entropy per sample (N,), sigma (N,)) of one view."""
        assert span[0] < span[1], "a span holds a block"
        others = self._others(index, view, span[0]) if self._vote_weight else None
        state, noise, z, sigma = self._state_before(index, view, span[0]), None, None, None
        for b in range(*span):
            if b in self._ahead[index]:
                state = self._ahead[index].pop(b)
                continue
            z, sigma = self._noisy_state(view, b)
            state, noise = span_state(self.stack, self.config, b, enter(self.stack, view.x, state), z, sigma)
            if b == span[0] and self.config.objective.input == "upstream":
                self._front[index] = (b + 1, state.detach())
        assert state is not None
        weight, interface = self._weights(sigma if view.levels else None, view.y), self.stack.interface
        if self.config.objective.loss == "cross_entropy":
            loss, ce = self.stack.block(span[1] - 1).loss(interface.head, state, noise, view.y, weight, others, self._vote_weight)
            return loss, ce, sigma if view.levels else None
        logits, denoised = read_out(self.stack, self.config, span[1] - 1, state, noise, z, sigma)
        assert denoised is not None
        ce = F.cross_entropy(logits.flatten(0, 1), view.y.flatten(), reduction="none").view(view.y.shape).mean(1)  # (N,)
        if view.levels is None:
            return ce.mean(), ce, None
        distance = (denoised - interface.target_embeddings().detach()[view.y]).square().sum(-1).mean(1)
        # Cross entropy only tunes the sharpness here: the embedding it is computed from is detached.
        return (weight * distance).mean() + ce.mean(), ce, sigma

    def _others(self, index: int, view: View, block: int) -> Tensor:
        """What the vote has beside the live block's own log-probabilities, (N, T, V): their mean, less what the block itself had there.

        As if all blocks moved as this one does. Cross entropy is convex in the sum, so merged blocks are at least as good as they were on average.
        """
        rest = self._rest[index] or self._vote(index, view)
        self._rest[index] = rest
        return rest[block]

    def _vote(self, index: int, view: View) -> dict[int, Tensor]:
        """For each block that may learn, the vote without it."""
        voters, own = self._peers or self.stack, dict[int, Tensor]()
        total = torch.zeros(*view.y.shape, VOCABULARY, device=view.y.device)
        for b in voters.held:
            with torch.set_grad_enabled(self._peers is None):
                state = voters.block(b)(enter(voters, view.x, None), None)
            if self._peers is None:
                self._ahead[index][b] = state
            with torch.no_grad():
                spoken = torch.log_softmax(read_out(voters, self.config, b, state, None, None, None)[0].float(), dim=-1)
                total.add_(spoken, alpha=1 / len(voters.held))
            if b in self.stack.held:
                own[b] = spoken
        return {b: spoken.neg_().add_(total) for b, spoken in own.items()}

    def _weights(self, sigma: Tensor | None, y: Tensor) -> Tensor:
        """What each sample's loss counts, (N,) float32: EDM's weight of its noise level, or 1."""
        if sigma is None or self.config.objective.weighting != "edm":
            return torch.ones(y.size(0), device=y.device)
        return edm_weight(sigma, self.config.noise.sigma_data)

    def _state_before(self, index: int, view: View, block: int) -> Tensor | None:
        """The detached state in front of a block (None: the token embeddings), run forward without gradient as far as needed."""
        if self.config.objective.input == "independent":
            return None
        at, state = self._front[index]
        assert at <= block, "spans are asked for in rising order"
        with torch.no_grad():
            for b in range(at, block):
                z, sigma = self._noisy_state(view, b)
                state, _ = span_state(self.stack, self.config, b, enter(self.stack, view.x, state), z, sigma)
        self._front[index] = (block, state)
        return state

    def _noisy_state(self, view: View, block: int) -> tuple[Tensor | None, Tensor | None]:
        """(z (N, T, E), sigma (N,)) that a block reads in this view."""
        n, device = view.y.size(0), view.y.device
        if view.levels is not None:
            target = self.stack.interface.target_embeddings()[view.y]
            if self.config.objective.loss == "embedding_mse":  # a learnt target would collapse onto one point
                target = target.detach()
            return view.levels.state(block, target), view.levels.sigma[block].to(device)
        if view.clean_sigma is None:
            return None, None
        sigma = max(view.clean_sigma[block], SIGMA_FLOOR)
        return torch.zeros(*view.y.shape, self.config.model.embed_dim, device=device), torch.full((n,), sigma, device=device)
