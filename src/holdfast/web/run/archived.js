// A run that retention has deleted: that it is archived, and its history from there.

import { call } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { statusBadge } from "../lib/icons.js";
import { jsonView } from "../lib/json.js";
import { failed } from "../lib/states.js";
import { ageOf, moment } from "../lib/time.js";

const PAGE = 200;

// Shows the run in this place, and returns true; false if it is not archived either.
export async function showArchived(place, signal, runId) {
  let run;
  try {
    run = await call("archive.get", { run_id: runId }, signal);
  } catch (problem) {
    if (problem.code === undefined) throw problem;
    return false;
  }
  new ArchivedPage(place, signal, run).more();
  return true;
}

class ArchivedPage {
  constructor(place, signal, run) {
    Object.assign(this, { signal, run, after: 0 });
    this.log = h("ol", { class: "archived-events" });
    this.next = h("button", { class: "button", type: "button", onclick: () => this.more() }, "More events");
    this.problem = h("div");
    const facts = [["Ended", ageOf(run.finished_at)], ["Archived", ageOf(run.archived_at)], ["Tenant", run.tenant], ["Version", run.workflow_version], ["Events", run.events], ["Kept in", h("code", {}, run.object_key)]];
    put(
      place,
      h("header", { class: "view-head" }, h("h1", {}, run.workflow), statusBadge(run.status), h("code", { class: "mono" }, run.run_id)),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Archived")), h("div", { class: "card-body" }, h("p", {}, "This run has been deleted by retention. Its history is in the archive."), h("dl", { class: "facts" }, facts.map(([term, fact]) => [h("dt", {}, term), h("dd", {}, fact)])))),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Events")), h("div", { class: "card-body" }, this.log, this.problem, this.next)),
    );
  }

  async more() {
    this.next.disabled = true;
    try {
      const page = await call("archive.events", { run_id: this.run.run_id, after: this.after, limit: PAGE }, this.signal);
      for (const event of page.items) this.log.append(this.line(event));
      this.after = page.items.at(-1)?.run_seq ?? this.run.events;
      put(this.problem);
    } catch (problem) {
      if (problem.code === undefined) throw problem;
      put(this.problem, failed(problem));
    }
    this.next.disabled = false;
    this.next.hidden = this.after >= this.run.events;
  }

  line(event) {
    return h(
      "li", { value: event.run_seq },
      h("details", {}, h("summary", {}, h("b", {}, event.event_type), " ", event.step_id && h("code", {}, event.step_id), " ", h("span", { class: "quiet" }, moment(event.persisted_at))), jsonView(event.data)),
    );
  }
}
