// What to show of all runs. The filter is in the address, so it can be kept and sent.

import { debounced, h, newId, put } from "../lib/dom.js";
import { icon, RUN_STATUSES, statusWord } from "../lib/icons.js";
import { getQuery, setQuery } from "../lib/router.js";
import { queryBox } from "./query-box.js";

const STATUSES = ["RUNNING", "RETRYING", "PAUSED", "FAILED", ...RUN_STATUSES.filter((each) => !["RUNNING", "PAUSED", "FAILED"].includes(each))];
const TIMES = [
  ["", "Any time"],
  ["1h", "Last hour"],
  ["24h", "Last day"],
  ["7d", "Last 7 days"],
  ["30d", "Last 30 days"],
];
const FIELDS = ["text", "workflow", "status", "tag", "time", "children"];

// `known()` says what can be completed: the names of workflows and attributes.
export function filterBar(changed, known) {
  const asked = getQuery();
  const filter = Object.fromEntries(FIELDS.map((name) => [name, asked[name] ?? ""]));
  let counts = {};
  const apply = () => {
    setQuery(filter);
    markSet();
    changed({ ...filter });
  };
  const later = debounced(apply, 250);

  const box = queryBox({ value: filter.text, known });
  const { input: search } = box;
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
  const children = h("input", { type: "checkbox", checked: Boolean(filter.children) });
  children.addEventListener("change", () => set("children", children.checked ? "1" : ""));
  const statuses = h("div", { class: "chips", role: "group", "aria-label": "Status" });

  function countOf(value) {
    const count = counts[value];
    return count ? h("span", { class: "count numbers" }, count.toLocaleString()) : null;
  }

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
        value && countOf(value),
      );
    const focused = statuses.contains(document.activeElement) ? document.activeElement.dataset.status : null;
    const isShown = (status) => status !== "APPROVED" || counts[status] || filter.status === status;
    put(
      statuses,
      chip("", "All"),
      STATUSES.filter(isShown).map((status) => chip(status, statusWord(status))),
    );
    if (focused) statuses.querySelector(`[data-status="${focused}"]`)?.focus();
  }

  // On a phone what narrows the list further is folded away, with how much of it is set.
  const more = h("div", { class: "filter-more", id: newId("filters") }, workflow, tag, time, h("label", { class: "check" }, children, "Children"));
  const isSet = h("span", { class: "count", hidden: true });
  const toggle = h("button", { class: "button filter-toggle", type: "button", "aria-expanded": "false", "aria-controls": more.id }, "Filter", isSet, icon("down"));
  toggle.addEventListener("click", () => toggle.setAttribute("aria-expanded", String(toggle.getAttribute("aria-expanded") !== "true")));

  function markSet() {
    const set = ["workflow", "tag", "time", "children"].filter((name) => filter[name]).length;
    isSet.textContent = set || "";
    isSet.hidden = set === 0;
  }

  // The status that is shown is in sight, also where there is no room for all of them.
  function reveal() {
    statuses.querySelector('[aria-pressed="true"]').scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  // How many there are of each status, whichever of them is shown.
  function setCounts(found) {
    if (JSON.stringify(found) === JSON.stringify(counts)) return;
    const isFirst = Object.keys(counts).length === 0;
    counts = found;
    showStatuses();
    if (isFirst) reveal();
  }

  function set(name, value) {
    filter[name] = value;
    if (name === "status") {
      showStatuses();
      statuses.querySelector('[aria-pressed="true"]').focus();
    }
    apply();
  }

  // Shows what an address names: a view that was saved, or nothing in particular.
  function take(given) {
    for (const name of FIELDS) filter[name] = given[name] ?? "";
    search.value = filter.text;
    workflow.value = filter.workflow;
    time.value = filter.time;
    tag.value = filter.tag;
    children.checked = Boolean(filter.children);
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
  markSet();
  const element = h("div", { class: "filter", role: "search" }, box.element, toggle, statuses, more);
  const isEmpty = () => FIELDS.every((name) => !filter[name] || name === "children");
  return { element, filter, search, box, take, clear: () => take({}), set, setCounts, nameWorkflows, isEmpty };
}
