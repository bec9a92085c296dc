// The plans that are registered: their versions, drawn, compared with each other, and started.

import { call } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { getQuery, setQuery } from "../lib/router.js";
import { may } from "../lib/session.js";
import { empty, failed, loading } from "../lib/states.js";
import { ageOf } from "../lib/time.js";
import { RunGraph } from "../run/graph.js";
import { startDialog } from "../run/start.js";

const MOST = 500;

export function showPlans(place, signal) {
  document.title = "Plans · Holdfast";
  put(place, loading("Loading plans"));
  const open = async () => {
    try {
      const { items, next } = await call("plans.list", { limit: MOST }, signal);
      if (items.length === 0)
        put(
          place,
          empty("No plans yet", "Plans are documents that are run. holdfast plan register etl.yaml registers one."),
        );
      else new PlansPage(place, signal, items, next).begin();
    } catch (problem) {
      if (problem.code !== undefined) put(place, failed(problem, open));
      else if (problem.name !== "AbortError") throw problem;
    }
  };
  open();
}

// The versions of each plan, the newest first.
function byPlan(items) {
  const found = new Map();
  for (const item of items) found.set(item.plan_id, [...(found.get(item.plan_id) ?? []), item]);
  for (const versions of found.values())
    versions.sort(isNewer);
  return found;
}

// Instants have more digits than a Date keeps, and two versions may have the same.
function isNewer(one, other) {
  const [first, second] = [one, other].map(({ registered_at: at }) => [Date.parse(at), at]);
  return (
    second[0] - first[0] ||
    second[1].localeCompare(first[1]) ||
    other.plan_version.localeCompare(one.plan_version, undefined, { numeric: true })
  );
}

class PlansPage {
  constructor(place, signal, items, next) {
    Object.assign(this, { place, signal, hasMore: Boolean(next), plans: byPlan(items) });
  }

  begin() {
    const asked = getQuery();
    this.planId = this.plans.has(asked.plan) ? asked.plan : this.plans.keys().next().value;
    this.version = asked.version ?? null;
    this.before = asked.before ?? null;
    this.list = h("ul", { class: "plain-list plan-list" });
    this.main = h("div", { class: "run-main" });
    put(
      this.place,
      h("header", { class: "view-head" }, h("h1", {}, "Plans")),
      h(
        "div",
        { class: "plans-grid" },
        h("nav", { class: "card", "aria-label": "Plans that are registered" }, this.list),
        this.main,
      ),
    );
    this.show();
  }

  get versions() {
    return this.plans.get(this.planId);
  }

  choose(planId, version = null, before = null) {
    Object.assign(this, { planId, version, before });
    setQuery({ plan: planId, version: version ?? "", before: before ?? "" });
    this.show();
  }

  show() {
    this.showing?.abort();
    this.showing = new AbortController();
    this.signal.addEventListener("abort", () => this.showing.abort());
    put(
      this.list,
      [...this.plans].map(([planId, versions]) =>
        h(
          "li",
          {},
          h(
            "button",
            {
              class: "plan-item",
              type: "button",
              "aria-current": planId === this.planId ? "true" : null,
              onclick: () => this.choose(planId),
            },
            h("strong", {}, planId),
            h("span", { class: "quiet" }, versions.length === 1 ? "1 version" : `${versions.length} versions`),
          ),
        ),
      ),
      this.hasMore && h("li", { class: "quiet" }, `The first ${MOST} versions are shown.`),
    );
    const version = this.versions.find((each) => each.plan_version === this.version) ?? this.versions[0];
    const before = this.versions.find((each) => each.plan_version === this.before && each !== version) ?? null;
    this.showVersion(version, before, this.showing.signal);
  }

  showVersion(version, before, signal) {
    const about = { plan_id: this.planId, plan_version: version.plan_version };
    const compared = before && { plan_id: this.planId, from_version: before.plan_version, to_version: version.plan_version };
    const graph = new RunGraph({
      ask: (named) => call("plans.graph", { ...about, from_version: before?.plan_version, ...named }, signal),
      signal,
      label: "Graph of the plan",
      hasRun: false,
      onPick: (node) => this.changes?.reveal(node.id),
    });
    this.changes = before ? new Changes(compared, signal) : null;
    put(
      this.main,
      h(
        "section",
        { class: "card plan-head" },
        h(
          "div",
          { class: "card-body" },
          h("h2", {}, this.planId),
          choice("Version", this.versions, version, (chosen) => this.choose(this.planId, chosen, this.before)),
          this.versions.length > 1 &&
            choice("Compared with", [null, ...this.versions.filter((each) => each !== version)], before, (chosen) =>
              this.choose(this.planId, version.plan_version, chosen),
            ),
          h("span", { class: "hint" }, "registered ", ageOf(version.registered_at)),
          may("runs:write") &&
            h(
              "button",
              {
                class: "button primary",
                type: "button",
                onclick: () => startDialog({ plan: { plan_id: this.planId, plan_version: version.plan_version } }),
              },
              "Start a run",
            ),
        ),
      ),
      h("section", { class: "card graph-panel" }, h("header", {}, h("h2", {}, "Graph"), graph.tools), graph.element),
      this.changes?.element,
    );
    graph.load();
    this.changes?.load();
  }
}

function choice(word, versions, chosen, onChoose) {
  const select = h(
    "select",
    { "aria-label": word },
    versions.map((each) =>
      h("option", { value: each?.plan_version ?? "", selected: each === chosen }, each?.plan_version ?? "no other version"),
    ),
  );
  select.addEventListener("change", () => onChoose(select.value || null));
  return h("label", { class: "plan-choice" }, h("span", { class: "quiet" }, word), select);
}

// What differs between two versions, step by step.
class Changes {
  constructor(asked, signal) {
    Object.assign(this, { asked, signal });
    this.body = h("div", { class: "card-body" }, loading("Comparing"));
    this.element = h("section", { class: "card" }, h("header", {}, h("h2", {}, "Changes")), this.body);
  }

  async load() {
    try {
      this.show(await call("plans.diff", this.asked, this.signal));
    } catch (problem) {
      if (problem.code !== undefined) put(this.body, failed(problem));
      else if (problem.name !== "AbortError") throw problem;
    }
  }

  show({ added, removed, changed, fields }) {
    const line = (change, id, inner = null) =>
      h("li", { dataset: { change, step: id } }, h("span", { class: "change" }, change), " ", h("code", {}, id), inner);
    const lines = [
      ...(fields.length > 0 ? [line("changed", "the plan itself", sides(fields))] : []),
      ...added.map((id) => line("added", id)),
      ...removed.map((id) => line("removed", id)),
      ...changed.map(({ step_id: id, fields: inner }) => line("changed", id, sides(inner))),
    ];
    put(
      this.body,
      lines.length === 0
        ? h("p", { class: "quiet" }, "Nothing that matters differs.")
        : h("ul", { class: "plain-list changes" }, lines),
    );
  }

  reveal(stepId) {
    const found = [...this.body.querySelectorAll("[data-step]")].find((each) => each.dataset.step === stepId);
    found?.scrollIntoView({ block: "nearest" });
    found?.querySelector("details")?.setAttribute("open", "");
  }
}

function sides(fields) {
  return h(
    "details",
    { open: fields.length < 4 },
    h("summary", {}, fields.map(({ field }) => field).join(", ")),
    h(
      "table",
      { class: "sides" },
      h("thead", {}, h("tr", {}, ["Field", "Before", "Now"].map((word) => h("th", { scope: "col" }, word)))),
      h(
        "tbody",
        {},
        fields.map(({ field, before, after }) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, field),
            [before, after].map((value) =>
              h("td", {}, value === undefined ? h("span", { class: "quiet" }, "–") : h("pre", {}, JSON.stringify(value, null, 2))),
            ),
          ),
        ),
      ),
    ),
  );
}
