// The list of tasks, live, and beside it the one that is open.

import { call, queryOf } from "../lib/api.js";
import { h, perFrame, put } from "../lib/dom.js";
import { readAgain } from "../lib/pages.js";
import { go, setAddress } from "../lib/router.js";
import { denied, empty, failed, loading } from "../lib/states.js";
import { may, who } from "../lib/session.js";
import { Stream } from "../lib/stream.js";
import { toastProblem } from "../lib/toast.js";
import { showConnection } from "../shell.js";
import { counted, recount } from "./counted.js";
import { filterBar, filterQuery, fits, listFields, readFilter, streamFields } from "./filter.js";
import { taskBulk } from "./bulk.js";
import { taskRow } from "./task-row.js";
import { TaskPane } from "./task.js";

const PAGE = 200;

export function showTasks(place, signal, taskId) {
  if (!may("tasks:read")) return put(place, denied({ details: { scope: "tasks:read" } }));
  return new TaskList(place, signal, taskId);
}

class TaskList {
  constructor(place, signal, taskId) {
    Object.assign(this, { signal, taskId, filter: readFilter(), tasks: new Map(), cursor: null, problem: null, isLoading: true });
    this.reading = new AbortController();
    this.rows = h("div", { class: "task-rows" }, loading());
    this.shown = new Map();
    this.draw = perFrame(() => !signal.aborted && this.drawNow());
    const pane = h("section", { class: "task-pane", "aria-label": "The task" });
    this.pane = new TaskPane(pane, signal, { back: () => this.open(undefined), changed: (task) => this.changed(task) });
    this.layout = h(
      "div", { class: "tasks" },
      h("section", { class: "task-list", "aria-label": "Tasks" }, filterBar(this.filter, () => this.restart()), this.rows),
      pane,
    );
    put(place, this.layout);
    signal.addEventListener("abort", () => this.reading.abort());
    this.watch();
    this.open(taskId, { isFirst: true });
  }

  watch() {
    this.stream = new Stream({
      address: () => `/v1/stream${queryOf(streamFields(this.filter))}`,
      onEvent: (name, data) => this.heard(name, data),
      onState: (state, problem) => {
        showConnection(state === "refused" ? "none" : state);
        if (state === "refused") this.fail(problem);
      },
      signal: this.signal,
    });
  }

  heard(name, data) {
    if (name === "reset") this.load();
    else if (name === "task") this.changed(data);
    else if (name === "task_left") this.left(data.task_id);
  }

  restart() {
    this.tasks.clear();
    this.isLoading = true;
    this.draw();
    this.stream.reopen({ forget: true });
    this.load();
  }

  async load(cursor = "") {
    this.reading.abort();
    this.reading = new AbortController();
    const { signal } = this.reading;
    try {
      const page = await readAgain((next) => call("tasks.list", { ...listFields(this.filter), cursor: next, limit: PAGE }, signal), 1, cursor);
      if (!cursor) this.tasks.clear();
      for (const task of page.items) this.tasks.set(task.task_id, task);
      Object.assign(this, { cursor: page.next, problem: null, isLoading: false });
      if (!cursor) this.pane.refresh();
      this.draw();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      this.fail(problem);
    }
  }

  fail(problem) {
    if (problem.code === undefined) throw problem;
    Object.assign(this, { problem, isLoading: false });
    this.draw();
  }

  changed(task) {
    const isListed = (this.filter.status === "ALL" || task.status === this.filter.status) && fits(this.filter, task);
    if (isListed) this.tasks.set(task.task_id, task);
    else this.tasks.delete(task.task_id);
    if (task.task_id === this.taskId) task.payload_bytes === null ? this.pane.take(task) : this.pane.refresh();
    this.draw();
  }

  // After a change, which may have changed what the tab counts, too.
  reload() {
    if (this.isNarrow()) recount(this.rows);
    this.load();
  }

  left(taskId) {
    this.tasks.delete(taskId);
    if (taskId === this.taskId) this.pane.refresh();
    this.draw();
  }

  open(taskId, { isFirst = false } = {}) {
    this.taskId = taskId;
    this.layout.classList.toggle("is-open", taskId !== undefined);
    if (!isFirst) {
      setAddress(this.address(taskId));
      if (taskId !== undefined) window.scrollTo(0, 0);
    }
    this.pane.show(taskId, this.tasks.get(taskId));
    this.draw();
  }

  address(taskId) {
    return `/inbox${taskId === undefined ? "" : `/${encodeURIComponent(taskId)}`}${queryOf(filterQuery(this.filter))}`;
  }

  drawNow() {
    this.layout.classList.toggle("is-empty", this.tasks.size === 0 && this.taskId === undefined);
    const focused = this.rows.contains(document.activeElement) ? document.activeElement.dataset.task : undefined;
    if (this.problem !== null && this.tasks.size === 0) put(this.rows, failed(this.problem, () => this.restart()));
    else if (this.isLoading) put(this.rows, loading("Loading tasks"));
    else if (this.tasks.size === 0) put(this.rows, this.nothing());
    else put(this.rows, this.forAll(), this.list(), this.cursor !== null && this.more());
    if (!this.isLoading && this.problem === null && !this.isNarrow()) counted(this.rows, this.tasks.size, this.cursor === null);
    if (focused !== undefined) this.rows.querySelector(`[data-task="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  list() {
    const sorted = [...this.tasks.values()].sort(this.filter.status === "COMPLETED" ? byEnd : byUrgency);
    const open = (event, taskId) => {
      event.preventDefault();
      this.open(taskId);
    };
    return h("ul", {}, sorted.map((task) => taskRow(task, { address: this.address(task.task_id), isOpen: task.task_id === this.taskId, open })));
  }

  // What is done to one can be done to all that the filter finds.
  forAll() {
    if (this.tasks.size < 2 || this.filter.status !== "OPEN" || !may("tasks:write")) return null;
    const act = () => taskBulk(this.filter, () => this.reload()).catch((problem) => {
      if (problem.code === undefined) throw problem;
      toastProblem(problem);
    });
    return h("button", { class: "link-button for-all", type: "button", onclick: act }, this.cursor === null ? `Answer or assign all ${this.tasks.size.toLocaleString()}…` : "Answer or assign all of these…");
  }

  more() {
    return h("button", { class: "button more", type: "button", onclick: () => this.load(this.cursor) }, "Show more");
  }

  isNarrow() {
    return Object.values(filterQuery(this.filter)).some(Boolean);
  }

  nothing() {
    const others = whoSeesOthers();
    if (!this.isNarrow()) return empty("Nothing waits for you", `New tasks appear here by themselves. ${others}`.trim());
    return empty("No task fits", others, h("button", { class: "button", type: "button", onclick: () => go("/inbox") }, "Clear the filter"));
  }
}

// Health counts the tasks of everybody.
function whoSeesOthers() {
  const { is_admin: isAdmin, is_open: isOpen, roles } = who();
  if (isAdmin || isOpen) return "";
  const yours = roles.length === 0 ? "Your token has no role" : `You have the ${roles.length === 1 ? "role" : "roles"} ${roles.join(", ")}`;
  return `${yours}; tasks of other roles are seen by those who have them, and by an admin.`;
}

function byUrgency(one, other) {
  return (one.due_at ?? "9").localeCompare(other.due_at ?? "9") || one.created_at.localeCompare(other.created_at) || one.task_id.localeCompare(other.task_id);
}

function byEnd(one, other) {
  return (other.completed_at ?? "").localeCompare(one.completed_at ?? "");
}
