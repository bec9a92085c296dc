// Starting a run, anew or again with an edited input.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, newId, put } from "../lib/dom.js";
import { schemaForm } from "../lib/forms.js";
import { requestId } from "../lib/ids.js";
import { go, runAddress } from "../lib/router.js";
import { showMisfit } from "../lib/misfit.js";
import { may } from "../lib/session.js";
import { loading } from "../lib/states.js";
import { toast, toastProblem } from "../lib/toast.js";
import { knownWorkflows } from "../lib/workflows.js";

const PLAN = "plan:"; // how the workflow of a plan's runs begins
const MOST_PLANS = 500;

// `plan` is a version of one, with `plan_id` and `plan_version`; runs of one that is not named start the last version.
export async function startDialog({ workflow = null, plan = null, input = undefined, tags = [], reference = "" } = {}) {
  const ids = [newId(), newId(), newId()];
  const place = h("div", {}, loading("Loading workflows"));
  const doc = h("p", { class: "hint" });
  const choose = h("select", { id: ids[0] });
  const referenceInput = h("input", { id: ids[1], value: reference, autocomplete: "off" });
  const tagsInput = h("input", { id: ids[2], value: tags.join(", "), autocomplete: "off" });
  const request_id = requestId();
  let form = null;
  let known = [];

  openDialog({
    title: input === undefined ? "Start a run" : "Start again with another input",
    action: "Start",
    wide: true,
    body: [
      h("div", { class: "field" }, h("label", { for: ids[0] }, "Workflow"), choose, doc),
      place,
      h(
        "div",
        { class: "two" },
        labelled(ids[1], "Reference", referenceInput),
        labelled(ids[2], "Tags, with commas", tagsInput),
      ),
    ],
    act: async () => {
      const found = form?.read();
      if (!found) return false;
      const listed = tagsInput.value
        .split(",")
        .map((tag) => tag.trim())
        .filter(Boolean);
      const asked = { ...whatToStart(choose.value, plan, found.value ?? {}), tags: listed, request_id };
      if (referenceInput.value.trim()) asked.reference_key = referenceInput.value.trim();
      const operation = choose.value.startsWith(PLAN) ? "plans.start" : "runs.start";
      const run = await call(operation, asked).catch((problem) => {
        if (problem.code === "InvalidInput" && showMisfit(form.element, problem.message, problem.details?.field))
          return null;
        throw problem;
      });
      if (run === null) return false;
      toast("The run has started.");
      go(runAddress(run.run_id));
      return true;
    },
  });
  const show = async (value) => {
    form = null;
    const chosen = await describe(choose.value, known, plan);
    doc.textContent = chosen?.doc ?? "";
    form = schemaForm(chosen?.input ?? {}, { value, what: "Input" });
    put(place, form.element);
  };
  choose.addEventListener("change", () => show(undefined).catch(toastProblem));
  try {
    known = await startable();
  } catch (problem) {
    toastProblem(problem);
  }
  const wanted = plan ? PLAN + plan.plan_id : workflow;
  put(
    choose,
    known.map(({ name, word }) => h("option", { value: name, selected: name === wanted }, word ?? name)),
  );
  await show(input ?? undefined);
}

// What can be started: workflows in code, flows, and plans that are registered.
export async function startable() {
  if (!may("workflows:read")) return [];
  const [workflows, plans] = await Promise.all([knownWorkflows(), call("plans.list", { limit: MOST_PLANS })]);
  const ids = new Set(plans.items.map(({ plan_id: id }) => id));
  return [...workflows, ...[...ids].map((id) => ({ name: PLAN + id, word: `Plan ${id}` }))];
}

// What a workflow or a plan says of itself, with the schema of its input.
export async function describe(name, known, plan = null) {
  const listed = known.find((each) => each.name === name);
  if (!name.startsWith(PLAN)) return listed;
  const planId = name.slice(PLAN.length);
  const version = plan?.plan_id === planId ? plan.plan_version : undefined;
  const { description, input, plan_version: shown } = await call("plans.get", { plan_id: planId, plan_version: version });
  return { doc: [`Version ${shown}.`, description].filter(Boolean).join(" "), input };
}

function whatToStart(name, plan, input) {
  if (!name.startsWith(PLAN)) return { workflow: name, input };
  const planId = name.slice(PLAN.length);
  const version = plan?.plan_id === planId ? { plan_version: plan.plan_version } : {};
  return { plan_id: planId, ...version, inputs: input };
}

function labelled(id, word, input) {
  return h("div", { class: "field" }, h("label", { for: id }, word, h("span", { class: "quiet" }, " optional")), input);
}
