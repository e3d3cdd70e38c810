"""From what runs and benches say to the five sections of the page: each with its plots, a table of every number in them, and a sentence for whatever
is left out.

A run has a colour when there are several; its blocks then differ by dashes. A run alone has a colour for each block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blocktrain.report.page.plots import Plot, Series
from blocktrain.report.page.run_figures import Curve, RunFigures, SigmaDraws, SwarmFigures
from blocktrain.report.serving_tables import link_name
from blocktrain.swarm.dashboard.stream import thin_curve

CE = "CE (nats per byte)"
MODES = ("baseline", "exact", "speculative", "sweep")


@dataclass(frozen=True)
class Table:
    """Rows of text; the columns from `words` on are numbers and stand to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


@dataclass(frozen=True)
class Figure:
    """A plot with the numbers in it."""

    title: str
    plot: Plot
    table: Table


@dataclass(frozen=True)
class Section:
    """One question, its figures, and a sentence for each thing that is not there."""

    title: str
    lead: str
    figures: Sequence[Figure]
    missing: Sequence[str]


def sections_of(runs: Sequence[RunFigures], benches: Sequence[tuple[str, dict[str, Any]]]) -> list[Section]:
    """All five, in the order of the page."""
    return [training(runs), noise(runs), composition(runs), swarm(runs), serving(benches)]


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _style(runs: Sequence[RunFigures], run: int, part: int) -> tuple[int, int]:
    """Colour and dash of a part of a run."""
    return (run, part) if len(runs) > 1 else (part, part)


def _name(runs: Sequence[RunFigures], run: RunFigures, part: str) -> str:
    return f"{run.label}, {part}" if len(runs) > 1 else part


def _figures(*found: Figure) -> list[Figure]:
    """Those in which there is something to see."""
    return [figure for figure in found if figure.plot.series]


def _missing(runs: Sequence[RunFigures], reasons: Sequence[object]) -> list[str]:
    """A sentence for each reason, with the runs that it is true of."""
    labels: dict[str, list[str]] = {}
    for run, reason in zip(runs, reasons, strict=True):
        if isinstance(reason, str):
            labels.setdefault(reason, []).append(run.label)
    return [f"{', '.join(names)}: {reason}." for reason, names in labels.items()]


# --- Training ---


def training(runs: Sequence[RunFigures]) -> Section:
    """CE over bytes seen, of every span, with what the composed model has at the end."""
    series: list[Series] = []
    for r, run in enumerate(runs):
        parts = [*_curves(run.curves)]
        series += [_curve(_name(runs, run, curve.name), curve, *_style(runs, r, i)) for i, curve in enumerate(parts)]
        ends = [_curve(_name(runs, run, "end-to-end reference"), curve, *_style(runs, r, len(parts))) for curve in _curves(run.reference)]
        series += ends[-1:]
        series += _headlines(runs, r, run, len(parts))
    rows = [[s.name, f"{x:,.0f}", number(y)] for s in series for x, y in zip(s.x, s.y, strict=True)]
    alt = "Cross entropy in training against bytes seen, and the composed model on held-out text."
    plot = Plot(alt, "bytes seen by a block", CE, series, log_x=True)
    figure = Figure("Training and the composed model", plot, Table(("series", "bytes seen", CE), rows))
    evaluated = [run.evaluation for run in runs]
    return Section(
        "Training",
        "Lines are the cross entropy of training batches. Marks are held-out text: the model composed of all blocks, and the end-to-end "
        "Transformer of the same shape.",
        _figures(figure),
        [*_missing(runs, [run.curves for run in runs]), *_missing(runs, evaluated), *_missing(runs, [run.reference for run in runs])],
    )


def _curves(found: list[Curve] | str) -> list[Curve]:
    return [] if isinstance(found, str) else found


def _curve(name: str, curve: Curve, colour: int, dash: int) -> Series:
    points = thin_curve(list(zip(curve.bytes_seen, curve.ce, strict=True)))
    return Series(name, [x for x, _ in points], [y for _, y in points], colour, dash)


def _headlines(runs: Sequence[RunFigures], r: int, run: RunFigures, parts: int) -> list[Series]:
    """Marks of the composed model and of the reference beside it."""
    if isinstance(run.evaluation, str):
        return []
    at, marks = [float(run.evaluation["bytes_seen"])], []
    for i, (key, name) in enumerate((("headline_ce", "composed model, held out"), ("reference_ce", "end-to-end reference, held out"))):
        if run.evaluation[key] is not None:
            colour = r if len(runs) > 1 else parts - 1 + i
            marks.append(Series(_name(runs, run, name), at, [run.evaluation[key]], colour, i, "marks"))
    return marks


# --- Noise ---


def noise(runs: Sequence[RunFigures]) -> Section:
    """Which noise levels were drawn, how hard each was in training, and how hard on held-out text."""
    drawn, trained, heldout = [], [], []
    rows: list[list[str]] = []
    for r, run in enumerate(runs):
        if isinstance(run.sigma, SigmaDraws):
            sigma = run.sigma
            total = sum(sigma.counts)
            drawn.append(Series(run.label, sigma.edges, [n / total for n in sigma.counts], r, 0, "steps"))
            middles = _middles(sigma.edges)
            seen = [(x, ce) for x, ce in zip(middles, sigma.ce, strict=True) if ce is not None]
            trained.append(Series(_name(runs, run, "training"), [x for x, _ in seen], [ce for _, ce in seen], r, 0))
            rows += [
                [run.label, _range(low, high), f"{n:,.0f}", number(ce)]
                for low, high, n, ce in zip(sigma.edges, sigma.edges[1:], sigma.counts, sigma.ce, strict=False)
            ]
        bins = run.evaluation["sigma_bins"] if isinstance(run.evaluation, dict) else []
        if bins:
            shown = [(math.sqrt(max(b["low"], 1e-12) * b["high"]), b["ce"]) for b in bins]
            colour = r if len(runs) > 1 else 1
            heldout.append(Series(_name(runs, run, "oracle, held out"), [x for x, _ in shown], [ce for _, ce in shown], colour, 1))
    oracle = [
        [run.label, _range(b["low"], b["high"]), str(b["block"]), number(b["ce"])]
        for run in runs
        if isinstance(run.evaluation, dict)
        for b in run.evaluation["sigma_bins"]
    ]
    histogram = Plot("How often each noise level was drawn in training.", "noise level sigma", "share of sequences drawn", drawn, log_x=True)
    levels = Plot("Cross entropy by noise level.", "noise level sigma", CE, [*trained], log_x=True)
    oracles = Plot("Oracle cross entropy by noise level, held-out text.", "noise level sigma", CE, heldout, log_x=True)
    return Section(
        "Noise levels",
        "A block that is shown a noisy copy of the answer: the less noise, the easier. Neither line is a score of the model.",
        _figures(
            Figure("Noise drawn in training", histogram, Table(("run", "sigma", "sequences", CE), rows)),
            Figure("Training CE by noise level", levels, Table(("run", "sigma", "sequences", CE), rows)),
            Figure("Oracle CE by noise level", oracles, Table(("run", "sigma", "block", CE), oracle)),
        ),
        _missing(runs, [run.sigma for run in runs]),
    )


def _middles(edges: Sequence[float]) -> list[float]:
    return [math.sqrt(low * high) for low, high in zip(edges, edges[1:], strict=False)]


def _range(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}"


# --- Composition ---


def composition(runs: Sequence[RunFigures]) -> Section:
    """Rollout CE after each block: a line that falls is depth that composes."""
    series: list[Series] = []
    rows: list[list[str]] = []
    for r, run in enumerate(runs):
        if isinstance(run.evaluation, str):
            continue
        told = run.evaluation
        points = [(b + 1.0, ce) for b, ce in enumerate(told["rollout_ce"]) if ce is not None]
        series.append(Series(_name(runs, run, "rollout"), [x for x, _ in points], [ce for _, ce in points], r, 0))
        rows += [[run.label, f"after block {x - 1:.0f}", number(ce)] for x, ce in points]
        for i, (key, name) in enumerate((("reference_ce", "end-to-end reference"), ("ngram_ce", "order-5 n-gram"))):
            if told[key] is not None:
                series.append(Series(_name(runs, run, name), [], [told[key]], r if len(runs) > 1 else i + 1, i + 1, "level"))
                rows.append([run.label, name, number(told[key])])
        rows += [[run.label, name, number(told[key])] for key, name in (("composition_gain", "composition gain"), ("gap", "gap to the reference"))]
    shown, cut = _near_the_best(series)
    plot = Plot("Held-out cross entropy after each block of the sweep.", "blocks passed", CE, _one_level_each(series), whole_x=True, y_range=shown)
    figure = Figure("Rollout CE after every block", plot, Table(("run", "figure", CE), rows, words=2))
    return Section(
        "Does depth compose?",
        "Held-out cross entropy after each block of the sweep; the answer is never seen. Where a line falls, further blocks help; "
        "where it rises, they harm. Where blocks vote, it is the mean of the votes so far." + cut,
        _figures(figure),
        _missing(runs, [run.evaluation for run in runs]),
    )


REACH = 1.5  # nats above the lowest point that a plot of composition shows at most: an arm that diverges would flatten all others


def _near_the_best(series: Sequence[Series]) -> tuple[tuple[float, float] | None, str]:
    """(range of y, what is to be said of it); no range where all points are near each other."""
    values = [y for one in series for y in one.y if math.isfinite(y)]
    if not values or max(values) <= min(values) + REACH:
        return None, ""
    low = min(values)
    beyond = sum(y > low + REACH for y in values)
    points = "1 point" if beyond == 1 else f"{beyond} points"
    return (low - 0.08 * REACH, low + REACH), f" {points} more than {REACH:g} nats above the lowest: outside the drawing, in the table."


def _one_level_each(series: Sequence[Series]) -> list[Series]:
    """Runs on one text share their n-gram line: levels that are equal are drawn once, under the first one's name."""
    kept: list[Series] = []
    for one in series:
        twin = next((k for k in kept if one.kind == k.kind == "level" and k.y == one.y and k.dash == one.dash), None)
        if twin is None:
            kept.append(one)
    return kept


# --- Many workers ---


def swarm(runs: Sequence[RunFigures]) -> Section:
    """Who took part, and what was moved for it."""
    shares, uploads, totals = [], [], []
    share_rows: list[list[str]] = []
    upload_rows: list[list[str]] = []
    total_rows: list[list[str]] = []
    for r, run in enumerate(runs):
        if not isinstance(run.swarm, SwarmFigures):
            continue
        for block, points in sorted(run.swarm.participations.items()):
            name = _name(runs, run, f"block {block}")
            shares.append(Series(name, [float(v) for v, _ in points], [100 * share for _, share in points], *_style(runs, r, block)))
            share_rows += [[name, str(version), f"{share:.1%}"] for version, share in points]
        for block, sent in sorted(run.swarm.uploads.items()):
            name = _name(runs, run, f"block {block}")
            uploads.append(Series(name, [float(x) for x, _ in sent], [ce for _, ce in sent], *_style(runs, r, block)))
            upload_rows += [[name, f"{x:,}", number(ce)] for x, ce in sent]
        headline = run.evaluation["headline_ce"] if isinstance(run.evaluation, dict) else None
        for i, (name, moved) in enumerate((("up", run.swarm.up), ("down", run.swarm.down))):
            total_rows.append([run.label, name, f"{moved:,}", number(headline)])
            if headline is not None:
                totals.append(Series(_name(runs, run, name), [float(moved)], [headline], r if len(runs) > 1 else i, i, "marks"))
    participation = Plot(
        "Share of assigned work that came in time, by round.",
        "round (version of the block)",
        "participation (%)",
        shares,
        whole_x=True,
        y_range=(0, 105),
    )
    sent = Plot("Training cross entropy against bytes of updates.", "bytes of updates, all blocks", CE, uploads)
    moved = Plot("Held-out cross entropy of the composed model against all bytes moved.", "bytes moved in the whole run", CE, totals)
    return Section(
        "Many workers",
        "The ledger counts every byte of the run, not when it moved: up and down are one mark a run. What updates had cost by each round is known.",
        _figures(
            Figure("Participation over rounds", participation, Table(("series", "round", "participation"), share_rows)),
            Figure("Bytes sent up against training CE", sent, Table(("series", "bytes of updates", CE), upload_rows)),
            Figure("All bytes moved against the composed model", moved, Table(("run", "direction", "bytes", CE), total_rows, words=2)),
        ),
        _missing(runs, [run.swarm for run in runs]),
    )


# --- Serving ---


def serving(benches: Sequence[tuple[str, dict[str, Any]]]) -> Section:
    """Speed over links with delay. `benches` are (label, result of the bench)."""
    speed, harvest = [], []
    rows: list[list[str]] = []
    for i, (label, result) in enumerate(benches):
        for j, mbit in enumerate(dict.fromkeys(table["mbit_s"] for table in result["tables"])):
            tables = sorted((t for t in result["tables"] if t["mbit_s"] == mbit), key=lambda table: table["rtt_ms"])
            for mode in dict.fromkeys(row["name"] for table in tables for row in table["rows"]):
                points = [(table["rtt_ms"], row) for table in tables for row in table["rows"] if row["name"] == mode]
                name = ", ".join([*([label] if len(benches) > 1 else []), mode, f"{mbit:g} Mbit/s" if mbit else "no limit"])
                colour = MODES.index(mode) if mode in MODES else len(MODES)
                x = [float(rtt) for rtt, _ in points]
                speed.append(Series(name, x, [row["bytes_per_s"] for _, row in points], colour, 2 * i + j))
                harvest.append(Series(name, x, [row["bytes_per_traversal"] for _, row in points], colour, 2 * i + j))
        rows += [
            [label, row["name"], link_name(table), number(row["bytes_per_s"], 1), number(row.get("ratio"), 2), number(row["bytes_per_traversal"], 2)]
            for table in result["tables"]
            for row in table["rows"]
        ]
    table = Table(("bench", "mode", "link", "bytes per second", "over baseline", "bytes per traversal"), rows, words=3)
    fast = Plot("Bytes per second against round-trip time.", "round-trip time (ms)", "bytes per second", speed)
    many = Plot("Bytes per traversal of all stages against round-trip time.", "round-trip time (ms)", "bytes per traversal", harvest)
    return Section(
        "Serving over links with delay",
        "baseline is the plain autoregressive pipeline of the end-to-end Transformer over the same stages, one byte a traversal.",
        _figures(Figure("Bytes per second", fast, table), Figure("Bytes per traversal", many, table)),
        [] if benches else ["No bench was given: add the output of `blocktrain bench serving RUN` with --bench FILE."],
    )
