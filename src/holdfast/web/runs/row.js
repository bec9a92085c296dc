// One run as a row.

import { h } from "../lib/dom.js";
import { shortId } from "../lib/ids.js";
import { icon, statusBadge } from "../lib/icons.js";
import { runAddress } from "../lib/router.js";
import { ageOf, elapsedOf, moment } from "../lib/time.js";

const WAITS = {
  signal: "Waits for a signal",
  task: "Waits for a person",
  child: "Waits for a child",
  timer: "Sleeps",
  activity: "A step is under way",
  update: "Answers an update",
};

export const FINISHED = new Set(["COMPLETED", "FAILED", "CANCELLED"]);

export function nowOf(run) {
  if (run.last_error && (run.status === "FAILED" || run.status === "PAUSED")) {
    return h("span", { class: "row-error" }, h("b", {}, run.last_error.code), " ", run.last_error.message);
  }
  if (FINISHED.has(run.status)) return "";
  const kind = run.waiting_kind;
  if (!kind) return run.node ? "Runs on " + run.node : "";
  const until = run.waiting_until && h("span", { class: "quiet" }, ` until ${moment(run.waiting_until)}`);
  return h("span", { class: "row-waits" }, icon(kind), h("span", {}, WAITS[kind] ?? kind, until));
}

const MOST_ATTRIBUTES = 4;

function attributesOf(run) {
  return [...Object.entries(run.reference_parts ?? {}).map(([name, value]) => [`reference.${name}`, value]), ...Object.entries(run.attributes ?? {})]
    .flatMap(([name, value]) => [value].flat().map((each) => [name, each]))
    .slice(0, MOST_ATTRIBUTES);
}

function conditionOf(name, value) {
  return `${name}=${typeof value === "string" ? JSON.stringify(value) : value}`;
}

export function runRow(run, { isSelected, onSelect, canSelect }) {
  const address = runAddress(run.run_id);
  const name = run.reference_key ?? shortId(run.run_id);
  const box =
    canSelect && h("input", { type: "checkbox", tabindex: "-1", checked: isSelected, "aria-label": `Select ${name}` });
  if (box) box.addEventListener("click", (event) => onSelect(run, box.checked, event.shiftKey));
  const cells = [
    canSelect && h("div", { class: "c-box", role: "cell" }, box),
    h("div", { class: "c-status", role: "cell" }, statusBadge(run.status)),
    h(
      "div",
      { class: "c-run", role: "cell" },
      h("a", { href: address, "data-main": "", title: run.run_id, class: run.reference_key ? "" : "mono" }, name),
      run.reference_key && h("span", { class: "mono quiet sub" }, shortId(run.run_id)),
    ),
    h(
      "div",
      { class: "c-workflow", role: "cell" },
      h("span", {}, run.workflow),
      h("span", { class: "quiet sub" }, `version ${run.workflow_version}`),
    ),
    h("div", { class: "c-now", role: "cell" }, nowOf(run)),
    h(
      "div",
      { class: "c-tags", role: "cell" },
      run.tags
        .slice(0, 3)
        .map((tag) => h("a", { class: "tag", tabindex: "-1", href: `/runs?tag=${encodeURIComponent(tag)}` }, tag)),
      run.tags.length > 3 && h("span", { class: "quiet" }, `+${run.tags.length - 3}`),
      attributesOf(run).map(([name, value]) =>
        h("a", { class: "tag attribute", tabindex: "-1", href: `/runs?text=${encodeURIComponent(conditionOf(name, value))}` }, h("span", { class: "quiet" }, name), ` ${value}`),
      ),
    ),
    h("div", { class: "c-age", role: "cell" }, ageOf(run.created_at)),
    h("div", { class: "c-took", role: "cell" }, elapsedOf(run.created_at, run.finished_at)),
  ];
  const row = h(
    "div",
    { class: "run-row", role: "row", "aria-selected": canSelect ? String(isSelected) : null },
    cells,
  );
  row.addEventListener("keydown", (event) => {
    if (event.key !== " " || !box || event.target === box) return;
    event.preventDefault();
    box.checked = !box.checked;
    onSelect(run, box.checked, event.shiftKey);
  });
  return row;
}
