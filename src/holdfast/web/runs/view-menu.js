// How the list looks, kept by this browser: its columns, its density, views by name. And what it finds, as a file.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, newId, put } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { readAgain } from "../lib/pages.js";
import { toast, toastProblem } from "../lib/toast.js";
import { askedOf } from "./source.js";

const KEY = "holdfast.runs";
const MOST_EXPORTED = 50_000;
const PAGE = 500;
export const COLUMNS = {
  status: ["Status", "112px"],
  run: ["Run", "minmax(150px, 1.1fr)"],
  workflow: ["Workflow", "minmax(110px, 0.8fr)"],
  now: ["Now", "minmax(180px, 2.4fr)"],
  tags: ["Tags", "minmax(90px, 0.8fr)"],
  node: ["Node", "minmax(80px, 0.5fr)"],
  age: ["Started", "84px"],
  took: ["Took", "100px"],
};
const FIXED = new Set(["status", "run"]);
const BUILT_IN = [
  ["Needs somebody", { status: "PAUSED" }],
  ["Retrying", { status: "RETRYING" }],
  ["Failed today", { status: "FAILED", time: "24h" }],
];
const EXPORTED = ["run_id", "workflow", "workflow_version", "status", "created_at", "finished_at", "reference_key", "tags", "last_error"];

function kept() {
  try {
    return { hidden: ["node"], isRoomy: false, views: [], ...JSON.parse(localStorage.getItem(KEY) ?? "{}") };
  } catch {
    return { hidden: ["node"], isRoomy: false, views: [] }; // storage may be forbidden, or hold something else
  }
}

function keep(preferences) {
  try {
    localStorage.setItem(KEY, JSON.stringify(preferences));
  } catch {
    return;
  }
}

// `bar` is the filter; `onLook` hears that columns or density have changed. A column of tags that has none is left out.
export function viewMenu({ bar, table, onLook, signal }) {
  const preferences = kept();
  const body = h("div", { class: "menu-body items view-menu" });
  const element = h("details", { class: "menu" }, h("summary", { class: "button", "aria-label": "View" }, icon("more"), "View"), body);
  const close = () => {
    element.open = false;
  };

  let hasTags = false;
  function look() {
    const hidden = hasTags ? preferences.hidden : [...preferences.hidden, "tags"];
    const shown = Object.keys(COLUMNS).filter((name) => !hidden.includes(name));
    table.style.setProperty("--columns", shown.map((name) => COLUMNS[name][1]).join(" "));
    table.dataset.hidden = hidden.join(" ");
    document.documentElement.dataset.rows = preferences.isRoomy ? "roomy" : "dense";
    onLook();
  }

  function changed() {
    keep(preferences);
    look();
    show();
  }

  function check(label, isOn, onChange) {
    const input = h("input", { type: "checkbox", checked: isOn });
    input.addEventListener("change", () => {
      onChange(input.checked);
      changed();
    });
    return h("label", { class: "menu-check" }, input, label);
  }

  function show() {
    const views = [...BUILT_IN, ...preferences.views];
    put(
      body,
      h("p", { class: "menu-title" }, "Views"),
      views.map(([name, query], n) =>
        h(
          "div",
          { class: "menu-pair" },
          h("button", { class: "menu-item", type: "button", onclick: () => (close(), bar.take(query)) }, name),
          n >= BUILT_IN.length &&
            h(
              "button",
              { class: "icon-button", type: "button", "aria-label": `Forget the view ${name}`, onclick: () => (preferences.views.splice(n - BUILT_IN.length, 1), changed()) },
              icon("close"),
            ),
        ),
      ),
      h("button", { class: "menu-item", type: "button", onclick: () => (close(), saveView()) }, "Save this view…"),
      h("p", { class: "menu-title" }, "Columns"),
      Object.entries(COLUMNS)
        .filter(([name]) => !FIXED.has(name))
        .map(([name, [word]]) =>
          check(word, !preferences.hidden.includes(name), (isOn) => {
            preferences.hidden = preferences.hidden.filter((each) => each !== name).concat(isOn ? [] : [name]);
          }),
        ),
      check("Roomy rows", preferences.isRoomy, (isOn) => (preferences.isRoomy = isOn)),
      h("p", { class: "menu-title" }, "Export what is found"),
      ["csv", "json"].map((kind) =>
        h("button", { class: "menu-item", type: "button", onclick: () => (close(), exportRuns(kind, bar.filter, signal)) }, kind.toUpperCase()),
      ),
    );
  }

  function saveView() {
    const id = newId("view");
    const name = h("input", { id, required: true, maxlength: 60 });
    openDialog({
      title: "Save this view",
      action: "Save",
      body: [h("div", { class: "field" }, h("label", { for: id }, "Name"), name)],
      act: async () => {
        if (!name.value.trim()) return false;
        const query = Object.fromEntries(Object.entries(bar.filter).filter(([, value]) => value));
        preferences.views = [...preferences.views.filter(([each]) => each !== name.value.trim()), [name.value.trim(), query]];
        changed();
        toast("The view is saved in this browser.");
        return true;
      },
    });
  }

  function expectTags(isSo) {
    if (isSo === hasTags) return;
    hasTags = isSo;
    look();
  }

  show();
  look();
  return { element, expectTags };
}

async function exportRuns(kind, filter, signal) {
  const runs = [];
  try {
    for (let cursor = ""; cursor !== null && runs.length < MOST_EXPORTED;) {
      const ask = (place) => call("runs.list", { ...askedOf(filter), cursor: place, order: "newest", limit: PAGE }, signal);
      const found = await readAgain(ask, 1, cursor);
      runs.push(...found.items);
      cursor = found.next;
    }
  } catch (problem) {
    if (problem.name !== "AbortError") toastProblem(problem);
    return;
  }
  save(`runs.${kind}`, kind === "json" ? JSON.stringify(runs, null, 1) : csvOf(runs, EXPORTED));
  toast(`${runs.length.toLocaleString()} runs were exported${runs.length >= MOST_EXPORTED ? "; there are more" : ""}.`);
}

// A cell that a spreadsheet would take for a formula begins with a quote.
export function csvOf(rows, columns) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
    const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return [columns, ...rows.map((row) => columns.map((name) => row[name]))].map((row) => row.map(cell).join(",")).join("\r\n");
}

export function save(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: name.endsWith("csv") ? "text/csv" : "application/json" }));
  const link = h("a", { download: name });
  link.setAttribute("href", address);
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
