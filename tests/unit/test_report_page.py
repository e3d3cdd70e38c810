"""The report's pieces: what is read of runs and benches, what is said of what is missing, and that names of folders stay text."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.config import to_toml
from blocktrain.errors import ConfigError
from blocktrain.report.page.bench_file import read_bench
from blocktrain.report.page.plots import Plot, Series, draw
from blocktrain.report.page.report import Front, labels_of, render, write_report
from blocktrain.report.page.run_figures import Curve, RunFigures, SigmaDraws, SwarmFigures, curves_of
from blocktrain.report.page.sections import Table, sections_of
from tests.conftest import PAPER, tiny_config

EVIL = '<img src=x onerror="alert(1)">&$\\frac{1}$'
EVALUATION: dict[str, Any] = {
    "headline_ce": 1.5,
    "reference_ce": 1.4321,
    "ngram_ce": 1.3855,
    "rollout_ce": [1.7, None, 1.5],
    "sigma_bins": [{"low": 1.0, "high": 3.0, "block": 1, "ce": 2.125}, {"low": 3.0, "high": 10.0, "block": 0, "ce": 2.25}],
    "bytes_seen": 4096,
    "composition_gain": 0.2,
    "gap": 0.0679,
}


def run_of(label: str = "run", **changed: Any) -> RunFigures:
    curves = [Curve("block 0", [1024.0, 2048.0], [3.0, 2.0625])]
    sigma = SigmaDraws([1.0, 2.0, 4.0, 8.0], [30.0, 10.0, 0.0], [2.5, 2.75, None])
    swarm = SwarmFigures({0: [(1, 1.0), (2, 0.5)]}, {0: [(1000, 3.0), (2000, 2.5)]}, 2500, 9000)
    fields = {"curves": curves, "reference": curves, "evaluation": EVALUATION, "sigma": sigma, "swarm": swarm} | changed
    return RunFigures(label, tiny_config(), **fields)


def page_of(*runs: RunFigures, benches: list[tuple[str, dict[str, Any]]] | None = None) -> str:
    return render(Front("title", "lead"), sections_of(runs, benches or []))


class Text(HTMLParser):
    """What a reader sees of a page, and its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words, self.tags, self.ids = "", list[tuple[str, dict[str, str | None]]](), list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_data(self, data: str) -> None:
        self.words += data + " "


# --- The page ---


def test_names_of_folders_are_text():
    page = Text(page_of(run_of(EVIL), run_of("other"), benches=[(EVIL, bench_result())]))
    assert EVIL in page.words
    assert not [tag for tag, _ in page.tags if tag in ("img", "script")]
    assert page_of(run_of(EVIL)).count("<img") == 0


def test_every_plotted_number_is_in_a_table():
    words = Text(page_of(run_of(), benches=[("bench", bench_result())])).words
    for number in ("2.0625", "1.7000", "1.5000", "1.4321", "1.3855", "2.7500", "2.1250", "50.0%", "2,500", "9,000", "2.5000", "26.7", "6.62"):
        assert number in words, number


def test_there_is_a_drawing_for_each_figure_and_it_asks_for_nothing():
    html = page_of(run_of(), benches=[("bench", bench_result())])
    page = Text(html)
    drawings = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(drawings) == 10
    assert all(attrs.get("aria-label") and "width" not in attrs for attrs in drawings)
    assert len(page.ids) == len(set(page.ids)), "drawings share ids"
    used = re.findall(r"url\(#([^)]+)\)", html)
    assert used and set(used) <= set(page.ids)
    asked = [attrs[name] or "" for tag, attrs in page.tags for name in ("src", "href") if name in attrs and tag != "use"]
    assert asked == ["data:,"], "the page asks for something outside itself"
    assert "#a1b2" not in html, "a colour that the style sheet was to set"


def test_axes_have_units():
    words = Text(page_of(run_of(), benches=[("bench", bench_result())])).words
    for label in ("CE (nats per byte)", "bytes seen by a block", "round-trip time (ms)", "bytes of updates, all blocks", "participation (%)"):
        assert label in words


def test_what_is_missing_is_said_once_for_all_it_is_true_of():
    lacking = {"curves": "no metrics", "reference": "no reference", "evaluation": "not evaluated", "sigma": "no noise", "swarm": "no workers"}
    words = Text(page_of(run_of("a", **lacking), run_of("b", **lacking))).words
    for sentence in lacking.values():
        assert f"a, b: {sentence}." in words
    assert "No bench was given" in words
    assert "<figure>" not in page_of(run_of("a", **lacking))


def test_runs_beside_each_other_have_their_own_colours():
    both = sections_of([run_of("a"), run_of("b")], [])[2].figures[0].plot.series
    assert {series.colour for series in both if series.name.startswith("a")} == {0}
    assert {series.colour for series in both if series.name == "b, rollout"} == {1}
    assert [s.name for s in both if s.kind == "level"] == ["a, end-to-end reference", "a, order-5 n-gram"], "equal levels are one line"


def test_a_long_table_is_folded_and_whole():
    curve = Curve("block 0", [float(i) for i in range(1, 301)], [1.0 + 1 / i for i in range(1, 301)])
    html = page_of(run_of(curves=[curve], reference="none", evaluation="none"))
    assert "All 300 rows" in html


def test_labels_tell_folders_apart(tmp_path: Path):
    assert labels_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert labels_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert labels_of([tmp_path / "a", tmp_path / "a"]) == ["a", "a"]
    assert labels_of([]) == []


def test_a_drawing_takes_any_numbers():
    for y in ([0.0, 0.0], [1e-9, 1e9], [5.0]):
        plot = Plot("alt <b>", "x", "y", [Series("s", [1.0, 2.0][: len(y)], y)], log_x=True)
        drawing = draw(plot, "name")
        assert drawing.startswith("<svg") and 'aria-label="alt &lt;b&gt;"' in drawing


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install -c constraints\.txt '\.\[report\]'"):
        write_report(tmp_path / "report.html", [])


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/report\.html: cannot be written"):
        write_report(tmp_path / "file" / "report.html", [])
    with pytest.raises(ConfigError, match="is a folder"):
        write_report(tmp_path, [])
    with pytest.raises(ConfigError, match="nothing: not a run folder"):
        write_report(tmp_path / "report.html", [tmp_path / "nothing"])
    assert not (tmp_path / "report.html").exists()


def test_the_front_table_is_escaped():
    html = render(Front("t", "l", Table(("a",), [(EVIL,)])), [])
    assert EVIL not in html and "&lt;img" in html


# --- Runs ---


def line(updates: int, ce: list[float], blocks: list[list[int]]) -> str:
    return json.dumps({"updates": updates, "blocks": blocks, "ce": ce})


def test_curves_are_of_spans_and_pass_over_what_is_no_line(tmp_path: Path):
    lines = [line(1, [3.0, 2.0], [[0, 1], [1, 2]]), '{"updates": 2, "blo', line(2, [2.5, float("nan")], [[0, 1], [1, 2]]), "[]", "7"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    config = tiny_config()
    first, second = curves_of(tmp_path, config)
    assert isinstance(first, Curve) and isinstance(second, Curve)
    assert (first.name, first.bytes_seen, first.ce) == ("block 0", [config.tokens_per_step, 2 * config.tokens_per_step], [3.0, 2.5])
    assert (second.name, second.ce) == ("block 1", [2.0])
    assert "no metrics.jsonl" in str(curves_of(tmp_path / "nothing", config))


def test_blocks_trained_one_after_another_each_begin_at_nothing(tmp_path: Path):
    config = tiny_config(train={"order": "sequential", "steps": 10})
    (tmp_path / "metrics.jsonl").write_text("\n".join([line(10, [3.0], [[0, 1]]), line(11, [4.0], [[1, 2]])]))
    curves = curves_of(tmp_path, config)
    assert not isinstance(curves, str)
    assert [curve.bytes_seen for curve in curves] == [[10 * config.tokens_per_step], [config.tokens_per_step]]


def test_a_run_that_was_never_trained_is_all_sentences(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(to_toml(tiny_config(objective=PAPER)))
    write_report(tmp_path / "report.html", [tmp_path / "run"])
    words = Text((tmp_path / "report.html").read_text()).words
    for sentence in ("no metrics.jsonl", "has no checkpoint yet", "the checkpoint has no statistics", "trained without workers"):
        assert sentence in words, sentence


def test_noise_is_read_as_the_trainer_counted(tmp_path: Path):
    from blocktrain.report.page.run_figures import read_run
    from blocktrain.training.data import load_corpus
    from blocktrain.training.run import TrainingRun
    from tests.conftest import write_text

    torch.manual_seed(0)
    text = str(write_text(tmp_path / "text.txt"))
    config = tiny_config(objective=PAPER, data={"corpus": text}, train={"steps": 6})
    TrainingRun(tmp_path / "run", config, load_corpus(text)).train()
    found = read_run(tmp_path / "run", "run", lambda _: None)
    assert isinstance(found.sigma, SigmaDraws)
    assert sum(found.sigma.counts) == 6 * 4 * 3, "steps x sequences x blocks"
    assert found.sigma.edges[0] == pytest.approx(1) and found.sigma.edges[-1] == pytest.approx(10)
    assert all((ce is None) == (count == 0) for ce, count in zip(found.sigma.ce, found.sigma.counts, strict=True))
    assert isinstance(found.evaluation, dict) and len(found.evaluation["sigma_bins"]) == 4


# --- Bench files ---


def bench_result() -> dict[str, Any]:
    rows = [
        {"name": "baseline", "bytes_per_s": 4.5, "bytes_per_traversal": 1.0, "ratio": 1.0},
        {"name": "speculative", "bytes_per_s": 26.7, "bytes_per_traversal": 6.62, "ratio": 6.0},
    ]
    return {"bench": "serving", "tables": [{"rtt_ms": 100.0, "mbit_s": 0.0, "rows": rows}, {"rtt_ms": 0.0, "mbit_s": 20.0, "rows": rows}]}


def test_the_result_is_found_wherever_it_stands(tmp_path: Path):
    path = tmp_path / "bench.txt"
    for text in (json.dumps(bench_result()), json.dumps(bench_result(), indent=2), f"a table\n| 1 |\n[1]\n{json.dumps(bench_result())}\nnote\n"):
        path.write_text(text)
        assert read_bench(path) == bench_result()


def broken(**changed: Any) -> str:
    return json.dumps(bench_result() | changed)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no line of JSON"),
        ("| a table |", "no line of JSON"),
        ("[" * 100_000, "no line of JSON"),
        (json.dumps({"bench": "training"}), "bench is 'training'"),
        (broken(tables=[]), "tables is missing"),
        (broken(tables=None), "tables is missing"),
        (broken(tables=[{"rtt_ms": 1.0}]), r"tables\[0\] has no rtt_ms or mbit_s"),
        (broken(tables=[{"rtt_ms": "1", "mbit_s": 0}]), r"tables\[0\] has no rtt_ms or mbit_s"),
        (broken(tables=[{"rtt_ms": 1.0, "mbit_s": 0.0, "rows": []}]), r"tables\[0\]\.rows is missing"),
        (broken(tables=[{"rtt_ms": 1.0, "mbit_s": 0.0, "rows": [{}]}]), "row without a name"),
        (broken(tables=[{"rtt_ms": 1.0, "mbit_s": 0.0, "rows": [{"name": "exact", "bytes_per_s": 1.0}]}]), "no number bytes_per_traversal"),
        (broken(tables=[{"rtt_ms": 1.0, "mbit_s": 0.0, "rows": [{"name": "exact", "bytes_per_s": float("nan")}]}]), "no number bytes_per_s"),
    ],
)
def test_a_file_that_is_no_bench_is_named_with_what_is_wrong(tmp_path: Path, text: str, word: str):
    path = tmp_path / "bench.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word) as caught:
        read_bench(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    for path, word in ((tmp_path / "none", "no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(ConfigError, match=word):
            read_bench(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_bench(tmp_path / "binary")


def test_an_arm_that_diverges_does_not_flatten_the_others():
    """Its points are in the table, and the page says how many are not drawn."""
    wild = run_of("wild", evaluation={**EVALUATION, "rollout_ce": [1.6, 9.25, 11.96]})
    said = Text(page_of(run_of(), wild))
    assert "2 points more than 1.5 nats above the lowest: outside the drawing" in said.words
    assert "11.96" in said.words
    assert "outside the drawing" not in Text(page_of(run_of())).words
