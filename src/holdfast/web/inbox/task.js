// One task: what is asked, the form for the answer, and everything that happened to it.

import { call } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { isPlain } from "../lib/exact.js";
import { icon } from "../lib/icons.js";
import { jsonView } from "../lib/json.js";
import { readAgain } from "../lib/pages.js";
import { runAddress } from "../lib/router.js";
import { titleOf } from "../lib/schema.js";
import { who } from "../lib/session.js";
import { failed, loading } from "../lib/states.js";
import { ageOf, exact } from "../lib/time.js";
import { actions, commentBox } from "./task-actions.js";
import { answerForm, outcome } from "./answer.js";
import { historyList } from "./task-history.js";
import { abilities, actingAs, me, whyNot } from "./acting.js";
import { marks } from "./task-row.js";

export class TaskPane {
  constructor(place, signal, { back, changed }) {
    Object.assign(this, { place, signal, back, changed, taskId: undefined, task: null, events: null, shownForm: "", shownTalk: "", shownHead: "" });
    this.head = h("header", { class: "task-head" });
    this.about = h("div", { class: "task-asked" });
    this.answer = h("div", { class: "task-answer" });
    this.acting = who().is_open && h("div", {}, actingAs(() => this.draw()));
    this.facts = h("div", { class: "task-facts" });
    this.talk = h("div", { class: "task-talk" });
    this.history = h("div", { class: "task-history" });
  }

  show(taskId, known = null) {
    Object.assign(this, { taskId, task: null, events: null, shownForm: "", shownTalk: "", shownHead: "" });
    if (taskId === undefined) return put(this.place, h("p", { class: "pick" }, "Choose a task to see what it asks."));
    put(this.place, loading("Loading the task"));
    if (known && known.payload_bytes === null) this.take(known); // else it is in the list without its payload
    return this.refresh();
  }

  async refresh() {
    const { taskId } = this;
    if (taskId === undefined) return;
    try {
      const task = await call("tasks.get", { task_id: taskId }, this.signal);
      if (this.taskId === taskId) this.take(task);
    } catch (problem) {
      if (problem.name === "AbortError" || this.taskId !== taskId) return;
      if (problem.code === undefined) throw problem;
      if (this.task === null || problem.status === 404) this.gone(problem);
    }
  }

  gone(problem) {
    this.task = null;
    const text = problem.status === 404 ? h("p", { class: "hint" }, "Perhaps it has been given to somebody else.") : null;
    put(this.place, this.backLink(), failed(problem, () => this.show(this.taskId)), text);
  }

  // Takes the task as it is now. What somebody is typing stays as long as they may still send it.
  take(task) {
    const isFirst = this.task === null;
    this.task = task;
    if (isFirst) put(this.place, this.head, this.about, this.acting, this.answer, this.talk, this.facts, this.history);
    if (isFirst) put(this.about, asked(task.payload));
    this.draw();
    this.readHistory();
  }

  draw() {
    const { task } = this;
    if (task === null) return;
    const may = abilities(task);
    const shown = JSON.stringify([task, may]);
    if (this.shownHead !== shown) this.drawHead(task, may);
    this.shownHead = shown;
    this.drawAnswer(task, may);
    if (this.shownTalk !== String(may.comment)) {
      this.shownTalk = String(may.comment);
      put(this.talk, may.comment && commentBox(() => this.task, () => this.readHistory()));
    }
  }

  drawHead(task, may) {
    put(
      this.head, this.backLink(), h("h2", {}, task.name),
      h("div", { class: "task-marks" }, marks(task), task.assignee !== null && h("span", { class: "holder" }, icon("task"), task.assignee)),
      actions(task, may, (done) => this.changed(done)),
    );
    put(this.facts, h("h3", {}, "About"), facts(task));
  }

  drawAnswer(task, may) {
    const kind = task.status !== "OPEN" ? `${task.status} ${task.completed_by}` : may.complete ? `form ${task.answered_by.length}` : `why ${whyNot(task)}`;
    if (this.shownForm === kind) return;
    const wasTyping = this.shownForm.startsWith("form") && task.status !== "OPEN" && task.completed_by !== me();
    this.shownForm = kind;
    if (task.status !== "OPEN") put(this.answer, outcome(task, wasTyping));
    else if (may.complete) put(this.answer, answerForm(task, (done) => this.changed(done), () => this.refresh()));
    else put(this.answer, h("p", { class: "note" }, icon("task"), whyNot(task)));
    if (task.status !== "OPEN") this.drawGiven();
  }

  backLink() {
    return h("button", { class: "link-button task-back", type: "button", onclick: () => this.back() }, icon("back"), "Inbox");
  }

  async readHistory() {
    const { taskId } = this;
    try {
      const { items } = await readAgain((cursor) => call("tasks.history", { task_id: taskId, cursor }, this.signal), Infinity);
      if (this.taskId !== taskId) return;
      this.events = items;
      put(this.history, h("h3", {}, "History"), historyList(items));
      this.drawGiven();
    } catch (problem) {
      if (problem.name === "AbortError" || this.taskId !== taskId) return;
      if (problem.code === undefined) throw problem;
      put(this.history, h("p", { class: "hint" }, "The history cannot be read: ", problem.message));
    }
  }

  // The answer that stands is in the history.
  drawGiven() {
    const given = this.events?.findLast((event) => event.event_type === "TaskCompleted");
    const place = this.answer.querySelector(".given");
    if (given && place && !place.hasChildNodes()) put(place, asked(given.data.answer));
  }
}

function facts(task) {
  const lines = [
    ["Asked by", h("a", { href: runAddress(task.run_id) }, task.workflow)],
    ["Since", ageOf(task.created_at)],
    task.due_at && ["Due", h("time", { datetime: task.due_at }, exact(task.due_at))],
    ["Assignee", task.assignee ?? h("span", { class: "quiet" }, "None yet")],
    task.roles.length > 0 && ["For", task.roles.map((role) => h("span", { class: "tag" }, role))],
    task.answered_by.length > 0 && ["Answered", task.answered_by.join(", ")],
    task.task_type && ["Type", task.task_type],
    task.route && ["Route", task.route],
    task.reminders > 0 && ["Reminders", task.reminders],
  ];
  return h("dl", { class: "facts" }, lines.filter(Boolean).map(([term, text]) => [h("dt", {}, term), h("dd", {}, text)]));
}

// A value as people read it: an object as terms and texts, and only what is nested as JSON.
function asked(value) {
  if (value === null || value === undefined) return null;
  if (Array.isArray(value)) return value.every(isPlain) ? h("ol", { class: "asked-list" }, value.map((each) => h("li", {}, plainText(each)))) : h("div", { class: "asked-many" }, value.map(asked));
  if (isPlain(value)) return h("p", { class: "asked-text" }, plainText(value));
  const entries = Object.entries(value);
  if (entries.length === 0 || entries.length > 60) return jsonView(value);
  return h("dl", { class: "asked" }, entries.map(([name, each]) => [h("dt", {}, titleOf(name, {})), h("dd", {}, isPlain(each) ? plainText(each) : tableOf(each) ?? jsonView(each, { label: name }))]));
}

// A list of flat objects as a table; undefined for anything else.
function tableOf(value) {
  const isFlat = (each) => each !== null && typeof each === "object" && !Array.isArray(each) && Object.values(each).every(isPlain);
  if (!Array.isArray(value) || value.length === 0 || value.length > 60 || !value.every(isFlat)) return undefined;
  const names = [...new Set(value.flatMap((each) => Object.keys(each)))];
  if (names.length === 0 || names.length > 8) return undefined;
  return h(
    "div", { class: "asked-table" },
    h(
      "table", {},
      h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, titleOf(name, {}))))),
      h("tbody", {}, value.map((each) => h("tr", {}, names.map((name) => h("td", {}, name in each ? plainText(each[name]) : null))))),
    ),
  );
}

function plainText(value) {
  if (value === null || value === "") return h("span", { class: "quiet" }, "–");
  if (typeof value === "boolean") return value ? "Yes" : "No";
  return h("span", { class: "asked-value", tabindex: String(value).length > 600 ? "0" : null }, String(value));
}
