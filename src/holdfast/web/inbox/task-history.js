// Who did what to a task, and what was refused, in words.

import { h } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { ageOf } from "../lib/time.js";

const SAYINGS = {
  TaskCreated: () => ["inbox", ["The task was opened"]],
  TaskAssigned: (data) => ["task", assigned(data)],
  TaskReminded: (data) => ["timer", [`Reminder ${data.count}`]],
  TaskCommented: (data) => ["update", [who(data.actor), " said"], h("blockquote", {}, data.text)],
  TaskAnswered: (data) => ["APPROVED", [who(data.actor), " answered ", short(data.answer)]],
  TaskCompleted: (data) => ["COMPLETED", [who(data.actor), " completed it"]],
  TaskRefused: (data) => ["CANCELLED", [who(data.actor), ` could not ${data.action}: ${data.error?.message ?? ""}`]],
  StepSkipped: () => ["SKIPPED", ["The step was skipped"]],
};

function who(name) {
  return h("strong", {}, name ?? "Somebody");
}

function assigned({ action, actor, assignee, roles }) {
  const to = assignee ? who(assignee) : roles ? `the roles ${roles.join(", ")}` : "everybody it is for";
  if (action === "claim") return [who(actor), " took it"];
  if (action === "release") return [who(actor), " gave it back"];
  if (action === "escalate") return ["It was not answered in time, so it was escalated to ", to];
  return [who(actor), " gave it to ", to];
}

function short(answer) {
  const text = JSON.stringify(answer ?? null);
  return h("code", {}, text.length > 120 ? `${text.slice(0, 120)}…` : text);
}

export function historyList(events) {
  return h("ol", { class: "happenings" }, events.map((event) => {
    const [mark, words, body] = (SAYINGS[event.event_type] ?? (() => ["activity", [event.event_type]]))(event.data ?? {});
    return h("li", { class: event.event_type === "TaskRefused" ? "refused" : null }, icon(mark), h("div", {}, h("p", {}, words, " ", h("span", { class: "quiet" }, ageOf(event.persisted_at))), body));
  }));
}
