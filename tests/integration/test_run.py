"""Runs in one process: resume repeats the unbroken run, whatever the order, objective, optimizer and precision."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

from blocktrain.config import RunConfig, load_config
from blocktrain.errors import CheckpointError, DataError, DivergedError
from blocktrain.training.checkpoint import load_run
from blocktrain.training.data import load_corpus
from blocktrain.training.evaluate import evaluate
from blocktrain.training.run import StepReport, TrainingRun
from tests.conftest import CLEAN, PAPER, VOTES, tiny_config


def ignore(_: object) -> None:
    return None


def train(folder: Path, config: RunConfig, text: Path, stop_after: int | None = None) -> bool:
    """Train, or stop after so many steps as Ctrl-C does."""
    taken: list[int] = []
    run = TrainingRun(
        folder,
        config,
        load_corpus(str(text)),
        report=lambda step: taken.append(step.updates),
        stopped=lambda: stop_after is not None and len(taken) >= stop_after,
    )
    return run.train()


KINDS: dict[str, dict[str, Any]] = {
    "clean": {"objective": CLEAN},
    "votes": {"objective": VOTES},
    "votes sequential": {"objective": VOTES, "train": {"order": "sequential"}},
    "common vote": {"objective": {**VOTES, "vote_weight": 0.5}, "model": {"block_heads": True}},
    "vote of own samples": {"objective": {**VOTES, "vote_weight": 0.5}, "train": {"samples": "own"}},
    "late vote": {"objective": {**VOTES, "vote_weight": 0.5, "vote_from": 0.4}},
    "spans": {"objective": {**CLEAN, "span": 2}},
    "paper": {"objective": PAPER},
    "adamw": {"objective": PAPER, "train": {"optimizer": "adamw"}},
    "ema": {"objective": CLEAN, "train": {"ema": 0.9}},
    "private": {"objective": {**CLEAN, "private_layers": 1}},
    "information": {"objective": PAPER, "noise": {"partition": "information", "information_fit_at": 0.3}},
    "sequential": {"objective": PAPER, "train": {"order": "sequential"}},
    "sequential upstream": {"objective": CLEAN, "train": {"order": "sequential", "ema": 0.9}},
    "window": {"objective": {**PAPER, "input": "upstream", "window": 8}},
    "mse": {"objective": {**PAPER, "loss": "embedding_mse"}},
    "bfloat16": {"objective": CLEAN, "train": {"precision": "bfloat16"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_ends_in_the_weights_of_the_unbroken_one(kind: str, text: Path, tmp_path: Path):
    config = tiny_config(**KINDS[kind])
    assert train(tmp_path / "whole", config, text)
    for _ in range(40):  # stop again and again: inside a phase, at its edge, before the first checkpoint
        if train(tmp_path / "broken", config, text, stop_after=7):
            break
    else:
        pytest.fail("never finished")
    whole, broken = (load_run(tmp_path / name, ignore) for name in ("whole", "broken"))
    assert broken.model_digest == whole.model_digest
    assert broken.partition == whole.partition
    same = {"updates", "bytes_seen", "training_flops", "config_digest", "fitted"}
    assert broken.progress.model_dump(include=same) == whole.progress.model_dump(include=same)
    lines = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("whole", "broken")]
    assert [line["updates"] for line in lines[1]] == [line["updates"] for line in lines[0]]
    assert [line["ce"] for line in lines[1]] == [line["ce"] for line in lines[0]]


def test_a_finished_run_is_left_as_it_is_and_can_be_lengthened(text: Path, tmp_path: Path):
    config = tiny_config(objective=CLEAN)
    train(tmp_path / "run", config, text)
    digest = load_run(tmp_path / "run", ignore).model_digest
    assert train(tmp_path / "run", config, text)
    assert load_run(tmp_path / "run", ignore).model_digest == digest
    longer = tiny_config(objective=CLEAN, train={"steps": 16})
    assert train(tmp_path / "run", longer, text)
    assert load_run(tmp_path / "run", ignore).progress.updates == 16


def test_a_lengthened_run_says_that_its_common_vote_rests(text: Path, tmp_path: Path):
    """The beginning is a share of train.steps, so more of them move it on."""
    voting = {**VOTES, "vote_weight": 0.5, "vote_from": 0.5}
    said: list[str] = []
    for steps in (8, 24):
        config = tiny_config(objective=voting, train={"steps": steps})
        assert TrainingRun(tmp_path / "run", config, load_corpus(str(text)), say=said.append).train()
    assert [line for line in said if "common vote" in line] == [
        "step 4: the blocks learn from their common vote from here on",
        "the common vote had begun and rests until step 12, which is objective.vote_from of train.steps = 24",
        "step 12: the blocks learn from their common vote from here on",
    ]


def test_where_a_vote_would_begin_may_change_while_there_is_none(text: Path, tmp_path: Path):
    train(tmp_path / "run", tiny_config(objective={**VOTES, "vote_from": 0.5}), text, stop_after=3)
    assert train(tmp_path / "run", tiny_config(objective=VOTES), text)


CHANGES = [
    ({"model": {"width": 64}}, "model.width"),
    ({"seed": 5}, "seed"),
    ({"train": {"optimizer": "adamw"}}, "train.optimizer"),
    ({"train": {"steps": 3}}, "train.steps"),
    ({"train": {"batch_size": 8}}, "train.batch_size"),
    ({"objective": {**CLEAN, "span": 2}}, "objective.span"),
    ({"objective": {**PAPER}}, "objective"),
    ({"noise": {"sigma_max": 20.0}}, "noise.sigma_max"),
]


@pytest.mark.parametrize(
    ("change", "word"),
    CHANGES,
)
def test_what_cannot_be_changed_on_the_way_is_refused_and_nothing_is_touched(change: dict[str, Any], word: str, text: Path, tmp_path: Path):
    train(tmp_path / "run", tiny_config(objective=CLEAN), text, stop_after=6)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=word):
        train(tmp_path / "run", tiny_config(**{"objective": CLEAN, **change}), text)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert train(tmp_path / "run", tiny_config(objective=CLEAN), text)  # the run itself is as good as before


def test_steps_cannot_change_once_a_block_of_a_sequential_run_is_done(text: Path, tmp_path: Path):
    config = tiny_config(objective=PAPER, train={"order": "sequential"})
    train(tmp_path / "run", config, text, stop_after=15)
    with pytest.raises(CheckpointError, match=r"train\.steps"):
        train(tmp_path / "run", tiny_config(objective=PAPER, train={"order": "sequential", "steps": 20}), text)


def test_another_text_is_refused(text: Path, tmp_path: Path):
    train(tmp_path / "run", tiny_config(objective=CLEAN), text, stop_after=3)
    text.write_text(text.read_text()[100:])
    with pytest.raises(CheckpointError, match="not the one"):
        train(tmp_path / "run", tiny_config(objective=CLEAN), text)


@pytest.mark.parametrize("place", ["write_bytes", "sync_folder", "replace"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(place: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny_config(objective=CLEAN)
    train(tmp_path / "whole", config, text)
    train(tmp_path / "run", config, text, stop_after=6)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    module = "blocktrain.training.checkpoint"
    monkeypatch.setattr(f"{module}.os.replace" if place == "replace" else f"{module}.{place}", full)
    with pytest.raises(CheckpointError, match="No space left"):
        train(tmp_path / "run", config, text)
    monkeypatch.undo()
    assert load_run(tmp_path / "run", ignore).progress.updates == 6
    assert train(tmp_path / "run", config, text)
    assert load_run(tmp_path / "run", ignore).model_digest == load_run(tmp_path / "whole", ignore).model_digest


@pytest.mark.parametrize("damaged", ["newest", "both"])
def test_a_finished_block_that_rots_is_noticed(damaged: str, text: Path, tmp_path: Path):
    """One block after another: files of finished blocks are carried from checkpoint to checkpoint, and verified each time."""
    config = tiny_config(objective=PAPER, train={"order": "sequential"})
    train(tmp_path / "whole", config, text)
    train(tmp_path / "run", config, text, stop_after=18)
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(folders) == 2
    for folder in folders[1:] if damaged == "newest" else folders:
        path = folder / "block-000.safetensors"
        assert path.stat().st_nlink == 1  # two checkpoints, two copies
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    if damaged == "both":
        with pytest.raises(CheckpointError, match="block-000"):
            train(tmp_path / "run", config, text)
        return
    assert train(tmp_path / "run", config, text)
    assert load_run(tmp_path / "run", ignore).model_digest == load_run(tmp_path / "whole", ignore).model_digest


def test_rot_under_a_running_training_stops_it(text: Path, tmp_path: Path):
    config = tiny_config(objective=PAPER, train={"order": "sequential"})

    def rot(step: StepReport) -> None:
        if step.updates == 18:
            newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
            path = newest / "block-000.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\x55")

    with pytest.raises(CheckpointError, match=r"block-000.*damaged"):
        TrainingRun(tmp_path / "run", config, load_corpus(str(text)), report=rot).train()


def test_two_processes_do_not_train_one_folder(text: Path, tmp_path: Path):
    config = tiny_config(objective=CLEAN)

    def intrude(step: StepReport) -> None:
        if step.updates == 3:
            with pytest.raises(CheckpointError, match="another process"):
                train(tmp_path / "run", config, text)

    assert TrainingRun(tmp_path / "run", config, load_corpus(str(text)), report=intrude).train()


def test_a_text_that_changes_while_it_is_trained_on_stops_the_run(text: Path, tmp_path: Path):
    def cut(step: StepReport) -> None:
        if step.updates == 4:
            text.write_text("short")

    with pytest.raises(DataError, match="changed"):
        TrainingRun(tmp_path / "run", tiny_config(objective=CLEAN), load_corpus(str(text)), report=cut).train()


def test_a_short_heldout_text_is_refused_before_training(tmp_path: Path):
    small = tmp_path / "small.txt"
    small.write_text("word " * 100)
    with pytest.raises(DataError, match="held-out"):
        train(tmp_path / "run", tiny_config(objective=CLEAN), small)
    assert not (tmp_path / "run").exists()


def test_divergence_stops_the_run_and_keeps_the_last_good_weights(text: Path, tmp_path: Path):
    wild = {"lr": 1e30, "muon_lr": 1e30, "clip_norm": 0.0, "warmup_steps": 0, "checkpoint_every": 1}
    with pytest.raises(DivergedError, match=r"train\.lr"):
        train(tmp_path / "run", tiny_config(objective=CLEAN, train=wild), text)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert "NaN" not in line


def test_odd_lines_in_the_metrics_are_dropped(text: Path, tmp_path: Path):
    config = tiny_config(objective=CLEAN)
    train(tmp_path / "run", config, text, stop_after=6)
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'null\n[1]\n\xff\xfe\n{"updates": 6, "ce"')
    assert train(tmp_path / "run", config, text)
    assert [json.loads(line)["updates"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == list(range(1, 13))


def test_the_average_forgets_its_random_start(text: Path, tmp_path: Path):
    """Averaged weights of a short run are near the raw ones, not near the first draw."""
    ce = []
    for ema in (0.0, 0.999):
        config = tiny_config(objective=CLEAN, train={"ema": ema, "steps": 60, "lr": 0.01})
        train(tmp_path / f"run{ema}", config, text)
        ce.append(evaluate(load_run(tmp_path / f"run{ema}", ignore), load_corpus(str(text)), ignore).headline_ce)
    assert ce[1] < ce[0] + 0.5


def test_how_a_run_is_read_comes_from_run_toml_as_it_is_now(text: Path, tmp_path: Path):
    config = tiny_config(objective=PAPER)
    train(tmp_path / "run", config, text)
    path = tmp_path / "run" / "run.toml"
    path.write_text(
        path.read_text().replace('start = "noise"', 'start = "zero"').replace("windows = 8", "windows = 5").replace("lr = 0.01 ", "lr = 0.5 ")
    )
    run = load_run(tmp_path / "run", ignore)
    assert (run.config.objective.start, run.config.evaluate.windows) == ("zero", 5)
    assert run.config.train.lr == run.trained_config.train.lr == 0.01  # what was trained stays what it was


def test_a_run_from_before_a_setting_is_read_and_gone_on_with_as_it_was(text: Path, tmp_path: Path):
    config = tiny_config(objective=CLEAN, model={"short_conv": 0}, train={"samples": "shared"})
    run = tmp_path / "run"
    train(run, config, text, stop_after=7)
    path = run / "run.toml"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith(("short_conv", "samples"))))
    for progress in run.glob("checkpoints/*/progress.json"):
        fields = json.loads(progress.read_text())
        settings = json.loads(fields["config"])
        del settings["model"]["short_conv"], settings["train"]["samples"]
        progress.write_text(json.dumps({**fields, "config": json.dumps(settings)}))
    said: list[str] = []
    assert load_run(run, said.append).trained_config == load_config(path) == config
    assert said == []
    assert train(run, load_config(path), text)


def test_a_reference_of_another_length_gives_no_gap(text: Path, tmp_path: Path):
    from blocktrain.config import reference_config

    config, longer = (tiny_config(objective=CLEAN, train={"steps": steps}) for steps in (4, 8))
    train(tmp_path / "run", config, text)
    train(tmp_path / "run" / "reference", reference_config(config), text)
    said: list[str] = []
    assert evaluate(load_run(tmp_path / "run", ignore), load_corpus(str(text)), said.append).gap is not None
    train(tmp_path / "run", longer, text)
    assert evaluate(load_run(tmp_path / "run", ignore), load_corpus(str(text)), said.append).gap is None
    assert "no gap" in said[0]


def test_a_damaged_checkpoint_is_passed_over_and_said_so(text: Path, tmp_path: Path):
    config = tiny_config(objective=CLEAN)
    train(tmp_path / "whole", config, text)
    train(tmp_path / "run", config, text, stop_after=11)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    path = newest / "block-001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1  # one flipped bit
    path.write_bytes(data)
    said: list[str] = []
    older = load_run(tmp_path / "run", said.append)
    assert older.progress.updates < 11
    assert "block-001.safetensors" in said[0]
    assert train(tmp_path / "run", config, text)
    assert load_run(tmp_path / "run", ignore).model_digest == load_run(tmp_path / "whole", ignore).model_digest


def test_with_every_checkpoint_damaged_the_run_says_which_file(text: Path, tmp_path: Path):
    train(tmp_path / "run", tiny_config(objective=CLEAN), text)
    for path in (tmp_path / "run" / "checkpoints").glob("*/progress.json"):
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match=r"progress\.json"):
        load_run(tmp_path / "run", ignore)


def test_the_interface_does_not_drift_under_finished_blocks(text: Path, tmp_path: Path):
    """One after another: trained with the first block, frozen for the others. Together: one interface, not one a block."""
    config = tiny_config(objective=PAPER, train={"order": "sequential"})
    digests = set()
    for steps in (12, 12, 12):
        train(tmp_path / "run", config, text, stop_after=steps)
        newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
        digests.add(json.loads((newest / "progress.json").read_text())["files"]["interface.safetensors"])
    assert len(digests) == 1


def test_all_five_numbers_and_their_relations(text: Path, tmp_path: Path):
    """A run and its reference, evaluated: keys as promised, figures consistent with one another."""
    from blocktrain.config import reference_config

    config = tiny_config(objective=PAPER, train={"steps": 30})
    corpus = load_corpus(str(text))
    train(tmp_path / "run", config, text)
    run = load_run(tmp_path / "run", ignore)
    without = evaluate(run, corpus, ignore).to_json()
    assert without["gap"] is None
    assert without["reference_ce"] is None
    train(tmp_path / "run" / "reference", reference_config(config), text)
    figures = evaluate(run, corpus, ignore).to_json()
    promised = "headline_ce perplexity bits_per_byte oracle_ce rollout_ce best_single_block_ce composition_gain reference_ce gap ngram_ce "
    promised += "bytes_seen training_flops parameters seed config_digest"
    assert set(promised.split()) <= set(figures)
    assert len(figures["rollout_ce"]) == len(figures["oracle_ce"]) == 3
    assert figures["headline_ce"] == figures["rollout_ce"][-1]
    assert figures["perplexity"] == pytest.approx(math.exp(figures["headline_ce"]))
    assert figures["bits_per_byte"] == pytest.approx(figures["headline_ce"] / math.log(2))
    assert figures["composition_gain"] == pytest.approx(figures["best_single_block_ce"] - figures["headline_ce"])
    assert figures["gap"] == pytest.approx(figures["headline_ce"] - figures["reference_ce"])
    assert figures["noise_draws"] == 8
    assert all(spread > 0 for spread in figures["rollout_std"])  # more than one draw was taken
    assert figures["bytes_seen"] == 30 * 4 * 32
    assert [b["block"] for b in figures["sigma_bins"]] == sorted((b["block"] for b in figures["sigma_bins"]), reverse=True)
    assert json.loads(json.dumps(figures)) == figures


def test_inside_a_span_there_is_no_read_out(text: Path, tmp_path: Path):
    config = tiny_config(objective={**CLEAN, "span": 2})
    train(tmp_path / "run", config, text)
    result = evaluate(load_run(tmp_path / "run", ignore), load_corpus(str(text)), ignore)
    assert result.rollout_ce[0] is None
    assert result.oracle_ce is None
    assert result.best_single_block_ce == result.rollout_ce[1]


def test_one_span_over_all_blocks_composes_nothing(text: Path, tmp_path: Path):
    config = tiny_config(objective={**CLEAN, "span": 3})
    train(tmp_path / "run", config, text)
    figures = evaluate(load_run(tmp_path / "run", ignore), load_corpus(str(text)), ignore).to_json()
    assert figures["composition_gain"] is None
    assert figures["best_single_block_ce"] is None
