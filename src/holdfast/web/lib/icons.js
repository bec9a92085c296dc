// Small drawings. Each status has a shape of its own: colours need not be distinguished.

import { h, s } from "./dom.js";

const PATHS = {
  PENDING: [["circle", { cx: 8, cy: 8, r: 5.5, "stroke-dasharray": "2.4 2.1" }]],
  APPROVED: [
    ["circle", { cx: 8, cy: 8, r: 5.5 }],
    ["path", { d: "M5.6 8.2l1.7 1.7 3.2-3.6" }],
  ],
  RUNNING: [
    ["circle", { cx: 8, cy: 8, r: 5.5, class: "faint" }],
    ["path", { d: "M8 2.5a5.5 5.5 0 0 1 5.5 5.5", class: "spin" }],
  ],
  PAUSED: [["path", { d: "M6 4v8M10 4v8" }]],
  COMPLETED: [["path", { d: "M3.5 8.5l3 3 6-7" }]],
  SUCCESS: [["path", { d: "M3.5 8.5l3 3 6-7" }]],
  FAILED: [["path", { d: "M4.5 4.5l7 7M11.5 4.5l-7 7" }]],
  CANCELLED: [
    ["circle", { cx: 8, cy: 8, r: 5.5 }],
    ["path", { d: "M4.2 11.8l7.6-7.6" }],
  ],
  SKIPPED: [["path", { d: "M4 4.5l4 3.5-4 3.5M9 4.5l4 3.5-4 3.5" }]],
  WAITING: [
    [
      "path",
      {
        d: "M5 2.5h6M5 13.5h6M5.5 2.5c0 3 5 4 5 5.5s-5 2.5-5 5.5M10.5 2.5c0 3-5 4-5 5.5s5 2.5 5 5.5",
      },
    ],
  ],
  RETRYING: [["path", { d: "M13 8a5 5 0 1 1-1.6-3.7M13 2.5v3h-3" }]],
  activity: [["path", { d: "M9 2 4 9h4l-1 5 5-7H8z" }]],
  timer: [
    ["circle", { cx: 8, cy: 8.5, r: 5 }],
    ["path", { d: "M8 5.5v3l2 1.5M6.5 1.5h3" }],
  ],
  signal: [["path", { d: "M8 9.5v4M5 11a4.2 4.2 0 1 1 6 0M8 8.5a.5.5 0 1 0 0-1 .5.5 0 0 0 0 1z" }]],
  task: [
    ["circle", { cx: 8, cy: 5.5, r: 2.5 }],
    ["path", { d: "M3 13.5c.5-3 2.5-4 5-4s4.5 1 5 4" }],
  ],
  child: [["path", { d: "M4 3v5a3 3 0 0 0 3 3h5M9.5 8.5 12 11l-2.5 2.5" }]],
  update: [["path", { d: "M13 6A5.3 5.3 0 0 0 3.5 5M3 2.5V5.5h3M3 10a5.3 5.3 0 0 0 9.5 1M13 13.5v-3h-3" }]],
  added: [["path", { d: "M8 3v10M3 8h10" }]],
  removed: [["path", { d: "M3 8h10" }]],
  changed: [["path", { d: "M8 2.5v6M5 5.5h6M5 12.5h6" }]],
  search: [
    ["circle", { cx: 7, cy: 7, r: 4.5 }],
    ["path", { d: "M10.5 10.5 14 14" }],
  ],
  plus: [["path", { d: "M8 3v10M3 8h10" }]],
  close: [["path", { d: "M4 4l8 8M12 4l-8 8" }]],
  more: [["path", { d: "M3 8h.01M8 8h.01M13 8h.01" }]],
  down: [["path", { d: "M4 6l4 4 4-4" }]],
  back: [["path", { d: "M10 3.5 5.5 8l4.5 4.5" }]],
  light: [
    ["circle", { cx: 8, cy: 8, r: 3 }],
    ["path", { d: "M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1" }],
  ],
  dark: [["path", { d: "M13 9.5A5.5 5.5 0 0 1 6.5 3 5.5 5.5 0 1 0 13 9.5z" }]],
  system: [["path", { d: "M2 3h12v8H2zM6 14h4" }]],
  copy: [["path", { d: "M6 6h7v7H6zM3 10V3h7" }]],
  warning: [["path", { d: "M8 2.5 14 13H2zM8 6.5v3M8 11.3v.01" }]],
  runs: [["path", { d: "M2.5 4h7M2.5 8h11M2.5 12h5" }]],
  plans: [["path", { d: "M2.5 3h4v3h-4zM9.5 10h4v3h-4zM2.5 10h4v3h-4zM4.5 6v4M6.5 11.5h3" }]],
  schedules: [["path", { d: "M2.5 3.5h11v10h-11zM2.5 6.5h11M5.5 2v3M10.5 2v3M8 8.5v2l1.5 1" }]],
  inbox: [["path", { d: "M2.5 9 4.5 3h7l2 6v4h-11zM2.5 9h3.5l.7 1.5h2.6L10 9h3.5" }]],
  audit: [["path", { d: "M4 1.5h8v13H4zM6 5h4M6 8h4M6 11h2" }]],
  health: [["path", { d: "M1.5 8h3L6 4l3 8 1.7-4h3.8" }]],
};

export function icon(name, label = null) {
  const shapes = (PATHS[name] ?? PATHS.activity).map(([tag, attributes]) => s(tag, attributes));
  const said = label === null ? { "aria-hidden": "true" } : { role: "img", "aria-label": label };
  return s("svg", { class: `icon icon-${name}`, viewBox: "0 0 16 16", ...said }, shapes);
}

export const RUN_STATUSES = ["RUNNING", "PAUSED", "FAILED", "PENDING", "APPROVED", "COMPLETED", "CANCELLED"];

const WORDS = {
  RETRYING: "Retrying",
  PENDING: "Pending",
  APPROVED: "Approved",
  RUNNING: "Running",
  PAUSED: "Paused",
  COMPLETED: "Completed",
  FAILED: "Failed",
  CANCELLED: "Cancelled",
  SUCCESS: "Done",
  SKIPPED: "Skipped",
  WAITING: "Waiting",
  OPEN: "Open",
};

export function statusWord(status) {
  return WORDS[status] ?? status;
}

export function statusBadge(status, { waits = false } = {}) {
  const shown = waits && status === "RUNNING" ? "WAITING" : status;
  return h("span", { class: "status", dataset: { status: shown } }, icon(shown), h("span", {}, statusWord(shown)));
}
