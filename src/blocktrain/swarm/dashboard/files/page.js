// The page: one stream of statuses in, figures out. The figures stand before plotly has loaded; its curves follow.
import { blockFigure, chart, forget, headlineFigure, redraw } from "./charts.js";
import { $, Keyed, bar, chip, clock, clone, make, put, show, tick } from "./dom.js";
import { ago, bytes, countdown, fixed, percent, plural, short, signed, span, whole } from "./format.js";

const FEW_BLOCKS = 12; // cards shown before "show all"
const MOST_WORKERS = 100; // rows in the document, whatever the number of workers
const FEW_WORKERS = matchMedia("(max-width: 44rem)").matches ? 20 : MOST_WORKERS;
const MOST_LINES = 50; // of log and refusals
const SILENCE_MS = 45000; // the stream sends at least a comment every 15 s, and mostly a status every second
const BARS = 24; // participations shown

let status = null;
let allBlocks = false;
let rows = FEW_WORKERS;
let query = "";

// ---- headline and run

function showHeadline() {
  const { headline_ce: ce, headline_tokens: at } = status;
  put($("ce"), fixed(ce, 3));
  const meaning = typeof ce === "number" ? `Held-out cross entropy of the composed model. Lower is better. ${fixed(ce / Math.LN2, 2)} bits per byte` : "Not measured yet: the blocks are composed and scored now and then";
  show($("ce").parentElement, typeof ce === "number");
  put($("ce-meaning"), `${meaning}${typeof at === "number" && typeof ce === "number" ? `, measured at ${whole(at)} tokens.` : "."}`);
  const marks = [
    ["n-gram", status.ngram_ce, "counting, order 5"],
    ["reference", status.reference_ce, "trained end to end"],
  ].filter(([, value]) => typeof value === "number");
  show($("beside"), marks.length > 0);
  beside.show(marks, ([name]) => name);
  chart($("headline-chart"), ...headlineFigure(status));
}

const beside = new Keyed(
  $("beside"),
  ([name, , what]) => {
    const element = make("div");
    const [term, value, note] = [make("dt"), make("dd"), make("dd", "note")];
    put(term, `${name} (${what})`);
    element.append(term, value, note);
    return { element, value, note };
  },
  ({ value, note }, [, ce]) => {
    put(value, fixed(ce, 3));
    const known = typeof status.headline_ce === "number";
    put(note, known ? `headline ${signed(status.headline_ce - ce)}` : "");
  },
);

function progress(parts, tokens, target) {
  const share = target > 0 && typeof tokens === "number" ? tokens / target : null;
  put(parts.tokens, target > 0 ? `${short(tokens)} of ${short(target)} tokens` : `${short(tokens)} tokens`, `${whole(tokens)} tokens`);
  put(parts.share, share === null ? "" : percent(share));
  bar(parts.bar, share);
}

function showRun() {
  document.title = `${status.run ?? "run"} · ${fixed(status.headline_ce, 3)} · ${status.state ?? ""}`;
  put($("run"), status.run ?? "run", status.run);
  chip($("state"), status.state);
  put($("reason"), status.reason ?? "");
  progress({ tokens: $("run-tokens"), share: $("run-share"), bar: $("run-bar") }, status.tokens, status.target_tokens);
  show($("run-progress"), typeof status.tokens === "number");
  const live = (status.workers ?? []).filter((worker) => worker.state === "live");
  put($("f-live"), `${whole(live.length)} of ${whole((status.workers ?? []).length)}`);
  put($("f-speed"), `${short(live.reduce((sum, worker) => sum + (worker.tokens_per_s ?? 0), 0))} tokens/s`);
  const updates = Object.entries(status.updates ?? {}).filter(([name, count]) => count || name === "fresh");
  put($("f-updates"), updates.map(([name, count]) => `${whole(count)} ${name.replaceAll("_", " ")}`).join(" · ") || null);
  put($("f-interface"), status.interface ? `v${status.interface.version ?? "–"} · ${status.interface.mode ?? "–"}` : null);
  clock($("f-uptime"), status.uptime_s, 1, span);
  put($("f-down"), bytes(status.bytes?.down), `${whole(status.bytes?.down)} bytes`);
  put($("f-up"), bytes(status.bytes?.up), `${whole(status.bytes?.up)} bytes`);
  put($("run-id"), status.run_id, status.run_id);
  put($("digest"), status.config_digest, status.config_digest);
}

// ---- blocks

function counts(items) {
  const found = new Map();
  for (const { state } of items) found.set(state, (found.get(state) ?? 0) + 1);
  return [...found].map(([state, count]) => `${whole(count)} ${state ?? "unknown"}`).join(" · ");
}

function showBlocks() {
  const blocks = status.blocks ?? [];
  const shown = allBlocks ? blocks : blocks.slice(0, FEW_BLOCKS);
  show($("blocks-empty"), blocks.length === 0);
  put($("blocks-summary"), blocks.length ? `${whole(blocks.length)} in all: ${counts(blocks)}` : "");
  show($("map"), blocks.length > FEW_BLOCKS);
  map.show(blocks.length > FEW_BLOCKS ? blocks : [], (block) => block.block);
  cards.show(shown, (block) => block.block);
  show($("blocks-more"), blocks.length > FEW_BLOCKS);
  put($("blocks-more"), allBlocks ? `Show the first ${FEW_BLOCKS}` : `Show all ${blocks.length} blocks`);
}

const map = new Keyed(
  $("map"),
  () => {
    const element = make("li");
    const button = make("button", "tile");
    button.type = "button";
    element.append(button);
    const entry = { element, button };
    button.addEventListener("click", () => openCard(entry.block));
    return entry;
  },
  (entry, block) => {
    entry.block = block.block;
    chip(entry.button, block.state);
    put(entry.button, block.block, `block ${block.block}: ${block.state}, version ${block.version ?? "–"}`);
    const label = `Block ${block.block}, ${block.state}`;
    if (entry.button.ariaLabel !== label) entry.button.ariaLabel = label;
  },
);

function openCard(block) {
  if (!cards.kept.has(block)) {
    allBlocks = true;
    showBlocks();
  }
  const card = cards.kept.get(block)?.element;
  card?.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  card?.focus({ preventScroll: true });
}

const cards = new Keyed(
  $("cards"),
  () => {
    const { element, parts } = clone("card");
    element.tabIndex = -1;
    return { element, parts };
  },
  ({ element, parts }, block) => {
    put(parts.name, `Block ${block.block}`);
    if (!element.ariaLabel) element.ariaLabel = `Block ${block.block}`;
    chip(parts.state, block.state);
    put(parts.version, typeof block.version === "number" ? `version ${block.version}` : "");
    put(parts.loss, fixed(block.loss, 3));
    put(parts.participation, percent(block.participation));
    bars(parts.bars, block.participations ?? []);
    put(parts.reported, reported(block));
    put(parts.down, bytes(block.bytes_down), `${whole(block.bytes_down)} bytes`);
    put(parts.up, bytes(block.bytes_up), `${whole(block.bytes_up)} bytes`);
    put(parts.reason, block.reason ?? "", block.reason);
    progress(parts, block.tokens, block.target_tokens);
    clock(parts.deadline, block.deadline_in_s, -1, countdown);
    chart(parts.chart, ...blockFigure(block, status));
  },
  ({ parts }) => forget(parts.chart),
);

function reported({ assigned, reported: done, pending }) {
  if (!assigned && !pending) return null;
  return `${whole(done)} of ${whole(assigned)}${pending ? `, ${pending} uploading` : ""}`;
}

function bars(svg, points) {
  const last = points.slice(-BARS);
  const key = JSON.stringify(last);
  if (svg.dataset.key === key) return;
  svg.dataset.key = key;
  svg.replaceChildren(
    ...last.map(([version, share], at) => {
      const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const height = Math.max(1, 16 * Math.min(1, share ?? 0));
      const place = { x: 3 * at, y: 16 - height, width: 2, height, rx: 0.5 };
      for (const [name, value] of Object.entries(place)) rect.setAttribute(name, value);
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = `version ${version}: ${percent(share)}`;
      rect.append(title);
      return rect;
    }),
  );
}

$("blocks-more").addEventListener("click", () => {
  allBlocks = !allBlocks;
  showBlocks();
});

// ---- workers

const STATES = ["suspended", "revoked", "live", "gone", "left"]; // the order of rows: what needs a look first
const byName = new Intl.Collator("en", { numeric: true });

function ranges(blocks) {
  const sorted = [...(blocks ?? [])].sort((a, b) => a - b);
  const parts = [];
  for (let at = 0; at < sorted.length; at += 1) {
    const from = at;
    while (sorted[at + 1] === sorted[at] + 1) at += 1;
    parts.push(from === at ? `${sorted[at]}` : `${sorted[from]}–${sorted[at]}`);
  }
  return parts.join(", ") || "none";
}

function matches(worker) {
  const asked = /^block\s*(\d+)$/.exec(query);
  if (asked) return (worker.blocks ?? []).includes(Number(asked[1]));
  return [worker.worker, worker.state, worker.last].some((text) => String(text ?? "").toLowerCase().includes(query));
}

function showWorkers() {
  const workers = status.workers ?? [];
  const found = (query ? workers.filter(matches) : [...workers]).sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state) || byName.compare(a.worker, b.worker));
  const limit = Math.min(rows, MOST_WORKERS);
  put($("workers-summary"), workers.length ? `${whole(workers.length)} in all: ${counts(workers)}` : "");
  show($("workers-empty"), found.length === 0);
  put($("workers-empty"), workers.length ? "No worker matches." : "No worker has joined yet.");
  show($("workers-box"), found.length > 0);
  table.show(found.slice(0, limit), (worker, at) => worker.worker ?? at);
  const hidden = found.length - limit;
  const rest = limit < MOST_WORKERS ? "" : ": search to see others";
  put($("workers-shown"), hidden > 0 ? `${limit} of ${plural(found.length, query ? "match" : "worker").replace("matchs", "matches")} shown${rest}.` : "");
  show($("workers-more"), hidden > 0 && limit < MOST_WORKERS);
}

const table = new Keyed(
  $("rows"),
  () => clone("row"),
  ({ parts }, worker) => {
    put(parts.worker, worker.worker, worker.worker);
    chip(parts.state, worker.state);
    const blocks = ranges(worker.blocks);
    put(parts.blocks, typeof worker.version === "number" ? `${blocks} · v${worker.version}` : blocks, blocks);
    put(parts.speed, short(worker.tokens_per_s));
    put(parts.down, bytes(worker.bytes_down), `${whole(worker.bytes_down)} bytes`);
    put(parts.up, bytes(worker.bytes_up), `${whole(worker.bytes_up)} bytes`);
    put(parts.updates, worker.refusals ? `${whole(worker.updates)}, ${whole(worker.refusals)} refused` : whole(worker.updates));
    clock(parts.seen, worker.seen_s_ago, 1, ago);
    put(parts.last, worker.last ?? "", worker.last);
  },
);

$("search").addEventListener("input", (event) => {
  query = event.target.value.trim().toLowerCase();
  if (status) showWorkers();
});
$("workers-more").addEventListener("click", () => {
  rows += FEW_WORKERS;
  showWorkers();
});

// ---- refusals, log, bytes

function lines(id, create, write) {
  const keyed = new Keyed($(id), create, write);
  return (items) => {
    const newest = [...(items ?? [])].sort((a, b) => (a.s_ago ?? 0) - (b.s_ago ?? 0)).slice(0, MOST_LINES);
    show($(`${id}-empty`), newest.length === 0);
    show($(id), newest.length > 0);
    keyed.show(newest, (_, at) => at);
  };
}

function makeLine() {
  const element = make("li");
  const [when, who, text] = [make("span", "when"), make("span", "who-line"), make("span", "what")];
  element.append(when, who, text);
  return { element, when, who, text };
}

const showRefusals = lines("refusals", makeLine, ({ when, who, text }, refusal) => {
  clock(when, refusal.s_ago, 1, ago);
  const block = typeof refusal.block === "number" ? `block ${refusal.block} · ` : "";
  put(who, `${block}${refusal.worker ?? "–"}`, refusal.worker); // the name may be long and is clipped
  put(text, refusal.reason);
});

const showLog = lines("log", makeLine, ({ when, who, text }, entry) => {
  clock(when, entry.s_ago, 1, ago);
  show(who, false);
  put(text, entry.text);
});

function showBytes() {
  const kinds = Object.entries(status.bytes?.by_kind ?? {}).filter(([, count]) => typeof count === "number");
  const total = kinds.reduce((sum, [, count]) => sum + count, 0);
  show($("kinds-empty"), kinds.length === 0);
  show($("kinds"), kinds.length > 0);
  kindRows.show(
    kinds.map(([kind, count]) => ({ kind, count, share: total ? count / total : 0 })),
    ({ kind }) => kind,
  );
}

const kindRows = new Keyed(
  $("kind-rows"),
  () => {
    const [element, kind, count, share] = [make("tr"), make("th"), make("td", "num"), make("td", "share")];
    kind.scope = "row";
    const [meter, words] = [make("progress"), make("span")];
    meter.max = 1;
    share.append(meter, words);
    element.append(kind, count, share);
    return { element, kind, count, meter, words };
  },
  ({ kind, count, meter, words }, item) => {
    put(kind, item.kind);
    put(count, bytes(item.count), `${whole(item.count)} bytes`);
    bar(meter, item.share);
    meter.ariaLabel = `share of ${item.kind}`;
    put(words, percent(item.share));
  },
);

// ---- the stream

function showAll() {
  showRun();
  showHeadline();
  showBlocks();
  showWorkers();
  showRefusals(status.refusals);
  showLog(status.log);
  showBytes();
}

let source;
let heard = performance.now();

function link(sentence) {
  const element = $("link");
  put(element, sentence);
  show(element, sentence !== "");
  document.body.classList.toggle("stale", sentence !== "");
}

function connect() {
  source?.close();
  heard = performance.now();
  source = new EventSource("v1/events");
  source.addEventListener("message", (event) => {
    heard = performance.now();
    link("");
    status = JSON.parse(event.data);
    showAll();
  });
  source.addEventListener("trouble", (event) => {
    heard = performance.now();
    link(`${JSON.parse(event.data).error}; these are the figures from before`);
  });
  source.addEventListener("error", () => {
    link("Connection lost, trying again …");
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000); // a refusal ends it for good; ask anew
  });
}

setInterval(() => {
  tick();
  if (performance.now() - heard > SILENCE_MS) connect(); // a connection can die without a word
}, 1000);

$("plotly").addEventListener("load", redraw);
if (window.Plotly) redraw();
connect();
