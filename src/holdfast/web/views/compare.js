// Two runs, such as a fork and the run that it is from: their histories side by side, and where they part.

import { call } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { shortId } from "../lib/ids.js";
import { statusBadge } from "../lib/icons.js";
import { jsonView } from "../lib/json.js";
import { render, runAddress } from "../lib/router.js";
import { failed, loading } from "../lib/states.js";
import { precise } from "../lib/time.js";
import { TONES } from "../run/event-tables.js";
import { eventWord, gistOf } from "../run/words.js";

const BEFORE = 5; // how many events that are the same are shown before the histories part
const PAGE = 50;

export function showCompare(place, signal, { run_id: runId, other_id: otherId }) {
  document.title = "Compare two runs · Holdfast";
  put(place, loading("Comparing the runs"));
  const open = async () => {
    try {
      const ask = (id) => call("runs.get", { run_id: id }, signal);
      const runs = await Promise.all([ask(runId), ask(otherId)]);
      const difference = await call("runs.diff", { run_id: runId, other_run_id: otherId }, signal);
      await new Comparison(place, signal, runs, difference).begin();
    } catch (problem) {
      if (problem.code !== undefined) put(place, failed(problem, open));
      else if (problem.name !== "AbortError") throw problem;
    }
  };
  return open();
}

class Comparison {
  constructor(place, signal, runs, difference) {
    Object.assign(this, { place, signal, runs, difference });
    this.first = Math.max(1, (difference.parts_at ?? 1) - BEFORE);
    this.last = Math.max(...runs.map((run) => run.last_event_seq));
    this.next = this.first;
    this.rows = h("ol", { class: "compared", "aria-label": "Events of both runs" });
    this.earlier = h("button", { class: "button", type: "button", onclick: () => this.fromStart() }, "From the first event");
    this.later = h("button", { class: "button", type: "button", onclick: () => this.more() }, "More events");
  }

  async begin() {
    const titles = this.runs.map((run) =>
      h(
        "div",
        { class: "compared-run" },
        h("h2", {}, h("a", { href: runAddress(run.run_id), title: run.run_id }, run.reference_key ?? shortId(run.run_id))),
        statusBadge(run.status),
        h("p", { class: "quiet" }, run.reference_key && [h("span", { class: "mono" }, shortId(run.run_id)), " "], `${run.workflow} version ${run.workflow_version}, ${run.last_event_seq.toLocaleString()} events`),
      ),
    );
    put(
      this.place,
      h("header", { class: "view-head" }, h("h1", {}, "Compare two runs")),
      h("p", { class: "compared-verdict", role: "status" }, this.verdict()),
      h("section", { class: "card" }, h("header", { class: "compared-heads" }, titles), this.earlier, this.rows, this.later),
    );
    await this.more();
  }

  verdict() {
    const { parts_at: at, event_type: own, other_event_type: other, is_whole: isWhole } = this.difference;
    if (at === null) return isWhole ? "Both histories are the same." : "As far as they were compared, both histories are the same.";
    const word = (type) => (type === null ? "nothing" : eventWord(type));
    return `The histories part at event ${at}: ${word(own)} on the left, ${word(other)} on the right.`;
  }

  async fromStart() {
    this.first = this.next = 1;
    put(this.rows);
    await this.more();
  }

  async more() {
    const { signal } = this;
    this.later.disabled = true;
    try {
      const ask = (run) => call("runs.events", { run_id: run.run_id, after: this.next - 1, limit: PAGE }, signal);
      const pages = await Promise.all(this.runs.map(ask));
      const [own, other] = pages.map(({ items }) => new Map(items.map((event) => [event.run_seq, event])));
      for (let seq = this.next, end = this.endOf(pages); seq <= end; seq += 1) this.add(seq, own.get(seq), other.get(seq));
    } catch (problem) {
      if (problem.code === undefined) throw problem;
      put(this.rows, h("li", {}, failed(problem, () => render())));
    }
    this.later.disabled = false;
    this.later.hidden = this.next > this.last;
    this.earlier.hidden = this.first === 1;
  }

  // A page of large events ends early: then both are shown up to there, and the rest is read with the next.
  endOf(pages) {
    const ends = pages.map(({ items }, index) => items.at(-1)?.run_seq ?? this.runs[index].last_event_seq);
    const cut = ends.filter((end, index) => end < this.runs[index].last_event_seq);
    return Math.min(this.next + PAGE - 1, this.last, ...cut);
  }

  add(seq, own, other) {
    this.next = seq + 1;
    const { parts_at: at } = this.difference;
    if (seq === at) this.rows.append(h("li", { class: "compared-mark" }, "Here they part"));
    this.rows.append(h("li", { class: "compared-row", dataset: { parted: String(at !== null && seq >= at) } }, this.cell(own, "left"), this.cell(other, "right")));
  }

  cell(event, side) {
    if (event === undefined) return h("div", { class: "compared-cell", dataset: { side } });
    return h(
      "details",
      { class: "compared-cell", dataset: { side, tone: TONES[event.event_type] ?? "plain" } },
      h("summary", {}, h("span", { class: "log-seq numbers" }, event.run_seq), " ", h("b", {}, eventWord(event.event_type)), " ", event.step_id && h("code", {}, event.step_id), " ", gistOf(event)),
      h("p", { class: "quiet" }, precise(event.persisted_at)),
      jsonView(event.data, { label: "Data" }),
    );
  }
}
