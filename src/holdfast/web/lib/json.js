// A value as it is, folded where it is long. Everything is text: what looks like markup is shown, and is none.

import { h, put } from "./dom.js";
import { isPlain } from "./exact.js";
import { icon } from "./icons.js";
import { toast } from "./toast.js";

const OPEN_DEPTH = 2;
const MOST_ITEMS = 200;
const LARGE = 1024; // characters: what is longer is cut, and shown when it is asked for
const FEW_ITEMS = 20;

export function jsonView(value, { label = "" } = {}) {
  const isLarge = (JSON.stringify(value) ?? "").length > LARGE;
  return h("div", { class: "json", role: "group", "aria-label": label || "Value" }, node(value, 0, isLarge), copyButton(value));
}

function moreButton(word, show) {
  return h("button", { class: "link-button", type: "button", onclick: (event) => show(event.currentTarget) }, word);
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

function node(value, depth, isLarge) {
  if (isPlain(value)) return scalar(value);
  const entries = Array.isArray(value) ? value.map((each, n) => [n, each]) : Object.entries(value);
  const [left, right] = Array.isArray(value) ? "[]" : "{}";
  if (entries.length === 0) return h("span", { class: "json-mark" }, left + right);
  const row = ([key, each]) =>
    h(
      "div",
      { class: "json-row" },
      h("span", { class: "json-key" }, String(key)),
      h("span", { class: "json-mark" }, ": "),
      node(each, depth + 1, isLarge),
    );
  const body = h("div", { class: "json-in" });
  const showFrom = (from, count) => {
    const left = entries.length - from - count;
    body.append(...entries.slice(from, from + count).map(row));
    if (left > 0)
      body.append(
        moreButton(`… and ${left.toLocaleString()} more`, (button) => {
          button.remove();
          showFrom(from + count, MOST_ITEMS);
        }),
      );
  };
  showFrom(0, isLarge ? FEW_ITEMS : MOST_ITEMS);
  const count = `${left} ${entries.length} ${right}`;
  return h("details", { open: depth < (isLarge ? 1 : OPEN_DEPTH) }, h("summary", { class: "json-mark" }, count), body);
}

function scalar(value) {
  if (typeof value !== "string") return h("span", { class: "json-other" }, String(value));
  const shown = (text) => (text.includes("\n") ? text : JSON.stringify(text));
  const place = h("span", { class: "json-text" }, shown(value.slice(0, LARGE)));
  if (value.length <= LARGE) return place;
  const more = moreButton(`… show all ${value.length.toLocaleString()} characters`, () => put(place, shown(value)));
  place.append(" ", more);
  return place;
}
