// A value as people read it: an object as terms and texts, and only what is nested as JSON.

import { h } from "../lib/dom.js";
import { isPlain } from "../lib/exact.js";
import { jsonView } from "../lib/json.js";
import { titleOf } from "../lib/schema.js";

export function asked(value) {
  if (value === null || value === undefined) return null;
  if (Array.isArray(value)) return value.every(isPlain) ? h("ol", { class: "asked-list" }, value.map((each) => h("li", {}, text(each)))) : h("div", { class: "asked-many" }, value.map(asked));
  if (isPlain(value)) return h("p", { class: "asked-text" }, text(value));
  const entries = Object.entries(value);
  if (entries.length === 0 || entries.length > 60) return jsonView(value);
  return h("dl", { class: "asked" }, entries.map(([name, each]) => [h("dt", {}, titleOf(name, {})), h("dd", {}, isPlain(each) ? text(each) : jsonView(each, { label: name }))]));
}

function text(value) {
  if (value === null || value === "") return h("span", { class: "quiet" }, "–");
  if (typeof value === "boolean") return value ? "Yes" : "No";
  return h("span", { class: "asked-value", tabindex: String(value).length > 600 ? "0" : null }, String(value));
}
