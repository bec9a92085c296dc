// Creating a schedule: what it starts, with which input, and when. And changing when; and the ticks of a past period.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, newId, put } from "../lib/dom.js";
import { schemaForm } from "../lib/forms.js";
import { showMisfit } from "../lib/misfit.js";
import { loading } from "../lib/states.js";
import { toast, toastProblem } from "../lib/toast.js";
import { describe, startable } from "../run/start.js";

const UNITS = [["1", "seconds"], ["60", "minutes"], ["3600", "hours"], ["86400", "days"]];
const OVERLAPS = [["skip", "Skip the tick"], ["queue", "Wait for that run"], ["cancel-running", "Cancel that run"], ["allow", "Run beside it"]];

// `created` is called when there is one more.
export async function createDialog(created) {
  const id = h("input", { autocomplete: "off", spellcheck: "false" });
  const workflow = h("select", {});
  const overlap = h("select", {}, options(OVERLAPS));
  const doc = h("p", { class: "hint" });
  const place = h("div", { dataset: { name: "input" } }, loading("Loading workflows"));
  const timing = timingFields();
  let form = null;
  let known = [];
  const body = h(
    "div",
    { class: "fields schedule-form" },
    h("div", { class: "two" }, field("schedule_id", "Id", id), field("workflow", "Workflow", workflow, doc)),
    timing.element,
    field("overlap", "If a run still goes on", overlap),
    place,
  );
  openDialog({
    title: "Create a schedule",
    action: "Create",
    wide: true,
    body,
    act: async () => {
      clear(body);
      const misfit = id.value.trim() === "" ? ["Please fill this in.", "schedule_id"] : timing.misfit();
      if (misfit) return !showMisfit(body, ...misfit);
      const input = form?.read();
      if (!input) return false;
      const values = { schedule_id: id.value.trim(), workflow: workflow.value, ...timing.value(), overlap: overlap.value, input: input.value ?? {} };
      if (!(await asked(body, "schedules.create", values))) return false;
      toast("The schedule is created.");
      created();
      return true;
    },
  });
  const show = async () => {
    form = null;
    const chosen = workflow.value;
    const said = await describe(chosen, known);
    if (chosen !== workflow.value) return; // another one was chosen meanwhile
    doc.textContent = said?.doc ?? "";
    form = schemaForm(said?.input ?? {}, { what: "Input" });
    put(place, form.element);
  };
  workflow.addEventListener("change", () => show().catch(toastProblem));
  try {
    known = await startable();
    put(workflow, options(known.map(({ name, word }) => [name, word ?? name])));
    await show();
  } catch (problem) {
    if (problem.code === undefined) throw problem;
    toastProblem(problem);
  }
}

// Changes when a schedule starts runs; its workflow and its input stay.
export function changeDialog(named, schedule, changed) {
  const timing = timingFields(schedule);
  const overlap = h("select", {}, options(OVERLAPS));
  overlap.value = schedule.overlap;
  const kept = { start_at: schedule.start_at, end_at: schedule.end_at, jitter_s: schedule.jitter_s, catch_up_s: schedule.catch_up_s };
  const body = h(
    "div",
    { class: "fields schedule-form" },
    h("p", {}, "Ticks from now on follow the new rule. What it starts, and its input, stay.", schedule.is_declared && " It is declared in code: a deployment with another declaration changes it again."),
    timing.element,
    field("overlap", "If a run still goes on", overlap),
  );
  openDialog({
    title: `Change ${named.schedule_id}`,
    action: "Change",
    wide: true,
    body,
    act: async () => {
      clear(body);
      const misfit = timing.misfit();
      if (misfit) return !showMisfit(body, ...misfit);
      const isDone = await asked(body, "schedules.update", { ...named, ...kept, ...timing.value(), overlap: overlap.value });
      if (!isDone) return false;
      toast("The schedule is changed.");
      changed();
      return true;
    },
  });
}

// Runs the ticks of a period that is over.
export function backfillDialog(named, changed) {
  const since = h("input", { type: "datetime-local", step: "1" });
  const until = h("input", { type: "datetime-local", step: "1", value: localValue(new Date()) });
  const overlap = h("select", {}, options([["queue", "One after the other"], ["allow", "All at once"]]));
  const body = h(
    "div",
    { class: "fields schedule-form" },
    h("p", {}, "Runs the ticks of a period that is over, such as a pause. A tick whose run is still there is not run again."),
    h("div", { class: "two" }, field("since", "From, in your time zone", since), field("until", "Until, not included", until)),
    field("overlap", "How", overlap),
  );
  openDialog({
    title: `Backfill ${named.schedule_id}`,
    action: "Run these ticks",
    body,
    act: async () => {
      clear(body);
      for (const [name, input] of [["since", since], ["until", until]]) if (input.value === "") return !showMisfit(body, "Please fill this in.", name);
      const period = { since: new Date(since.value).toISOString(), until: new Date(until.value).toISOString(), overlap: overlap.value };
      const done = await asked(body, "schedules.backfill", { ...named, ...period });
      if (!done) return false;
      toast(done.ticks === 0 ? "There is no tick in that period." : `${done.ticks} ${done.ticks === 1 ? "tick is" : "ticks are"} run.`);
      changed();
      return true;
    },
  });
}

// Calls an operation; what is wrong with a field is shown there, and then the answer is null.
async function asked(body, operation, values) {
  try {
    return await call(operation, values);
  } catch (problem) {
    if (problem.code === "InvalidInput" && showMisfit(body, problem.message, problem.details?.field)) return null;
    throw problem;
  }
}

function clear(body) {
  for (const each of body.querySelectorAll(".error")) each.hidden = true;
  for (const each of body.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
}

// A date as an input of the type datetime-local has it.
function localValue(date) {
  return new Date(date - date.getTimezoneOffset() * 60000).toISOString().slice(0, 19);
}

function options(choices) {
  return choices.map(([value, word]) => h("option", { value }, word));
}

// A label, an input, and a place for what is wrong with it, under the name that the service has for it.
function field(name, word, input, hint = null) {
  const id = newId();
  input.id = id;
  input.setAttribute("aria-describedby", `${id}-error`);
  return h("div", { class: "field", dataset: { name } }, h("label", { for: id }, word), input, hint, h("p", { class: "error", id: `${id}-error`, hidden: true }));
}

// By a cron expression in a time zone, or at an interval; as `now` has it, if that is given.
function timingFields(now = { cron: "", tz: "UTC", every_s: null }) {
  const group = newId("timing");
  const zones = newId("zones");
  const kinds = [["cron", "Cron"], ["every", "Interval"]].map(([value, word]) => [h("input", { type: "radio", name: group, value, checked: value === (now.every_s === null ? "cron" : "every") }), word]);
  const cron = h("input", { value: now.cron, autocomplete: "off", spellcheck: "false", placeholder: "0 9 * * MON-FRI" });
  const tz = h("input", { value: now.tz, autocomplete: "off", spellcheck: "false", list: zones });
  const unit = h("select", {}, options(UNITS));
  unit.value = [...UNITS].reverse().find(([seconds]) => (now.every_s ?? 3600) % seconds === 0)?.[0] ?? "1";
  const count = h("input", { inputmode: "decimal", value: String((now.every_s ?? 3600) / unit.value), autocomplete: "off" });
  const byCron = h(
    "div",
    { class: "two" },
    field("cron", "Cron expression", cron, h("p", { class: "hint" }, "Minute, hour, day, month, weekday; six fields begin with seconds.")),
    field("tz", "Time zone", tz),
    h("datalist", { id: zones }, ["UTC", ...Intl.supportedValuesOf("timeZone")].map((zone) => h("option", { value: zone }))),
  );
  const byInterval = h("div", { class: "two" }, field("every_s", "Every", count), field("unit", "Unit", unit));
  const isCron = () => kinds[0][0].checked;
  const show = () => {
    byCron.hidden = !isCron();
    byInterval.hidden = isCron();
  };
  for (const [radio] of kinds) radio.addEventListener("change", show);
  show();
  const seconds = () => Number(count.value) * Number(unit.value);
  const choices = h("div", { class: "choices", role: "radiogroup", "aria-label": "When" }, kinds.map(([radio, word]) => h("label", { class: "choice" }, radio, h("span", {}, word))));
  return {
    element: h("fieldset", { class: "group" }, h("legend", {}, "When"), choices, byCron, byInterval),
    misfit: () => {
      if (isCron()) return cron.value.trim() === "" ? ["Please fill this in.", "cron"] : null;
      return seconds() >= 1 ? null : ["At least one second.", "every_s"];
    },
    value: () => (isCron() ? { cron: cron.value.trim(), tz: tz.value.trim() || "UTC" } : { every_s: seconds() }),
  };
}
