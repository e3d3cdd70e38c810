"""The transport bench at a size at which its figures mean nothing: that it runs to its end, and what it says."""

from __future__ import annotations

import json

import pytest

from blocktrain import cli
from blocktrain.report import bench_transport
from blocktrain.report.bench_transport import bench_transport as bench
from blocktrain.report.bench_transport import render, stand_in


def test_its_figures_and_goals():
    result = bench(quick=True, size_mb=4.0, repeats=1)
    assert json.loads(json.dumps(result)) == result
    assert set(result) == {"bench", "quick", "throughput", "memory", "simulated", "goals"}
    rates = {f"{kind}_mb_per_s" for kind in ("raw", "push", "pull")}
    assert set(result["throughput"]) == rates | {"bytes", "push_ratio", "pull_ratio", "gate_s", "close_s", "repeats"}
    assert all(value > 0 for value in result["throughput"].values())
    assert set(result["memory"]) == {"workers", "bytes_each", "seconds", "close_s", "baseline", "growth"}
    assert [goal["goal"] for goal in result["goals"]] == [0.6, 0.6, 64.0]
    assert result["simulated"] is None
    assert [table.title for table in render(result)][-1] == "goals"


def test_room_for_simulated_workers(monkeypatch: pytest.MonkeyPatch):
    one = {"name": "events/s", "value": 5.0, "sign": ">=", "goal": 1.0, "met": True}
    rates = dict.fromkeys(("bytes", "push_ratio", "pull_ratio", "gate_s", "close_s", "raw_mb_per_s", "push_mb_per_s", "pull_mb_per_s"), 1.0)
    monkeypatch.setattr(bench_transport, "bench_throughput", lambda *_: rates)
    memory = {"workers": 8, "bytes_each": 1, "seconds": 1.0, "close_s": 1.0, "baseline": 1, "growth": 1}
    monkeypatch.setattr(bench_transport, "bench_rss", lambda *_: memory)
    result = bench(quick=True, simulated=lambda quick: {"events_per_s": 5.0, "goals": [one]})
    assert result["goals"][-1] == one
    assert [table.title for table in render(result)][-2:] == ["simulated workers", "goals"]


def test_the_block_has_the_size_that_was_asked_for():
    for size_mb, count in ((512.0, 128), (64.0, 16), (2.0, 1)):
        layout = stand_in(size_mb)
        assert len(layout.trainable["block-000"]) == count
        assert sum(4 * shape[0] for shape in layout.part_shapes("block-000").values()) == size_mb * 1e6


def test_the_command_ends_with_1_where_a_goal_is_missed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    goal = {"name": "x", "value": 0.1, "sign": ">=", "goal": 0.6, "met": False}
    monkeypatch.setattr(bench_transport, "bench_transport", lambda **_: {"goals": [goal]})
    assert cli.run(["bench", "transport", "--quick", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["goals"][0]["met"] is False
