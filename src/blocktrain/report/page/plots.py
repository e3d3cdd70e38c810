"""Plots as inline SVG, drawn by matplotlib, coloured by the page's style sheet.

matplotlib is given made-up colours that are replaced by CSS variables, so one drawing serves a light page and a dark one. Text stays text. Legends
are HTML beside the drawing: names of folders can be long, hold anything, and must wrap on a phone, which a legend inside a drawing does not.

matplotlib comes with the extra `[report]` and is imported when something is drawn. Not used: pyplot, which has global state and looks for a display.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from blocktrain.errors import ConfigError, how_to_install

COLOURS = 8  # of the palette in page.css
DASHES: tuple[tuple[float, ...], ...] = ((), (5.0, 2.0), (1.5, 1.5), (7.0, 2.0, 1.5, 2.0), (3.0, 3.0), (9.0, 3.0))
MARKERS = "os"  # as the legend draws them
WIDTH, HEIGHT = 320, 224  # points; a phone shows about one pixel a point
FONT = 10.5

# Colours that are in no drawing by chance -> the page's variables.
INK, MUTED, LINE, SURFACE = "#a1b201", "#a1b202", "#a1b203", "#a1b204"
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)", SURFACE: "var(--surface)"}
_PALETTE = [f"#a1b21{i}" for i in range(COLOURS)]
_VARIABLES |= {colour: f"var(--c{i})" for i, colour in enumerate(_PALETTE)}

Kind = Literal["line", "marks", "steps", "level"]


@dataclass(frozen=True)
class Series:
    """One line of a plot and of its legend. `steps` has one more x than y: the edges of its bins; `level` has one y and no x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dash: int = 0
    kind: Kind = "line"

    @property
    def dashes(self) -> tuple[float, ...]:
        return DASHES[self.dash % len(DASHES)]


@dataclass(frozen=True)
class Plot:
    """What is drawn. `alt` says in a sentence what is to be seen; labels carry units."""

    alt: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    whole_x: bool = False  # ticks at whole numbers only
    y_range: tuple[float, float] | None = None


def require_matplotlib() -> None:
    """Raises ConfigError where the extra is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(f"the report needs the package matplotlib: {how_to_install('report')}") from None


def draw(plot: Plot, name: str) -> str:
    """The plot as an `<svg>` element whose ids all begin with `name`, so that many fit on one page."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": FONT, "axes.unicode_minus": True, "text.parse_math": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for series in plot.series:
            _draw_series(axes, series)
        _dress(figure, axes, plot)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inline(written.getvalue(), name, plot.alt)


def _draw_series(axes: Any, series: Series) -> None:
    colour = _PALETTE[series.colour % COLOURS]
    style: dict[str, Any] = {"color": colour, "linewidth": 1.6, "linestyle": (0, series.dashes) if series.dashes else "-"}
    if series.kind == "level":
        axes.axhline(series.y[0], **(style | {"linewidth": 1.2}))
    elif series.kind == "steps":
        axes.stairs(series.y, series.x, fill=True, color=colour, alpha=0.18, linewidth=0)
        axes.stairs(series.y, series.x, color=colour, linewidth=1.4, linestyle=style["linestyle"], baseline=None)
    elif series.kind == "marks":
        marker = {"marker": MARKERS[series.dash % len(MARKERS)], "markersize": 7, "markeredgecolor": SURFACE, "markeredgewidth": 1}
        axes.plot(series.x, series.y, color=colour, linestyle="none", zorder=5, **marker)
    else:
        few = len(series.x) <= 12
        axes.plot(series.x, series.y, **style, marker="o" if few else None, markersize=3.5)


def _dress(figure: Any, axes: Any, plot: Plot) -> None:
    """Axes, units and grid, in the page's colours."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if plot.log_x:
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=plot.whole_x))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    axes.set_xlabel(plot.x_label, color=INK)
    axes.set_ylabel(plot.y_label, color=INK)
    axes.grid(color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.04, y=0.08)
    low, high = axes.get_xlim()
    few_decades = plot.log_x and high / low < 300  # with more there is no room between the powers of ten
    axes.xaxis.set_minor_formatter(FuncFormatter(_minor_tick if few_decades else lambda *_: ""))
    if plot.y_range:
        axes.set_ylim(*plot.y_range)
    axes.tick_params(which="both", colors=MUTED, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)


def _tick(value: float, _: object = None) -> str:
    """A short number: 1.5M, 20k, 0.25."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _minor_tick(value: float, _: object = None) -> str:
    """Between the powers of ten only 2 and 5 are written, or the numbers run into each other."""
    leading = round(value / 10 ** math.floor(math.log10(value) + 1e-9)) if value > 0 else 0
    return _tick(value) if leading in (2, 5) else ""


def _inline(svg: str, name: str, alt: str) -> str:
    """Only the element: no XML header, no size of its own, ids of its own, colours from the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, flags=re.S)  # it would style the whole page
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    box = re.search(r'viewBox="[^"]+"', svg)
    assert box is not None, "matplotlib writes a viewBox"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img" aria-label="{escape(alt)}">'
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1).strip()
