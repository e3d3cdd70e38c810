// Numbers to words. Whatever is missing is a dash.
const NONE = "–";
const missing = (value) => typeof value !== "number" || !Number.isFinite(value);
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const fixed = (value, digits) => (missing(value) ? NONE : value.toFixed(digits));
export const whole = (value) => (missing(value) ? NONE : grouped.format(value));
export const percent = (value) => (missing(value) ? NONE : value > 0 && value < 0.01 ? "< 1 %" : `${Math.round(value * 100)} %`);
export const signed = (value) => (value < 0 ? `−${Math.abs(value).toFixed(3)}` : `+${value.toFixed(3)}`);

function scaled(value, base, names) {
  let at = 0;
  while (Math.abs(value) >= base * 0.9995 && at < names.length - 1) {
    value /= base;
    at += 1;
  }
  return `${at && value < 99.95 ? value.toFixed(1) : Math.round(value)}${names[at]}`;
}

export const bytes = (value) => (missing(value) ? NONE : scaled(value, 1000, [" B", " kB", " MB", " GB", " TB", " PB"]));
export const short = (value) => (missing(value) ? NONE : scaled(value, 1000, ["", "k", "M", "G", "T"]));

export function span(seconds) {
  if (missing(seconds)) return NONE;
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export const ago = (seconds) => (missing(seconds) ? NONE : `${span(seconds)} ago`);

export function countdown(seconds) {
  if (missing(seconds)) return NONE;
  const s = Math.ceil(seconds);
  if (s <= 0) return "any moment";
  return `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`;
}

export const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
