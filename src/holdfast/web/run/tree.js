// Where a run stands among others: who started it, and whom it has started.

import { call } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { shortId } from "../lib/ids.js";
import { statusBadge } from "../lib/icons.js";
import { runAddress } from "../lib/router.js";

const MOST_UP = 20;
const MOST_CHILDREN = 200;

async function ancestors(head, signal) {
  const chain = [];
  for (let each = head; each.parent_run_id && chain.length < MOST_UP;) {
    each = await call("runs.get", { run_id: each.parent_run_id }, signal);
    chain.unshift(each);
  }
  return chain;
}

function line(run, isHere) {
  const name = run.reference_key ?? shortId(run.run_id);
  return h(
    "span",
    { class: "tree-line" },
    statusBadge(run.status),
    isHere ? h("strong", { "aria-current": "true" }, name) : h("a", { href: runAddress(run.run_id) }, name),
    h("span", { class: "quiet" }, run.workflow),
  );
}

async function childrenOf(runId, signal) {
  const { items, next } = await call("runs.list", { parent_run_id: runId, limit: MOST_CHILDREN }, signal);
  return [
    items.map((child) => branch(child, signal)),
    next && h("li", { class: "quiet" }, `The first ${MOST_CHILDREN} are shown.`),
  ];
}

function branch(run, signal) {
  const inner = h("ul", { class: "tree" });
  let isRead = false;
  const details = h("details", {}, h("summary", {}, line(run, false)), inner);
  details.addEventListener("toggle", async () => {
    if (isRead) return;
    isRead = true;
    const found = await childrenOf(run.run_id, signal).catch((problem) => [h("li", {}, problem.message)]);
    put(inner, found[0].length === 0 ? h("li", { class: "quiet" }, "No children") : found);
  });
  return h("li", {}, details);
}

// Shows the tree, or nothing for a run that stands alone.
export async function showTree(card, body, head, signal) {
  const [up, [down, more]] = await Promise.all([ancestors(head, signal), childrenOf(head.run_id, signal)]);
  card.hidden = up.length === 0 && down.length === 0;
  const here = h("li", {}, line(head, true), down.length > 0 && h("ul", { class: "tree" }, down, more));
  put(
    body,
    h(
      "ul",
      { class: "tree" },
      up.reduceRight((inner, run) => h("li", {}, line(run, false), h("ul", { class: "tree" }, inner)), here),
    ),
  );
}
