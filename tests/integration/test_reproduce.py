"""`reproduce` at its smallest scale and `report` on what it made: figures, going on where it stopped, and the page in a real browser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from blocktrain import cli
from blocktrain.report.experiments import lab as lab_module
from blocktrain.training.run import TrainingRun
from tests.browsing import visit
from tests.conftest import write_text

ONLY = "long-run,sigma-range,memory"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    write_text(folder / "train.txt")
    write_text(folder / "heldout.txt", 8000)
    return ["--train", str(folder / "train.txt"), "--heldout", str(folder / "heldout.txt")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A folder in which the three experiments are done."""
    out = tmp_path_factory.mktemp("made") / "a <b> & $c"
    assert cli.run(["reproduce", str(out), "--scale", "smoke", "--only", ONLY, *texts]) == 0
    return out


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Step numbers of all trainings from now on."""
    steps: list[int] = []
    tell = TrainingRun._tell

    def told(self: TrainingRun, index: int, step: int, *rest: Any) -> None:
        steps.append(step)
        tell(self, index, step, *rest)

    monkeypatch.setattr(TrainingRun, "_tell", told)
    return steps


def test_the_table_has_the_papers_figure_and_ours(made: Path):
    table = json.loads((made / "table.json").read_text())
    rows = {row["experiment"]: row for row in table["rows"]}
    assert list(rows)[:3] == ["long-run, the paper's recipe", "long-run, our default", "long-run, our blocks with a common vote"]
    assert "1.359" in rows["long-run, the paper's recipe"]["paper"]
    kept = json.loads((made / "long-run.json").read_text())["result"]["figures"]
    named = {"paper": "long-run, the paper's recipe", "default": "long-run, our default", "common": "long-run, our blocks with a common vote"}
    for recipe, name in named.items():
        assert f"CE {kept[recipe]['headline_ce']:.3f}" in rows[name]["ours"]
        assert kept[recipe]["gap"] == pytest.approx(kept[recipe]["headline_ce"] - kept[recipe]["reference_ce"])
        assert f"gap {kept[recipe]['gap']:+.4f} ± {kept[recipe]['gap_standard_error']:.4f}" in rows[name]["ours"]
    assert "measured" in rows["memory, our default"]["differs"]
    assert all(row["experiment"] in (made / "table.md").read_text() for row in table["rows"])
    assert "mean nothing" in table["warning"]


def test_oracle_and_rollout_stand_side_by_side(made: Path):
    figures = json.loads((made / "sigma-range.json").read_text())["result"]["figures"]
    leaking, cured = figures["sigma 0 to 2"], figures["sigma 1 to 10"]
    assert leaking["oracle_ce"][-1] < leaking["rollout_ce"][-1]
    assert leaking["oracle_ce"][-1] < cured["oracle_ce"][-1], "with next to no noise the answer is nearly given away"


def test_a_second_call_trains_nothing_and_says_the_same(
    made: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    before = {name: (made / name).read_text() for name in ("table.md", "table.json", "report.html")}
    steps = counted(monkeypatch)
    monkeypatch.setattr(lab_module, "evaluate", lambda *_: pytest.fail("evaluated again"))
    assert cli.run(["reproduce", str(made), "--scale", "smoke", "--only", ONLY, *texts]) == 0
    assert steps == []
    assert "long-run: finished before" in capsys.readouterr().err
    assert {name: (made / name).read_text() for name in before} == before


def test_a_stopped_one_goes_on_where_it_was(made: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stopped after the checkpoint in the middle of the paper's recipe: what was trained stays, the rest is trained, the table is the same."""
    command = ["reproduce", str(tmp_path / "out"), "--scale", "smoke", "--only", "long-run,sigma-range", *texts]
    steps, tell = counted(monkeypatch), TrainingRun._tell

    def stop(self: TrainingRun, index: int, step: int, *rest: Any) -> None:
        tell(self, index, step, *rest)
        if self.folder.name == "paper" and step == 15:
            raise KeyboardInterrupt

    with monkeypatch.context() as stopping:
        stopping.setattr(TrainingRun, "_tell", stop)
        assert cli.run(command) == 130
    assert len(steps) == 2 * 24 + 15
    assert not (tmp_path / "out" / "table.md").exists()
    steps.clear()
    evaluated, evaluate = list[Path](), lab_module.evaluate
    monkeypatch.setattr(lab_module, "evaluate", lambda run, *rest: (evaluated.append(run.folder), evaluate(run, *rest))[1])
    assert cli.run(command) == 0
    assert len(evaluated) == len(set(evaluated)) == 5, "each run is evaluated once, though two experiments look at one"
    assert steps == [*range(13, 25), *range(1, 25), *range(1, 25)], "from the checkpoint of step 12 on, then the common vote and the leaking arm"
    assert json.loads((tmp_path / "out" / "long-run.json").read_text()) == json.loads((made / "long-run.json").read_text())


def test_a_folder_has_one_length_seed_text_and_scale(made: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs of another length would be trained on from where they stand, at a schedule that is neither."""
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    command = ["reproduce", str(made), "--scale", "smoke", "--only", ONLY]
    other = write_text(tmp_path / "other.txt", 9000)
    for more, word in (
        ([*texts, "--steps", "30"], "steps 24, now it is 30"),
        ([*texts, "--steps", "7"], "steps 24, now it is 7"),
        ([*texts, "--seed", "1"], "seed 0, now it is 1"),
        ([*texts[:3], str(other)], "held-out text"),
    ):
        assert cli.run([*command, *more]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert word in said[-1] and "name another folder" in said[-1]
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_a_run_folder_and_a_file_are_no_place_for_experiments(made: Path, texts: list[str], capsys: pytest.CaptureFixture[str]):
    for place, word in ((made / "long-run" / "paper", "is the folder of a run"), (made / "table.md", "is a file")):
        assert cli.run(["reproduce", str(place), "--scale", "smoke", *texts]) == 2
        assert word in capsys.readouterr().err


def test_a_kept_result_without_its_form_is_a_line(made: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    shutil.copytree(made, out)
    kept = json.loads((out / "sigma-range.json").read_text())
    kept["result"]["evaluations"] = {run: dict.fromkeys(told, "much") for run, told in kept["result"]["evaluations"].items()}
    (out / "sigma-range.json").write_text(json.dumps(kept))
    assert cli.run(["reproduce", str(out), "--scale", "smoke", "--only", ONLY, *texts]) == 1
    said = capsys.readouterr().err
    assert "a kept result has not its form" in said and "Traceback" not in said


def test_an_experiment_that_fails_leaves_the_others(made: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    shutil.copytree(made, out)
    (out / "sigma-range.json").unlink()
    toml = out / "sigma-range" / "sigma-0-2" / "checkpoints"
    for path in toml.glob("*/progress.json"):
        path.write_text("damaged")
    assert cli.run(["reproduce", str(out), "--scale", "smoke", "--only", ONLY, *texts]) == 1
    said = capsys.readouterr().err
    assert "sigma-range: failed: " in said and "Traceback" not in said
    rows = {row["experiment"]: row["ours"] for row in json.loads((out / "table.json").read_text())["rows"]}
    assert rows["sigma-range"].startswith("failed: ") and "long-run, our default" in rows


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "nothing"], ["--only", "nothing", "long-run"]),
        (["--only", ","], ["--only", "empty name"]),
        (["--steps", "1.5"], ["--steps", "whole number"]),
        (["--train", "README.md"], ["--heldout", "needed"]),
        (["--heldout", "README.md"], ["--train", "needed"]),
        (["--train", "nothing", "--heldout", "nothing"], ["--train", "no such file"]),
        (["--train", "README.md", "--heldout", "README.md", "--data", "python"], ["--data"]),
        (["--scale", "huge"], ["huge"]),
        (["--seed", "-1"], ["seed"]),
        (["--steps", "0"], ["--steps: train.steps"]),
        (["--steps", "9999999999999", "--data", "python"], ["--steps: train.steps"]),
        (["--data", "nothing"], ["nothing"]),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "README.md")
    assert cli.run(["reproduce", "out", *flags]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and all(word in said[0] for word in words), said
    assert not (tmp_path / "out").exists()


# --- The page ---


def test_report_draws_runs_side_by_side(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [str(made / "long-run" / "default"), str(made / "long-run" / "paper")]
    page = tmp_path / "new" / "page.html"
    assert cli.run(["report", *runs, "--out", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    html = page.read_text()
    kept = json.loads((made / "long-run.json").read_text())["result"]["figures"]
    for number in (kept["default"]["headline_ce"], kept["default"]["reference_ce"], kept["paper"]["rollout_ce"][0], kept["paper"]["ngram_ce"]):
        assert f"{number:.4f}" in html
    assert "default: no noisy target takes part" in html


def test_report_of_one_run_lies_in_its_folder(made: Path):
    run = made / "long-run" / "paper"
    assert cli.run(["report", str(run)]) == 0
    assert "Noise drawn in training" in (run / "report.html").read_text()
    (run / "report.html").unlink()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], ["RUN", "needed"]), (["none"], ["none", "not a run folder"]), (["--bench", "none.json"], ["none.json", "no such file"])],
)
def test_a_mistake_of_report_is_one_line(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.run(["report", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and all(word in said[0] for word in words), said


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1280, "dark")])
def test_a_browser_shows_it_whole(browser: Browser, made: Path, width: int, scheme: Any):
    asked: list[str] = []
    with visit(browser, "about:blank", viewport={"width": width, "height": 800}, color_scheme=scheme) as (page, said):
        page.on("request", lambda request: asked.append(request.url))
        page.goto((made / "report.html").as_uri())
        expect(page.get_by_role("heading", level=1)).to_contain_text("scale smoke")
        assert page.locator("figure > svg").count() == 5  # training, three of noise, composition
        for i in range(5):
            box = page.locator("figure > svg").nth(i).bounding_box()
            assert box is not None and box["width"] > 250 and box["height"] > 150 and box["x"] >= 0 and box["x"] + box["width"] <= width
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"{overflow} px too wide"
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('figure > svg text')].filter(t => t.textContent.trim())"
            ".map(t => t.getBoundingClientRect()).filter(b => b.width > b.height).map(b => b.height))"
        )
        assert smallest >= 9, "letters of a drawing are too small to read"
        ink, paper = page.evaluate(
            "[getComputedStyle(document.querySelector('figure > svg text')).fill, getComputedStyle(document.body).backgroundColor]"
        )
        assert brightness(ink) > brightness(paper) if scheme == "dark" else brightness(ink) < brightness(paper)
        assert asked == [(made / "report.html").as_uri()] and said == []


def brightness(colour: str) -> int:
    return sum(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")[:3])
