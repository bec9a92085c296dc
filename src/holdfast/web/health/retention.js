// Retention: what is kept for how long, what would go now, and what went.

import { call } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { ageOf } from "../lib/time.js";
import { panel } from "./panels.js";

const number = new Intl.NumberFormat();
const COUNTED = [
  ["runs", "Runs"], ["archived", "Runs archived"], ["events", "Events"], ["tasks", "Tasks"], ["runtime_states", "Snapshots"], ["acceptance_records", "Acceptance records"],
  ["dead_letters", "Dead letters"], ["audit_entries", "Audit entries"], ["outbox", "Outbox"], ["stale_runs", "Stale runs, which stay"], ["stale_tasks", "Stale tasks, which stay"],
];

const days = (count) => (count === null ? "for ever" : `${number.format(count)} ${count === 1 ? "day" : "days"}`);

function ruleWords({ workflow, status, tenant }) {
  const words = [workflow && `of ${workflow}`, status && `with ${status}`, tenant && `of tenant ${tenant}`].filter(Boolean);
  return words.length === 0 ? "Finished runs" : `Finished runs ${words.join(", ")}`;
}

function counts(report) {
  const rows = COUNTED.filter(([field]) => report[field] > 0).map(([field, word]) => [h("dt", {}, word), h("dd", {}, number.format(report[field]))]);
  return rows.length === 0 ? h("p", { class: "hint" }, "Nothing is past its window.") : h("dl", { class: "counts" }, rows);
}

export class RetentionPanel {
  constructor(signal) {
    this.signal = signal;
    this.body = h("div", { class: "retention" }, h("p", { class: "hint" }, "Loading…"));
    this.found = h("div", { role: "status" });
    this.element = panel("Retention", "CANCELLED", this.body);
    this.read();
  }

  async read() {
    try {
      this.show(await call("retention.show", {}, this.signal));
    } catch (problem) {
      if (problem.code === undefined && problem.name !== "AbortError") throw problem;
      if (problem.code !== undefined) put(this.body, h("p", { class: "hint" }, problem.message));
    }
  }

  show({ rules, windows_days: windows, node, history, archive }) {
    const kept = rules.map((rule) => [h("dt", {}, ruleWords(rule)), h("dd", {}, days(rule.finished_days))]);
    const others = Object.entries(windows).filter(([, window]) => window !== null).map(([name, window]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, days(window))]);
    const went = history.slice(0, 10).map((entry) => h("li", {}, h("span", { class: "quiet" }, ageOf(entry.at), " "), entry.detail));
    put(
      this.body,
      h("dl", { class: "counts" }, kept, others),
      h("p", { class: "hint" }, node ? `Node ${node} looks after it.` : "No node looks after it.", archive ? " Histories are archived before they go." : ""),
      h("button", { class: "button", type: "button", onclick: () => this.preview() }, "What would go now?"), this.found,
      h("h3", {}, "What went"), went.length === 0 ? h("p", { class: "hint" }, "Nothing yet.") : h("ul", { class: "alerts" }, went),
    );
  }

  async preview() {
    put(this.found, h("p", { class: "hint" }, "Counting…"));
    try {
      const report = await call("retention.preview", {}, this.signal);
      put(this.found, counts(report), report.has_more && h("p", { class: "hint" }, "And more."));
    } catch (problem) {
      if (problem.code === undefined) throw problem;
      put(this.found, h("p", { class: "hint" }, problem.message));
    }
  }
}
