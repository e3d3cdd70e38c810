// Curves by plotly. A chart is drawn when it comes into view and again only when its data, its width or the colours changed.
import { fixed, short } from "./format.js";

const CONFIG = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false, showTips: false };
const drawers = new WeakMap();
const visible = new Set();

const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) visible.add(target);
      else visible.delete(target);
      if (isIntersecting) draw(target);
    }
  },
  { rootMargin: "200px" },
);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

export function redraw() {
  for (const element of visible) {
    const drawer = drawers.get(element);
    if (drawer) drawer.drawn = null;
    draw(element);
  }
}

export function chart(element, key, figure) {
  const known = drawers.get(element);
  drawers.set(element, { key, figure, drawn: known ? known.drawn : null });
  if (!known) watcher.observe(element);
  if (visible.has(element)) draw(element);
}

export function forget(element) {
  watcher.unobserve(element);
  visible.delete(element);
  if (window.Plotly && element.classList.contains("js-plotly-plot")) window.Plotly.purge(element);
}

function draw(element) {
  const drawer = drawers.get(element);
  if (!drawer || !window.Plotly || drawer.drawn === drawer.key) return;
  drawer.drawn = drawer.key;
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const figure = drawer.figure(colour);
  element.setAttribute("aria-label", figure.label);
  element.setAttribute("role", "img");
  window.Plotly.react(element, figure.traces, layout(colour, figure), CONFIG);
}

function layout(colour, { small, values, empty, shapes = [], annotations = [] }) {
  const axis = {
    fixedrange: true,
    gridcolor: colour("line"),
    zeroline: false,
    showline: false,
    showspikes: false,
    ticks: "",
    tickfont: { size: 11, color: colour("muted") },
    nticks: small ? 4 : 6,
    automargin: false,
    visible: values.length > 0,
  };
  return {
    autosize: true,
    height: small ? 150 : 250,
    margin: { l: 40, r: small ? 10 : 16, t: 10, b: small ? 24 : 38 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
    showlegend: false,
    hovermode: "x unified",
    dragmode: false,
    hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 } },
    xaxis: { ...axis, showgrid: false, rangemode: "tozero", tickformat: "~s", hoverformat: ".3s", unifiedhovertitle: { text: "%{x:.3s} tokens" }, title: small ? undefined : { text: "tokens", font: { size: 11, color: colour("muted") }, standoff: 6 } },
    yaxis: { ...axis, tickformat: ".2~f", ...range(values) },
    shapes,
    annotations: values.length ? annotations : [{ text: empty, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { size: 13, color: colour("muted") } }],
  };
}

// Some air above and below, so that neither a curve nor a label is cut off.
function range(values) {
  if (!values.length) return {};
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const air = 0.12 * (high - low || 1);
  return { range: [low - air, high + air] };
}

const heights = (points) => points.map((point) => point[1]);

function line(points, colour, name, dash, width) {
  return {
    x: points.map((point) => point[0]),
    y: points.map((point) => point[1]),
    mode: points.length === 1 ? "markers" : "lines",
    line: { color: colour, width, dash },
    marker: { color: colour, size: 7 },
    name,
    hovertemplate: "%{y:.3f}",
  };
}

const whole = (points) => points.filter((point) => point.every((value) => typeof value === "number"));

export function headlineFigure(status) {
  const points = whole(status.headline ?? []);
  const marks = [
    [status.ngram_ce, "n-gram"],
    [status.reference_ce, "reference"],
  ].filter(([value]) => typeof value === "number");
  const last = points.at(-1);
  const key = JSON.stringify([points.length, last, marks]);
  const figure = (colour) => ({
    empty: "the curve begins with the first headline",
    values: [...heights(points), ...marks.map(([value]) => value)],
    traces: [line(points, colour("headline"), "headline", "solid", 2.5)],
    shapes: marks.map(([value]) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, line: { color: colour("muted"), width: 1, dash: "dot" } })),
    annotations: marks.map(([value, name]) => ({
      text: `${name} ${fixed(value, 2)}`,
      xref: "paper",
      x: 1,
      xanchor: "right",
      y: value,
      yanchor: last && value < last[1] ? "top" : "bottom", // away from the curve
      showarrow: false,
      font: { size: 11, color: colour("muted") },
    })),
    label: last ? `Headline: from ${fixed(points[0][1], 2)} to ${fixed(last[1], 3)} nats per byte at ${short(last[0])} tokens` : "Headline: not measured yet",
  });
  return [key, figure];
}

export function blockFigure(block, status) {
  const losses = whole((block.losses ?? []).map(([, tokens, ce]) => [tokens, ce]));
  const headline = ofBlock(whole(status.headline ?? []), status);
  const last = losses.at(-1);
  const key = JSON.stringify([losses.length, last, headline.length, headline.at(-1)]);
  const figure = (colour) => ({
    small: true,
    empty: "the curve begins with the first round",
    values: [...heights(headline), ...heights(losses)],
    traces: [line(headline, colour("headline"), "composed", "dot", 2), line(losses, colour("block"), "loss", "solid", 2)],
    label: last ? `Loss of block ${block.block}: from ${fixed(losses[0][1], 2)} to ${fixed(last[1], 3)} at ${short(last[0])} tokens` : `Loss of block ${block.block}: no round yet`,
  });
  return [key, figure];
}

// The headline counts the run's tokens, a block its own: a point of the headline is put where the average block was at that time.
function ofBlock(points, status) {
  const counts = (status.blocks ?? []).map((block) => block.tokens).filter((tokens) => typeof tokens === "number");
  const mean = counts.reduce((sum, tokens) => sum + tokens, 0) / counts.length;
  const scale = status.tokens > 0 && mean > 0 ? mean / status.tokens : 1;
  return points.map(([tokens, ce]) => [tokens * scale, ce]);
}
