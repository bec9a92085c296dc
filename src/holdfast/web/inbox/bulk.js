// Doing something to all tasks that the filter finds: give them to somebody, claim them, or answer all of them alike.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, newId, put } from "../lib/dom.js";
import { schemaForm } from "../lib/forms.js";
import { toast } from "../lib/toast.js";
import { actor, newOperationId } from "./acting.js";
import { listFields } from "./filter.js";

const PAGE = 500;
const MOST_SHOWN = 50;
const WORDS = {
  reassign: ["Assign to somebody", "Assign", "assigned"],
  complete: ["Answer all alike", "Complete", "completed"],
  claim: ["Claim for me", "Claim", "claimed"],
  unassign: ["Take from their assignees", "Unassign", "unassigned"],
};

// Everything that a list finds.
export async function readAll(operation, fields) {
  const found = [];
  for (let cursor = ""; cursor !== null;) {
    const page = await call(operation, { ...fields, cursor, limit: PAGE });
    found.push(...page.items);
    cursor = page.next;
  }
  return found;
}

// Does something to each, one after the other, and returns what was refused, each with why.
export async function eachOf(items, bar, act) {
  const refused = [];
  bar.hidden = false;
  for (const [n, item] of items.entries()) {
    await act(item).catch((problem) => {
      if (problem.code === undefined || problem.isUnreachable) throw problem;
      refused.push([item, problem]);
    });
    bar.value = n + 1;
  }
  return refused;
}

// Shows what was refused; whether there was nothing.
export function refusals(place, refused, nameOf) {
  if (refused.length === 0) return true;
  put(
    place, h("p", { class: "problem", role: "alert" }, `${refused.length.toLocaleString()} refused:`),
    h("ul", { class: "refused" }, refused.slice(0, MOST_SHOWN).map(([item, problem]) => h("li", {}, `${nameOf(item)}: ${problem.message}`))),
  );
  return false;
}

export async function taskBulk(filter, done) {
  const tasks = await readAll("tasks.list", { ...listFields(filter), status: "OPEN" });
  const id = newId("bulk");
  const isAlike = new Set(tasks.map((task) => JSON.stringify([task.workflow, task.name, task.form]))).size === 1;
  const choice = h("select", { id }, Object.entries(WORDS).filter(([name]) => name !== "complete" || isAlike).map(([name, [word]]) => h("option", { value: name }, word)));
  const to = h("input", { id: `${id}-to`, autocomplete: "off", maxlength: 200, placeholder: "A name", "aria-required": "true" });
  const form = isAlike ? schemaForm(tasks[0].form ?? {}, { what: "Answer" }) : null;
  const place = h("div", {});
  const bar = h("progress", { max: tasks.length, value: 0, hidden: true, "aria-label": "Progress" });
  const result = h("div", {});
  let dialog;
  const show = () => {
    put(place, choice.value === "complete" ? form.element : choice.value === "reassign" && h("div", { class: "field" }, h("label", { for: to.id }, "To whom"), to));
    if (dialog) dialog.querySelector("button[type=submit]").textContent = action();
  };
  const action = () => `${WORDS[choice.value][1]} ${tasks.length.toLocaleString()}`;
  choice.addEventListener("change", show);
  show();
  const operationId = newOperationId();
  dialog = openDialog({
    title: `All ${tasks.length.toLocaleString()} tasks`,
    action: action(),
    body: [
      h("p", {}, `${tasks.length.toLocaleString()} open ${tasks.length === 1 ? "task fits" : "tasks fit"} the filter.`, !isAlike && h("span", { class: "hint" }, " They are of several kinds, so they cannot be answered alike.")),
      h("div", { class: "field" }, h("label", { for: id }, "What to do"), choice), place, bar, result,
    ],
    act: async () => {
      const name = choice.value;
      const isNameless = name === "reassign" && to.value.trim() === "";
      to.setAttribute("aria-invalid", String(isNameless));
      if (isNameless) {
        to.focus();
        return false;
      }
      const given = name === "complete" ? form.read() : {};
      if (given === undefined) return false;
      const fields = name === "complete" ? { answer: given.value } : name === "reassign" ? { to: to.value.trim() } : {};
      const operation = `tasks.${name === "unassign" ? "reassign" : name}`;
      const refused = await eachOf(tasks, bar, (task) => call(operation, { task_id: task.task_id, operation_id: operationId, ...actor(task), ...fields }));
      toast(`${(tasks.length - refused.length).toLocaleString()} ${WORDS[name][2]}.`);
      done();
      return refusals(result, refused, (task) => task.name);
    },
  });
}
