// Inbox: what waits for a person. Tasks to answer, signals to send, and messages that could not be handled.

import { call } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { may } from "../lib/session.js";
import { showLetters } from "../inbox/letters.js";
import { showSignals } from "../inbox/signals.js";
import { showTasks } from "../inbox/tasks.js";

const PARTS = {
  tasks: { address: "/inbox", word: "Tasks", scope: "tasks:read", mark: "task", count: ["tasks.list", { status: "OPEN" }], show: showTasks },
  signals: { address: "/inbox/signals", word: "Signals", scope: "signals:read", mark: "signal", count: ["signals.waiting", {}], show: showSignals },
  letters: { address: "/inbox/letters", word: "Dead letters", scope: "letters:read", mark: "warning", count: ["letters.list", {}], show: showLetters },
};
const MOST = 100;

export function showInbox(place, signal, fields = {}) {
  document.title = "Inbox · Holdfast";
  const name = fields.task_id in PARTS && fields.task_id !== "tasks" ? fields.task_id : "tasks";
  const body = h("div", { class: "inbox-body" });
  const tabs = Object.entries(PARTS).filter(([each, part]) => each === name || may(part.scope)).map(([each, part]) => tab(part, each === name, signal));
  put(place, h("header", { class: "inbox-head" }, h("h1", {}, "Inbox"), h("nav", { class: "inbox-tabs", "aria-label": "In the inbox" }, tabs)), body);
  body.addEventListener("counted", ({ detail }) => say(place.querySelector("[aria-current] .count"), detail.count, detail.isAll));
  body.addEventListener("recount", () => countOf(PARTS[name], place.querySelector("[aria-current] .count"), signal));
  PARTS[name].show(body, signal, name === "tasks" ? fields.task_id : undefined);
}

function tab(part, isHere, signal) {
  const count = h("span", { class: "count", hidden: true });
  countOf(part, count, signal);
  return h("a", { href: part.address, "aria-current": isHere ? "true" : null }, icon(part.mark), h("span", {}, part.word), count);
}

function say(element, count, isAll) {
  element.textContent = isAll ? String(count) : `${count}+`;
  element.hidden = count === 0;
}

// How many there are, as far as one page says. It is a hint: without it the tab is as good.
async function countOf(part, element, signal) {
  if (!may(part.scope)) return;
  try {
    const { items, next } = await call(part.count[0], { ...part.count[1], limit: MOST }, signal);
    say(element, items.length, next === null);
  } catch (problem) {
    if (problem.code === undefined && problem.name !== "AbortError") throw problem;
  }
}
