"""The experiments' pieces: scales, keys, results that are kept, the table, and what happens to the others when one fails."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from blocktrain.config import DataConfig, ModelConfig, reference_config
from blocktrain.errors import ConfigError, ExperimentError
from blocktrain.report.experiments import fixed_depth, reproduce, serving, swarm_processes
from blocktrain.report.experiments.lab import Lab, ce_list, gap_text, paired
from blocktrain.report.experiments.result import Experiment, Result, Row, save_result, saved_result
from blocktrain.report.experiments.scale import SCALES, scale_named
from blocktrain.training.data import load_corpus

MANY_WORKERS = ("six-workers", "transport", "regimes")


@pytest.fixture
def lab(tmp_path: Path, text: Path) -> Lab:
    said: list[str] = []
    lab = Lab(tmp_path / "out", SCALES["smoke"], load_corpus(str(text)), DataConfig(corpus=str(text)), say=said.append)
    lab.out.mkdir()
    return lab


# --- Scales and keys ---


@pytest.mark.parametrize("name", SCALES)
def test_every_experiment_can_be_set_up_at_every_scale(lab: Lab, name: str):
    lab = dataclasses.replace(lab, scale=SCALES[name])
    keys = {experiment.name: experiment.key(lab) for experiment in reproduce.EXPERIMENTS.values()}
    assert keys.pop("transport") == keys["six-workers"], "they share a run"
    assert len(set(keys.values())) == len(keys)


def test_a_scale_that_is_none_is_named():
    with pytest.raises(ConfigError, match="--scale: no scale 'huge'; known: smoke, bench, paper"):
        scale_named("huge")


def test_the_bench_scale_is_that_of_the_published_figures(lab: Lab):
    config = dataclasses.replace(lab, scale=SCALES["bench"]).default_config()
    assert (config.model.width, config.model.layers, config.train.steps, config.train.batch_size) == (128, 12, 1200, 16)
    assert config.model.layer_matrices * 2 == 12 * 128**2, "two layers have the weights of an ordinary one"
    assert (config.evaluate.windows, config.objective.span, config.train.optimizer) == (64, 1, "muon")


def test_only_at_the_papers_scale_do_the_recipes_differ_in_their_optimizer(lab: Lab):
    for name, scale in SCALES.items():
        at = dataclasses.replace(lab, scale=scale)
        default, paper = at.default_config(), at.paper_config()
        assert (default.train == paper.train) == (name != "paper")
        assert (reference_config(default).digest == reference_config(paper).digest) == (name != "paper")
        assert (paper.objective.input, paper.objective.start, paper.noise.sigma_min) == ("independent", "noise", 1.0)
    assert paper.train.optimizer == "adamw" and default.train.optimizer == "muon"


def test_another_length_is_that_of_every_training_on_one_machine(lab: Lab):
    shorter = dataclasses.replace(lab, scale=SCALES["bench"].with_steps(300))
    trained = [shorter.default_config(), shorter.paper_config(), shorter.common_config(), serving.window_config(shorter)]
    assert {config.train.steps for config in trained} == {300}
    assert shorter.scale.swarm == SCALES["bench"].swarm and SCALES["bench"].fields["train"]["steps"] == 1200


@pytest.mark.parametrize("name", list(reproduce.EXPERIMENTS))
def test_a_key_changes_with_seed_text_and_scale(lab: Lab, tmp_path: Path, name: str):
    other = tmp_path / "other.txt"
    other.write_text("another text\n" * 4000)
    key = reproduce.EXPERIMENTS[name].key
    changed = [
        dataclasses.replace(lab, seed=1),
        dataclasses.replace(lab, corpus=load_corpus(str(other))),
        dataclasses.replace(lab, scale=SCALES["bench"]),
    ]
    assert len({key(lab), *map(key, changed)}) == 4
    longer = dataclasses.replace(lab, scale=lab.scale.with_steps(30))
    assert (key(longer) != key(lab)) == (name not in MANY_WORKERS), "runs of many workers keep their length"
    moved = dataclasses.replace(lab, out=tmp_path / "elsewhere", data=DataConfig(corpus=str(tmp_path / "renamed.txt")))
    assert key(moved) == key(lab), "where the text and the results lie decides nothing"


def test_every_divisor_is_a_cut_that_leaves_a_block_an_ordinary_layer(lab: Lab):
    assert fixed_depth.cuts(ModelConfig(blocks=3, layers_per_block=4, attention_ratio=1.0)) == [12, 6, 4, 3, 2, 1]
    assert fixed_depth.cuts(ModelConfig(blocks=3, layers_per_block=4, attention_ratio=0.5)) == [6, 4, 3, 2, 1]
    for found in fixed_depth.arms(lab).values():
        assert {config.model.layers for config in found.values()} == {4}


# --- Results ---


def result_of(ours: str) -> Result:
    return Result([Row("name", "paper", ours, "differs")], {"ce": 1.5}, ("a/b",), ("c.json",), {"a/b": {"headline_ce": 1.5}})


def test_a_result_is_read_as_it_was_kept_and_only_under_its_key(tmp_path: Path):
    path = tmp_path / "name.json"
    assert saved_result(path, "key") is None
    save_result(path, "key", result_of("1.5"))
    assert saved_result(path, "key") == result_of("1.5")
    assert saved_result(path, "another") is None
    path.write_text(path.read_text()[:-20])
    assert saved_result(path, "key") is None
    path.write_text(json.dumps({"key": "key", "format": -1, "result": {}}))
    assert saved_result(path, "key") is None


def test_differences_are_paired():
    mean, error = paired([2.0, 3.0, 4.0], [1.0, 2.0, 1.0])
    assert mean == pytest.approx(5 / 3) and error == pytest.approx(2 / 3)
    assert gap_text([2.0, 2.0], [1.0, 1.0]) == "+1.0000 ± 0.0000"
    assert ce_list([1.25, None]) == "1.250, –" and ce_list(None) == "–"
    with pytest.raises(ValueError, match="longer"):
        paired([1.0], [1.0, 2.0])


# --- One after another ---


def experiment(name: str, ran: list[str], problem: Exception | None = None) -> Experiment:
    def run(_: Lab) -> Result:
        ran.append(name)
        if problem:
            raise problem
        return Result([Row(name, "1 | 2", f"{name} has <3>", "size")], {})

    return Experiment(name, lambda _: name, run)


def test_one_that_fails_is_one_line_and_the_others_go_on(lab: Lab):
    ran: list[str] = []
    bug = ZeroDivisionError("our own\nmistake")
    asked = [experiment("a", ran, ConfigError("a: cannot")), experiment("b", ran), experiment("c", ran, bug), experiment("d", ran)]
    outcome = reproduce.reproduce(lab, asked)
    assert ran == ["a", "b", "c", "d"]
    assert list(outcome.failed) == ["a", "c"]
    assert outcome.failed["a"] == "a: cannot"
    assert outcome.failed["c"].startswith("ZeroDivisionError: our own mistake (see ")
    assert "Traceback" in (lab.out / "c-traceback.txt").read_text()
    assert [row.experiment for row in outcome.rows] == ["b", "d", "a", "c"]
    again = reproduce.reproduce(lab, asked)
    assert ran == ["a", "b", "c", "d", "a", "c"], "what failed is tried again, what is done is not"
    assert again.rows == outcome.rows


def test_the_table_is_kept_in_two_forms(lab: Lab):
    reproduce.reproduce(lab, [experiment("a", [])])
    lines = (lab.out / "table.md").read_text().splitlines()
    assert lines[0] == SCALES["smoke"].warning and "mean nothing" in lines[0]
    assert lines[2:] == [
        "| experiment | the paper's figure | ours | what differs |",
        "| --- | --- | --- | --- |",
        r"| a | 1 \| 2 | a has <3> | size |",
    ]
    table = json.loads((lab.out / "table.json").read_text())
    assert table["rows"] == [{"experiment": "a", "paper": "1 | 2", "ours": "a has <3>", "differs": "size"}]
    assert (table["scale"], table["warning"], table["seed"]) == ("smoke", SCALES["smoke"].warning, 0)
    page = (lab.out / "report.html").read_text()
    assert "a has &lt;3&gt;" in page and "mean nothing" in page


def test_a_stop_stops_all(lab: Lab):
    ran: list[str] = []

    def stop(_: Lab) -> Result:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce(lab, [Experiment("a", lambda _: "a", stop), experiment("b", ran)])
    assert ran == []


def test_two_at_once_are_refused(lab: Lab):
    with filelock.FileLock(lab.out / ".lock"), pytest.raises(ConfigError, match="another process"):
        reproduce.reproduce(lab, [])


def test_names_are_chosen_in_their_order():
    assert [one.name for one in reproduce.chosen("mse, long-run")] == ["long-run", "mse"]
    assert [one.name for one in reproduce.chosen("")] == list(reproduce.EXPERIMENTS)
    with pytest.raises(ConfigError, match="--only: no experiment 'nothing'; known: long-run, memory, "):
        reproduce.chosen("long-run,nothing")


# --- Processes ---


def test_settings_become_flags():
    assert swarm_processes.assignments({"train": {"lr": 0.5, "order": "sequential"}}) == ["train.lr=0.5", 'train.order="sequential"']


def test_a_coordinator_that_cannot_start_is_said_with_its_reason(tmp_path: Path):
    with pytest.raises(ExperimentError, match=r"did not start: .*train\.nothing.*coordinator\.log"):
        swarm_processes.train_swarm(tmp_path / "run", "python", ["train.nothing=1"], 1, lambda _: None)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_process_ends_with_the_one_that_started_it():
    code = (
        "import os, signal, subprocess; from blocktrain.report.experiments.swarm_processes import _end_with_parent as bound;"
        "p = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=bound);"
        "print(p.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    status = Path(f"/proc/{int(done.stdout)}/status")
    for _ in range(100):
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.05)
    pytest.fail("it goes on without its parent")
