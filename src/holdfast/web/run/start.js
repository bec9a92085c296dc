// Starting a run, anew or again with an edited input.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, newId, put } from "../lib/dom.js";
import { schemaForm } from "../lib/forms.js";
import { requestId } from "../lib/ids.js";
import { go, runAddress } from "../lib/router.js";
import { showMisfit } from "../lib/misfit.js";
import { loading } from "../lib/states.js";
import { toast, toastProblem } from "../lib/toast.js";
import { knownWorkflows } from "../lib/workflows.js";

export async function startDialog({ workflow = null, input = undefined, tags = [], reference = "" } = {}) {
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
      const asked = { workflow: choose.value, input: found.value ?? {}, tags: listed, request_id };
      if (referenceInput.value.trim()) asked.reference_key = referenceInput.value.trim();
      const run = await call("runs.start", asked).catch((problem) => {
        if (problem.code === "InvalidInput" && showMisfit(form.element, problem.message)) return null;
        throw problem;
      });
      if (run === null) return false;
      toast("The run has started.");
      go(runAddress(run.run_id));
      return true;
    },
  });
  const show = (value) => {
    const chosen = known.find(({ name }) => name === choose.value);
    doc.textContent = chosen?.doc ?? "";
    form = schemaForm(chosen?.input ?? {}, { value, what: "Input" });
    put(place, form.element);
  };
  choose.addEventListener("change", () => show(undefined));
  try {
    known = await knownWorkflows();
  } catch (problem) {
    toastProblem(problem);
  }
  put(
    choose,
    known.map(({ name }) => h("option", { value: name, selected: name === workflow }, name)),
  );
  show(input ?? undefined);
}

function labelled(id, word, input) {
  return h("div", { class: "field" }, h("label", { for: id }, word, h("span", { class: "quiet" }, " optional")), input);
}
