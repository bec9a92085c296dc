// Sending a signal to exactly one wait, by a form from the schema that its workflow has declared.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, put } from "../lib/dom.js";
import { schemaForm } from "../lib/forms.js";
import { showMisfit } from "../lib/misfit.js";
import { runAddress } from "../lib/router.js";
import { may } from "../lib/session.js";
import { loading } from "../lib/states.js";
import { toast } from "../lib/toast.js";
import { newOperationId } from "./acting.js";

const FOLLOW_MS = 700;

export async function sendDialog(wait, done) {
  const place = h("div", {}, loading("Looking for its form"));
  const signalId = newOperationId();
  let form = null;
  openDialog({
    title: `Send “${wait.name}”`,
    body: [h("p", { class: "hint" }, "To the run ", h("code", {}, wait.run_id), ", which waits at ", h("code", {}, wait.step_id), "."), place],
    action: "Send",
    act: () => send(wait, form, signalId, done),
  });
  form = schemaForm(await schemaOf(wait), { what: "Payload" });
  put(place, form.element);
  place.querySelector("input, textarea, select")?.focus();
}

// Returns what the signal is to look like, or nothing in particular where nothing was declared, or may not be seen.
async function schemaOf(wait) {
  if (!may("workflows:read")) return {};
  try {
    const workflow = await call("workflows.get", { name: wait.workflow, version: wait.workflow_version });
    return workflow.signals[wait.name] ?? {};
  } catch (problem) {
    if (problem.code === undefined) throw problem;
    return {};
  }
}

async function send(wait, form, signalId, done) {
  const given = form?.read();
  if (given === undefined) return false;
  const fields = { run_id: wait.run_id, name: wait.name, payload: given.value, signal_id: signalId, step_id: wait.step_id, require_waiting: true };
  try {
    await call("signals.send", fields);
  } catch (problem) {
    if (problem.code === "InvalidInput" && showMisfit(form.element, problem.message)) return false;
    throw problem;
  }
  follow(wait, signalId, done);
  return true;
}

// A signal that is accepted is safe; a moment later it can be said what became of it.
function follow(wait, signalId, done) {
  setTimeout(async () => {
    try {
      const receipt = await call("signals.receipt", { run_id: wait.run_id, name: wait.name, signal_id: signalId });
      const words = { consumed: `The run took the signal (event ${receipt.consumed_at_event}).`, accepted: "The signal is in the run’s mailbox." };
      toast(words[receipt.status] ?? `The signal was ${receipt.status}: ${receipt.reason}`, { link: ["See the run", runAddress(wait.run_id)] });
    } catch (problem) {
      if (problem.code === undefined) throw problem;
      toast("The signal was accepted.");
    }
    done();
  }, FOLLOW_MS);
}
