"""Perfect blocks are known exactly: logits log p(y|x) + <z, e_y> / sigma^2. A noise-started sweep of them does not compute p.

The excess cross entropy of reading the last block's posterior grows as sigma_min falls: this is target leakage. Taking the evidence out of the
read-out removes it entirely.
"""

import torch
import torch.nn.functional as F

from blocktrain.config import NoiseConfig
from blocktrain.diffusion.noise import make_partition
from blocktrain.diffusion.sampling import euler_sweep, evidence, expected_embedding

V, E, ROWS = 256, 128, 4000


def table(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(y|x) for random contexts with about the entropy of text bytes (1.4 nats), and unit embeddings."""
    g = torch.Generator().manual_seed(seed)
    logits = 5.0 * torch.randn(ROWS, V, generator=g, dtype=torch.float64)
    return F.log_softmax(logits, -1), F.normalize(torch.randn(V, E, generator=g, dtype=torch.float64), dim=-1)


def excess(sigma_min: float, *, evidence_free: bool = False, start: str = "noise", blocks: int = 4) -> float:
    """Cross entropy of the sweep's last logits minus the entropy of p, nats."""
    log_p, e = table()
    partition = make_partition(NoiseConfig(sigma_min=sigma_min, sigma_max=10.0), blocks)
    scored = torch.empty(0)

    def denoise(_: int, z: torch.Tensor, sigma: float) -> torch.Tensor:
        nonlocal scored
        logits = log_p + evidence(z, e, sigma)
        scored = logits - evidence(z, e, sigma) if evidence_free else logits
        return expected_embedding(logits, e)

    noise = torch.randn(ROWS, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in euler_sweep(denoise, (noise if start == "noise" else 0 * noise) * 10.0, partition.boundaries):
        pass
    p = log_p.exp()
    return float(-(p * F.log_softmax(scored, -1)).sum(-1).mean() + (p * log_p).sum(-1).mean())


def test_excess_of_a_noise_start_grows_as_sigma_min_falls():
    values = [excess(low) for low in (2.0, 1.0, 0.5, 0.2)]
    assert values == sorted(values)
    assert 0.01 < values[0] < 0.08  # about 0.04
    assert 0.07 < values[1] < 0.25  # about 0.14
    assert 0.3 < values[2] < 1.0  # about 0.53
    assert values[3] > 2  # the target leaks in training, and there is none to leak in the sweep


def test_evidence_free_readout_of_perfect_blocks_is_exact():
    assert abs(excess(0.2, evidence_free=True)) < 1e-9


def test_zero_start_is_far_closer_than_noise():
    assert excess(1.0, start="zero") < 0.25 * excess(1.0)
