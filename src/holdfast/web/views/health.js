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
import { alertList, concerns, findings, limitList, lockList, nodeList, queueList, runCounts, verdict, work } from "../health/panels.js";
import { RetentionPanel } from "../health/retention.js";
import { EVERY_MS, samples } from "../health/samples.js";

const EXAMINE_MS = 15_000;
const RANGES = [["5", "5 min"], ["15", "15 min"], ["60", "1 h"]];
const short = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3, notation: "compact" });
const perSecond = (value) => `${short.format(value)}/s`;
const milliseconds = (value) => `${short.format(value)} ms`;

function makeCharts() {
  return [
    new Chart({ title: "Throughput", hint: "Of the process that answers here", show: perSecond, lines: [{ name: "steps", word: "steps", mark: "a" }, { name: "finished", word: "runs finished", mark: "b" }] }),
    new Chart({ title: "Commit latency", hint: "How long the store takes to keep a turn", show: milliseconds, lines: [{ name: "commitHalf", word: "median", mark: "a" }, { name: "commitMost", word: "99th percentile", mark: "b" }] }),
    new Chart({ title: "Lag", hint: "How long the run that is due for longest has been so", show: (value) => `${short.format(value)} s`, least: 1, lines: [{ name: "lag", word: "behind", mark: "b" }] }),
    new Chart({ title: "Waiting", hint: "Runs that are due, jobs in queues, runs without a place", show: (value) => short.format(value), least: 4, lines: [{ name: "ready", word: "due", mark: "a" }, { name: "jobs", word: "jobs", mark: "b" }, { name: "queued", word: "without a place", mark: "c" }] }),
  ];
}

export function showHealth(place, signal) {
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
      this.place, h("header", { class: "view-head" }, h("h1", {}, "Health"), h("span", { class: "hint" }, `A sample every ${EVERY_MS / 1000} seconds while this page is open`), h("div", { class: "actions" }, this.ranges)),
      this.verdict, h("div", { class: "charts" }, this.charts.map((chart) => chart.element)), this.panels,
    );
    this.isBuilt = true;
  }

  // It is read out, so it is put there again only when it says something else.
  judge(problem) {
    const found = problem ? failed(problem) : verdict([...concerns(samples), ...findings(this.report)]);
    if (found.textContent !== this.verdict.textContent) put(this.verdict, found);
  }

  choose(minutes, button) {
    this.range = minutes;
    for (const each of this.ranges.children) each.setAttribute("aria-pressed", String(each === button));
    setQuery({ range: minutes === "15" ? "" : minutes });
    this.draw();
  }

  draw() {
    const { problem, latest, points } = samples;
    showConnection(problem?.isUnreachable ? "lost" : "live");
    if (latest === null) {
      if (problem) put(this.place, failed(problem, () => samples.take()));
      return;
    }
    if (!this.isBuilt) this.build();
    this.judge(problem);
    const until = nowMs();
    for (const chart of this.charts) chart.draw(points, until - Number(this.range) * 60_000, until);
    const focused = [...this.panels.querySelectorAll("a, button")].indexOf(document.activeElement);
    put(this.panels, nodeList(samples), lockList(samples), runCounts(samples), work(samples), queueList(samples), limitList(samples, this.workflows), alertList(samples), this.bus && this.bus.element, this.retention.element);
    if (focused >= 0) this.panels.querySelectorAll("a, button")[focused]?.focus({ preventScroll: true });
  }
}
