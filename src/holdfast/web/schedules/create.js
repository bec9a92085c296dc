// Creating a schedule: what it starts, with which input, and when.

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
      for (const each of body.querySelectorAll(".error")) each.hidden = true;
      for (const each of body.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
      const misfit = id.value.trim() === "" ? ["Please fill this in.", "schedule_id"] : timing.misfit();
      if (misfit) return !showMisfit(body, ...misfit);
      const input = form?.read();
      if (!input) return false;
      const asked = { schedule_id: id.value.trim(), workflow: workflow.value, ...timing.value(), overlap: overlap.value, input: input.value ?? {} };
      try {
        await call("schedules.create", asked);
      } catch (problem) {
        if (problem.code === "InvalidInput" && showMisfit(body, problem.message, problem.details?.field)) return false;
        throw problem;
      }
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

// By a cron expression in a time zone, or at an interval.
function timingFields() {
  const group = newId("timing");
  const zones = newId("zones");
  const kinds = [["cron", "Cron"], ["every", "Interval"]].map(([value, word]) => [h("input", { type: "radio", name: group, value, checked: value === "cron" }), word]);
  const cron = h("input", { autocomplete: "off", spellcheck: "false", placeholder: "0 9 * * MON-FRI" });
  const tz = h("input", { value: "UTC", autocomplete: "off", spellcheck: "false", list: zones });
  const count = h("input", { inputmode: "decimal", value: "1", autocomplete: "off" });
  const unit = h("select", {}, options(UNITS));
  unit.value = "3600";
  const byCron = h(
    "div",
    { class: "two" },
    field("cron", "Cron expression", cron, h("p", { class: "hint" }, "Minute, hour, day, month, weekday; six fields begin with seconds.")),
    field("tz", "Time zone", tz),
    h("datalist", { id: zones }, ["UTC", ...Intl.supportedValuesOf("timeZone")].map((zone) => h("option", { value: zone }))),
  );
  const byInterval = h("div", { class: "two", hidden: true }, field("every_s", "Every", count), field("unit", "Unit", unit));
  const isCron = () => kinds[0][0].checked;
  for (const [radio] of kinds)
    radio.addEventListener("change", () => {
      byCron.hidden = !isCron();
      byInterval.hidden = isCron();
    });
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
