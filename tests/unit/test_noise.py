"""Partition, draws, and the information cut."""

from __future__ import annotations

import math

import pytest
import torch

from blocktrain.config import NoiseConfig
from blocktrain.diffusion.noise import information_boundaries, log_bins, make_partition


@pytest.mark.parametrize("noise", [NoiseConfig(), NoiseConfig(sigma_min=0.0, sigma_max=2.0), NoiseConfig(sigma_min=0.002, sigma_max=80.0)])
@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
def test_draws_stay_inside_the_training_range(noise: NoiseConfig, blocks: int):
    partition = make_partition(noise, blocks)
    for block in range(blocks):
        low, high = partition.training_range(block)
        core_low, core_high = partition.core_range(block)
        assert noise.sigma_min <= low <= core_low < core_high <= high <= noise.sigma_max
        sigma = partition.draw(block, 512, torch.Generator().manual_seed(block))
        assert torch.isfinite(sigma).all()
        assert (sigma > 0).all()
        assert float(sigma.min()) >= max(low, 1e-4) * (1 - 1e-5)
        assert float(sigma.max()) <= high * (1 + 1e-5)


def test_overlap_widens_a_range_in_its_own_log_width():
    noise = NoiseConfig(overlap=0.1)
    partition = make_partition(noise, 3)
    low, high = partition.core_range(1)
    share = (high / low) ** 0.1
    assert partition.training_range(1) == pytest.approx((low / share, high * share))
    assert partition.training_range(0)[1] == noise.sigma_max


def test_draws_are_a_function_of_the_seed():
    partition = make_partition(NoiseConfig(), 3)
    a, b, c = (partition.draw(1, 16, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_explicit_boundaries_are_used_as_given():
    partition = make_partition(NoiseConfig(partition=[10.0, 3.0, 1.0]), 2)
    assert partition.boundaries == (10.0, 3.0, 1.0)


def test_information_cut_gives_every_block_an_equal_fall_of_ce():
    noise = NoiseConfig(sigma_min=0.1, sigma_max=10.0)
    edges = log_bins(noise, 64)
    centres = [math.sqrt(a * b) for a, b in zip(edges, edges[1:], strict=False)]

    def ce(sigma: float) -> float:  # most of the fall lies around sigma = 0.5
        return 1.4 / (1 + math.exp(-4 * (math.log(sigma) - math.log(0.5))))

    cuts = information_boundaries(edges, [ce(s) for s in centres], noise, 4)
    assert cuts == sorted(cuts, reverse=True)
    assert (cuts[0], cuts[-1]) == (10.0, 0.1)
    falls = [ce(a) - ce(b) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert falls == pytest.approx([falls[0]] * 4, rel=0.1)


@pytest.mark.parametrize("ce", [[1.0] * 8, [1.0, 0.9, 1.1, 0.8, 1.3, 1.2, 1.25, 1.4]])
def test_information_cut_survives_flat_and_noisy_tables(ce: list[float]):
    noise = NoiseConfig()
    cuts = information_boundaries(log_bins(noise, 8), ce, noise, 3)
    assert len(cuts) == 4
    assert all(a > b for a, b in zip(cuts, cuts[1:], strict=False))
