"""The inner loop: spans of blocks on batches, one optimizer step at a time.

`BlockTrainer` is what a whole machine and a single worker share. It trains the blocks it is told to; every other block that the stack holds
is frozen and serves as upstream. It owns no file and no clock: batch and step number come in, figures come out, so that a step is a function
of (weights, moments, batch, seed, step) and a resumed run repeats the unbroken one.

With `input = upstream` and spans of one block this is one forward pass through the stack, with a detach between blocks and a backward pass
per block as soon as its loss is there: the arithmetic of end-to-end training, and one block's activations at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from blocktrain.config import RunConfig
from blocktrain.diffusion.noise import Partition, log_bins
from blocktrain.errors import DivergedError
from blocktrain.model.transformer import VOCABULARY, BlockStack, layer_flops
from blocktrain.seeding import fold
from blocktrain.training.hardware import Hardware
from blocktrain.training.objective import Span, SpanLoss, SpanObjective, make_views
from blocktrain.training.optim import clip, make_optimizers, schedule, set_rate

HOPELESS_CE = 100.0  # nats per byte; guessing has ln 256 = 5.5


@dataclass
class StepFigures:
    """What one step measured; each list has one entry per span."""

    loss: list[float] = field(default_factory=list)  # weighted, what was back-propagated
    ce: list[float] = field(default_factory=list)  # plain cross entropy, nats per byte
    anchor_ce: list[float | None] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)  # per trained block, then the interface if it is trained
    rate: float = 0.0  # share of the peak learning rate


class BlockTrainer:
    """Trains spans of a stack's blocks, and the interface unless it is frozen."""

    def __init__(
        self,
        stack: BlockStack,
        config: RunConfig,
        partition: Partition,
        spans: Sequence[Span],
        hardware: Hardware,
        *,
        train_interface: bool = True,
        peers: BlockStack | None = None,
    ) -> None:
        """`peers`: all blocks as they were at the last merge, where blocks learn from a common vote and `stack` does not hold all."""
        self.stack = stack
        self.peers = peers
        self.config = config
        self.partition = partition
        self.spans = sorted(spans)
        self.hardware = hardware
        self.trained = sorted({b for span in spans for b in range(*span)})
        self.train_interface = train_interface
        stack.requires_grad_(False)
        for module in self._modules():
            module.requires_grad_(True)
        self.optimizers = make_optimizers(stack, config.train, self.trained, train_interface)
        self._spans_with = {b: sum(first <= b < stop for first, stop in self.spans) for b in self.trained}
        self.bin_edges = log_bins(config.noise, 64)
        self.bin_sum = torch.zeros(64, dtype=torch.float64)  # of cross entropy, per bin of sigma
        self.bin_count = torch.zeros(64, dtype=torch.float64)

    def _modules(self) -> list[nn.Module]:
        return [*(self.stack.block(b) for b in self.trained), *([self.stack.interface] if self.train_interface else [])]

    def step(self, batch: Tensor, step: int, schedule_step: int | None = None) -> StepFigures:
        """One optimizer step on a batch of byte ids, (N, T + 1) for all spans or (spans, N, T + 1), one for each.

        `step` (from 0) folds into every draw and sets the learning rate.

        Where many workers share a block's steps, `schedule_step` is where the block's learning rate stands.

        Raises DivergedError, with weights and moments untouched, where the loss or a gradient norm is not finite or CE is beyond hope.
        """
        at = step if schedule_step is None else schedule_step
        figures = self.gradients(batch, step, at)
        figures.grad_norm = clip(self._modules(), self.config.train.clip_norm)
        scored = figures.loss if self._vote_weight(at) == 1 else figures.ce  # a member of a vote may be anything alone
        if not all(map(math.isfinite, (*figures.loss, *figures.grad_norm))) or max(scored) > HOPELESS_CE:
            raise DivergedError(
                f"step {step + 1}: training has diverged (CE {figures.ce}, loss {figures.loss}); the newest checkpoint is from before; "
                "try a lower train.lr and train.muon_lr, or more train.warmup_steps"
            )
        figures.rate = schedule(at, self.config.train)
        set_rate(self.optimizers, figures.rate)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return figures

    def gradients(self, batch: Tensor, step: int, schedule_step: int | None = None) -> StepFigures:
        """Leave the gradient of every span's loss in the parameters; a block's is the mean over the spans that hold it."""
        figures, vote_weight = StepFigures(), self._vote_weight(step if schedule_step is None else schedule_step)
        losses: list[SpanLoss] = []
        shared = self._objective(batch, step, vote_weight) if batch.ndim == 2 else None
        for index, span in enumerate(self.spans):
            objective = shared or self._objective(batch[index], step, vote_weight)
            with self.hardware.autocast():
                result = objective.loss(span)
            result.loss.backward()
            losses.append(SpanLoss(result.loss.detach(), result.ce, result.anchor_ce, result.sigma, result.ce_per_sample))
        self._average()
        for result in losses:  # read back once, after everything is queued
            figures.loss.append(float(result.loss))
            figures.ce.append(float(result.ce))
            figures.anchor_ce.append(None if result.anchor_ce is None else float(result.anchor_ce))
            self._log_sigma(result)
        return figures

    def _vote_weight(self, at: int) -> float:
        """Share of the common vote in the loss at step `at` of the schedule.

        The others have to be there: as peers, for a worker which was sent them with its work, or in the same stack.
        """
        everyone = len(self.trained) == self.config.model.blocks
        return self.config.objective.vote_weight if self.peers or (everyone and self.config.votes_at(at)) else 0.0

    def _objective(self, batch: Tensor, step: int, vote_weight: float) -> SpanObjective:
        ids = batch.to(self.hardware.device, torch.long)
        x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        views = make_views(self.config, self.partition, x, y, fold(self.config.seed, "step", step))
        peers = self.peers or (self.stack if self.config.train.samples == "own" else None)  # where nobody else learns from this batch
        return SpanObjective(self.stack, self.config, views, vote_weight=vote_weight, peers=peers)

    def _average(self) -> None:
        for b in self.trained:
            _scale(self.stack.block(b), 1 / self._spans_with[b])
        if self.train_interface:
            _scale(self.stack.interface, 1 / len(self.spans))

    def _log_sigma(self, result: SpanLoss) -> None:
        """Add each sample's cross entropy to its bin of sigma."""
        if result.sigma is None:
            return
        index = torch.bucketize(result.sigma.cpu(), torch.tensor(self.bin_edges[1:-1]))
        self.bin_sum.index_add_(0, index, result.ce_per_sample.cpu().double())
        self.bin_count.index_add_(0, index, torch.ones_like(index, dtype=torch.float64))


def _scale(module: nn.Module, factor: float) -> None:
    if factor != 1:
        torch._foreach_mul_([p.grad for p in module.parameters() if p.grad is not None], factor)


def step_flops(config: RunConfig, spans: Sequence[Span], tokens: int, *, votes: bool) -> int:
    """Floating-point operations of one step: forward 1, backward 2; frozen prefix passes, private layers, votes and every view counted.

    Embedding look-ups, norms and the optimizer are left out, as is usual. A span's first block's forward pass is reused as the next span's prefix.
    `votes`: whether blocks learn from their common vote in this step.
    """
    model, objective = config.model, config.objective
    per_layer = layer_flops(model)
    views = int(objective.noisy) + int(objective.anchor_weight > 0)
    enter = 2 * model.embed_dim * model.width if objective.noisy else 0
    head = 2 * model.width * (model.embed_dim if objective.loss == "embedding_mse" else VOCABULARY)
    total, passed = 0, 0
    for first, stop in sorted(spans):
        private = 0 if stop == model.blocks else objective.private_layers
        trained = (stop - first) * (model.layers_per_block * per_layer + enter) + private * per_layer + head
        prefix = 0
        if objective.input == "upstream":
            prefix = max(0, first - passed) * (model.layers_per_block * per_layer + enter)
            passed = max(passed, first + 1)
        total += 3 * trained + prefix
    if votes:  # of all blocks on each batch: of the blocks that learn, or of frozen copies
        own = config.train.samples == "own"
        alone = len(spans) < model.blocks or own
        total += (len(spans) if own else 1) * model.blocks * (model.layers_per_block * per_layer * alone + head)
    return total * views * tokens


def training_flops(config: RunConfig, spans: Sequence[Span], steps: int) -> int:
    """Of the first `steps` steps of a run on one machine."""
    voting = sum(map(config.votes_at, range(steps)))
    each = [step_flops(config, spans, config.tokens_per_step, votes=votes) for votes in (False, True)]
    return (steps - voting) * each[0] + voting * each[1]


def worker_flops(config: RunConfig, spans: Sequence[Span], steps: int) -> int:
    """The same where each span is trained by a worker of its own, which runs every other block that it needs itself."""
    return sum(training_flops(config, [span], steps) for span in spans)
