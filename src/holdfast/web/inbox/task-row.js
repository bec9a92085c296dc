// A task in a line or two: what it is about, how urgent it is, and whose.

import { nowMs } from "../lib/clock.js";
import { h } from "../lib/dom.js";
import { icon, statusBadge } from "../lib/icons.js";
import { ageOf } from "../lib/time.js";

const MOST_CHARS = 140;

export function isOverdue(task) {
  return task.status === "OPEN" && task.due_at !== null && Date.parse(task.due_at) < nowMs();
}

export function dueMark(task) {
  if (task.status !== "OPEN") return statusBadge(task.status);
  if (task.due_at === null) return null;
  const late = isOverdue(task);
  return h("span", { class: `due${late ? " late" : ""}` }, icon(late ? "warning" : "timer"), late ? "Overdue, due " : "Due ", ageOf(task.due_at));
}

// How many have answered of how many are needed.
export function progress(task) {
  if (task.approvals < 2 && task.of === null) return null;
  const done = task.answered_by.length;
  const dots = Array.from({ length: Math.min(task.of ?? task.approvals, 12) }, (_, n) => h("i", { class: n < done ? "done" : n < task.approvals ? "needed" : "" }));
  const words = `${done} of ${task.approvals} answers${task.of === null ? "" : `, ${task.of} asked`}`;
  return h("span", { class: "approvals" }, h("span", { class: "dots", "aria-hidden": "true" }, dots), words);
}

export function marks(task) {
  return [dueMark(task), task.is_escalated && h("span", { class: "due late" }, icon("child"), "Escalated"), progress(task)];
}

export function taskRow(task, { address, isOpen, open }) {
  const who = task.assignee === null ? task.roles.map((role) => h("span", { class: "tag" }, role)) : h("span", { class: "holder" }, icon("task"), task.assignee);
  return h(
    "li", {},
    h(
      "a", { class: "task-row", href: address, "data-task": task.task_id, "aria-current": isOpen ? "true" : null, onclick: (event) => plain(event) && open(event, task.task_id) },
      h("span", { class: "task-name" }, task.name), h("span", { class: "task-who" }, who),
      h("span", { class: "task-about" }, h("span", { class: "quiet" }, task.workflow), summary(task.payload)),
      h("span", { class: "task-marks" }, marks(task)),
    ),
  );
}

function plain(event) {
  return event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
}

function summary(payload) {
  if (payload === null) return null;
  const values = typeof payload === "object" ? Object.values(payload) : [payload];
  const text = values.filter((each) => each !== "" && each !== null).map((each) => (typeof each === "object" ? JSON.stringify(each) : String(each)).slice(0, MOST_CHARS)).join(" · ");
  return text && h("span", {}, ` ${text.slice(0, MOST_CHARS)}`);
}
