"""Cross entropy of given text through a chain of blocks as they serve: one traversal a window, no sampling.

This is the headline figure of an evaluation as the stages give it, with states rounded as on the wire.
"""

from __future__ import annotations

import asyncio

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model.transformer import MASK_ID
from blocktrain.serving.chain import Chain, Step
from blocktrain.serving.compute import Settings


async def score(chain: Chain, windows: np.ndarray, settings: Settings, masked: int = 0, at_once: int = 4) -> tuple[Tensor, tuple[int, ...]]:
    """windows (N, T + 1) byte ids -> CE of each in nats per byte (N,) float64, and the blocks that were left out.

    With `masked` the context of that many last positions is masked and only they are scored, as one sweep would write them.
    """
    slots, missing = asyncio.Semaphore(at_once), set[int]()

    async def one(window: np.ndarray) -> float:
        x, y = [int(i) for i in window[:-1]], torch.from_numpy(window[1:].astype(np.int64))
        want = len(x) - masked if masked else 0
        async with slots:
            text = await chain.open(settings)
            try:
                logits = await text.step(Step(0, 0, x[: len(x) - masked] + [MASK_ID] * masked, want))
                missing.update(text.missing)
            finally:
                await text.close()
        return float(F.cross_entropy(logits.double(), y[want:]))

    ce = await asyncio.gather(*(one(window) for window in windows))
    return torch.tensor(ce, dtype=torch.float64), tuple(sorted(missing))
