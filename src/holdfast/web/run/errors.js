// An error with its traceback, and what caused it, all the way down.

import { h } from "../lib/dom.js";
import { icon } from "../lib/icons.js";

const FOREIGN = /site-packages|[\\/]holdfast[\\/](?!examples)|[\\/]lib[\\/]python3|<frozen /;

const framesOf = (traceback) => traceback.split(/^(?= {2}File ")/m).slice(1);
const isOwnFrame = (frame) => !FOREIGN.test(frame.split("\n")[0]);

// The frames of the author's own files, of a traceback that has others too; empty if there is nothing to leave out.
export function ownFrames(traceback) {
  const frames = framesOf(traceback);
  const own = frames.filter(isOwnFrame);
  return own.length > 0 && own.length < frames.length ? own.map((frame) => frame.replace(/\n(?! {4}).*/s, "")).join("\n") : "";
}

function traces(error, depth) {
  const own = ownFrames(error.traceback);
  const isOwn = depth === 0 && framesOf(error.traceback).every(isOwnFrame);
  return [
    own && h("details", { class: "trace own", open: true }, h("summary", {}, "In your code"), h("pre", { tabindex: "0" }, own)),
    h("details", { class: "trace", open: isOwn && !own }, h("summary", {}, own ? "Whole traceback" : "Traceback"), h("pre", { tabindex: "0" }, error.traceback)),
  ];
}

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
        each.traceback?.includes('File "') && traces(each, depth), // without a frame it says nothing more
      ),
    );
  }
  return h("div", { class: "error-view" }, title && h("h3", {}, title), parts);
}
