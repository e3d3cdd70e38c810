"""The serving bench at a size at which its figures mean little: that it runs to its end over real stages, what it says, and its parts."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.acceptance import formula, noise_of, offline, picks, walk
from blocktrain import cli
from blocktrain.errors import BlockTrainError, ConfigError, MemoryLimitError, ServingError
from blocktrain.report import logical
from blocktrain.report.bench_serving import Options, bench_serving, goals_of
from blocktrain.report.logical import choose_shape, layer_parameters, logical_config, logical_run, sizes_of
from blocktrain.report.netlink import Links
from blocktrain.report.serving_fleet import Fleet, split
from blocktrain.report.serving_rows import System, figures, run_once
from blocktrain.report.serving_tables import render
from blocktrain.report.texts import byte_entropy, distinct, heldout_of
from blocktrain.report.windows import window_ce, window_figures
from blocktrain.serving.chain import LocalChain, Step
from blocktrain.serving.compute import Settings
from blocktrain.serving.decoding import OwnDraft, Plan
from blocktrain.serving.host import expected_of
from blocktrain.serving.sampling import Sampling, pick
from blocktrain.training.checkpoint import load_run
from blocktrain.training.data import heldout_windows, load_corpus
from blocktrain.training.evaluate import Evaluator
from blocktrain.training.run import TrainingRun
from tests.conftest import CLEAN, PAPER, tiny_config, write_text

WINDOW = {**PAPER, "input": "upstream", "anchor_weight": 1.0, "start": "zero", "window": 8}


def trained(folder: Path, objective: dict[str, Any]) -> Path:
    text = write_text(folder / "text.txt")
    config = tiny_config(objective=objective, data={"corpus": str(text)}, train={"steps": 20})
    TrainingRun(folder / "run", config, load_corpus(str(text)), report=lambda _: None).train()
    return folder / "run"


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("windowed"), WINDOW)


def test_its_figures_and_goals(windowed: Path):
    options = Options(quick=True, hosts=2)
    result = bench_serving(windowed, options)
    assert json.loads(json.dumps(result)) == result
    assert [(table["rtt_ms"], table["mbit_s"]) for table in result["tables"]] == [(0.0, 0.0), (20.0, 0.0)]
    for table in result["tables"]:
        rows = {row["name"]: row for row in table["rows"]}
        assert list(rows) == ["baseline", "exact", "speculative", "sweep"]
        assert rows["exact"]["bytes_per_traversal"] == rows["baseline"]["bytes_per_traversal"] == 1.0
        assert rows["baseline"]["ratio"] == 1.0
        assert rows["sweep"]["bytes_per_traversal"] > 3
        assert table["speculative_equals_exact"] is True
        for row in rows.values():
            assert row["wire_bytes_per_traversal"] > 500, "traffic is read from the links"
            assert row["traversal_ms"] >= row["compute_ms_per_stage"] > 0
            assert row["network_ms_per_way"] >= table["rtt_ms"] / 2
    assert result["overhead"]["state_kb"] == 32 * 32 * 2 / 1024, "as many positions as the run has"
    assert [row["name"] for row in result["streams"]] == ["exact", "speculative"]
    assert result["quality"]["speculative"] == result["quality"]["exact"]
    assert result["quality"]["sweep"]["width"] == 9
    names = [goal["name"] for goal in result["goals"]]
    assert names[:2] == ["speculative, bytes per traversal at the longest RTT", "speculative gives the bytes of exact (1: yes)"]
    assert result["goals"][1]["met"]
    assert [table.title for table in render(result)] == ["RTT 0 ms, no limit", "RTT 20 ms, no limit", "quality", "the rest", "goals"]


def made_result(ratio: float, rtt_ms: float) -> dict[str, Any]:
    row = {"name": "speculative", "bytes_per_traversal": 5.0, "ratio": ratio}
    table = {"rtt_ms": rtt_ms, "mbit_s": 0.0, "rows": [row], "speculative_equals_exact": True}
    return {"tables": [table], "overhead": {"state_kb": 64.0, "hop_ms": 0.5}, "failover": {"identical_share": 0.99}}


def test_goals_are_of_what_was_measured():
    met = {goal.name: goal.met for goal in goals_of(made_result(2.9, 100.0))}
    assert met["speculative over baseline, bytes/s at RTT 100 ms"] is False
    assert met["failovers whose text is that of the undisturbed run, share"] is False
    assert met["overhead a hop at 64 KB states, ms"] is True
    assert not any("over baseline" in goal.name for goal in goals_of(made_result(2.9, 50.0)))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rtt", "-1"], "--rtt"),
        (["--rtt", "fast"], "--rtt"),
        (["--mbit", "nan"], "--mbit"),
        (["--prompts", "0"], "--prompts"),
        (["--hosts", "4"], "--hosts"),
        (["--draft-blocks", "3"], "--draft-blocks"),
        (["--failovers", "-1"], "--failovers"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(windowed: Path, flags: list[str], named: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["bench", "serving", str(windowed), *flags]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"blocktrain: {named}")


def test_a_row_is_counted_from_what_ran(windowed: Path):
    run = load_run(windowed, lambda _: None)
    chain, plan = LocalChain(run), Plan("exact", Sampling(0.8), 20)
    exact = asyncio.run(run_once(System("exact", chain, plan), b"one and two", 3))
    drafted = asyncio.run(run_once(System("x", chain, Plan("speculative", plan.sampling, 20), OwnDraft(run)), b"one and two", 3))
    assert drafted.text == exact.text
    assert len(exact.seen) == exact.counts.traversals == 20
    row = figures("x", [drafted], [exact])
    assert row["ratio"] == pytest.approx(drafted.bytes_per_s / exact.bytes_per_s)
    assert row["bytes_per_traversal"] == 20 / drafted.counts.traversals
    assert row["compute_ms_per_stage"] is None, "a chain in this process does not say"


def test_a_stage_that_cannot_start_is_said_at_once(windowed: Path):
    async def go() -> None:
        with Links() as links:
            fleet = Fleet(expected_of(windowed, lambda _: None), lambda *_: ["-c", "raise SystemExit('no such stage')"], split(3, 1), links)
            fleet.start()
            try:
                await fleet.connect()
            finally:
                await fleet.close()

    with pytest.raises(ServingError, match="no such stage"):
        asyncio.run(go())


# --- Quality ---


def test_variety_of_texts():
    assert distinct(b"aaaa", 1) == 0.25 and distinct(b"abab", 2) == pytest.approx(2 / 3) and distinct(b"a", 2) == 0
    assert byte_entropy(b"aaaa") == 0 and byte_entropy(bytes(range(256))) == 8


def test_the_ce_of_a_window_is_that_of_evaluation(windowed: Path):
    run = load_run(windowed, lambda _: None)
    windows = heldout_windows(heldout_of(run), run.config.model.positions, 8)
    masked = Evaluator(run, windows).rollout(mask_last=8)[0, -1].mean()
    found = window_figures(run, windows, 9, cuts=1)
    assert found["masked_ce"] == pytest.approx(float(masked), abs=1e-5)
    assert found["ce"] == pytest.approx((found["by_place"][0] + 8 * found["masked_ce"]) / 9)
    first = window_ce(run, windows[:, :-8], 1)
    assert found["by_place"][0] == pytest.approx(float(first), abs=1e-5), "the first byte of a window sees all bytes before it, and no later one"
    both = torch.stack([window_ce(run, windows, 9), window_ce(run, windows[:, :-9], 9)]).mean(0)
    assert torch.allclose(window_ce(run, windows, 9, cuts=2), both)
    with pytest.raises(ConfigError, match=r"objective\.window"):
        window_ce(run, windows, 10)


# --- Acceptance ---


def test_picks_of_many_rows_are_those_of_sampling():
    logits = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(0)) * 3
    noise = noise_of(2, 5, 7)
    for temperature in (0.0, 0.5, 1.0):
        for n in range(2):
            wanted = [pick(logits[n, t], Sampling(temperature, seed=7 * 2 + n), t) for t in range(5)]
            assert picks(logits, temperature, noise)[n].tolist() == wanted


def test_walking_over_independent_positions_gives_the_formula():
    equal = (torch.rand(200, 500, generator=torch.Generator().manual_seed(0)) < 0.8).numpy()
    for length in (2, 4, 8):
        found = walk(equal, length)
        assert found is not None and found[1] == pytest.approx(formula(0.8, length), rel=0.01)
    assert walk(equal[:, :4], 4) is None
    assert walk(equal | True, 4) == (4.0, 5.0) and walk(equal & False, 4) == (0.0, 1.0)
    assert formula(1.0, 4) == 5 and formula(0.0, 4) == 1


def test_acceptance_is_of_each_draft_at_each_temperature(windowed: Path):
    run = load_run(windowed, lambda _: None)
    windows = heldout_windows(heldout_of(run), run.config.model.positions, 4)
    rows = offline(run, windows, [1, 2], 2)
    assert [(row["draft_blocks"], row["temperature"]) for row in rows[:4]] == [(1, 0.0), (1, 0.5), (1, 0.8), (1, 1.0)]
    assert len(rows) == 8 and all(0 < row["acceptance"] <= 1 for row in rows)
    assert rows[0]["bytes_per_traversal"][32] is None, "a window of 32 does not hold 32 drafts and one more"


# --- Hosts and logical shapes ---


def test_blocks_are_spread_evenly():
    assert split(3, 3) == [range(1), range(1, 2), range(2, 3)]
    assert split(5, 2) == [range(3), range(3, 5)]
    with pytest.raises(ConfigError, match="--hosts"):
        split(3, 4)


@pytest.mark.parametrize("hosts", [1, 3, 8])
@pytest.mark.parametrize("parameters", [1e8, 1e9, 75.8e9, 1e12])
def test_a_shape_has_about_the_parameters_that_were_asked_for(parameters: float, hosts: int):
    model = choose_shape(parameters, hosts)
    assert model.blocks == hosts
    assert abs(model.layers * layer_parameters(model.width) / parameters - 1) < (0.02 if parameters >= 1e9 else 0.1)
    assert 20 < model.width / model.layers < 300


@pytest.mark.parametrize("parameters", [0.0, 1e4, math.nan, math.inf])
def test_too_few_parameters_are_refused(parameters: float):
    with pytest.raises(ConfigError, match="--logical-params"):
        choose_shape(parameters, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_logical_run_computes_every_layer_and_holds_one(dtype: str, monkeypatch: pytest.MonkeyPatch):
    config = logical_config(2e7, 2, dtype, 63)
    run, sizes = logical_run(config, range(2)), sizes_of(config)
    assert sum(p.numel() for p in run.stack.parameters()) == sizes.physical < sizes.parameters / 2
    assert sizes.parameters == pytest.approx(2e7, rel=0.1)
    layer, calls = run.stack.block(0).layers[0], []
    layer.register_forward_hook(lambda *_: calls.append(1))

    async def go() -> torch.Tensor:
        chain = LocalChain(run)
        text = await chain.open(Settings())
        logits = await text.step(Step(0, 0, list(range(10))))
        await chain.close()
        return logits

    logits = asyncio.run(go())
    assert bool(logits.isfinite().all()) and len(calls) == config.model.layers
    monkeypatch.setattr(logical, "available_memory", lambda _: 1 << 20)
    with pytest.raises(MemoryLimitError, match="--logical-params"):
        logical.require_memory(config, 2)


def test_a_run_without_a_read_out_before_the_last_block_has_no_speculative_row(tmp_path: Path):
    run = trained(tmp_path, {**CLEAN, "span": 3})
    with pytest.raises(BlockTrainError, match="read-out"):
        OwnDraft(load_run(run, lambda _: None), 1)
