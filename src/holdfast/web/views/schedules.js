// Schedules: what is started when, how far each is, and what can be done with it.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, newId, on, put } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { requestId, shortId } from "../lib/ids.js";
import { readAgain } from "../lib/pages.js";
import { runAddress } from "../lib/router.js";
import { may } from "../lib/session.js";
import { denied, empty, failed, loading } from "../lib/states.js";
import { ageOf, duration, exact, inZone } from "../lib/time.js";
import { toast, toastProblem } from "../lib/toast.js";
import { backfillDialog, changeDialog, createDialog } from "../schedules/create.js";
import { showConnection } from "../shell.js";

const PAGE = 100;
const MOST_RUNNING = 500;
const EVERY_MS = 5000;
const TAG = "schedule:"; // how the tag of a schedule's runs begins
const OVERLAPS = { skip: "is skipped", queue: "waits", "cancel-running": "cancels that run", allow: "runs beside it" };
const number = new Intl.NumberFormat();

export function showSchedules(place, signal) {
  document.title = "Schedules · Holdfast";
  if (!may("runs:read")) return put(place, denied({ details: { scope: "runs:read" } }));
  return new SchedulesView(place, signal);
}

class SchedulesView {
  constructor(place, signal) {
    Object.assign(this, { signal, items: [], next: null, isRead: false, elements: new Map() });
    this.rows = h("div", {}, loading("Loading schedules"));
    const create = may("runs:write") && h("button", { class: "button primary", type: "button", onclick: () => createDialog(() => this.load()) }, icon("plus"), "Create a schedule");
    put(place, h("header", { class: "view-head" }, h("h1", {}, "Schedules"), h("div", { class: "actions" }, create)), this.rows);
    const timer = setInterval(() => document.hidden || this.load(), EVERY_MS);
    signal.addEventListener("abort", () => clearInterval(timer));
    on(document, "visibilitychange", () => document.hidden || this.load(), signal);
    this.load();
  }

  // Each time is counted, so that an answer that was overtaken by a later one is left alone.
  async load(cursor = "") {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    try {
      const ask = (from) => call("schedules.list", { cursor: from, limit: PAGE }, this.signal);
      const [page, running] = await Promise.all([cursor ? ask(cursor) : readAgain(ask, this.items.length), this.countRunning()]);
      if (turn !== this.turn) return;
      this.items = cursor ? [...this.items, ...page.items] : page.items;
      Object.assign(this, { next: page.next, running, isRead: true });
      showConnection("live");
      this.draw();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      if (turn === this.turn) this.showProblem(problem);
    }
  }

  showProblem(problem) {
    if (this.isRead && problem.isUnreachable) return showConnection("lost");
    this.isRead = false;
    return put(this.rows, failed(problem, () => this.load()));
  }

  // How many runs of each schedule go on: one question for all of them. A search may not see all; then it is "or more".
  async countRunning() {
    const { items, next } = await call("runs.list", { status: "RUNNING", text: TAG, order: "newest", limit: MOST_RUNNING }, this.signal);
    const counts = new Map();
    for (const tag of items.flatMap(({ tags }) => tags)) if (tag.startsWith(TAG)) counts.set(tag, (counts.get(tag) ?? 0) + 1);
    return { counts, isWhole: next === null };
  }

  draw() {
    const focused = document.activeElement?.dataset.focus;
    if (this.items.length === 0) {
      put(this.rows, empty("No schedules yet", "A schedule starts runs at its times. @app.schedule declares one in code; others are created here, by holdfast schedule create, or by a client."));
      return;
    }
    const more = this.next !== null && h("button", { class: "button", type: "button", onclick: () => this.load(this.next) }, "Show more");
    put(this.rows, h("ul", { class: "schedules" }, this.items.map((schedule) => this.element(schedule))), more);
    if (focused) [...this.rows.querySelectorAll("[data-focus]")].find((each) => each.dataset.focus === focused)?.focus({ preventScroll: true });
  }

  // What has not changed stays the same element, so that nothing that is selected or read out is interrupted.
  element(schedule) {
    const place = JSON.stringify([schedule.tenant, schedule.project, schedule.environment, schedule.schedule_id]);
    const running = this.running.counts.get(TAG + schedule.schedule_id) ?? 0;
    const text = JSON.stringify([schedule, running, this.running.isWhole]);
    const kept = this.elements.get(place);
    if (kept?.text === text) return kept.element;
    const element = item(schedule, { place, running, isWhole: this.running.isWhole, changed: () => this.load() });
    this.elements.set(place, { text, element });
    return element;
  }
}

function item(schedule, { place, running, isWhole, changed }) {
  const titleId = newId("schedule");
  const where = [schedule.tenant, schedule.project, schedule.environment];
  return h(
    "li",
    { class: "card schedule", "aria-labelledby": titleId },
    h(
      "header",
      {},
      h("h2", { id: titleId }, schedule.schedule_id),
      badge(schedule),
      schedule.is_declared && h("span", { class: "tag" }, "in code"),
      where.some((each) => each !== "default") && h("span", { class: "quiet" }, where.join(" / ")),
      h("div", { class: "actions" }, buttons(schedule, place, changed)),
    ),
    h(
      "div",
      { class: "card-body" },
      h("dl", { class: "schedule-facts" }, facts(schedule, running, isWhole).map(([term, ...said]) => h("div", {}, h("dt", {}, term), h("dd", {}, said)))),
      schedule.last_error && h("p", { class: "problem" }, h("strong", {}, "Last error: "), schedule.last_error),
    ),
  );
}

function badge({ is_paused: isPaused, next_ticks: ticks }) {
  const [status, mark, word] = isPaused ? ["PAUSED", "PAUSED", "Paused"] : ticks.length > 0 ? ["COMPLETED", "timer", "Active"] : ["CANCELLED", "CANCELLED", "Ended"];
  return h("span", { class: "status", dataset: { status } }, icon(mark), h("span", {}, word));
}

function facts(schedule, running, isWhole) {
  const tag = encodeURIComponent(TAG + schedule.schedule_id);
  const { next_ticks: ticks, last_run_id: lastRun } = schedule;
  const rest = [schedule.skipped > 0 && `${number.format(schedule.skipped)} skipped`, schedule.queued > 0 && `${number.format(schedule.queued)} queued`].filter(Boolean);
  return [
    ["Workflow", schedule.workflow, schedule.workflow_version && h("span", { class: "quiet" }, ` version ${schedule.workflow_version}`)],
    ["When", when(schedule), !schedule.at && h("p", { class: "quiet" }, `A tick while a run goes on ${OVERLAPS[schedule.overlap] ?? schedule.overlap}.`)],
    ["Next ticks", nextTicks(schedule, ticks)],
    ["Last run", lastRun ? h("a", { class: "mono", href: runAddress(lastRun), title: lastRun }, shortId(lastRun)) : "none yet", schedule.last_tick && h("p", { class: "quiet" }, "last tick ", ageOf(schedule.last_tick))],
    ["Running", h("a", { href: `/runs?tag=${tag}&status=RUNNING` }, isWhole ? number.format(running) : `${number.format(running)} or more`), h("p", { class: "quiet" }, h("a", { href: `/runs?tag=${tag}` }, `${number.format(schedule.started)} started`))],
    ["Missed", number.format(schedule.missed), rest.length > 0 && h("p", { class: "quiet" }, rest.join(", "))],
    schedule.note && ["Note", schedule.note],
  ].filter(Boolean);
}

function when({ cron, every_s: every, at, tz }) {
  if (cron) return [h("code", {}, cron), ` in ${tz}`];
  if (every !== null) return `every ${duration(every * 1000)}, shown in ${tz}`;
  return ["once, ", h("time", { datetime: at }, inZone(at, tz)), ` in ${tz}`];
}

function nextTicks({ is_paused: isPaused, tz }, ticks) {
  if (ticks.length === 0) return isPaused ? "none while it is paused" : "none";
  return h(
    "ol",
    { class: "ticks" },
    ticks.map((tick, n) => h("li", {}, h("time", { datetime: tick, title: exact(tick) }, inZone(tick, tz)), n === 0 && h("span", { class: "quiet" }, " ", ageOf(tick)))),
  );
}

function buttons(schedule, place, changed) {
  const { schedule_id: id, tenant, project, environment, is_paused: isPaused } = schedule;
  const named = { schedule_id: id, tenant, project, environment };
  const button = (word, slot, act, kind = "") =>
    h("button", { class: `button small ${kind}`, type: "button", "aria-label": `${word} ${id}`, "data-focus": `${slot} ${place}`, onclick: act }, word);
  const at = (operation, said) => async (event) => {
    const pressed = event.currentTarget;
    pressed.disabled = true;
    try {
      said(await call(operation, { ...named, ...(operation === "schedules.trigger" && { request_id: requestId() }) }));
      changed();
    } catch (problem) {
      if (problem.code === undefined) throw problem;
      toastProblem(problem);
    } finally {
      pressed.disabled = false;
      if (document.activeElement === document.body) pressed.focus({ preventScroll: true }); // a button that is disabled loses it
    }
  };
  return [
    may("runs:control") &&
      (isPaused
        ? button("Resume", "pause", at("schedules.resume", () => toast("It goes on.")))
        : button("Pause", "pause", () => pauseDialog(named, changed))),
    may("runs:write") && button("Trigger now", "trigger", at("schedules.trigger", ({ run_id: runId }) => toast("A run has started.", { link: ["See it", runAddress(runId)] }))),
    may("runs:write") && !schedule.at && button("Change", "change", () => changeDialog(named, schedule, changed)),
    may("runs:write") && button("Backfill", "backfill", () => backfillDialog(named, changed)),
    may("runs:write") && button("Delete", "delete", () => deleteDialog(named, schedule, changed), "danger"),
  ];
}

function pauseDialog(named, changed) {
  const id = newId("note");
  const note = h("input", { id, maxlength: 500, autocomplete: "off" });
  openDialog({
    title: `Pause ${named.schedule_id}?`,
    body: [
      h("p", {}, "Its ticks start nothing until it is resumed; those of the meantime are not run. Runs that have started go on."),
      h("div", { class: "field" }, h("label", { for: id }, "Note", h("span", { class: "quiet" }, " optional")), note),
    ],
    action: "Pause",
    act: async () => {
      await call("schedules.pause", { ...named, note: note.value.trim() });
      toast("Paused.");
      changed();
    },
  });
}

function deleteDialog(named, { is_declared: isDeclared }, changed) {
  openDialog({
    title: `Delete ${named.schedule_id}?`,
    body: h("p", {}, "It starts no more runs; those that have started go on. This cannot be undone.", isDeclared && " It is declared in code, and comes back with the next node that opens."),
    action: "Delete",
    danger: true,
    act: async () => {
      await call("schedules.delete", named);
      toast("Deleted.");
      changed();
    },
  });
}
