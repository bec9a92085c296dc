// Samples of the metrics, taken every few seconds while the page is open; the last hour of them is kept.
//
// Counters say how much there was since a process began, so what is drawn is the difference between two samples.

import { call } from "../lib/api.js";
import { nowMs } from "../lib/clock.js";
import { buckets, by, one, quantile, readMetrics } from "./metrics.js";

export const EVERY_MS = 5000;
export const HOUR_MS = 3_600_000;
const LEAST_MS = 1000;
const MOST_ALERTS = 200;

export class Samples {
  constructor() {
    Object.assign(this, { points: [], latest: null, nodes: new Map(), locks: [], alerts: [], lastAlert: 0, problem: null, listeners: new Set(), timer: 0 });
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
      const [families, nodes, locks] = await Promise.all([readMetrics(), call("system.nodes"), call("system.locks")]);
      this.locks = locks.items;
      this.add(reading(families, nowMs()));
      this.see(nodes.items);
      await this.hear();
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

  forget() {
    Object.assign(this, { lastAlert: 0, alerts: [] });
  }

  // Nodes that are gone stay for an hour: that one is missing is what one came to see.
  see(items) {
    const now = nowMs();
    for (const node of this.nodes.values()) node.isGone = true;
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

function point(before, now) {
  const seconds = Math.max(0.001, (now.at - before.at) / 1000);
  const rate = (name) => Math.max(0, now[name] - before[name]) / seconds;
  const commit = (share) => {
    const found = quantile(before.commits, now.commits, share);
    return found === null ? null : found * 1000;
  };
  return {
    at: now.at, finished: rate("finished"), started: rate("created"), steps: rate("steps"), lost: rate("lost"),
    commitHalf: commit(0.5), commitMost: commit(0.99), lag: now.lag, ready: now.ready, jobs: sum(now.queues), queued: now.queued,
  };
}

export const samples = new Samples();
