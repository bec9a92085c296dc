// Which tasks are shown. The filter is the address's query; the service applies it to lists, and this to what arrives live.

import { call } from "../lib/api.js";
import { nowMs } from "../lib/clock.js";
import { debounced, h, newId, put } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { getQuery, setQuery } from "../lib/router.js";
import { may, who } from "../lib/session.js";

const STATUSES = [["OPEN", "Open"], ["COMPLETED", "Completed"], ["CANCELLED", "Cancelled"], ["ALL", "All"]];
const DUE = [["", "Any time"], ["overdue", "Overdue"], ["day", "Within a day"], ["week", "Within a week"]];
const DAY_MS = 86_400_000;
const AHEAD_MS = { overdue: 0, day: DAY_MS, week: 7 * DAY_MS };

export function readFilter() {
  const { status, q, workflow, role, assignee, due, mine } = getQuery();
  return { status: STATUSES.some(([each]) => each === status) ? status : "OPEN", q: q ?? "", workflow: workflow ?? "", role: role ?? "", assignee: assignee ?? "", due: due in AHEAD_MS ? due : "", mine: mine ?? "" };
}

export function filterQuery(filter) {
  return { ...filter, status: filter.status === "OPEN" ? "" : filter.status };
}

function dueBefore(filter) {
  return filter.due ? nowMs() + AHEAD_MS[filter.due] : null;
}

export function listFields(filter) {
  const due = dueBefore(filter);
  return {
    status: filter.status === "ALL" ? "" : filter.status, text: filter.q, workflow: filter.workflow, role: filter.role, assignee: filter.assignee,
    mine: filter.mine && "true", due_before: due === null ? "" : new Date(due).toISOString(),
  };
}

// The stream knows neither text nor due dates: `fits` does.
export function streamFields(filter) {
  const { status, workflow, role, assignee, mine } = listFields(filter);
  return { kinds: "tasks", task_status: status, workflow, role, assignee, mine };
}

export function fits(filter, task) {
  const due = dueBefore(filter);
  const words = filter.q.toLowerCase().split(/\s+/).filter(Boolean);
  const said = `${task.name}\n${JSON.stringify(task.payload)}`.toLowerCase();
  return (due === null || (task.due_at !== null && Date.parse(task.due_at) < due))
    && (task.payload_bytes !== null || words.every((word) => said.includes(word)));
}

export function filterBar(filter, changed) {
  const set = (name) => (value) => {
    filter[name] = value;
    setQuery(filterQuery(filter));
    mark();
    changed();
  };
  const search = h("input", { type: "search", value: filter.q, placeholder: "Search", "aria-label": "Search names and contents" });
  search.addEventListener("input", debounced(() => set("q")(search.value.trim()), 250));
  const more = h(
    "div", { class: "sift-more", id: newId("filters") },
    selectOf("Status", STATUSES, filter.status, set("status")), workflows(filter, set("workflow")),
    textOf("Role", filter.role, set("role"), who().roles), textOf("Assignee", filter.assignee, set("assignee"), [who().name]),
    selectOf("Due", DUE, filter.due, set("due")),
    who().is_admin && !who().is_open && selectOf("Whose", [["", "Everybody’s"], ["1", "For me"]], filter.mine, set("mine")),
  );
  const count = h("span", { class: "count", hidden: true });
  const toggle = h("button", { class: "button sift-toggle", type: "button", "aria-expanded": "false", "aria-controls": more.id }, "Filter", count, icon("down"));
  toggle.addEventListener("click", () => toggle.setAttribute("aria-expanded", String(toggle.getAttribute("aria-expanded") !== "true")));
  function mark() {
    const set = Object.values({ ...filterQuery(filter), q: "" }).filter(Boolean).length;
    count.textContent = set;
    count.hidden = set === 0;
  }
  mark();
  return h("form", { class: "sift", role: "search", onsubmit: (event) => event.preventDefault() }, h("div", { class: "sift-search" }, icon("search"), search), toggle, more);
}

function labelled(word, input) {
  const id = newId("filter");
  input.id = id;
  return h("div", { class: "sift-field" }, h("label", { for: id }, word), input);
}

function selectOf(word, choices, value, set) {
  const select = h("select", {}, choices.map(([each, text]) => h("option", { value: each, selected: each === value }, text)));
  select.addEventListener("change", () => set(select.value));
  return labelled(word, select);
}

function textOf(word, value, set, known) {
  const list = h("datalist", { id: newId("known") }, known.filter(Boolean).map((each) => h("option", { value: each })));
  const input = h("input", { value, list: list.id, placeholder: "Any", autocomplete: "off" });
  input.addEventListener("change", () => set(input.value.trim()));
  const field = labelled(word, input);
  field.append(list);
  return field;
}

function workflows(filter, set) {
  const any = ["", "Any"];
  const field = selectOf("Workflow", filter.workflow ? [any, [filter.workflow, filter.workflow]] : [any], filter.workflow, set);
  if (may("workflows:read")) fillWorkflows(field.querySelector("select"), filter, any);
  return field;
}

async function fillWorkflows(select, filter, any) {
  try {
    const names = (await call("workflows.list")).items.map(({ name }) => name);
    if (filter.workflow && !names.includes(filter.workflow)) names.push(filter.workflow);
    const choices = [any, ...names.map((name) => [name, name])];
    put(select, choices.map(([value, text]) => h("option", { value, selected: value === filter.workflow }, text)));
  } catch (problem) {
    if (problem.code === undefined) throw problem;
  }
}
