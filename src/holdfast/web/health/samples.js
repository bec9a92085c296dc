// Samples of the installation: those that are kept in the store, one a minute of the last day, and those that this page takes of
// the metrics every few seconds while it is open; the last hour of these is kept here.
//
// Counters say how much there was since a process began, so what is drawn is the difference between two samples.

import { call } from "../lib/api.js";
import { nowMs } from "../lib/clock.js";
import { may } from "../lib/session.js";
import { buckets, by, one, quantile, readMetrics } from "./metrics.js";

export const EVERY_MS = 5000;
export const HOUR_MS = 3_600_000;
const LEAST_MS = 1000;
const MOST_ALERTS = 200;
const DAY_MS = 24 * HOUR_MS;
const STORED_MS = 60_000;
const MOST_STORED = 500;
const LIVE_MS = 2 * EVERY_MS; // how far apart two samples of the page may be without a hole, and a half

export class Samples {
  constructor() {
    Object.assign(this, { points: [], stored: [], takeovers: [], storedAt: 0, latest: null, nodes: new Map(), locks: [], alerts: [], lastAlert: 0, problem: null, listeners: new Set(), timer: 0 });
  }

  // Calls back after each sample until the signal aborts. Sampling goes on, so that coming back shows no hole.
  listen(listener, signal) {
    this.listeners.add(listener);
    signal.addEventListener("abort", () => this.listeners.delete(listener));
    if (this.timer === 0) this.begin();
  }

  begin() {
    this.timer = setInterval(() => !document.hidden && this.take(), EVERY_MS);
    document.addEventListener("visibilitychange", () => !document.hidden && this.take());
    this.take();
  }

  async take() {
    if (this.isTaking) return;
    this.isTaking = true;
    try {
      const since = new Date(nowMs() - DAY_MS).toISOString();
      const retried = may("runs:read") ? call("runs.count", { retrying: true }) : null;
      const [families, nodes, locks, takeovers, again] = await Promise.all([readMetrics(), call("system.nodes"), call("system.locks"), call("system.takeovers", { since }), retried]);
      this.locks = locks.items;
      this.takeovers = takeovers.items.reverse();
      this.add({ ...reading(families, nowMs()), retrying: again?.total });
      this.see(nodes.items);
      await this.hear();
      if (nowMs() - this.storedAt >= STORED_MS) await this.readStored();
      this.problem = null;
    } catch (problem) {
      if (problem.code === undefined) throw problem;
      this.problem = problem;
    } finally {
      this.isTaking = false;
      for (const listener of this.listeners) listener(this);
    }
  }

  add(now) {
    const before = this.latest;
    if (before !== null && now.at - before.at < LEAST_MS) return; // too close together to say how fast anything is
    this.latest = now;
    if (before !== null && now.created < before.created) this.forget(); // another process answers, or it began anew
    else if (before !== null) this.points.push(point(before, now));
    while (this.points.length > 0 && this.points[0].at < now.at - HOUR_MS) this.points.shift();
  }

  // What was sampled before this page was opened, over all nodes.
  async readStored() {
    const after = this.stored.at(-1)?.at ?? nowMs() - DAY_MS;
    for (let since = after; ;) {
      const { items } = await call("system.samples", { since: new Date(since).toISOString(), limit: MOST_STORED });
      this.stored.push(...items.map(storedPoint).filter((each) => each.at > (this.stored.at(-1)?.at ?? 0)));
      if (items.length < MOST_STORED) break;
      since = this.stored.at(-1).at;
    }
    while (this.stored.length > 0 && this.stored[0].at < nowMs() - DAY_MS) this.stored.shift();
    this.storedAt = nowMs();
  }

  // All of them in order.
  get all() {
    return [...this.stored, ...this.points].sort((one, other) => one.at - other.at);
  }

  forget() {
    Object.assign(this, { lastAlert: 0, alerts: [] });
  }

  // Nodes that are gone stay for an hour: that one is missing is what one came to see. One that has stopped in an orderly way,
  // such as for another version, has ended its lease before its time. One that has crashed was seen until its lease was nearly
  // over. Where there was no look at that time, as while a server is started again, nothing is claimed: a takeover says if it crashed.
  see(items) {
    const now = nowMs();
    for (const node of this.nodes.values()) {
      const until = Date.parse(node.lease_until);
      const hasExpired = until <= now && until - node.seenAt < 1.2 * EVERY_MS && now - node.seenAt < 3 * EVERY_MS;
      if (!node.isGone) node.hasStopped = !hasExpired;
      node.isGone = true;
    }
    for (const node of items) this.nodes.set(node.name, { ...node, seenAt: now, isGone: false });
    for (const [name, node] of this.nodes) if (now - node.seenAt > HOUR_MS) this.nodes.delete(name);
  }

  async hear() {
    const { items } = await call("system.alerts", { after: this.lastAlert, limit: 500 });
    if (items.length === 0) return;
    this.lastAlert = items.at(-1).number;
    this.alerts = [...items.reverse(), ...this.alerts].slice(0, MOST_ALERTS);
  }
}

function sum(counts) {
  return Object.values(counts).reduce((total, each) => total + each, 0);
}

function reading(families, at) {
  const events = by(families, "events_total", "type");
  return {
    at,
    runs: by(families, "runs", "status"),
    queues: by(families, "queue_jobs", "queue"),
    ready: one(families, "runs_ready"),
    leased: one(families, "runs_leased"),
    queued: one(families, "runs_queued"),
    lag: one(families, "ready_lag_seconds"),
    messages: one(families, "messages_waiting"),
    signals: one(families, "signals_waiting"),
    tasks: one(families, "tasks_open"),
    letters: one(families, "dead_letters_open"),
    running: one(families, "activities_running"),
    streams: one(families, "event_streams"),
    created: one(families, "runs_created_total"),
    finished: sum(by(families, "runs_finished_total", "status")),
    steps: (events.StepCompleted ?? 0) + (events.StepFailed ?? 0),
    lost: sum(by(families, "turns_lost_total", "reason")),
    commits: buckets(families, "commit_seconds"),
  };
}

function storedPoint(sample) {
  const minutes = Math.max(sample.every_s, 1) / 60;
  const loads = Object.values(sample.load);
  return {
    at: Date.parse(sample.at), every: Math.max(sample.every_s * 1000, STORED_MS), completed: sample.completed / minutes, failed: sample.failed / minutes,
    retrying: sample.retrying, paused: sample.runs.PAUSED ?? 0, running: sample.runs.RUNNING ?? 0, overdue: sample.overdue,
    lag: sample.lag_ms / 1000, ready: sample.ready, jobs: sample.jobs, queued: sample.queued, nodes: sample.nodes,
    owned: sum(loads.map((load) => load.runs)), activities: sum(loads.map((load) => load.activities)),
  };
}

function point(before, now) {
  const seconds = Math.max(0.001, (now.at - before.at) / 1000);
  const rate = (name) => Math.max(0, now[name] - before[name]) / seconds;
  const commit = (share) => {
    const found = quantile(before.commits, now.commits, share);
    return found === null ? null : found * 1000;
  };
  return {
    at: now.at, every: LIVE_MS, running: now.runs.RUNNING ?? 0, paused: now.runs.PAUSED ?? 0, retrying: now.retrying, finished: rate("finished"), started: rate("created"), steps: rate("steps"), lost: rate("lost"),
    commitHalf: commit(0.5), commitMost: commit(0.99), overdue: now.tasks === 0 ? 0 : undefined, lag: now.lag, ready: now.ready, jobs: sum(now.queues), queued: now.queued,
  };
}

export const samples = new Samples();
