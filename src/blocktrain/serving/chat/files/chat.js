// The chat: what is said goes into the page as text nodes, and nothing is kept anywhere but a key, for as long as the tab lives.

const $ = (id) => document.getElementById(id);
const turns = []; // {role, content} as the API takes them
let model = "blocktrain";
let stopping = null; // AbortController of the answer that is coming

const headers = () => ({ "Content-Type": "application/json", ...($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {}) });

function show(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

async function refused(response) {
  const said = await response.json().catch(() => ({}));
  const error = said.error ?? { message: `the server said ${response.status}` };
  return Object.assign(new Error(error.message), { code: error.code, status: response.status });
}

async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await refused(response);
  return response.json();
}

function wantKey(error) {
  if (error.status !== 401) return false;
  $("key-row").hidden = false;
  if (!$("key").value) $("key").focus();
  return true;
}

async function look() {
  try {
    const cluster = await get("v1/cluster");
    model = cluster.model;
    $("model").textContent = document.title = model;
    const state = $("state");
    state.dataset.state = cluster.healthy ? "ok" : "down";
    state.textContent = cluster.healthy ? `${cluster.blocks} blocks up` : cluster.reason;
    if (!$("mode").options.length) {
      for (const mode of cluster.modes) $("mode").add(new Option(mode, mode, mode === cluster.mode, mode === cluster.mode));
    }
    if (!stopping) show("trouble", "");
  } catch (error) {
    $("state").dataset.state = "down";
    $("state").textContent = wantKey(error) ? "key needed" : "not reachable";
  }
}

function addTurn(role, content) {
  $("empty").hidden = true;
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  turn.append(document.createTextNode(content));
  $("turns").append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

function question() {
  const seed = $("seed").value.trim();
  return {
    model,
    messages: turns,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    max_completion_tokens: Number($("most").value) || 300,
    temperature: Number($("temperature").value),
    ...($("mode").value ? { mode: $("mode").value } : {}),
    ...(seed === "" ? {} : { seed: Number(seed) }),
  };
}

// Ask; where the conversation has grown too long for the model, its oldest turns are left out.
async function ask(signal) {
  for (;;) {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(question()), signal });
    if (response.ok) return response;
    const error = await refused(response);
    if (error.code !== "context_length_exceeded" || turns.length < 2) throw error;
    turns.splice(0, turns[1].role === "assistant" && turns.length > 2 ? 2 : 1);
    show("note", "The oldest turns no longer fit the model and were left out.");
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer was cut off");
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function figures(usage, began) {
  const seconds = (performance.now() - began) / 1000;
  $("made").textContent = usage.completion_tokens;
  $("rate").textContent = seconds > 0 ? (usage.completion_tokens / seconds).toFixed(1) : "–";
  $("traversal").textContent = usage.traversals ? (usage.completion_tokens / usage.traversals).toFixed(2) : "–";
}

async function answer() {
  const turn = addTurn("assistant", "");
  const text = turn.firstChild;
  const box = document.querySelector("main");
  const began = performance.now();
  turn.classList.add("busy");
  try {
    for await (const event of events(await ask(stopping.signal))) {
      const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
      const said = event.choices[0]?.delta.content ?? "";
      text.appendData(text.data ? said : said.trimStart());
      if (event.usage) figures(event.usage, began);
      if (atEnd) box.scrollTop = box.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      wantKey(error);
      show("trouble", error.message);
    }
  }
  turn.classList.remove("busy");
  if (text.data) turns.push({ role: "assistant", content: text.data });
  else turn.remove();
  return text.data !== "";
}

async function submit(event) {
  event.preventDefault();
  const content = $("text").value.trim();
  if (stopping || !content) return;
  stopping = new AbortController();
  for (const id of ["trouble", "note"]) show(id, "");
  if ($("key").value) sessionStorage.setItem("key", $("key").value);
  $("send").disabled = !($("stop").disabled = false);
  $("text").value = "";
  turns.push({ role: "user", content });
  const mine = addTurn("user", content);
  const answered = await answer();
  if (!answered && !stopping.signal.aborted) { // nothing came: what was asked can be sent again
    turns.pop();
    mine.remove();
    $("text").value = content;
  }
  stopping = null;
  $("send").disabled = !($("stop").disabled = true);
  $("text").focus();
}

function clear() {
  stopping?.abort();
  turns.length = 0;
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  for (const id of ["trouble", "note"]) show(id, "");
  $("empty").hidden = false;
}

$("form").addEventListener("submit", submit);
$("stop").addEventListener("click", () => stopping?.abort());
$("clear").addEventListener("click", clear);
$("key").addEventListener("change", look);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) $("form").requestSubmit(), event.preventDefault();
});
$("key").value = sessionStorage.getItem("key") ?? "";
look();
setInterval(look, 5000);
