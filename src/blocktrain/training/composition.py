"""One block's step, and the blocks composed into a sweep.

N batch, T positions, E target-embedding width, V vocabulary.

`block_step` is the only place where a block meets the noise level: training, evaluation, generation and serving all go through it, so they cannot
disagree about preconditioning or about which embedding (always the normalised one) is used. `Composer` runs the blocks in falling sigma.

A sweep may not see the target: nothing here takes y.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.config import RunConfig
from blocktrain.diffusion.edm import c_in, c_noise, c_out, c_skip
from blocktrain.diffusion.noise import Partition
from blocktrain.diffusion.sampling import euler_sweep, evidence, expected_embedding
from blocktrain.model.memory import BlockTile
from blocktrain.model.transformer import BlockStack
from blocktrain.seeding import generator


@dataclass(frozen=True)
class BlockOutput:
    """What a block says at one noise level."""

    state: Tensor  # (N, T, D), handed to the next block
    logits: Tensor | None  # (N, T, V) float32, posterior given context and z; None where they were not asked for
    denoised: Tensor | None  # (N, T, E) float32, the estimate of the target embedding; None where no z takes part


def enter(stack: BlockStack, x: Tensor, upstream: Tensor | None) -> Tensor:
    """The clean input of a block: the context's token embeddings, or the state the block before it handed on. -> (N, T, D)."""
    return stack.interface.tokens(x) if upstream is None else upstream


def span_state(
    stack: BlockStack,
    config: RunConfig,
    block: int,
    state: Tensor,
    z: Tensor | None,
    sigma: Tensor | None,
    tile: BlockTile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run one block's layers: state (N, T, D), z (N, T, E) at sigma (N,) -> the state it hands on, and its noise-level embedding (N, 1, C)."""
    if z is None or sigma is None:
        return stack.block(block)(state, None, tile), None
    column = sigma.view(-1, 1, 1)
    noise = stack.interface.noise(c_noise(sigma))[:, None, :]
    state = state + stack.interface.enter(c_in(column, config.noise.sigma_data) * z)
    return stack.block(block)(state, noise, tile), noise


def read_out(
    stack: BlockStack,
    config: RunConfig,
    block: int,
    state: Tensor,
    noise: Tensor | None,
    z: Tensor | None,
    sigma: Tensor | None,
    tile: BlockTile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Logits (N, T, V) and, for embedding_mse, the denoised embedding (N, T, E) of a block whose state is known."""
    read = stack.block(block).read
    if config.objective.loss == "cross_entropy":
        return read(stack.interface.head, state, noise, tile).float(), None
    assert z is not None and sigma is not None, "embedding_mse is refused without the noisy target"
    column, data = sigma.view(-1, 1, 1), config.noise.sigma_data
    denoised = c_skip(column, data) * z + c_out(column, data) * read(stack.interface.denoised, state, noise, tile).float()
    # Sharpness is the one number that turns an embedding into logits; it must not reach back into the embedding.
    logits = denoised.detach() @ stack.interface.target_embeddings().detach().T * stack.interface.log_sharpness.exp()
    return logits, denoised


VOTE_UNITS = 1 << 16  # of a nat
LEAST_VOTE = -64.0  # nats; with it 255 blocks stay within half of what an int32 holds (MAX_VOTERS in config.py)


def vote(votes: Tensor | None, scored: Tensor) -> Tensor:
    """The votes so far and one block's scored logits (N, T, V) -> the votes with its: the sum of log-probabilities in units of 2^-16 nats, int32.

    Whole numbers, so that the sum is the same bits in whatever order, and wherever, blocks are counted.
    """
    mine = (torch.log_softmax(scored.float(), dim=-1).clamp(min=LEAST_VOTE) * VOTE_UNITS).round().to(torch.int32)
    return mine if votes is None else votes + mine


def mean_of(votes: Tensor, count: int) -> Tensor:
    """Votes of `count` blocks -> the mean of their log-probabilities, which are logits like any other, float32."""
    return votes.double().div(VOTE_UNITS * count).float()


class Composer:
    """The blocks of a stack composed on the run's noise schedule."""

    def __init__(self, stack: BlockStack, config: RunConfig, partition: Partition) -> None:
        self.stack = stack
        self.config = config
        self.partition = partition

    @property
    def readable(self) -> list[int]:
        """Blocks whose logits were trained: each independent block, or the last block of each span."""
        return list(range(self.config.objective.span - 1, self.config.model.blocks))

    def start(self, shape: tuple[int, int], seed: int, draw: int = 0, first: int = 0, position: int = 0) -> Tensor | None:
        """The state (N, T, E) a sweep starts from at block `first`: None where no z takes part, zeros, or noise.

        The noise of a slot is a function of (seed, draw, position) alone, so generating byte by byte and scoring a whole text agree.
        """
        objective, (n, t), e = self.config.objective, shape, self.config.model.embed_dim
        device = self.stack.interface.tokens.weight.device
        if not objective.noisy:
            return None
        if objective.start == "zero":
            return torch.zeros(n, t, e, device=device)
        rows = [torch.randn(n, e, generator=generator(seed, "start", draw, position + i)) for i in range(t)]
        return torch.stack(rows, dim=1).to(device) * self.partition.boundaries[first]

    def step(self, block: int, x: Tensor, upstream: Tensor | None, z: Tensor | None, tile: BlockTile | None = None, read: bool = True) -> BlockOutput:
        """One block at its upper boundary of sigma: x (N, T), upstream (N, T, D) or None, z (N, T, E) or None.

        Without `read` there are no logits, unless the next noise level needs them.
        """
        sigma = None if z is None else torch.full((x.size(0),), self.partition.boundaries[block], device=x.device)
        state, noise = span_state(self.stack, self.config, block, enter(self.stack, x, upstream), z, sigma, tile)
        if z is None and not read:
            return BlockOutput(state, None, None)
        logits, denoised = read_out(self.stack, self.config, block, state, noise, z, sigma, tile)
        if z is not None and denoised is None:
            denoised = expected_embedding(logits, self.stack.interface.target_embeddings())
        return BlockOutput(state, logits, denoised)

    def sweep(self, x: Tensor, z: Tensor | None, only: int | None = None) -> Iterator[Tensor]:
        """Yield the logits (N, T, V) of the blocks so far, after every block, highest sigma first. `only` runs one alone, from its own start."""
        blocks = list(range(self.config.model.blocks)) if only is None else [only]
        state: Tensor | None = None

        def run(block: int, z: Tensor | None) -> BlockOutput:
            nonlocal state
            output = self.step(block, x, state if self.config.objective.input == "upstream" else None, z)
            state = output.state
            return output

        def read(block: int, output: BlockOutput, z: Tensor | None) -> Tensor:
            nonlocal votes
            scored = self.scored(block, output, z)
            if block not in self.voters:
                return scored
            votes = vote(votes, scored)
            return mean_of(votes, len([b for b in blocks if b in self.voters and b <= block]))

        votes: Tensor | None = None
        if z is None:
            for block in blocks:
                yield read(block, run(block, None), None)
            return

        def denoise(i: int, z: Tensor, _: float) -> Tensor:
            nonlocal scored
            output = run(blocks[i], z)
            scored = read(blocks[i], output, z)
            assert output.denoised is not None
            return output.denoised

        scored = z
        for _ in euler_sweep(denoise, z, self.partition.boundaries[blocks[0] : blocks[-1] + 2]):
            yield scored

    @property
    def voters(self) -> list[int]:
        """The blocks of whose log-probabilities the prediction is the mean; none where it is the last block's alone."""
        return self.readable if self.config.objective.votes else []

    def scored(self, block: int, output: BlockOutput, z: Tensor | None) -> Tensor:
        """The logits (N, T, V) that are scored and sampled: the block's own, or without what z says of the target."""
        assert output.logits is not None
        if z is None or self.config.objective.readout == "posterior":
            return output.logits
        return output.logits - evidence(z, self.stack.interface.target_embeddings(), self.partition.boundaries[block])
