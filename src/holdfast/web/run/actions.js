// What an operator can do to a run and its steps: only what its status and the caller's scopes allow.

import { call } from "../lib/api.js";
import { nowMs } from "../lib/clock.js";
import { openDialog, reasonField } from "../lib/dialog.js";
import { h, newId, put } from "../lib/dom.js";
import { fieldFor, Unfit } from "../lib/fields.js";
import { schemaForm } from "../lib/forms.js";
import { requestId } from "../lib/ids.js";
import { go, runAddress } from "../lib/router.js";
import { may } from "../lib/session.js";
import { toast, toastProblem } from "../lib/toast.js";
import { workflowNamed } from "../lib/workflows.js";
import { OVERRIDES, TERMINAL } from "./event-tables.js";
import { failuresToSettle, UNRESOLVED } from "./fold.js";
import { startDialog } from "./start.js";

const PLAN = "plan:"; // how the workflow of a plan's runs begins
export const APPROVAL = ":approval"; // the task in which a step of a plan is approved; alone, the run

const COMMANDS = {
  approve: { word: "Approve", title: "Let this run go ahead", done: "The run was approved.", on: ["PENDING"] },
  resume: {
    word: "Resume",
    title: "Let this run go on",
    done: "The run was resumed.",
    on: ["PAUSED"],
    hint: "If an error in its code has paused it, it runs that code again, and is paused again if it is the same.",
  },
  pause: {
    word: "Pause",
    title: "Hold this run",
    done: "The run is paused.",
    on: ["RUNNING"],
    hint: "Results are still recorded, but its program does not go on.",
  },
  cancel: {
    word: "Cancel",
    title: "Cancel this run",
    done: "The run was asked to cancel.",
    on: ["PENDING", "APPROVED", "RUNNING", "PAUSED"],
    danger: true,
    hint: "It may clean up first.",
  },
  terminate: {
    word: "Terminate",
    title: "End this run at once",
    done: "The run has ended.",
    on: ["PENDING", "APPROVED", "RUNNING", "PAUSED"],
    danger: true,
    hint: "It is not given a chance to clean up.",
    needed: true,
  },
};

const POISON_HINT = "It runs its code once more, alone. If that ends the process again, the run is paused again; all others continue on the next node.";

const RAISE = {
  name: "raise",
  operation: "resume",
  word: "Resume with the error",
  title: "Raise the step’s error in the workflow",
  done: "The workflow has the error.",
  danger: true,
  hint: "A workflow that does not catch the error fails for good. To try the step again, retry it instead.",
  more: { raise_failure: true },
};

// What to say of a run that was resumed: its code has run already, and may have failed as before.
async function resumed(runId, done) {
  const { status, last_error: error } = await call("runs.get", { run_id: runId });
  if (status === "PAUSED" && error) toast(`The run was resumed, and ${error.code} has paused it again.`, { kind: "bad" });
  else toast(done);
}

function command(runId, name, hintHere) {
  const { operation = name, word, title, done, hint, danger = false, needed = false, more = {} } =
    name === RAISE.name ? RAISE : COMMANDS[name];
  const reason = reasonField({ needed });
  const signal_id = requestId();
  const why = hintHere ?? hint;
  openDialog({
    title,
    action: word,
    danger,
    body: [hint && h("p", {}, why), reason.element],
    act: async () => {
      if (!reason.check()) return false;
      await call(`runs.${operation}`, { run_id: runId, reason: reason.value(), signal_id, wait: true, ...more });
      if (name === "resume") await resumed(runId, done);
      else toast(done);
      return true;
    },
  });
}

export function commandsFor(model) {
  const { status } = model.state;
  if (!may("runs:control")) return [];
  const hintHere = (name) => (name === "resume" && model.head.last_error?.code === "PoisonTurn" ? POISON_HINT : undefined);
  const offered = (name) => ({ name, ...COMMANDS[name], act: () => command(model.runId, name, hintHere(name)) });
  const names = Object.keys(COMMANDS)
    .filter((name) => COMMANDS[name].on.includes(status))
    .filter((name) => name !== "approve" || model.state.queued?.requires_approval);
  const [failed] = failuresToSettle(model.state);
  if (failed === undefined) return names.map(offered);
  return [
    { name: "retry-step", word: "Retry step", step: failed.id, act: () => retryStep(model.runId, failed.id) },
    ...names.filter((name) => name !== "resume").map(offered),
    { ...RAISE, act: () => command(model.runId, RAISE.name) },
  ];
}

export function othersFor(model) {
  const isOver = TERMINAL.has(model.state.status);
  return [
    !isOver && may("signals:write") && { name: "signal", word: "Signal", act: () => signalDialog(model) },
    model.state.status === "FAILED" && may("runs:control") && { name: "retry", word: hasFailedStep(model.state) ? "Retry from the failed step" : "Retry from where it failed", act: () => retryFailed(model) },
    isOver && may("runs:control") && { name: "retry-from-start", word: "Retry from the start", act: () => retryFromStart(model.runId) },
    may("runs:write") && { name: "again", word: "Start again with another input", act: () => startAgain(model) },
  ].filter(Boolean);
}

const hasFailedStep = (state) => [...state.steps.values()].some((step) => step.status === "FAILED");

function startAgain(model) {
  startDialog({
    workflow: model.head.workflow,
    input: model.state.queued?.input ?? {},
    tags: model.head.tags,
    reference: model.head.reference_key ?? "",
  });
}

function retryFromStart(runId) {
  const reason = reasonField();
  const signal_id = requestId();
  openDialog({
    title: "Do this run again",
    action: "Retry",
    body: [h("p", {}, "A new run starts, with the same input. This one stays as it is."), reason.element],
    act: async () => {
      const run = await call("runs.retry", { run_id: runId, from_start: true, reason: reason.value(), signal_id });
      toast("The new run has started.");
      go(runAddress(run.run_id));
    },
  });
}

// A run that goes on from the step that failed, with what was recorded before it. A second click gives the same run.
const retries = new Map();

async function retryFailed(model) {
  const { runId } = model;
  try {
    if (!retries.has(runId) && !model.head.done_again_by) {
      await model.readHead();
      if (model.head.done_again_by) return toast("It was done again meanwhile.", { kind: "bad" });
    }
    if (!retries.has(runId)) retries.set(runId, requestId());
    const run = await call("runs.retry", { run_id: runId, signal_id: retries.get(runId) });
    toast("A new run goes on from there.");
    go(runAddress(run.run_id));
  } catch (problem) {
    toastProblem(problem);
  }
}

// A run that begins with what this one has recorded up to an event.
export function forkAt(runId, seq) {
  const reason = reasonField();
  const request_id = requestId();
  openDialog({
    title: `Fork at event ${seq}`,
    action: "Fork",
    body: [h("p", {}, "A new run keeps what was recorded up to the end of this event’s commit, at the latest, and goes on from there. This one stays as it is."), reason.element],
    act: async () => {
      const run = await call("runs.fork", { run_id: runId, at: seq, request_id, reason: reason.value() });
      toast(`The new run has events 1 to ${run.run_seq}.`);
      go(runAddress(run.run_id));
    },
  });
}

// Which commands there are for a step, as buttons.
export function stepActions(model, step) {
  if (!may("runs:control") || TERMINAL.has(model.state.status)) return signalOnly(model, step);
  const current = model.state.steps.get(step.id);
  const isUnresolved = current?.status === "RUNNING" && current.error?.code === UNRESOLVED;
  const isPlan = model.head.workflow.startsWith(PLAN);
  const isHeld = model.state.status === "PAUSED" || (isPlan && isOwnStep(step.id)); // a plan goes on beside a failure
  const next = current?.attempts.at(-1);
  const isLater = current?.status === "RUNNING" && current.kind === "activity" && current.attempts.length > 1 && next.until === null && next.from > nowMs();
  const canRetry = isUnresolved || isLater || (current?.status === "FAILED" && current.kind === "activity" && isHeld);
  const canApprove = isPlan && current?.status === "RUNNING" && isForEveryone(current);
  const mayOverride = !OVERRIDES.has(current?.kind) || may("runs:override");
  const isEngines = step.id.includes("!reconcile"); // a task about another step: that step can be skipped
  const canSkip = !isEngines && current && (current.status === "RUNNING" || canRetry) && current.kind !== "update" && mayOverride;
  return [
    ...signalOnly(model, step),
    canApprove &&
      h(
        "button",
        { class: "button small primary", type: "button", onclick: () => approveStep(model.runId, step.id) },
        "Approve",
      ),
    canRetry &&
      h(
        "button",
        { class: "button small primary", type: "button", onclick: () => (isLater ? tryNow : retryStep)(model.runId, step.id) },
        isUnresolved ? "Ask the verifier again" : isLater ? "Try now" : "Retry step",
      ),
    canSkip &&
      h(
        "button",
        { class: "button small", type: "button", onclick: () => skipStep(model.runId, current) },
        "Skip step",
      ),
  ].filter(Boolean);
}

const isOwnStep = (id) => !id.includes(":") && !id.endsWith("]"); // no item of a step, nor what belongs to one

// Whether a step is the task in which a plan asks everyone for approval; others are answered by those they name.
function isForEveryone({ id, first }) {
  const { roles, assignee } = first.data;
  return id.endsWith(APPROVAL) && !roles?.length && !assignee;
}

function approveStep(runId, taskStep) {
  const reason = reasonField();
  const signal_id = requestId();
  const step_id = taskStep.slice(0, -APPROVAL.length);
  openDialog({
    title: step_id ? "Let this step go ahead" : "Let this run go ahead",
    action: "Approve",
    body: [step_id && h("p", {}, h("code", {}, step_id), " begins when it is approved."), reason.element],
    act: async () => {
      const about = { run_id: runId, reason: reason.value(), signal_id, wait: true };
      await call("runs.approve", step_id ? { ...about, step_id } : about);
      toast(step_id ? "The step was approved." : "The run was approved.");
    },
  });
}

function signalOnly(model, step) {
  const isOpen = step.kind === "signal" && model.state.steps.get(step.id)?.status === "RUNNING";
  if (!isOpen || !may("signals:write")) return [];
  return [
    h(
      "button",
      { class: "button small primary", type: "button", onclick: () => signalDialog(model, step.id) },
      "Send the signal",
    ),
  ];
}

export function retryStep(runId, stepId) {
  const reason = reasonField();
  const signal_id = requestId();
  openDialog({
    title: "Try this step again",
    action: "Retry step",
    body: [h("p", {}, h("code", {}, stepId), " is tried again, as a new attempt of yours."), reason.element],
    act: async () => {
      await call("runs.retry_step", { run_id: runId, step_id: stepId, reason: reason.value(), signal_id, wait: true });
      toast("The step is tried again.");
    },
  });
}

// Begins the next attempt of an activity at once, which has failed and is tried again later.
export async function tryNow(runId, stepId) {
  try {
    await call("runs.retry_step", { run_id: runId, step_id: stepId, reason: "", signal_id: requestId(), wait: true });
    toast("The step is tried now.");
  } catch (problem) {
    toastProblem(problem);
  }
}

export function resumeRun(runId) {
  command(runId, "resume");
}

export function approveRun(runId) {
  command(runId, "approve");
}

export function skipStep(runId, { id: stepId, kind }) {
  const reason = reasonField();
  const hasResult = !OVERRIDES.has(kind) && kind !== "timer";
  const result = fieldFor(
    "Result for the workflow",
    { description: "JSON; the workflow gets it in place of the step’s result. Empty is null." },
    {},
    undefined,
    false,
  );
  const signal_id = requestId();
  openDialog({
    title: "Skip this step",
    action: "Skip step",
    danger: true,
    body: [
      h("p", {}, h("code", {}, stepId), hasResult ? " will not be done." : " will not be done; the workflow gets null."),
      hasResult && result.element,
      reason.element,
    ],
    act: async () => {
      let given;
      try {
        given = result.read();
      } catch (unfit) {
        if (unfit instanceof Unfit) return false;
        throw unfit;
      }
      await call("runs.skip_step", {
        run_id: runId,
        step_id: stepId,
        result: hasResult ? (given ?? null) : null,
        reason: reason.value(),
        signal_id,
        wait: true,
      });
      toast("The step was skipped.");
      return true;
    },
  });
}

function openWaits(model) {
  return [...model.state.steps.values()].filter((step) => step.kind === "signal" && step.status === "RUNNING");
}

export async function signalDialog(model, stepId = null) {
  const workflow = await workflowNamed(model.head.workflow).catch(() => null);
  const waits = openWaits(model);
  const wait = waits.find((step) => step.id === stepId) ?? null;
  const names = [...new Set([...waits.map((step) => step.first.data.name), ...Object.keys(workflow?.signals ?? {})])];
  const id = newId("signal");
  const name = h("input", {
    id,
    list: `${id}-names`,
    autocomplete: "off",
    required: true,
    readonly: wait !== null,
    value: wait?.first.data.name ?? names[0] ?? "",
  });
  const place = h("div", {});
  const signal_id = requestId();
  let form;
  const show = () => {
    form = schemaForm(workflow?.signals?.[name.value] ?? {}, { what: "Payload" });
    put(place, form.element);
  };
  name.addEventListener("change", show);
  show();
  openDialog({
    title: "Send a signal",
    action: "Send",
    wide: true,
    body: [
      h(
        "div",
        { class: "field" },
        h("label", { for: id }, "Signal"),
        name,
        h(
          "datalist",
          { id: `${id}-names` },
          names.map((each) => h("option", { value: each })),
        ),
        h(
          "p",
          { class: "hint" },
          wait
            ? ["It goes to exactly this wait: ", h("code", {}, wait.id)]
            : "It goes to the oldest wait of this name, or is kept until there is one.",
        ),
      ),
      place,
    ],
    act: async () => {
      const found = form.read();
      if (!found || !name.value) return false;
      const asked = { run_id: model.runId, name: name.value, payload: found.value, signal_id };
      if (wait) asked.step_id = wait.id;
      model.whenTaken(signal_id, (event) => toast(`The run took “${asked.name}” at event ${event.run_seq}.`));
      await call("signals.send", asked);
      toast(`“${asked.name}” was accepted.`);
      return true;
    },
  });
}
