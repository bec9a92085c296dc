// What a run was given, what it returned or why it did not, what it waits for, and what waits for it.

import { call } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { jsonView } from "../lib/json.js";
import { placeWords } from "../lib/places.js";
import { may } from "../lib/session.js";
import { nowMs } from "../lib/clock.js";
import { runAddress } from "../lib/router.js";
import { ageOf, moment } from "../lib/time.js";
import { approveRun, resumeRun, retryStep, signalDialog, skipStep, tryNow } from "./actions.js";
import { errorView } from "./errors.js";
import { TERMINAL } from "./event-tables.js";
import { failuresToSettle, isPausedByError } from "./fold.js";

const MOST_FAILED = 3;
const AWAITING_APPROVAL = "AWAITING_APPROVAL";

// Activities that have failed and are tried again: each with what it failed with, how often, and when it is next.
export function retriedSteps(state) {
  return [...state.steps.values()].filter((step) => step.kind === "activity" && step.status === "RUNNING" && failuresOf(step).length > 0);
}

function failuresOf(step) {
  return step.attempts.filter((attempt) => attempt.error && attempt.logical === step.logical);
}

function retryCard(model, step) {
  const failures = failuresOf(step);
  const { error } = failures.at(-1);
  const next = step.attempts.at(-1);
  const isLater = next.until === null && next.from > nowMs();
  return need(
    "RETRYING",
    h(
      "span",
      {},
      h("code", {}, step.id),
      failures.length === 1 ? " failed once, " : ` failed ${failures.length} times, `,
      h("strong", {}, error.code),
      error.message && ` ${error.message}`,
      ", again ",
      isLater ? ageOf(new Date(next.from).toISOString()) : "now",
    ),
    isLater &&
      may("runs:control") &&
      h("button", { class: "button small primary", type: "button", onclick: () => tryNow(model.runId, step.id) }, "Try now"),
  );
}

function pauseCard({ head, runId }) {
  const { actor, reason, since } = head.pause;
  return need(
    "PAUSED",
    h("span", {}, "Paused by ", h("strong", {}, actor || "an operator"), " ", ageOf(since), reason && `: ${reason}`),
    may("runs:control") && h("button", { class: "button small primary", type: "button", onclick: () => resumeRun(runId) }, "Resume"),
  );
}

// A run, or a call of it, that waits because of a limit: how far it has come.
function placeCard({ head }) {
  return need("PENDING", h("span", {}, ...placeWords(head)));
}

function approvalCard({ runId }) {
  return need(
    "APPROVED",
    h("span", {}, "Waits to be approved: it does not start before."),
    may("runs:control") && h("button", { class: "button small primary", type: "button", onclick: () => approveRun(runId) }, "Approve"),
  );
}

// The workflow has got a failure, and has not ended, because it still waits for a child.
function failedBesideChild(state) {
  const child = [...state.steps.values()].find((step) => step.kind === "child" && step.status === "RUNNING");
  const failed = [...state.steps.values()].findLast((step) => step.status === "FAILED" && step.deliveredBy !== null);
  if (!child || !failed) return null;
  return need(
    "child",
    h(
      "span",
      {},
      h("code", {}, failed.id),
      " has failed: ",
      h("strong", {}, failed.error?.code),
      ` ${failed.error?.message ?? ""}. The run has not ended, it waits for the child `,
      h("a", { href: runAddress(child.first.data.child_run_id) }, child.id),
      ".",
    ),
  );
}

// What needs somebody: a failed step that holds the run, a wait for a signal, a task.
export function needs(model, state) {
  if (TERMINAL.has(state.status)) return [];
  const cards = [];
  for (const failed of failuresToSettle(state).slice(0, MOST_FAILED)) {
    cards.push(
      need(
        "FAILED",
        h("span", {}, "Paused, because ", h("code", {}, failed.id), " failed: ", failed.error?.message),
        may("runs:control") && [
          h(
            "button",
            { class: "button small primary", type: "button", onclick: () => retryStep(model.runId, failed.id) },
            "Retry step",
          ),
          h(
            "button",
            { class: "button small", type: "button", onclick: () => skipStep(model.runId, failed) },
            "Skip step",
          ),
        ],
      ),
    );
  }
  const { head } = model;
  if (state.status === "PAUSED" && head.pause && cards.length === 0 && !isPausedByError(state)) cards.push(pauseCard(model));
  if (!TERMINAL.has(state.status) && (head.place || (state.status === "PENDING" && head.queued_at))) cards.push(placeCard(model));
  if (state.substatus === AWAITING_APPROVAL) cards.push(approvalCard(model));
  if (state.status === "RUNNING") cards.push(...[failedBesideChild(state)].filter(Boolean));
  for (const step of retriedSteps(state).slice(0, MOST_FAILED)) cards.push(retryCard(model, step));
  for (const step of state.steps.values()) {
    if (step.status !== "RUNNING" || cards.length >= 6) continue;
    const { data } = step.first;
    if (step.kind === "signal") {
      cards.push(
        need(
          "signal",
          h(
            "span",
            {},
            "Waits for the signal ",
            h("code", {}, data.name),
            data.until && h("span", { class: "quiet" }, ` until ${moment(data.until / 1000)}`),
          ),
          may("signals:write") &&
            h(
              "button",
              { class: "button small primary", type: "button", onclick: () => signalDialog(model, step.id) },
              "Send it",
            ),
        ),
      );
    } else if (step.kind === "task") {
      cards.push(
        need(
          "task",
          h(
            "span",
            {},
            "Waits for a person: ",
            h("strong", {}, data.name),
            data.roles?.length && h("span", { class: "quiet" }, ` for ${data.roles.join(", ")}`),
          ),
          h(
            "a",
            { class: "button small primary", href: `/inbox/${encodeURIComponent(data.task_id)}` },
            "Open the task",
          ),
        ),
      );
    }
  }
  return cards;
}

function need(name, text, actions) {
  return h(
    "div",
    { class: "need", dataset: { status: ["FAILED", "PAUSED"].includes(name) ? name : "WAITING" } },
    icon(name),
    text,
    h("div", { class: "actions" }, actions || []),
  );
}

export function inputPanel(place, state) {
  put(place, jsonView(state.queued?.input ?? null, { label: "Input" }));
}

export function outcomePanel(card, place, title, state) {
  const isThere = TERMINAL.has(state.status) || state.error !== null;
  card.hidden = !isThere;
  if (!isThere) return;
  const isTrouble = TERMINAL.has(state.status) || isPausedByError(state) || failuresToSettle(state).length > 0;
  title.textContent = state.status === "COMPLETED" ? "Result" : isTrouble ? "Error" : "Last error";
  if (state.status === "COMPLETED") put(place, jsonView(state.result, { label: "Result" }));
  else if (state.error) put(place, errorView(state.error));
  else put(place, h("p", { class: "quiet" }, "It was cancelled."));
}

// Signals that the run has not taken yet.
export async function mailboxPanel(card, place, runId, signal) {
  if (!may("signals:read")) return;
  const { items } = await call("signals.mailbox", { run_id: runId }, signal);
  card.hidden = items.length === 0;
  put(
    place,
    h(
      "ul",
      { class: "plain-list" },
      items.map((mail) =>
        h(
          "li",
          {},
          h("strong", {}, mail.name),
          " ",
          h("span", { class: "quiet" }, "since ", ageOf(mail.accepted_at)),
          jsonView(mail.payload, { label: mail.name }),
        ),
      ),
    ),
  );
}

// The typed state of a flow as it is now, which its query `state` returns.
export class FlowState {
  constructor(card, runId, signal) {
    Object.assign(this, { card, runId, signal, isThere: false, shown: null });
    this.place = card.querySelector(".card-body");
  }

  // What one reads stays where it is while the state is the same.
  async load() {
    if (!this.isThere || this.isAsking) return;
    this.isAsking = true;
    try {
      const { result } = await call("runs.query", { run_id: this.runId, name: "state", input: {} }, this.signal);
      this.show(JSON.stringify(result), jsonView(result, { label: "State" }));
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      this.show(problem.message, h("p", { class: "quiet" }, `The state cannot be shown: ${problem.message}`));
    } finally {
      this.isAsking = false;
    }
  }

  show(text, element) {
    this.card.hidden = false;
    if (text === this.shown) return;
    this.shown = text;
    put(this.place, element);
  }
}
