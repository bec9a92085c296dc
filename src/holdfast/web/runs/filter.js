// What to show of all runs. The filter is in the address, so it can be kept and sent.

import { debounced, h, put } from "../lib/dom.js";
import { icon, statusWord } from "../lib/icons.js";
import { getQuery, setQuery } from "../lib/router.js";

const STATUSES = ["RUNNING", "PAUSED", "FAILED", "PENDING", "APPROVED", "COMPLETED", "CANCELLED"];
const TIMES = [
  ["", "Any time"],
  ["1h", "Last hour"],
  ["24h", "Last day"],
  ["7d", "Last 7 days"],
  ["30d", "Last 30 days"],
];
const FIELDS = ["text", "workflow", "status", "tag", "time"];

export function filterBar(changed) {
  const asked = getQuery();
  const filter = Object.fromEntries(FIELDS.map((name) => [name, asked[name] ?? ""]));
  const apply = () => {
    setQuery(filter);
    changed({ ...filter });
  };
  const later = debounced(apply, 250);

  const search = h("input", {
    type: "search",
    placeholder: "Search id, reference, workflow, tag, error; cents>1000 region=eu",
    "aria-label": "Search runs",
    value: filter.text,
    "aria-keyshortcuts": "/",
    maxlength: 1000,
  });
  search.addEventListener("input", () => {
    filter.text = search.value;
    later();
  });
  const workflow = h(
    "select",
    { "aria-label": "Workflow" },
    h("option", { value: "" }, "All workflows"),
    filter.workflow && h("option", { selected: true }, filter.workflow),
  );
  workflow.addEventListener("change", () => set("workflow", workflow.value));
  const time = h(
    "select",
    { "aria-label": "Started" },
    TIMES.map(([value, word]) => h("option", { value, selected: value === filter.time }, word)),
  );
  time.addEventListener("change", () => set("time", time.value));
  const tag = h("input", { placeholder: "Tag", "aria-label": "Tag", value: filter.tag });
  tag.addEventListener("input", () => {
    filter.tag = tag.value.trim();
    later();
  });
  const statuses = h("div", { class: "chips", role: "group", "aria-label": "Status" });

  function showStatuses() {
    const chip = (value, word) =>
      h(
        "button",
        {
          class: "chip",
          type: "button",
          "aria-pressed": String(filter.status === value),
          dataset: value ? { status: value } : {},
          onclick: () => set("status", value),
        },
        value && icon(value),
        word,
      );
    put(
      statuses,
      chip("", "All"),
      STATUSES.map((status) => chip(status, statusWord(status))),
    );
  }

  function set(name, value) {
    filter[name] = value;
    if (name === "status") {
      showStatuses();
      statuses.querySelector('[aria-pressed="true"]').focus();
    }
    apply();
  }

  function clear() {
    for (const name of FIELDS) filter[name] = "";
    search.value = workflow.value = time.value = tag.value = "";
    showStatuses();
    apply();
  }

  function nameWorkflows(names) {
    const all = names.includes(filter.workflow) || !filter.workflow ? names : [...names, filter.workflow];
    put(
      workflow,
      h("option", { value: "" }, "All workflows"),
      all.map((name) => h("option", { value: name, selected: name === filter.workflow }, name)),
    );
  }

  showStatuses();
  const element = h(
    "div",
    { class: "filter", role: "search" },
    h("label", { class: "search" }, icon("search"), search),
    statuses,
    h("div", { class: "filter-more" }, workflow, tag, time),
  );
  return { element, filter, search, clear, nameWorkflows, isEmpty: () => FIELDS.every((name) => !filter[name]) };
}
