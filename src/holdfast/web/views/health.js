// Health: whether work goes on, how fast, and what is in its way.

import { call, Problem } from "../lib/api.js";
import { nowMs } from "../lib/clock.js";
import { h, put } from "../lib/dom.js";
import { getQuery, setQuery } from "../lib/router.js";
import { may, who } from "../lib/session.js";
import { denied, failed, loading } from "../lib/states.js";
import { showConnection } from "../shell.js";
import { BusPanel } from "../health/bus.js";
import { Chart } from "../health/chart.js";
import { alertList, concerns, findings, limitList, lockList, nodeList, queueList, runCounts, takeoverList, verdict, work } from "../health/panels.js";
import { RetentionPanel } from "../health/retention.js";
import { EVERY_MS, samples } from "../health/samples.js";

const EXAMINE_MS = 15_000;
const RANGES = [["5", "5 min"], ["15", "15 min"], ["60", "1 h"], ["360", "6 h"], ["1440", "24 h"]];
const short = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3, notation: "compact" });
const count = (value) => short.format(value);
const perSecond = (value) => `${short.format(value)}/s`;
const perMinute = (value) => `${short.format(value)}/min`;
const milliseconds = (value) => `${short.format(value)} ms`;
const line = (name, word, mark) => ({ name, word, mark });

function makeCharts() {
  return [
    new Chart({ title: "Failures", hint: "Runs that have failed, over all nodes", show: perMinute, least: 1, lines: [line("failed", "failed", "b")] }),
    new Chart({ title: "Trouble", hint: "Retrying and paused runs, overdue tasks", show: count, least: 4, lines: [line("retrying", "retrying", "b"), line("paused", "paused", "c"), line("overdue", "overdue", "a")] }),
    new Chart({ title: "Lag", hint: "How long the run that is due for longest has been so", show: (value) => `${short.format(value)} s`, least: 1, lines: [line("lag", "behind", "b")] }),
    new Chart({ title: "Waiting", hint: "Runs that are due, jobs in queues, runs without a place", show: count, least: 4, lines: [line("ready", "due", "a"), line("jobs", "jobs", "b"), line("queued", "without a place", "c")] }),
    new Chart({ title: "Completed", hint: "Runs that have completed, over all nodes", show: perMinute, least: 1, lines: [line("completed", "completed", "a")] }),
    new Chart({ title: "Load", hint: "What the nodes have in hand", show: count, least: 4, lines: [line("running", "runs", "a"), line("activities", "activities", "b"), line("nodes", "nodes", "c")] }),
    new Chart({ title: "Throughput", hint: "Of the process that answers here", isLive: true, show: perSecond, lines: [line("steps", "steps", "a"), line("finished", "runs finished", "b")] }),
    new Chart({ title: "Commit latency", hint: "How long the store takes to keep a turn", isLive: true, show: milliseconds, lines: [line("commitHalf", "median", "a"), line("commitMost", "99th percentile", "b")] }),
  ];
}

export function showHealth(place, signal) {
  document.title = "Health · Holdfast";
  if (!may("system:read")) return put(place, denied(refusal()));
  return new HealthView(place, signal);
}

function refusal() {
  if (who().tenant) return new Problem({ code: "NotPermitted", detail: "Health is about all tenants together; it needs a token without a tenant." });
  return new Problem({ code: "NotPermitted", details: { scope: "system:read" } });
}

class HealthView {
  constructor(place, signal) {
    Object.assign(this, { place, charts: makeCharts(), workflows: [], isBuilt: false });
    const asked = getQuery().range;
    this.range = RANGES.some(([minutes]) => minutes === asked) ? asked : "15";
    this.verdict = h("div", { role: "status" });
    this.panels = h("div", { class: "panels" });
    this.retention = new RetentionPanel(signal);
    put(place, loading("Taking the first sample"));
    this.bus = may("letters:read") && new BusPanel(signal);
    this.examine(signal);
    const examining = setInterval(() => !document.hidden && this.examine(signal), EXAMINE_MS);
    signal.addEventListener("abort", () => clearInterval(examining));
    samples.listen(() => {
      this.draw();
      if (this.bus) this.bus.read();
    }, signal);
    if (samples.latest !== null) this.draw();
    this.readWorkflows(signal);
  }

  // The doctor reads more than a sample does, and comes less often.
  async examine(signal) {
    try {
      this.report = await call("system.doctor", {}, signal);
      this.draw();
    } catch (problem) {
      if (problem.code === undefined && problem.name !== "AbortError") throw problem; // the samples say what is wrong
    }
  }

  async readWorkflows(signal) {
    if (!may("workflows:read")) return;
    try {
      this.workflows = (await call("workflows.list", {}, signal)).items;
      this.draw();
    } catch (problem) {
      if (problem.code === undefined && problem.name !== "AbortError") throw problem;
    }
  }

  build() {
    const ranges = RANGES.map(([minutes, word]) => h("button", { type: "button", "aria-pressed": String(minutes === this.range), onclick: (event) => this.choose(minutes, event.currentTarget) }, word));
    this.ranges = h("div", { class: "ranges", role: "group", "aria-label": "How far back" }, ranges);
    put(
      this.place, h("header", { class: "view-head" }, h("h1", {}, "Health"), h("span", { class: "hint" }, `A sample a minute is kept for a day; while this page is open, one every ${EVERY_MS / 1000} seconds`), h("div", { class: "actions" }, this.ranges)),
      this.verdict, h("div", { class: "charts" }, this.charts.map((chart) => chart.element)), this.panels,
    );
    this.isBuilt = true;
  }

  // It is read out, so it is put there again only when it says something else.
  judge(problem) {
    const found = problem ? failed(problem) : verdict([...concerns(samples, this.report), ...findings(this.report)]);
    if (found.textContent !== this.verdict.textContent) put(this.verdict, found);
  }

  choose(minutes, button) {
    this.range = minutes;
    for (const each of this.ranges.children) each.setAttribute("aria-pressed", String(each === button));
    setQuery({ range: minutes === "15" ? "" : minutes });
    this.draw();
  }

  draw() {
    const { problem, latest, all } = samples;
    showConnection(problem?.isUnreachable ? "lost" : "live");
    if (latest === null) {
      if (problem) put(this.place, failed(problem, () => samples.take()));
      return;
    }
    if (!this.isBuilt) this.build();
    this.judge(problem);
    const until = nowMs();
    for (const chart of this.charts) chart.draw(all, until - Number(this.range) * 60_000, until);
    const focused = [...this.panels.querySelectorAll("a, button")].indexOf(document.activeElement);
    put(this.panels, nodeList(samples), takeoverList(samples), lockList(samples), runCounts(samples), work(samples), queueList(samples), limitList(samples, this.workflows), alertList(samples), this.bus && this.bus.element, this.retention.element);
    if (focused >= 0) this.panels.querySelectorAll("a, button")[focused]?.focus({ preventScroll: true });
  }
}
