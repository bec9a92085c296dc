// The audit log: what callers have changed, who they were, and when.

import { call } from "../lib/api.js";
import { debounced, h, newId, put } from "../lib/dom.js";
import { getQuery, runAddress, setQuery } from "../lib/router.js";
import { may } from "../lib/session.js";
import { denied, empty, failed, loading } from "../lib/states.js";
import { ageOf } from "../lib/time.js";

const PAGE = 100;
const FILTERS = [["operation", "Operation"], ["actor", "Actor"], ["run_id", "Run"]];
const HEADS = ["When", "Actor", "Token", "Operation", "About", "Outcome"];

export function showAudit(place, signal) {
  document.title = "Audit · Holdfast";
  if (!may("audit:read")) return put(place, denied({ details: { scope: "audit:read" } }));
  return new AuditView(place, signal);
}

class AuditView {
  constructor(place, signal) {
    Object.assign(this, { signal, filter: {}, items: [], next: null });
    const asked = getQuery();
    for (const [name] of FILTERS) if (asked[name]) this.filter[name] = asked[name];
    this.rows = h("div", { class: "audit-place" }, loading("Loading the audit log"));
    put(place, h("header", { class: "view-head" }, h("h1", {}, "Audit"), h("span", { class: "hint" }, "What callers have changed")), this.bar(), this.rows);
    this.load();
  }

  bar() {
    const changed = debounced(() => {
      setQuery(this.filter);
      this.load();
    }, 300);
    const fields = FILTERS.map(([name, word]) => {
      const id = newId("audit");
      const input = h("input", { id, type: "search", value: this.filter[name] ?? "", autocomplete: "off" });
      input.addEventListener("input", () => {
        const text = input.value.trim();
        if (text) this.filter[name] = text;
        else delete this.filter[name];
        changed();
      });
      return h("div", { class: "sift-field" }, h("label", { for: id }, word), input);
    });
    return h("form", { class: "sift audit-bar", onsubmit: (event) => event.preventDefault() }, fields);
  }

  async load(cursor = "") {
    const filter = { ...this.filter };
    try {
      const page = await call("audit.list", { ...filter, cursor, limit: PAGE }, this.signal);
      if (JSON.stringify(filter) !== JSON.stringify(this.filter)) return; // what was asked meanwhile comes by itself
      this.items = cursor ? [...this.items, ...page.items] : page.items;
      this.next = page.next;
      this.draw();
    } catch (problem) {
      if (problem.code === undefined && problem.name !== "AbortError") throw problem;
      if (problem.name !== "AbortError") put(this.rows, failed(problem, () => this.load()));
    }
  }

  draw() {
    if (this.items.length === 0) return put(this.rows, empty("Nothing here", "No caller has changed anything that fits."));
    const more = this.next && h("button", { class: "button", type: "button", onclick: () => this.load(this.next) }, "Show more");
    const head = h("tr", {}, HEADS.map((word) => h("th", { scope: "col" }, word)));
    const table = h("table", { class: "audit" }, h("thead", {}, head), h("tbody", {}, this.items.map(row)));
    put(this.rows, h("div", { class: "audit-scroll", tabindex: "0", role: "region", "aria-label": "Audit log" }, table), more);
  }
}

function row(entry) {
  const about = entry.run_id ? h("a", { class: "mono", href: runAddress(entry.run_id) }, entry.run_id) : entry.subject;
  const token = entry.by ? `${entry.by.name} (${entry.by.token_id})` : "";
  const detail = [entry.run_id ? entry.subject : "", entry.detail].filter(Boolean).join(" · ");
  return h(
    "tr",
    {},
    h("td", { class: "when" }, ageOf(entry.at)),
    h("td", {}, entry.actor),
    h("td", { class: "quiet" }, token),
    h("td", {}, h("code", {}, entry.operation)),
    h("td", { class: "about" }, about, detail && h("span", { class: "quiet" }, " ", detail)),
    h("td", {}, entry.outcome),
  );
}
