// The service's operations by name, as its catalogue has them, and its refusals as errors with a code.

import { parse } from "./exact.js";
import { mounted } from "./mount.js";

const OPERATIONS = {
  "runs.start": "POST /v1/runs",
  "runs.get": "GET /v1/runs/{run_id}",
  "runs.list": "GET /v1/runs",
  "runs.snapshot": "GET /v1/runs/{run_id}/snapshot",
  "runs.graph": "GET /v1/runs/{run_id}/graph",
  "runs.handlers": "GET /v1/runs/{run_id}/handlers",
  "runs.query": "POST /v1/runs/{run_id}/queries/{name}",
  "runs.update": "POST /v1/runs/{run_id}/updates/{name}",
  "runs.cancel": "POST /v1/runs/{run_id}/cancel",
  "runs.pause": "POST /v1/runs/{run_id}/pause",
  "runs.resume": "POST /v1/runs/{run_id}/resume",
  "runs.approve": "POST /v1/runs/{run_id}/approve",
  "runs.terminate": "POST /v1/runs/{run_id}/terminate",
  "runs.retry_step": "POST /v1/runs/{run_id}/steps/{step_id}/retry",
  "runs.skip_step": "POST /v1/runs/{run_id}/steps/{step_id}/skip",
  "runs.retry": "POST /v1/runs/{run_id}/retry",
  "runs.events": "GET /v1/runs/{run_id}/events",
  "runs.diff": "GET /v1/runs/{run_id}/diff",
  "runs.fork": "POST /v1/runs/{run_id}/fork",
  "runs.count": "GET /v1/run-counts",
  "runs.command_many": "POST /v1/run-commands",
  "streams.list": "GET /v1/runs/{run_id}/streams",
  "signals.send": "POST /v1/runs/{run_id}/signals/{name}",
  "signals.send_many": "POST /v1/signals",
  "signals.receipt": "GET /v1/runs/{run_id}/signals/{name}/{signal_id}",
  "signals.waiting": "GET /v1/waits",
  "signals.waits": "GET /v1/runs/{run_id}/waits",
  "signals.mailbox": "GET /v1/runs/{run_id}/mailbox",
  "signals.unconsumed": "GET /v1/signals",
  "tasks.list": "GET /v1/tasks",
  "tasks.get": "GET /v1/tasks/{task_id}",
  "tasks.history": "GET /v1/tasks/{task_id}/history",
  "tasks.assign": "POST /v1/tasks/{task_id}/assign",
  "tasks.claim": "POST /v1/tasks/{task_id}/claim",
  "tasks.release": "POST /v1/tasks/{task_id}/release",
  "tasks.reassign": "POST /v1/tasks/{task_id}/reassign",
  "tasks.complete": "POST /v1/tasks/{task_id}/complete",
  "tasks.comment": "POST /v1/tasks/{task_id}/comments",
  "letters.list": "GET /v1/dead-letters",
  "letters.get": "GET /v1/dead-letters/{letter_id}",
  "letters.requeue": "POST /v1/dead-letters/{letter_id}/requeue",
  "letters.drop": "POST /v1/dead-letters/{letter_id}/drop",
  "sinks.list": "GET /v1/sinks",
  "bus.letters": "GET /v1/bus/dead-letters",
  "bus.requeue": "POST /v1/bus/dead-letters/{letter_id}/requeue",
  "bus.drop": "POST /v1/bus/dead-letters/{letter_id}/drop",
  "plans.list": "GET /v1/plans",
  "plans.get": "GET /v1/plans/{plan_id}",
  "plans.graph": "GET /v1/plans/{plan_id}/graph",
  "plans.diff": "GET /v1/plans/{plan_id}/diff",
  "plans.start": "POST /v1/plans/{plan_id}/runs",
  "schedules.create": "POST /v1/schedules",
  "schedules.list": "GET /v1/schedules",
  "schedules.backfill": "POST /v1/schedules/{schedule_id}/backfill",
  "schedules.pause": "POST /v1/schedules/{schedule_id}/pause",
  "schedules.resume": "POST /v1/schedules/{schedule_id}/resume",
  "schedules.trigger": "POST /v1/schedules/{schedule_id}/trigger",
  "schedules.update": "POST /v1/schedules/{schedule_id}/update",
  "schedules.delete": "POST /v1/schedules/{schedule_id}/delete",
  "workflows.list": "GET /v1/workflows",
  "workflows.get": "GET /v1/workflows/{name}",
  "system.health": "GET /v1/health",
  "system.stats": "GET /v1/stats",
  "system.doctor": "GET /v1/doctor",
  "system.queues": "GET /v1/queues",
  "system.nodes": "GET /v1/nodes",
  "system.locks": "GET /v1/locks",
  "system.samples": "GET /v1/samples",
  "system.takeovers": "GET /v1/takeovers",
  "system.alerts": "GET /v1/alerts",
  "audit.list": "GET /v1/audit",
  "retention.show": "GET /v1/retention",
  "retention.preview": "GET /v1/retention/preview",
  "archive.get": "GET /v1/archive/{run_id}",
  "archive.events": "GET /v1/archive/{run_id}/events",
};

export const OWN_HEADER = { "X-Holdfast-Request": "page" };

// A refusal. `code` is the service's, or "Unreachable" where no server answered.
export class Problem extends Error {
  constructor({ code, detail, status = 0, details = {}, correlation_id = "", retryMs = null }) {
    super(detail || code);
    Object.assign(this, { code, status, details, correlationId: correlation_id, retryMs });
  }

  get isSignedOut() {
    return this.status === 401;
  }

  get isDenied() {
    return this.code === "NotPermitted";
  }

  get isUnreachable() {
    return this.code === "Unreachable" || this.status === 503;
  }
}

export function unreachable() {
  return new Problem({ code: "Unreachable", detail: "The service does not answer." });
}

export async function problemOf(response) {
  let said = {};
  try {
    said = await response.json();
  } catch {
    said = {}; // something between us and the service answered in its own words
  }
  const seconds = Number(response.headers.get("retry-after"));
  return new Problem({
    code: said.code ?? `Http${response.status}`,
    detail: said.detail ?? `The service answered ${response.status}.`,
    status: response.status,
    details: said.details,
    correlation_id: said.correlation_id,
    retryMs: seconds > 0 ? seconds * 1000 : null,
  });
}

let signedOut = () => {};

// Says what to do when the service no longer knows who we are.
export function onSignedOut(listener) {
  signedOut = listener;
}

export function tellSignedOut() {
  signedOut();
}

export async function request(verb, address, body, signal) {
  const headers = { Accept: "application/json", ...OWN_HEADER };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(mounted(address), {
      method: verb,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (!response.ok) {
    const problem = await problemOf(response);
    if (problem.isSignedOut && address !== "/session") signedOut();
    throw problem;
  }
  return response.status === 204 ? null : parse(await response.text());
}

export function addressOf(template, fields) {
  const rest = { ...fields };
  const path = template.replace(/\{(\w+)\}/g, (_, name) => {
    const value = rest[name];
    delete rest[name];
    return encodeURIComponent(value);
  });
  return [path, rest];
}

export function queryOf(fields) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) {
    for (const each of Array.isArray(value) ? value : [value])
      if (each !== undefined && each !== null && each !== "") query.append(name, each);
  }
  const text = query.toString();
  return text && `?${text}`;
}

export function call(name, fields = {}, signal = undefined) {
  const [verb, template] = OPERATIONS[name].split(" ");
  const [path, rest] = addressOf(template, fields);
  return verb === "GET" ? request(verb, path + queryOf(rest), undefined, signal) : request(verb, path, rest, signal);
}
