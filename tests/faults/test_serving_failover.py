"""A stage that serves a text is killed in the middle of it, again and again: the other stage of its block goes on with the same bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from blocktrain.report.netlink import Links
from blocktrain.report.serving_failover import Disturbed, bench_failovers
from blocktrain.training.data import load_corpus
from blocktrain.training.run import TrainingRun
from tests.conftest import CLEAN, tiny_config, write_text


def test_two_kills_do_not_show_in_the_text(tmp_path: Path):
    text = write_text(tmp_path / "text.txt")
    config = tiny_config(objective=CLEAN, data={"corpus": str(text)})
    TrainingRun(tmp_path / "run", config, load_corpus(str(text)), report=lambda _: None).train()
    with Links() as links:
        found = asyncio.run(bench_failovers(tmp_path / "run", 2, links, 2, b"one and two make ", lambda _: None))
    assert found["identical_share"] == 1.0
    assert 0 < found["stall_median_s"] <= found["stall_max_s"] < 5.0


def test_a_stall_is_the_longest_pause_beyond_the_usual_one():
    assert Disturbed(b"", [0.1, 0.1, 0.9, 0.1]).stall_s == 0.8
