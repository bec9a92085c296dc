// What can be done with a task besides answering it: take it, give it back or to somebody, and say something about it.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, newId } from "../lib/dom.js";
import { toast, toastProblem } from "../lib/toast.js";
import { actor, me, newOperationId } from "./acting.js";

const COMMENT_CHARS = 4000;

async function operate(name, task, fields = {}) {
  return call(`tasks.${name}`, { task_id: task.task_id, operation_id: newOperationId(), ...actor(task), ...fields });
}

export function actions(task, may, done) {
  const doing = (name, fields, word) => async (event) => {
    const button = event.currentTarget;
    button.disabled = true;
    try {
      done(await operate(name, task, fields));
      toast(word);
    } catch (problem) {
      if (problem.code === undefined) throw problem;
      toastProblem(problem);
    } finally {
      button.disabled = false;
    }
  };
  const button = (word, onclick) => h("button", { class: "button", type: "button", onclick }, word);
  const found = [
    may.claim && button("Claim", doing("claim", {}, "It is yours now.")),
    may.release && button("Release", doing("release", {}, "Given back.")),
    may.take && button("Take over", doing("reassign", { to: me() }, "It is yours now.")),
    may.assign && button("Assign…", () => assign(task, done)),
  ].filter(Boolean);
  return found.length > 0 && h("div", { class: "actions" }, found);
}

function assign(task, done) {
  const id = newId("assignee");
  const input = h("input", { id, value: "", autocomplete: "off", placeholder: "A name; empty for no assignee", maxlength: 200 });
  const roles = h("input", { id: `${id}-roles`, value: task.roles.join(", "), autocomplete: "off" });
  openDialog({
    title: "Give the task to somebody",
    body: [
      h("div", { class: "field" }, h("label", { for: id }, "To whom"), input),
      h("div", { class: "field" }, h("label", { for: roles.id }, "For which roles"), roles, h("p", { class: "hint" }, "With commas between. Everyone who has one of them can see the task.")),
    ],
    action: "Assign",
    act: async () => {
      const wanted = roles.value.split(",").map((each) => each.trim()).filter(Boolean);
      const isSame = wanted.join() === task.roles.join();
      const to = input.value.trim();
      done(await operate("reassign", task, { ...(to && { to }), ...(!isSame && { roles: wanted }) }));
      toast(to ? `Given to ${to}.` : "It has no assignee now.");
    },
  });
}

export function commentBox(taskNow, done) {
  const id = newId("comment");
  const input = h("textarea", { id, rows: 2, maxlength: COMMENT_CHARS, placeholder: "Say something about it" });
  const button = h("button", { class: "button", type: "submit" }, "Comment");
  const form = h("form", { class: "comment", novalidate: true }, h("label", { for: id, class: "visually-hidden" }, "Comment"), input, button);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (text === "" || button.disabled) return input.focus();
    button.disabled = true;
    try {
      await operate("comment", taskNow(), { text });
      input.value = "";
      done();
    } catch (problem) {
      if (problem.code === undefined) throw problem;
      toastProblem(problem);
    } finally {
      button.disabled = false;
    }
    return undefined;
  });
  return form;
}
