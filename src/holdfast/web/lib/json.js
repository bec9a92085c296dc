// A value as it is, folded where it is long. Everything is text: what looks like markup is shown, and is none.

import { h } from "./dom.js";
import { isPlain } from "./exact.js";
import { icon } from "./icons.js";
import { toast } from "./toast.js";

const OPEN_DEPTH = 2;
const MOST_ITEMS = 200;
const MOST_TEXT = 4000;

export function jsonView(value, { label = "" } = {}) {
  return h("div", { class: "json", role: "group", "aria-label": label || "Value" }, node(value, 0), copyButton(value));
}

function copyButton(value) {
  const copy = async () => {
    await navigator.clipboard.writeText(typeof value === "string" ? value : JSON.stringify(value, null, 2));
    toast("Copied.");
  };
  return h(
    "button",
    { class: "icon-button copy", type: "button", "aria-label": "Copy", title: "Copy", onclick: copy },
    icon("copy"),
  );
}

function node(value, depth) {
  if (isPlain(value)) return scalar(value);
  const entries = Array.isArray(value) ? value.map((each, n) => [n, each]) : Object.entries(value);
  const [left, right] = Array.isArray(value) ? "[]" : "{}";
  if (entries.length === 0) return h("span", { class: "json-mark" }, left + right);
  const more = entries.length - MOST_ITEMS;
  const rows = entries
    .slice(0, MOST_ITEMS)
    .map(([key, each]) =>
      h(
        "div",
        { class: "json-row" },
        h("span", { class: "json-key" }, String(key)),
        h("span", { class: "json-mark" }, ": "),
        node(each, depth + 1),
      ),
    );
  const rest = more > 0 && h("div", { class: "quiet" }, `… and ${more} more`);
  const count = `${left} ${entries.length} ${right}`;
  return h(
    "details",
    { open: depth < OPEN_DEPTH },
    h("summary", { class: "json-mark" }, count),
    h("div", { class: "json-in" }, rows, rest),
  );
}

function scalar(value) {
  if (typeof value === "string") {
    const text = value.length > MOST_TEXT ? `${value.slice(0, MOST_TEXT)}… (${value.length} characters)` : value;
    return h("span", { class: "json-text" }, text.includes("\n") ? text : JSON.stringify(text));
  }
  return h("span", { class: "json-other" }, String(value));
}
