// What happened, in a few words.

import { duration } from "../lib/time.js";
import { LABELS } from "./event-tables.js";

export function kindWord(kind) {
  return LABELS[kind] ?? kind;
}

// The type of an event as words: "StepStarted" is "Step started".
export function eventWord(type) {
  const words = type.replaceAll(/([a-z])([A-Z])/g, "$1 $2").split(" ");
  return [words[0], ...words.slice(1).map((word) => word.toLowerCase())].join(" ");
}

const GIST = {
  RunQueued: (data) => `${data.plan_id} version ${data.plan_version}`,
  RunPaused: (data) => data.error?.message ?? data.reason,
  RunResumed: (data) => data.reason,
  RunFailed: (data) => `${data.error.code}: ${data.error.message}`,
  InputReplaced: () => "by a later start of its key",
  RunCancelRequested: (data) => data.reason,
  RunTimedOut: (data) => `longer than ${data.limit_ms / 1000} s (${data.timeout} time-out)`,
  StepRetried: (data) => data.error?.message || data.reason,
  StepFailed: (data) => `${data.error.code}: ${data.error.message}`,
  StepSkipped: (data) => data.reason,
  SignalAccepted: (data) =>
    `${data.name}${data.actor ? ` by ${data.actor}` : ""}${data.reason ? `: ${data.reason}` : ""}`,
  SignalRejected: (data) =>
    `${data.name}${data.actor ? ` by ${data.actor}` : ""}${data.reason ? `: ${data.reason}` : ""}`,
  SignalWaiting: (data) => data.name,
  SignalReceived: (data) => data.name,
  SignalSent: (data) => `${data.name} to ${data.run_id}`,
  TaskCreated: (data) => data.name,
  TaskCompleted: (data) => `by ${data.actor}`,
  TaskAssigned: (data) => `${data.action} by ${data.actor}`,
  ChildStarted: (data) => data.child_run_id,
  ChildFailed: (data) => `${data.error.code}: ${data.error.message}`,
  MarkerRecorded: (data) => data.name,
  UpdateAccepted: (data) => data.name,
  UpdateCompleted: (data) => data.error && `${data.error.code}: ${data.error.message}`,
};

// It stands beside the id of the step, which it does not repeat.
export function gistOf(event) {
  const make = GIST[event.event_type];
  const gist = (make && event.data && make(event.data)) || "";
  return gist === event.step_id ? "" : gist;
}

// What a step is called where people look for it. The id of an update says nothing; its name does.
export function nameOf(step) {
  return step.kind === "update" && step.first.data?.name ? `update ${step.first.data.name}` : step.id;
}

export function spokenStep(step, until) {
  const tries = step.attempts.length > 1 ? `, ${step.attempts.length} attempts` : "";
  const took = duration((step.until ?? until) - step.from);
  return `${nameOf(step)}, ${kindWord(step.kind)}, ${step.status.toLowerCase()}, ${took}${tries}`;
}
