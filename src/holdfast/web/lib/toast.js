// Short words about what was just done. They are read out, and stay longer when something went wrong.

import { h } from "./dom.js";
import { icon } from "./icons.js";

let place = null;

function ensurePlace() {
  place ??= document.body.appendChild(h("div", { class: "toasts", role: "status", "aria-live": "polite" }));
  return place;
}

export function toast(text, { kind = "fine", link = null } = {}) {
  const close = h(
    "button",
    { class: "icon-button", type: "button", "aria-label": "Dismiss", onclick: () => element.remove() },
    icon("close"),
  );
  const element = h(
    "div",
    { class: "toast", dataset: { kind } },
    icon(kind === "fine" ? "COMPLETED" : "warning"),
    h("span", {}, text, link && [" ", h("a", { href: link[1] }, link[0])]),
    close,
  );
  ensurePlace().append(element);
  setTimeout(() => element.remove(), kind === "fine" ? 6000 : 15_000);
}

export function toastProblem(problem) {
  toast(problem.message, { kind: "bad" });
}
