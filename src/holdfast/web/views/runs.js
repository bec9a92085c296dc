// All runs, live.

import { call } from "../lib/api.js";
import { h, on, perFrame, put } from "../lib/dom.js";
import { icon, statusWord } from "../lib/icons.js";
import { Rows } from "../lib/rows.js";
import { may } from "../lib/session.js";
import { empty, failed, loading } from "../lib/states.js";
import { knownWorkflows } from "../lib/workflows.js";
import { startDialog } from "../run/start.js";
import { bulkBar } from "../runs/bulk.js";
import { filterBar } from "../runs/filter.js";
import { LiveRuns } from "../runs/live.js";
import { isTagged, runRow } from "../runs/row.js";
import { askedOf } from "../runs/source.js";
import { COLUMNS, viewMenu } from "../runs/view-menu.js";
import { showConnection } from "../shell.js";

const COUNT_EVERY_MS = 5000;

export function showRuns(place, signal) {
  document.title = "Runs · Holdfast";
  new RunsPage(place, signal);
}

class RunsPage {
  constructor(place, signal) {
    this.signal = signal;
    this.canSelect = may("runs:control") || may("signals:write");
    this.selected = new Map();
    this.isAll = false;
    this.total = null;
    this.lastSelected = null;
    this.names = [];
    this.show = perFrame(() => signal.aborted || this.showNow());
    this.bar = filterBar(
      (filter) => this.begin(filter),
      () => ({ workflows: this.names, attributes: this.attributes }),
    );
    this.note = h("p", { class: "list-note quiet", role: "status" });
    this.everything = this.canSelect && h("button", { class: "link-button everything", type: "button", hidden: true, onclick: () => this.selectAll() }, "");
    this.state = h("div", {});
    this.bulk = bulkBar(
      () => this.scope,
      () => this.select([], false),
      () => this.selectAll(),
    );
    this.rows = new Rows({
      signal,
      keyOf: (run) => run.run_id,
      onNearEnd: () => this.runs.more(),
      make: (run) => this.row(run),
    });
    this.table = this.makeTable();
    const view = (this.view = viewMenu({ bar: this.bar, table: this.table, onLook: () => this.runs && this.show(), signal }));
    const start = may("runs:write") && startButton([icon("plus"), "Start a run"]);
    put(
      place,
      h("div", { class: "view-head list-head" }, h("h1", {}, "Runs"), this.note, this.everything, h("div", { class: "actions" }, view.element, start)),
      this.bar.element,
      this.bulk.element,
      this.table,
      this.state,
    );
    this.listen();
    this.begin({ ...this.bar.filter });
    this.nameWorkflows();
    const counting = setInterval(() => !document.hidden && this.count(), COUNT_EVERY_MS);
    signal.addEventListener("abort", () => clearInterval(counting));
  }

  // What a command is about: the runs that were selected, or all that the filter finds.
  get scope() {
    const runs = this.isAll ? this.runs.items : [...this.selected.values()];
    return { runs, asked: this.isAll ? this.runs.source.asked : null, count: this.isAll ? (this.total ?? runs.length) : runs.length };
  }

  get attributes() {
    return [...new Set(this.runs.items.flatMap((run) => Object.keys(run.attributes ?? {})))].sort();
  }

  makeTable() {
    const all = h("input", { type: "checkbox", "aria-label": "Select all that are loaded" });
    this.box = all;
    all.addEventListener("change", () => {
      this.selected.clear();
      this.select(all.checked ? this.runs.items : [], true);
    });
    const head = h(
      "div",
      { class: "run-row run-head", role: "row", "aria-rowindex": 1 },
      this.canSelect && h("div", { class: "c-box", role: "columnheader" }, all),
      Object.entries(COLUMNS).map(([name, [word]]) => h("div", { class: `c-${name}`, role: "columnheader" }, word)),
    );
    return h(
      "div",
      { class: `run-table card${this.canSelect ? "" : " plain"}`, role: "table", "aria-label": "Runs" },
      h("div", { role: "rowgroup", class: "rows-head" }, head),
      this.rows.element,
    );
  }

  listen() {
    const keys = (event) => {
      if (event.key !== "/" || event.target.matches("input, textarea, select")) return;
      event.preventDefault();
      this.bar.search.focus();
    };
    const inSearch = (event) => {
      if (event.key !== "ArrowDown" && event.key !== "Enter") return;
      event.preventDefault();
      this.rows.focus(0);
    };
    on(document, "keydown", keys, this.signal);
    on(this.bar.search, "keydown", inSearch, this.signal);
  }

  begin(filter) {
    this.reading?.abort();
    const reading = new AbortController();
    this.reading = reading;
    this.signal.addEventListener("abort", () => reading.abort(), { signal: reading.signal });
    this.selected.clear();
    this.box.checked = false;
    this.isAll = false;
    this.total = null;
    this.hasTags = false;
    this.runs = new LiveRuns(filter, {
      signal: reading.signal,
      wanted: () => this.rows.range()[1],
      onState: (state, problem) => this.heard(state, problem),
      onChange: (at) => this.changed(at),
    });
    this.bulk.update();
    this.show();
    this.count();
  }

  // How many the filter finds of each status, and how many there are of the one that is shown.
  async count() {
    if (this.isCounting) return;
    this.isCounting = true;
    const { runs } = this;
    const { status, retrying, ...asked } = askedOf(this.bar.filter);
    try {
      const [all, again] = await Promise.all([
        call("runs.count", asked, this.signal),
        call("runs.count", { ...asked, retrying: true }, this.signal),
      ]);
      if (runs === this.runs) {
        this.bar.setCounts({ "": all.total, ...all.by_status, RETRYING: again.total });
        this.total = retrying ? again.total : status ? (all.by_status[status] ?? 0) : all.total;
        this.bulk.update(this.matching);
        this.show();
      }
    } catch (problem) {
      if (problem.code === undefined && problem.name !== "AbortError") throw problem; // the list works without
    } finally {
      this.isCounting = false;
    }
    if (runs !== this.runs && !this.signal.aborted) this.count();
  }

  heard(state, problem) {
    showConnection(state);
    if (state === "refused" && !problem.isSignedOut) put(this.state, failed(problem));
  }

  // What one reads must not move when something is put above it.
  changed(at) {
    if (at >= 0 && at < this.rows.range()[0]) requestAnimationFrame(() => window.scrollBy(0, this.rows.height));
    this.show();
  }

  showNow() {
    const { items, source, isBusy, problem } = this.runs;
    this.hasTags ||= items.some(isTagged); // and keeps the column: what one reads must not move to and fro
    this.view.expectTags(this.hasTags);
    this.rows.set(items);
    this.table.setAttribute("aria-rowcount", source.isWhole ? items.length + 1 : -1);
    this.table.hidden = items.length === 0;
    const of = source.isWhole ? "" : this.total > items.length ? ` of ${this.total.toLocaleString()}` : "+";
    this.note.textContent = items.length === 0 ? "" : `${items.length.toLocaleString()}${of} shown`;
    this.offerEverything();
    if (problem)
      put(
        this.state,
        failed(problem, () => this.runs.refill()),
      );
    else if (isBusy) put(this.state, items.length === 0 && loading("Loading runs"));
    else put(this.state, items.length === 0 && this.nothing());
  }

  nothing() {
    if (this.bar.isEmpty()) {
      const start = may("runs:write") && startButton("Start the first");
      return empty("No runs yet", "They appear here the moment they are started.", start);
    }
    const clear = h("button", { class: "button", type: "button", onclick: this.bar.clear }, "Clear the filter");
    const among = () => {
      this.bar.take({ ...this.bar.filter, children: "1" });
    };
    const children =
      askedOf(this.bar.filter).roots &&
      h("button", { class: "button", type: "button", onclick: among }, "Look among children too");
    const { status, text } = this.bar.filter;
    const isCalm = ["RETRYING", "PAUSED", "FAILED"].includes(status) && !text;
    return empty(isCalm ? `No run is ${statusWord(status).toLowerCase()}` : "No run matches", "", h("div", { class: "actions" }, clear, children));
  }

  row(run) {
    const isSelected = this.isAll || this.selected.has(run.run_id);
    const onSelect = (chosen, isOn, isRange) => {
      this.select(isRange && this.lastSelected ? between(this.runs.items, this.lastSelected, chosen) : [chosen], isOn);
      this.lastSelected = chosen;
    };
    return runRow(run, { canSelect: this.canSelect, isSelected, onSelect });
  }

  // Adds runs to the selection or takes them out; without any it is emptied.
  select(runs, isOn) {
    if (runs.length === 0) this.box.checked = false;
    if (runs.length === 0) this.selected.clear();
    if (this.isAll && !isOn) for (const run of this.runs.items) this.selected.set(run.run_id, run);
    this.isAll = false;
    for (const run of runs) {
      if (isOn) this.selected.set(run.run_id, run);
      else this.selected.delete(run.run_id);
    }
    if (runs.length === 0) this.selected.clear();
    this.rows.refresh();
    this.bulk.update(this.matching);
    this.offerEverything();
  }

  // How many the filter finds, where all that are loaded are selected and there are more; 0 if that is not known yet.
  get matching() {
    const isEverything = this.selected.size > 0 && this.selected.size >= this.runs.items.length;
    return !this.isAll && isEverything && !this.runs.source.isWhole ? (this.total ?? 0) : null;
  }

  // Also where rows have no boxes, as on a phone, one act is enough to mean all that the filter finds.
  offerEverything() {
    if (!this.everything) return;
    const { items, source } = this.runs;
    const count = source.isWhole || this.total === null ? items.length : Math.max(this.total, items.length);
    this.everything.hidden = items.length === 0 || this.isAll || this.selected.size > 0;
    this.everything.textContent = this.total === null && !source.isWhole ? "Select all" : `Select all ${count.toLocaleString()}`;
  }

  // All that the filter finds is meant from now on, whether it is loaded here or not.
  selectAll() {
    this.isAll = true;
    this.box.checked = true;
    this.rows.refresh();
    this.bulk.update();
    this.offerEverything();
  }

  async nameWorkflows() {
    const known = await knownWorkflows().catch(() => []); // the list works without their names
    this.names = [...new Set(known.map(({ name }) => name))];
    this.bar.nameWorkflows(this.names);
  }
}

function startButton(words) {
  return h("button", { class: "button primary", type: "button", onclick: () => startDialog() }, words);
}

function between(items, one, other) {
  const places = [one, other].map((run) => items.findIndex((each) => each.run_id === run.run_id));
  const [from, until] = places.sort((a, b) => a - b);
  return items.slice(Math.max(0, from), until + 1);
}
