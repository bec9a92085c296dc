// An error with its traceback, and what caused it, all the way down.

import { h } from "../lib/dom.js";
import { icon } from "../lib/icons.js";

export function errorView(error, { title = null } = {}) {
  const parts = [];
  for (let each = error, depth = 0; each && depth < 20; each = each.cause, depth += 1) {
    parts.push(
      h(
        "section",
        { class: "error-part" },
        h(
          "p",
          { class: "error-head" },
          depth > 0 ? h("span", { class: "quiet" }, "caused by ") : icon("FAILED"),
          h("strong", {}, each.code),
          h("span", {}, each.message),
        ),
        each.retryable && depth === 0 && h("p", { class: "hint" }, "It may help to try again."),
        each.traceback &&
          h(
            "details",
            { class: "trace", open: each.code === "UnhandledError" }, // the author's own frames
            h("summary", {}, "Traceback"),
            h("pre", {}, each.traceback),
          ),
      ),
    );
  }
  return h("div", { class: "error-view" }, title && h("h3", {}, title), parts);
}
