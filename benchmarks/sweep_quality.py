"""What a run that was trained with a window loses and gains by the width of its sweep: one row a width, then one JSON line.

    python benchmarks/sweep_quality.py RUN [--widths 1,4,8,16,64,whole] [--windows 64] [--prompts 8] [--bytes 192] [--temperature 0.8]

Held-out CE is teacher-forced, the window's context masked: of all its bytes, of the first masked one, of all masked ones. The texts that are
generated after held-out prompts have their variety beside that of the text that really follows. Width 1 is `exact`; `whole` is all that the run was
trained for.
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

from blocktrain.errors import BlockTrainError
from blocktrain.report.texts import heldout_of, prompts_of, variety
from blocktrain.report.windows import window_figures
from blocktrain.serving.chain import LocalChain
from blocktrain.serving.decoding import Counts, Plan, check_sweep, generate
from blocktrain.serving.sampling import Sampling
from blocktrain.training.checkpoint import LoadedRun, load_run
from blocktrain.training.data import heldout_windows


async def generated(run: LoadedRun, prompts: list[bytes], width: int, max_bytes: int, temperature: float) -> tuple[list[bytes], float]:
    """Texts after the prompts, and bytes per traversal."""
    chain, texts, counts = LocalChain(run), [], Counts()
    for seed, prompt in enumerate(prompts):
        plan, data = Plan("sweep", Sampling(temperature, seed=seed), max_bytes, window=width), b""
        async for piece in generate(chain, plan, prompt, counts=counts):
            data += bytes(piece.ids)
        texts.append(data)
    await chain.close()
    return texts, counts.bytes_per_traversal


def print_rows(rows: list[dict[str, Any]], heldout: dict[str, float]) -> None:
    names = ("distinct_1", "distinct_2", "distinct_3", "entropy")
    print(f"{'width':>8} {'CE':>7} {'1st masked':>11} {'masked':>7} {'bytes/traversal':>16} " + " ".join(f"{name:>10}" for name in names))
    for row in rows:
        masked = [("-" if row[key] is None else f"{row[key]:.3f}") for key in ("first_masked_ce", "masked_ce")]
        figures = " ".join(f"{row['variety'][name]:10.3f}" for name in names)
        print(f"{row['width']:8} {row['ce']:7.3f} {masked[0]:>11} {masked[1]:>7} {row['bytes_per_traversal']:16.2f} {figures}")
    print(f"{'held-out':>8} {'':7} {'':11} {'':7} {'':16} " + " ".join(f"{heldout[name]:10.3f}" for name in names), flush=True)


def widths_of(run: LoadedRun, asked: str) -> list[int]:
    """Named widths that the run allows, rising; one that is not allowed is left out unless it is the only one."""
    most = run.config.objective.window + 1
    widths = sorted({most if part == "whole" else int(part) for part in asked.split(",")})
    allowed = [width for width in widths if 1 <= width <= most]
    check_sweep(run.config, allowed[-1] if allowed else widths[0])
    return allowed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--widths", default="1,4,8,16,64,whole")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-bytes", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args()
    try:
        run = load_run(options.run, lambda message: print(message, file=sys.stderr))
        widths, heldout = widths_of(run, options.widths), heldout_of(run)
        prompts = prompts_of(heldout, options.prompts, options.prompt_bytes, options.bytes)
    except (BlockTrainError, ValueError) as error:
        parser.error(str(error))
    windows, rows = heldout_windows(heldout, run.config.model.positions, options.windows), []
    for width in widths:
        texts, rate = asyncio.run(generated(run, [prompt for prompt, _ in prompts], width, options.bytes, options.temperature))
        rows.append({**window_figures(run, windows, width), "bytes_per_traversal": rate, "variety": variety(texts)})
    following = variety([after for _, after in prompts])
    print_rows(rows, following)
    settings = {"windows": len(windows), "prompts": len(prompts), "bytes": options.bytes, "temperature": options.temperature}
    print(json.dumps({"benchmark": "sweep quality", "run": options.run.name, **settings, "rows": rows, "heldout": following}))


if __name__ == "__main__":
    main()
