// Who waits for which signal, with a form to send it; and the signals that no wait has taken.

import { call } from "../lib/api.js";
import { h, newId, put } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { readAgain } from "../lib/pages.js";
import { getQuery, runAddress, setQuery } from "../lib/router.js";
import { denied, empty, failed, loading } from "../lib/states.js";
import { may } from "../lib/session.js";
import { Stream } from "../lib/stream.js";
import { ageOf } from "../lib/time.js";
import { showConnection } from "../shell.js";
import { counted } from "./counted.js";
import { Mailbox } from "./mailbox.js";
import { sendDialog } from "./send.js";

const PAGE = 200;
const REST_MS = 2000;
const MAIL_MS = 10_000;

export function showSignals(place, signal) {
  if (!may("signals:read")) return put(place, denied({ details: { scope: "signals:read" } }));
  return new WaitList(place, signal);
}

class WaitList {
  constructor(place, signal) {
    const { name = "", run = "", finished = "" } = getQuery();
    Object.assign(this, { signal, name, waits: null, cursor: null, resting: false, isWanted: false });
    this.rows = h("div", { class: "waits" }, loading("Loading waits"));
    this.mail = new Mailbox({ run, finished }, () => this.keep(), signal);
    put(place, this.bar(), h("section", { "aria-label": "Waits" }, this.rows), this.mail.element);
    this.load();
    this.watch();
  }

  bar() {
    const id = newId("name");
    const input = h("input", { id, type: "search", value: this.name, placeholder: "Any signal", autocomplete: "off" });
    input.addEventListener("change", () => {
      Object.assign(this, { name: input.value.trim(), waits: null });
      this.keep();
      this.load();
    });
    return h("form", { class: "sift", role: "search", onsubmit: (event) => event.preventDefault() }, h("div", { class: "sift-field" }, h("label", { for: id }, "Signal"), input));
  }

  keep() {
    setQuery({ name: this.name, run: this.mail.run, finished: this.mail.isAll ? "1" : "" });
  }

  // No stream sends waits and signals, but they change only when runs do; a signal that is only kept changes nothing.
  watch() {
    const beat = setInterval(() => document.hidden || this.mail.load(), MAIL_MS);
    this.signal.addEventListener("abort", () => clearInterval(beat));
    if (!may("runs:read")) return;
    new Stream({
      address: () => "/v1/stream?kinds=runs",
      onEvent: () => this.soon(),
      onState: (state) => showConnection(state === "refused" ? "none" : state),
      signal: this.signal,
    });
  }

  soon() {
    if (this.resting) {
      this.isWanted = true;
      return;
    }
    this.resting = true;
    this.load();
    this.mail.load();
    setTimeout(() => {
      this.resting = false;
      if (this.isWanted && !this.signal.aborted) this.soon();
    }, REST_MS);
    this.isWanted = false;
  }

  async load(cursor = "") {
    try {
      const ask = (each) => call("signals.waiting", { name: this.name, cursor: each, limit: PAGE }, this.signal);
      const page = cursor ? await ask(cursor) : await readAgain(ask, this.waits?.length ?? 0);
      this.waits = cursor ? [...this.waits, ...page.items] : page.items;
      this.cursor = page.next;
      this.draw();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      if (this.waits === null || !problem.isUnreachable) put(this.rows, failed(problem, () => this.load()));
    }
  }

  draw() {
    if (!this.name) counted(this.rows, this.waits.length, this.cursor === null);
    if (this.waits.length === 0) {
      put(this.rows, empty(this.name ? `No run waits for “${this.name}”` : "No run waits for a signal", "Runs that do appear here by themselves."));
      return;
    }
    const focused = this.rows.contains(document.activeElement) ? document.activeElement.id : "";
    const names = Map.groupBy ? Map.groupBy(this.waits, (wait) => wait.name) : grouped(this.waits);
    const groups = [...names].map(([name, waits]) => h("section", { class: "card wait-group" }, h("header", {}, icon("signal"), h("h2", {}, name), h("span", { class: "count" }, waits.length)), h("ul", {}, waits.map((wait) => this.row(wait)))));
    const more = this.cursor !== null && h("button", { class: "button more", type: "button", onclick: () => this.load(this.cursor) }, "Show more");
    put(this.rows, groups, more);
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }

  row(wait) {
    const mark = `${wait.run_id}/${wait.step_id}`;
    return h(
      "li", { class: "wait" },
      h("div", { class: "wait-about" },
        h("span", { class: "wait-run" }, wait.reference_key && [h("a", { href: runAddress(wait.run_id) }, wait.reference_key), " "], wait.reference_key ? h("span", { class: "mono quiet" }, wait.run_id) : h("a", { class: "mono", href: runAddress(wait.run_id) }, wait.run_id)),
        h("span", { class: "quiet" }, h("b", {}, wait.workflow), " · ", wait.step_id !== wait.name && [wait.step_id, " · "], "began to wait ", ageOf(wait.since), wait.until && [", gives up ", ageOf(wait.until)])),
      h("div", { class: "actions" },
        h("button", { class: "button", type: "button", id: `mail ${mark}`, onclick: () => this.openMailbox(wait.run_id) }, "Mailbox"),
        may("signals:write") && h("button", { class: "button", type: "button", id: `send ${mark}`, onclick: () => sendDialog(wait, () => this.load()) }, "Send…")),
    );
  }

  async openMailbox(runId) {
    await this.mail.open(runId);
    this.mail.element.scrollIntoView({ block: "nearest" });
  }
}

function grouped(waits) {
  const names = new Map();
  for (const wait of waits) names.set(wait.name, [...(names.get(wait.name) ?? []), wait]);
  return names;
}
