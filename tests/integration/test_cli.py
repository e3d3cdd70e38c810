"""The command line as a user meets it: figures on stdout, one-line errors, exit codes, no tracebacks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from blocktrain import cli
from tests.faults.test_kill import SETTINGS

SETS = [f"--set={s}" for s in SETTINGS]
MSE = ("denoise_weight=1", "anchor_weight=0", "start=noise", "loss=embedding_mse")
QUICK = [*SETS, "--set=train.steps=4"]


def call(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[int, str, str]:
    code = cli.run(list(tokens))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def run(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "run"
    assert call(capsys, "train", str(folder), "--data", str(text), "--json", *QUICK)[0] == 0
    return folder


def test_train_evaluate_generate(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = str(tmp_path / "run")
    code, out, err = call(capsys, "train", folder, "--data", str(text), "--reference", *QUICK)
    assert code == 0, err
    for words in ("oracle CE", "rollout CE", "headline CE", "composition gain", "gap", "n-gram", "sample"):
        assert words in out
    assert "step 4/4" in err
    code, out, _ = call(capsys, "evaluate", folder, "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["gap"] is not None
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text()) == figures
    code, out, _ = call(capsys, "generate", folder, "--prompt", "one and", "--max-bytes", "20", "--json")
    made = json.loads(out)
    assert (code, made["bytes"], made["mode"]) == (0, 20, "exact")
    again = call(capsys, "generate", folder, "--prompt", "one and", "--max-bytes", "20")[1]
    assert again == made["text"] + "\n"


@pytest.mark.parametrize("begun", [True, False])
def test_a_reference_without_an_intact_checkpoint_costs_only_the_gap(begun: bool, run: Path, capsys: pytest.CaptureFixture[str]):
    """It was killed before its first checkpoint, or its files are cut."""
    assert call(capsys, "train", str(run), "--reference", "--json")[0] == 0
    checkpoints = run / "reference" / "checkpoints"
    if begun:
        shutil.rmtree(checkpoints)
    else:
        for file in checkpoints.glob("step-*/*.safetensors"):
            file.write_bytes(file.read_bytes()[:100])
    code, out, err = call(capsys, "evaluate", str(run), "--json")
    assert code == 0, err
    figures = json.loads(out)
    assert figures["gap"] is None and figures["headline_ce"] > 0
    assert f"so there is no gap; `blocktrain train {run} --reference` goes on" in err


def test_a_closed_standard_output_is_no_reason_not_to_start():
    """As a daemon may be started."""
    done = subprocess.run(["sh", "-c", f"'{sys.executable}' -m blocktrain memory --preset smoke >&-"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_first_checkpoint_that_cannot_be_written_promises_none_before_it(run: Path, capsys: pytest.CaptureFixture[str]):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_bytes(b"")
    code, _, err = call(capsys, "train", str(run))
    assert code == 2
    assert "there is no checkpoint before it" in err


def test_the_same_command_again_goes_on_and_presets_may_be_repeated(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["train", str(tmp_path / "run"), "--preset", "smoke", "--data", str(text), "--json", *QUICK]
    first, second = (json.loads(call(capsys, *arguments)[1]) for _ in range(2))
    assert first == second
    code, _, err = call(capsys, "train", str(tmp_path / "run"), "--preset", "paper")
    assert code == 2
    assert "--preset" in err


def test_a_setting_changed_in_the_file_is_used_and_said(run: Path, capsys: pytest.CaptureFixture[str]):
    path = run / "run.toml"
    path.write_text(path.read_text().replace("steps = 4", "steps = 6").replace("log_every = 1", "log_every = 2"))
    code, _, err = call(capsys, "train", str(run), "--json")
    assert code == 0
    assert "train.steps: 4 -> 6" in err


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["evaluate", "nowhere"], ["nowhere", "blocktrain train"]),
        (["generate", "nowhere", "--prompt", "x"], ["nowhere"]),
        (["train", "r", "--data", "no-such-text"], ["no-such-text"]),
        (["train", "r", "--preset", "lapto"], ["lapto", "laptop"]),
        (["train", "r", "--set", "train.stpes=3"], ["train.stpes", "steps"]),
        (["train", "r", "--set", "train.steps=many"], ["train.steps", "many"]),
        (["train", "r", "--config", "none.toml"], ["none.toml"]),
        (["train", "r", "--colour", "blue"], ["--colour"]),
        (["train"], ["RUN"]),
        (["generate", "r", "--prompt", "x", "--temperature", "hot"], ["hot"]),
        (["generate", "r", "--prompt", "x", "--temperature", "nan"], ["--temperature"]),
        (["generate", "r", "--prompt", "x", "--max-bytes", "-1"], ["--max-bytes"]),
        (["generate", "r", "--prompt", "x", "--max-bytes", "2.9"], ["--max-bytes", "whole number", "2.9"]),
        (["simulate", "r", "--regime", "wan", "--workers", "1.5"], ["--workers", "whole number"]),
        (["memory", "--params", "1e9", "--blocks", "2.5"], ["--blocks", "whole number"]),
        (["generate", "r", "--prompt", "x", "--top-p", "2"], ["--top-p"]),
        (["generate", "r", "--prompt", "x", "--mode", "magic"], ["magic"]),
        (["generate", "r", "--prompt", "x", "--window", "8"], ["--window", "sweep"]),
        (["generate", "r", "--prompt", "x", "--draft-bytes", "8"], ["--draft-bytes", "speculative"]),
        (["generate", "r", "--prompt", "x", "--draft", "d", "--mode", "sweep"], ["--draft", "speculative"]),
        (["nonsense"], ["nonsense"]),
        (["train", "r", "--set", "noise.P_std=0.1"], ["noise.P_std"]),
        (["train", "r", "--set", "noise.P_mean=-50"], ["noise.P_mean"]),
        (["train", "r", "--set", "train.batch_size=100000000000000000000000"], ["train.batch_size"]),
        (["train", "r", "--data", "python", "--set", "model.width=32768"], ["training needs", "GiB"]),
        (["train", "r", "--set", "train.steps=" + "9" * 5000], ["train.steps"]),
        (["train", "r", "--set", "noise.partition=" + "[" * 5000], ["noise.partition"]),
        (["train", "r", "--set", "noise.partition=[10,5,nan,1]"], ["noise.partition"]),
        (["train", "r", "--set", "train.steps=5\nfoo=3"], ["train.steps"]),
        (["train", "r", *(f"--set=objective.{s}" for s in MSE), "--set=objective.readout=evidence_free"], ["objective.readout"]),
        (["train", "r", "--data", "."], ["holds no text"]),
        (["train", "bad\udcff", "--data", "python"], ["RUN", "UTF-8"]),
        (["memory", "--params", "lots", "--blocks", "3"], ["lots"]),
        (["bench", "nothing"], ["nothing"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tokens: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *tokens)
    assert code == 2, out + err
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert all(word in err for word in words), err
    assert "Traceback" not in err
    assert not (tmp_path / "r").exists()  # nothing is left behind by a command that could not work


def test_a_run_folder_is_no_corpus_and_is_left_out_of_one(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "run", "--data", ".", "--json", *QUICK]
    first, second = (call(capsys, *arguments) for _ in range(2))
    assert (first[0], second[0]) == (0, 0), second[2]
    assert json.loads(first[1]) == json.loads(second[1])
    code, _, err = call(capsys, "train", "other", "--data", "run", *QUICK)
    assert code == 2
    assert "run folder" in err


def test_figures_are_printed_even_where_they_cannot_be_kept(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "evaluation.json").unlink()
    (run / "evaluation.json").mkdir()
    code, out, err = call(capsys, "evaluate", str(run), "--json")
    assert code == 0
    assert "headline_ce" in json.loads(out)
    assert "could not be written" in err


def test_a_checkpoint_of_a_newer_version_is_refused_in_one_line(run: Path, capsys: pytest.CaptureFixture[str]):
    for path in run.glob("checkpoints/*/progress.json"):
        path.write_text(path.read_text().replace('\\"blocks\\":', '\\"future\\":1,\\"blocks\\":'))
    for command in ("evaluate", "train"):
        code, _, err = call(capsys, command, str(run))
        assert code == 2
        assert "model.future" in err


def test_an_untrained_folder_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text("seed = 1\n")
    code, _, err = call(capsys, "evaluate", str(tmp_path / "run"))
    assert code == 2
    assert "no checkpoint yet" in err


def test_evaluate_may_change_how_a_run_is_read_but_not_what_it_is(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = str(tmp_path / "run")
    paper = [f"--set=objective.{s}" for s in ("input=independent", "denoise_weight=1.0", "anchor_weight=0.0", "start=noise", "span=1")]
    call(capsys, "train", folder, "--data", str(text), "--json", *QUICK, *paper)
    saved = (tmp_path / "run" / "evaluation.json").read_text()
    code, out, _ = call(capsys, "evaluate", folder, "--json", "--set", "objective.start=zero")
    assert code == 0
    assert json.loads(out)["noise_draws"] == 1
    assert (tmp_path / "run" / "evaluation.json").read_text() == saved
    code, _, err = call(capsys, "evaluate", folder, "--set", "noise.sigma_max=20.0")
    assert code == 2
    assert "noise.sigma_max" in err


def test_a_run_of_a_common_vote_is_read_by_one_block_too_and_names_both_counts_of_parameters(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = str(tmp_path / "run")
    common = ["--set=objective.input=independent", "--set=objective.vote_weight=0.8", "--set=model.block_heads=true"]
    code, out, _ = call(capsys, "train", folder, "--data", str(text), "--reference", *QUICK, *common)
    assert code == 0
    votes = json.loads(call(capsys, "evaluate", folder, "--json")[1])
    assert votes["parameters"] > votes["reference_parameters"]
    assert f"{votes['parameters']:,} (reference {votes['reference_parameters']:,})" in out
    code, out, err = call(capsys, "evaluate", folder, "--json", "--set", "objective.combine=last")
    assert (code, err.count("Traceback")) == (0, 0)
    assert json.loads(out)["headline_ce"] != votes["headline_ce"]


def test_help_answers_without_loading_torch():
    import subprocess
    import sys

    code = "import sys; from blocktrain import cli; cli.run(['train', '--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--preset" in done.stdout


def test_of_a_swarms_run_only_the_reference_is_trained_here(run: Path, capsys: pytest.CaptureFixture[str]):
    """Its blocks belong to its coordinator, and the gap needs the reference all the same."""
    (run / "swarm").mkdir()
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    code, _, said = call(capsys, "train", str(run))
    assert code == 2
    assert "is trained by many workers" in said
    code, _, said = call(capsys, "train", str(run), "--reference", "--set", "evaluate.windows=2")
    assert code == 2 and "--set" in said and "blocktrain coordinator" in said
    code, figures, _ = call(capsys, "train", str(run), "--reference", "--json")
    assert code == 0
    assert json.loads(figures)["gap"] is not None
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
