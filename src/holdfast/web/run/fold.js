// A run from its events: the same rules as the service's projection, plus what a drawing needs.
//
// Events are applied in order, each once. What is not known changes nothing but the number of the last event.

import { CLOSING, OPENING, TERMINAL, TRANSITIONS } from "./event-tables.js";

export const UNRESOLVED = "Unresolved";
const TIMED_OUT = { code: "SignalTimedOut", message: "no signal came in time", retryable: false };

export function newState() {
  return {
    seq: 0,
    status: "PENDING",
    substatus: null,
    isCancelling: false,
    steps: new Map(),
    pauses: [],
    rotations: [],
    queued: null,
    inputSeq: 0, // the event with the input
    from: null,
    startedAt: null,
    completedAt: null,
    last: null,
    result: undefined,
    error: null,
  };
}

export function timeOf(event) {
  event.ms ??= Date.parse(event.persisted_at);
  return event.ms;
}

export function apply(state, event) {
  const { event_type: type, data } = event;
  const at = timeOf(event);
  if (event.step_id !== null) applyToStep(state, event, at);
  else if (type === "RunPaused") state.substatus = data.error?.code ?? (data.reason || null);
  else if (type === "RunCancelRequested") {
    state.isCancelling = true;
    if (state.status === "RUNNING") state.substatus = "CANCELLING";
  } else if (type === "ContinuedAsNew") {
    giveUpOpen(state, event, at, [...(data.carried?.updates ?? []), ...(data.carried?.steps ?? [])]); // which go on
    state.rotations.push({ at, seq: event.run_seq });
  } else if (type === "RunQueued") {
    state.queued = data;
    state.inputSeq = event.run_seq;
    if (data.requires_approval) state.substatus = "AWAITING_APPROVAL";
  } else if (type === "InputReplaced") {
    state.queued = { ...state.queued, input: data.input };
    state.inputSeq = event.run_seq;
  } else if (type === "RunApproved") state.substatus = null;
  changeStatus(state, type, data, event, at);
  state.from ??= at;
  state.last = at;
  state.seq = event.run_seq;
  return state;
}

function changeStatus(state, type, data, event, at) {
  const status = TRANSITIONS[state.status][type];
  if (status === undefined) return;
  if (status === "PAUSED") {
    state.pauses.push({ from: at, until: null, reason: data.reason ?? "" });
    state.error = data.error ?? state.error;
    if (data.error) markDelivered(state, state.seq, null); // right after a resumption: the program got nothing
  } else if (state.status === "PAUSED") {
    state.pauses.at(-1).until = at;
    markDelivered(state, null, event.run_seq);
  }
  state.status = status;
  if (status === "RUNNING") {
    state.startedAt ??= at;
    state.substatus = state.isCancelling ? "CANCELLING" : null;
  }
  if (!TERMINAL.has(status)) return;
  giveUpOpen(state, event, at);
  state.substatus = null;
  state.completedAt = at;
  if (type === "RunCompleted") state.result = data.result ?? null;
  state.error = data.error ?? null;
}

// The program gets failures while it runs, else at the resumption; until then an operator can settle them.
function markDelivered(state, was, now) {
  for (const step of state.steps.values()) {
    if (step.status === "FAILED" && step.deliveredBy === was) step.deliveredBy = now;
  }
}

// An error has paused the run: what its steps fail with meanwhile is another matter.
export function isPausedByError(state) {
  return state.status === "PAUSED" && state.error !== null && state.substatus === state.error.code;
}

// Failed steps that wait for an operator: to resume the run would raise their errors in the workflow.
export function failuresToSettle(state) {
  if (state.status !== "PAUSED") return [];
  return [...state.steps.values()].filter(
    (step) => step.status === "FAILED" && step.deliveredBy === null && step.first.data.options?.on_failure === "pause",
  );
}

function giveUpOpen(state, event, at, but = []) {
  const kept = new Set(but.map((each) => each.step_id));
  for (const [stepId, step] of state.steps) {
    if (step.status === "RUNNING" && !kept.has(stepId)) close(step, "SKIPPED", event, at);
  }
}

function close(step, status, event, at) {
  step.status = status;
  step.until = at;
  step.last = event;
  const attempt = step.attempts.at(-1);
  if (attempt) attempt.until ??= at;
}

// The error of a step that is no longer unresolved.
function settledError(step) {
  return step.error?.code === UNRESOLVED ? null : step.error;
}

function applyToStep(state, event, at) {
  const { event_type: type, data, step_id: id } = event;
  let step = state.steps.get(id);
  if (type in OPENING) {
    const before = step?.kind === OPENING[type] ? step : null;
    step = {
      id,
      kind: OPENING[type],
      status: "RUNNING",
      logical: event.logical_attempt_id ?? 1,
      engine: event.engine_attempt_id ?? 1,
      from: before?.from ?? at,
      since: at,
      until: null,
      error: null,
      first: event,
      last: event,
      events: [...(before?.events ?? []), event.run_seq],
      attempts: [
        ...(before?.attempts ?? []),
        { from: at, until: null, logical: event.logical_attempt_id ?? 1, error: null },
      ],
    };
    state.steps.set(id, step);
    return;
  }
  if (step === undefined) {
    if (!(type in CLOSING) && !["StepRetried", "StepDetached", "StepUnresolved"].includes(type)) return;
    step = {
      id,
      kind: "activity",
      status: "PENDING",
      logical: 1,
      engine: 1,
      from: at,
      since: at,
      until: null,
      error: null,
      first: event,
      last: event,
      events: [],
      attempts: [],
    };
    state.steps.set(id, step);
  }
  step.events.push(event.run_seq);
  if (type === "StepRetried") {
    step.engine = event.engine_attempt_id ?? step.engine + 1;
    step.error = settledError(step);
    const lost = step.attempts.at(-1);
    if (lost?.from > at) step.attempts.pop(); // it was due later, and has not begun
    else if (lost) Object.assign(lost, { until: at, error: data.error ?? { code: data.reason, message: "" } });
    step.attempts.push({
      from: data.due_at ? Math.max(at, data.due_at / 1000) : at,
      until: null,
      logical: step.logical,
      error: null,
    });
  } else if (type === "StepDetached") {
    step.engine = event.engine_attempt_id ?? step.engine;
  } else if (type === "StepUnresolved") {
    step.engine = event.engine_attempt_id ?? step.engine;
    step.error = { code: UNRESOLVED, message: data.error.message, retryable: true };
  } else if (type in CLOSING) {
    step.error = (type === "SignalTimedOut" ? TIMED_OUT : data.error) ?? settledError(step);
    step.engine = event.engine_attempt_id ?? step.engine;
    const own = type === "SignalTimedOut" ? TIMED_OUT : data.error;
    if (own && step.attempts.length) step.attempts.at(-1).error = own;
    close(step, own ? "FAILED" : CLOSING[type], event, at);
    step.deliveredBy = state.status === "PAUSED" ? null : 0;
    if (own && !isPausedByError(state)) state.error = own;
  }
}

export function fold(events, upTo = events.length) {
  const state = newState();
  for (let n = 0; n < upTo; n += 1) apply(state, events[n]);
  return state;
}

// The part of a state that the service's snapshot has too, in the same words.
export function snapshotOf(state) {
  return {
    status: state.status,
    substatus: state.substatus,
    last_event_seq: state.seq,
    is_cancelling: state.isCancelling,
    steps: [...state.steps.values()].map((step) => ({
      step_id: step.id,
      status: step.status,
      kind: step.kind,
      logical_attempt_id: step.logical,
      engine_attempt_id: step.engine,
      error_code: step.error?.code ?? null,
    })),
  };
}
