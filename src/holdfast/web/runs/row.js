// One run as a row.

import { nowMs } from "../lib/clock.js";
import { h } from "../lib/dom.js";
import { shortId } from "../lib/ids.js";
import { icon, statusBadge } from "../lib/icons.js";
import { placeWords } from "../lib/places.js";
import { publishedOf } from "../lib/published.js";
import { runAddress } from "../lib/router.js";
import { ageOf, elapsedOf, moment } from "../lib/time.js";

const WAITS = {
  signal: ["Waits for the signal ", "Waits for a signal"],
  task: ["Waits for a person: ", "Waits for a person"],
  child: ["Waits for the child ", "Waits for a child"],
  timer: ["Sleeps", "Sleeps"],
  activity: ["Carries out ", "A step is under way"],
  update: ["Answers the update ", "Answers an update"],
  approval: ["Waits to be approved", "Waits to be approved"],
  start: ["Starts", "Starts"],
};
const NAMELESS = new Set(["timer", "approval", "start"]);

export const FINISHED = new Set(["COMPLETED", "FAILED", "CANCELLED"]);

// "failed 9 times, ConnectionError, again in 40 s: no answer". What is long is last: a row cuts it.
export function retryWords(retrying, error = null) {
  const times = retrying.failures === 1 ? "failed once" : `failed ${retrying.failures} times`;
  const message = error?.code === retrying.error_code ? `: ${error.message}` : "";
  const isLater = retrying.next_at && Date.parse(retrying.next_at) > nowMs() - 1000;
  return h(
    "span",
    { class: "row-error" },
    h("b", {}, retrying.activity),
    ` ${times}, `,
    h("b", {}, retrying.error_code),
    ", again ",
    isLater ? ageOf(retrying.next_at) : "now",
    message,
  );
}

function failedSteps({ failed_step_ids: ids }) {
  if (!ids?.length) return null;
  return [h("b", {}, ids[0]), ids.length > 1 ? ` and ${ids.length - 1} more steps failed: ` : " failed: "];
}

function pausedWords(run) {
  const { pause, last_error: error } = run;
  if (pause?.actor)
    return h("span", { class: "row-waits" }, h("span", {}, `Paused by ${pause.actor}`, pause.reason && `: ${pause.reason}`));
  const isByError = error && (!pause || pause.reason === error.code || run.failed_step_ids?.length > 0);
  if (isByError) return h("span", { class: "row-error" }, failedSteps(run), h("b", {}, error.code), " ", error.message);
  return pause?.reason || "Paused by an operator";
}

export function nowOf(run) {
  const error = run.last_error;
  if (run.status === "FAILED" && error) return h("span", { class: "row-error" }, h("b", {}, error.code), " ", error.message);
  if (FINISHED.has(run.status)) return "";
  if (run.status === "PAUSED") return pausedWords(run);
  if (run.retrying) return retryWords(run.retrying, error);
  if (run.queued_at || run.place) return h("span", { class: "row-waits" }, icon("WAITING"), h("span", {}, ...placeWords(run)));
  const kind = run.waiting_kind;
  if (!kind && run.node) return "Runs on " + run.node;
  if (!kind) return run.status === "RUNNING" ? h("span", { class: "row-waits" }, icon("signal"), h("span", {}, "Waits for a signal or an update")) : "";
  const [named, unnamed] = WAITS[kind] ?? [`${kind} `, kind];
  const name = NAMELESS.has(kind) ? null : run.waiting_for;
  const until = run.waiting_until && untilWords(kind, run.waiting_until);
  const after = kind === "child" && error && h("span", { class: "row-error" }, `, after ${error.code} ${error.message}`);
  return h("span", { class: "row-waits" }, icon(kind), h("span", {}, name ? named : unnamed, name && h("b", {}, name), until, after));
}

// A task stays open when its time is over; everything else ends then, or is about to.
function untilWords(kind, iso) {
  const isOverdue = kind === "task" && Date.parse(iso) < nowMs();
  return isOverdue ? h("span", { class: "row-error" }, ", overdue since ", moment(iso)) : h("span", { class: "quiet" }, ` ${kind === "start" ? "at" : "until"} ${moment(iso)}`);
}

const MOST_ATTRIBUTES = 4;

function attributesOf(run) {
  return [...Object.entries(run.reference_parts ?? {}).map(([name, value]) => [`reference.${name}`, value]), ...Object.entries(run.attributes ?? {})]
    .flatMap(([name, value]) => [value].flat().map((each) => [name, each]))
    .slice(0, MOST_ATTRIBUTES);
}

export function isTagged(run) {
  return run.tags.length > 0 || attributesOf(run).length > 0;
}

function conditionOf(name, value) {
  return `${name}=${typeof value === "string" ? JSON.stringify(value) : value}`;
}

// A click beside the words opens the run, and one beside the box ticks it. To mark words in order to copy them is neither.
function rowClicked(event, row, box) {
  if (event.target.closest("a, input, button") || !getSelection().isCollapsed) return;
  const meant = event.target.closest(".c-box") ? box : row.querySelector("[data-main]");
  meant.dispatchEvent(new MouseEvent("click", event));
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
    h("div", { class: "c-now", role: "cell" }, nowOf(run), !FINISHED.has(run.status) && publishedOf(run)),
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
    h("div", { class: "c-node quiet", role: "cell" }, run.node ?? ""),
    h("div", { class: "c-age", role: "cell" }, ageOf(run.created_at)),
    h("div", { class: "c-took", role: "cell" }, elapsedOf(run.created_at, run.finished_at)),
  ];
  const row = h(
    "div",
    { class: "run-row", role: "row", "aria-selected": canSelect ? String(isSelected) : null },
    cells,
  );
  row.addEventListener("click", (event) => rowClicked(event, row, box));
  row.addEventListener("keydown", (event) => {
    if (event.key !== " " || !box || event.target === box) return;
    event.preventDefault();
    box.checked = !box.checked;
    onSelect(run, box.checked, event.shiftKey);
  });
  return row;
}
