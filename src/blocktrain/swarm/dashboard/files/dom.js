// Writing to the page. Text goes in as text and only where it changed, so nothing flickers, selections stay, and no name can become markup.
export const $ = (id) => document.getElementById(id);

export function put(element, value, title) {
  const text = value == null ? "–" : String(value);
  if (element.textContent !== text) element.textContent = text;
  if (title !== undefined && element.title !== String(title ?? "")) element.title = String(title ?? "");
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

export function chip(element, state) {
  put(element, state ?? "unknown");
  if (element.dataset.state !== String(state)) element.dataset.state = String(state);
}

export function bar(element, share) {
  const known = typeof share === "number" && Number.isFinite(share);
  show(element, known);
  if (known && element.value !== Math.min(1, share)) element.value = Math.min(1, Math.max(0, share));
}

export function make(tag, name) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  return element;
}

export function clone(id) {
  const element = $(id).content.firstElementChild.cloneNode(true);
  const parts = Object.fromEntries([...element.querySelectorAll("[data-f]")].map((part) => [part.dataset.f, part]));
  return { element, parts };
}

// Children of a parent by key: made once, moved where the order changed, removed when they are gone.
export class Keyed {
  constructor(parent, create, update, gone) {
    Object.assign(this, { parent, create, update, gone, kept: new Map() });
  }

  show(items, keyOf) {
    const wanted = new Map(items.map((item, at) => [keyOf(item, at), item]));
    for (const [key, entry] of this.kept) {
      if (wanted.has(key)) continue;
      this.gone?.(entry);
      entry.element.remove();
      this.kept.delete(key);
    }
    let before = this.parent.firstElementChild;
    for (const [key, item] of wanted) {
      let entry = this.kept.get(key);
      if (!entry) this.kept.set(key, (entry = this.create(item)));
      if (entry.element === before) before = before.nextElementSibling;
      else this.parent.insertBefore(entry.element, before);
      this.update(entry, item);
    }
  }
}

// Times that go on between two messages: the element keeps what it counts from, `tick` writes all of them.
const clocks = new Map();

export function clock(element, seconds, direction, write) {
  if (typeof seconds !== "number") {
    clocks.delete(element);
    put(element, "–");
    return;
  }
  clocks.set(element, { seconds, direction, write, at: performance.now() });
  tickOne(element, clocks.get(element));
}

function tickOne(element, { seconds, direction, write, at }) {
  put(element, write(seconds + (direction * (performance.now() - at)) / 1000));
}

export function tick() {
  for (const [element, counted] of clocks) {
    if (element.isConnected) tickOne(element, counted);
    else clocks.delete(element);
  }
}
