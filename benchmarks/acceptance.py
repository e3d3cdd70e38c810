"""How often the first blocks of a run, drafting, pick the byte that the whole run picks: two tables, then one JSON line.

    python benchmarks/acceptance.py RUN [--draft-blocks 1,2] [--windows 64] [--noise-seeds 4] [--prompts 8] [--bytes 128]

Offline: every position of the held-out windows, teacher-forced. Draft and target pick with the same Gumbel noise of (seed, position), so
a draft is accepted exactly where the picks are equal. Bytes per traversal stand there twice: from walking over the positions as decoding does, and
from the formula (1 - a^(K+1)) / (1 - a), which takes positions as independent. Hard bytes come together, so the two differ.

Free running: real generation after held-out prompts, speculative with K fixed and adaptive, and whether the bytes are those of `exact`. Adaptive K
follows the times of this machine, where a traversal costs little; over a slow link it is larger.

N windows, T positions, V vocabulary, S noise seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads; see blocktrain.__main__

import numpy as np
import torch
from torch import Tensor

from blocktrain.errors import BlockTrainError
from blocktrain.report.texts import heldout_of, prompts_of
from blocktrain.serving.chain import Chain, LocalChain
from blocktrain.serving.decoding import Counts, OwnDraft, Plan, check_own_draft, generate
from blocktrain.serving.sampling import Sampling, gumbel
from blocktrain.training.checkpoint import LoadedRun, load_run
from blocktrain.training.composition import Composer
from blocktrain.training.data import heldout_windows

TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
LENGTHS = (2, 4, 8, 16, 32)
BATCH = 16


def logits_after(run: LoadedRun, windows: Tensor, blocks: list[int]) -> list[Tensor]:
    """Scored logits after each of `blocks` for windows (N, T + 1): one (N, T, V) float32 each."""
    composer, parts = Composer(run.stack, run.config, run.partition), []
    for ids in windows.split(BATCH):
        x = ids[:, :-1].contiguous()
        with torch.inference_mode():
            after = list(composer.sweep(x, composer.start((x.size(0), x.size(1)), run.config.seed)))
        parts.append([after[b].float() for b in blocks])
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def noise_of(windows: int, positions: int, seed: int) -> Tensor:
    """Gumbel noise (N, T, V) float64, for each window as if it were a text of its own."""
    return torch.stack([torch.stack([gumbel(seed * windows + n, t) for t in range(positions)]) for n in range(windows)])


def picks(logits: Tensor, temperature: float, noise: Tensor) -> Tensor:
    """The bytes that would be picked, (N, T); `sampling.pick` for many rows."""
    if temperature == 0:
        return logits.argmax(-1)
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature
    return (scaled + noise).argmax(-1)


def walk(equal: np.ndarray, length: int) -> tuple[float, float] | None:
    """(accepted run, bytes) of a traversal when decoding walks over (rows, T) with K = `length` drafts; None where T is too short.

    A traversal counts if all its drafts lie before the end.
    """
    rows, positions = equal.shape
    if positions <= length:
        return None
    until = np.full((rows, positions + 1), positions)  # first miss from each position on
    for t in range(positions - 1, -1, -1):
        until[:, t] = np.where(equal[:, t], until[:, t + 1], t)
    at, traversals, accepted = np.zeros(rows, dtype=int), 0, 0
    while (going := at + length < positions).any():
        run = np.minimum(until[np.arange(rows), np.minimum(at, positions)] - at, length)
        traversals += int(going.sum())
        accepted += int(run[going].sum())
        at = np.where(going, at + run + 1, at)
    return accepted / traversals, accepted / traversals + 1


def formula(a: float, length: int) -> float:
    return length + 1.0 if a == 1 else (1 - a ** (length + 1)) / (1 - a)


def offline(run: LoadedRun, windows: np.ndarray, depths: list[int], noise_seeds: int) -> list[dict[str, Any]]:
    """One row for each number of drafting blocks and temperature."""
    last = run.config.model.blocks - 1
    *drafts, target = logits_after(run, torch.from_numpy(windows.astype(np.int64)), [*(depth - 1 for depth in depths), last])
    equal: dict[tuple[int, float], list[Tensor]] = {(depth, t): [] for depth in depths for t in TEMPERATURES}
    for seed in range(noise_seeds):
        noise = noise_of(target.size(0), target.size(1), seed)
        for t in TEMPERATURES[bool(seed) :]:  # without noise one look is enough
            wanted = picks(target, t, noise)
            for depth, draft in zip(depths, drafts, strict=True):
                equal[depth, t].append(picks(draft, t, noise) == wanted)
    return [_row(depth, t, torch.cat(found).numpy()) for (depth, t), found in equal.items()]


def _row(depth: int, temperature: float, equal: np.ndarray) -> dict[str, Any]:
    a = float(equal.mean())
    walks = {length: walk(equal, length) for length in LENGTHS}
    return {
        "draft_blocks": depth,
        "temperature": temperature,
        "acceptance": a,
        "formula": {length: formula(a, length) for length in LENGTHS},
        "accepted_run": {length: found and found[0] for length, found in walks.items()},
        "bytes_per_traversal": {length: found and found[1] for length, found in walks.items()},
    }


async def text_of(chain: Chain, plan: Plan, prompt: bytes, draft: OwnDraft | None) -> tuple[bytes, Counts]:
    counts, data = Counts(), b""
    async for piece in generate(chain, plan, prompt, draft, counts):
        data += bytes(piece.ids)
    return data, counts


async def free_running(run: LoadedRun, prompts: list[bytes], depths: list[int], max_bytes: int, lengths: list[int | None]) -> list[dict[str, Any]]:
    """One row for each number of drafting blocks, temperature and K (None adapts it)."""
    chain, drafts, rows = LocalChain(run), {depth: OwnDraft(run, depth) for depth in depths}, []
    for t in TEMPERATURES:
        plans = [Sampling(t, seed=seed) for seed in range(len(prompts))]
        wanted = [(await text_of(chain, Plan("exact", s, max_bytes), p, None))[0] for s, p in zip(plans, prompts, strict=True)]
        for depth, draft in drafts.items():
            for length in lengths:
                found = [
                    await text_of(chain, Plan("speculative", s, max_bytes, draft_length=length), p, draft)
                    for s, p in zip(plans, prompts, strict=True)
                ]
                rows.append(_free_row(depth, t, length, [counts for _, counts in found], [text for text, _ in found] == wanted))
    await chain.close()
    return rows


def _free_row(depth: int, temperature: float, length: int | None, counts: list[Counts], equal: bool) -> dict[str, Any]:
    traversals, drafted = sum(c.traversals for c in counts), sum(c.drafted for c in counts)
    return {
        "draft_blocks": depth,
        "temperature": temperature,
        "draft_length": length,
        "bytes_per_traversal": sum(c.bytes for c in counts) / traversals,
        "drafted_per_traversal": drafted / traversals,
        "acceptance": sum(c.accepted for c in counts) / max(1, drafted),
        "equals_exact": equal,
    }


def print_offline(rows: list[dict[str, Any]]) -> None:
    print(f"{'draft':>6} {'T':>4} {'accepted':>9}  " + "".join(f"{f'K={length}':>17}" for length in LENGTHS))
    print(f"{'blocks':>6} {'':>4} {'':>9}  " + f"{'bytes (formula)':>17}" * len(LENGTHS))
    for row in rows:
        cells = [("-" if (got := row["bytes_per_traversal"][k]) is None else f"{got:.2f}") + f" ({row['formula'][k]:.2f})" for k in LENGTHS]
        print(f"{row['draft_blocks']:6} {row['temperature']:4} {row['acceptance']:9.3f}  " + "".join(f"{cell:>17}" for cell in cells), flush=True)


def print_free(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'draft':>6} {'T':>4} {'K':>8} {'bytes/traversal':>16} {'drafted':>8} {'accepted':>9} {'= exact':>8}")
    for row in rows:
        k = "adaptive" if row["draft_length"] is None else row["draft_length"]
        figures = f"{row['bytes_per_traversal']:16.2f} {row['drafted_per_traversal']:8.1f} {row['acceptance']:9.3f}"
        print(f"{row['draft_blocks']:6} {row['temperature']:4} {k:>8} {figures} {'yes' if row['equals_exact'] else 'NO':>8}", flush=True)


def depths_of(run: LoadedRun, asked: str) -> list[int]:
    """Numbers of drafting blocks; all that have a read-out unless some are named."""
    config = run.config
    check_own_draft(config, config.objective.span)
    depths = [int(part) for part in asked.split(",")] if asked else list(range(config.objective.span, config.model.blocks))
    for depth in depths:
        check_own_draft(config, depth)
    return depths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--draft-blocks", default="", help="numbers of blocks that draft; default: all with a read-out")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--noise-seeds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-bytes", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=128)
    parser.add_argument("--lengths", default="4,8,16,adaptive", help="K of free running")
    options = parser.parse_args()
    try:
        run = load_run(options.run, lambda message: print(message, file=sys.stderr))
        depths, heldout = depths_of(run, options.draft_blocks), heldout_of(run)
        prompts = [prompt for prompt, _ in prompts_of(heldout, options.prompts, options.prompt_bytes, options.bytes)]
    except (BlockTrainError, ValueError) as error:
        parser.error(str(error))
    windows = heldout_windows(heldout, run.config.model.positions, options.windows)
    teacher_forced = offline(run, windows, depths, options.noise_seeds)
    print_offline(teacher_forced)
    lengths = [None if part == "adaptive" else int(part) for part in options.lengths.split(",")]
    free = asyncio.run(free_running(run, prompts, depths, options.bytes, lengths))
    print_free(free)
    settings = {"windows": len(windows), "noise_seeds": options.noise_seeds, "prompts": len(prompts), "bytes": options.bytes}
    print(json.dumps({"benchmark": "acceptance", "run": options.run.name, **settings, "offline": teacher_forced, "free_running": free}))
    return 0 if all(row["equals_exact"] for row in free) else 1


if __name__ == "__main__":
    sys.exit(main())
