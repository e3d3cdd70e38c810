"""What a sweep costs in quality: held-out cross entropy of the bytes that one traversal gives together.

N windows, T positions, W bytes a traversal. The first of the W is predicted from all bytes before it, as in `exact`; the W - 1 others from positions
that see a mask for their context. Teacher-forced: each window of held-out text has its last W bytes scored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model.transformer import MASK_ID
from blocktrain.seeding import fold
from blocktrain.serving.decoding import check_sweep
from blocktrain.training.checkpoint import LoadedRun
from blocktrain.training.composition import Composer

BATCH = 16
SCORED = 16  # bytes of a window that are scored at least, where it is long enough


def window_ce(run: LoadedRun, windows: np.ndarray, width: int, cuts: int = 1) -> Tensor:
    """CE of each of the last `width` bytes of windows (N, T + 1), by its place in the traversal: (W,) float64, nats per byte.

    With more `cuts`, also of the windows cut short by W, 2 W, … bytes. Raises ConfigError where the run cannot give so many.
    """
    check_sweep(run.config, width)
    width = min(width, windows.shape[1] - 1)
    composer = Composer(run.stack, run.config, run.partition)
    return torch.stack([_cut_ce(run, composer, windows[:, : windows.shape[1] - cut * width], width) for cut in range(cuts)]).mean(0)


def _cut_ce(run: LoadedRun, composer: Composer, windows: np.ndarray, width: int) -> Tensor:
    parts = []
    for index, ids in enumerate(torch.from_numpy(windows.astype(np.int64)).split(BATCH)):
        x, y = ids[:, :-1].clone(), ids[:, -width:]
        x[:, x.size(1) - (width - 1) :] = MASK_ID
        z = composer.start((x.size(0), x.size(1)), fold(run.config.seed, "evaluate", index))
        with torch.inference_mode():
            *_, logits = composer.sweep(x, z)
        ce = F.cross_entropy(logits[:, -width:].float().flatten(0, 1), y.flatten(), reduction="none")
        parts.append(ce.view(y.shape).double())
    return torch.cat(parts).mean(0)


def window_figures(run: LoadedRun, windows: np.ndarray, width: int, cuts: int | None = None) -> dict[str, Any]:
    """CE of all W bytes, of the first that is masked, and of all that are masked (None where none is); nats per byte.

    By default windows are cut so often that narrow widths score 16 bytes of each too, within half a window.
    """
    most = max(1, (windows.shape[1] - 1) // 2 // width)
    ce = window_ce(run, windows, width, min(most, max(1, SCORED // width)) if cuts is None else cuts)
    masked = ce[1:]
    figures = {"width": width, "ce": float(ce.mean())}
    return figures | {
        "first_masked_ce": float(masked[0]) if len(masked) else None,
        "masked_ce": float(masked.mean()) if len(masked) else None,
        "by_place": ce.tolist(),
    }
