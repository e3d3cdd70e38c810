"""For Gaussian data the ideal denoiser is known in closed form: preconditioning, schedule and sampler must reproduce it."""

import math

import pytest
import torch

from blocktrain.config import NoiseConfig
from blocktrain.diffusion.edm import c_in, c_noise, c_out, c_skip, edm_weight
from blocktrain.diffusion.noise import make_partition
from blocktrain.diffusion.sampling import euler_sweep

SD = 0.5


def test_ideal_denoiser_of_centred_gaussian_is_c_skip():
    """x ~ N(0, sd^2): E[x | z] = sd^2 / (sd^2 + sigma^2) z, which leaves nothing for the network to add."""
    g = torch.Generator().manual_seed(0)
    sigma = 0.7
    x = SD * torch.randn(400_000, generator=g, dtype=torch.float64)
    z = x + sigma * torch.randn(400_000, generator=g, dtype=torch.float64)
    slope = (x * z).mean() / (z * z).mean()  # least squares
    assert slope == pytest.approx(float(c_skip(torch.tensor(sigma), SD)), rel=5e-3)


def test_network_input_and_target_have_unit_variance():
    g = torch.Generator().manual_seed(1)
    for sigma in (0.02, 0.5, 3.0, 20.0):
        s = torch.tensor(sigma, dtype=torch.float64)
        x = SD * torch.randn(400_000, generator=g, dtype=torch.float64)
        z = x + s * torch.randn(400_000, generator=g, dtype=torch.float64)
        assert (c_in(s, SD) * z).std() == pytest.approx(1, rel=1e-2)
        target = (x - c_skip(s, SD) * z) / c_out(s, SD)  # what F must output
        assert target.std() == pytest.approx(1, rel=1e-2)


def test_weight_is_inverse_square_of_c_out():
    sigma = torch.tensor([0.01, 0.5, 1.0, 10.0], dtype=torch.float64)
    assert torch.allclose(edm_weight(sigma, SD), 1 / c_out(sigma, SD) ** 2)
    assert torch.allclose(edm_weight(sigma, SD), 1 / SD**2 + 1 / sigma**2)
    assert torch.allclose(c_noise(sigma), torch.log(sigma) / 4)


@pytest.mark.parametrize("mean", [0.0, 0.8])
def test_euler_sweep_follows_the_exact_flow(mean: float):
    """x ~ N(mean, sd^2): the probability flow is z(s) = mean + (z0 - mean) sqrt((sd^2 + s^2) / (sd^2 + s0^2))."""
    z0 = torch.tensor([3.0, -7.0, 0.5], dtype=torch.float64)
    top, bottom = 10.0, 0.01

    def denoise(_: int, z: torch.Tensor, sigma: float) -> torch.Tensor:
        s = torch.tensor(sigma, dtype=torch.float64)
        return mean + c_skip(s, SD) * (z - mean)

    errors = []
    for steps in (200, 400):
        sigmas = torch.logspace(math.log10(top), math.log10(bottom), steps + 1, dtype=torch.float64).tolist()
        state = {"z": z0}

        def watched(i: int, z: torch.Tensor, sigma: float, state: dict = state) -> torch.Tensor:
            state["z"] = z
            return denoise(i, z, sigma)

        for _ in euler_sweep(watched, z0, sigmas):
            pass
        exact = mean + (z0 - mean) * math.sqrt((SD**2 + sigmas[-2] ** 2) / (SD**2 + top**2))
        errors.append(float((state["z"] - exact).abs().max()))
    assert errors[0] < 0.05
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.1)  # first order: the error halves with the step


def test_boundaries_have_equal_probability_and_fall():
    noise = NoiseConfig(sigma_min=0.002, sigma_max=80.0)
    partition = make_partition(noise, 4)
    assert list(partition.boundaries) == sorted(partition.boundaries, reverse=True)
    mass = [partition.density.cdf(a) - partition.density.cdf(b) for a, b in zip(partition.boundaries, partition.boundaries[1:], strict=False)]
    assert mass == pytest.approx([mass[0]] * 4, rel=1e-9)
    # Phi^-1(1/2) = 0: the middle boundary of a nearly untruncated density is exp(P_mean).
    assert partition.boundaries[2] == pytest.approx(math.exp(-1.2), rel=1e-2)


def test_draws_follow_the_truncated_density():
    partition = make_partition(NoiseConfig(overlap=0.0), 1)
    draws = partition.draw(0, 20_000, torch.Generator().manual_seed(3)).double().log()
    # Moments of a normal(-1.2, 1.2) truncated to [0, ln 10], by quadrature.
    t = torch.linspace(0, math.log(10), 100_001, dtype=torch.float64)
    density = torch.exp(-0.5 * ((t + 1.2) / 1.2) ** 2)
    density /= density.sum()
    mean = float((density * t).sum())
    assert float(draws.mean()) == pytest.approx(mean, abs=2e-3)
    assert float(draws.var()) == pytest.approx(float((density * (t - mean) ** 2).sum()), rel=1e-2)
