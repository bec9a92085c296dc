// Answering a task: its form, and what is shown when it is answered, by oneself or by somebody who was faster.

import { call } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { schemaForm } from "../lib/forms.js";
import { showMisfit } from "../lib/misfit.js";
import { ageOf } from "../lib/time.js";
import { toast } from "../lib/toast.js";
import { actor, newOperationId } from "./acting.js";

export function answerForm(task, done, refresh) {
  const form = schemaForm(task.form ?? {}, { what: "Answer" });
  const problem = h("div", { class: "problem", role: "alert", tabindex: "-1", hidden: true });
  const button = h("button", { class: "button primary", type: "submit" }, icon("COMPLETED"), "Complete");
  let attempt = null;

  async function send(answer) {
    const text = JSON.stringify(answer);
    if (attempt?.text !== text) attempt = { text, id: newOperationId() };
    return call("tasks.complete", { task_id: task.task_id, answer, operation_id: attempt.id, ...actor(task) });
  }

  async function submit(event) {
    event.preventDefault();
    problem.hidden = true;
    const given = form.read();
    if (given === undefined || button.disabled) return;
    button.disabled = true;
    try {
      const now = await send(given.value);
      toast(now.status === "OPEN" ? "Your answer is in. It waits for others." : "Completed.");
      done(now);
    } catch (refusal) {
      if (refusal.code === undefined) throw refusal;
      if (!isUnknown(refusal)) attempt = null; // decided: the next try is another operation
      say(refusal);
    } finally {
      button.disabled = false;
    }
  }

  function say(refusal) {
    if (refusal.code === "InvalidInput" && showMisfit(form.element, refusal.message)) return;
    problem.replaceChildren(...words(refusal));
    problem.hidden = false;
    problem.focus();
    if (refusal.code === "Conflict" || refusal.status === 404) refresh();
  }

  return h(
    "form", { class: "answer", novalidate: true, onsubmit: submit, "aria-label": "Your answer" },
    h("h3", {}, "Your answer"), form.element, problem, h("div", { class: "answer-bar" }, button),
  );
}

// Whether what was asked may have been done: the same operation is then asked for again, with the same id.
function isUnknown(refusal) {
  return refusal.isUnreachable || refusal.code === "RequestTimedOut" || refusal.status >= 500;
}

function words(refusal) {
  const { completed_by: by, by: holder } = refusal.details;
  const at = refusal.details.completed_at ?? refusal.details.at;
  const when = at ? [" ", ageOf(new Date(at / 1000).toISOString())] : [];
  if (by) return [h("strong", {}, by), " was faster, and completed it", ...when, "."];
  if (holder) return [refusal.message, ...when, "."];
  if (isUnknown(refusal)) return [`${refusal.message} Perhaps your answer has arrived: send it again, it counts once.`];
  return [refusal.message];
}

export function outcome(task, wasTyping) {
  const isDone = task.status === "COMPLETED";
  return h(
    "section", { class: "outcome", dataset: { status: task.status }, role: "status" },
    icon(task.status), h("div", {},
      h("p", {}, isDone ? ["Completed by ", h("strong", {}, task.completed_by), " "] : "Cancelled ", task.completed_at && ageOf(task.completed_at), "."),
      wasTyping && h("p", { class: "hint" }, "What you were filling in was not sent."),
      isDone && h("div", { class: "given" })),
  );
}
