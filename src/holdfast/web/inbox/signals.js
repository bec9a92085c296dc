// Who waits for which signal, with a form to send it; and the signals of a run that nobody has taken.

import { call } from "../lib/api.js";
import { h, newId, put } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { getQuery, runAddress, setQuery } from "../lib/router.js";
import { denied, empty, failed, loading } from "../lib/states.js";
import { may } from "../lib/session.js";
import { Stream } from "../lib/stream.js";
import { ageOf } from "../lib/time.js";
import { showConnection } from "../shell.js";
import { counted } from "./counted.js";
import { mailbox } from "./mailbox.js";
import { sendDialog } from "./send.js";

const PAGE = 200;
const REST_MS = 2000;

export function showSignals(place, signal) {
  if (!may("signals:read")) return put(place, denied({ details: { scope: "signals:read" } }));
  return new WaitList(place, signal);
}

class WaitList {
  constructor(place, signal) {
    const { name = "", run = "" } = getQuery();
    Object.assign(this, { signal, name, run, waits: null, cursor: null, resting: false, isWanted: false });
    this.rows = h("div", { class: "waits" }, loading("Loading waits"));
    this.mail = h("div", { class: "mail" });
    put(place, this.bar(), h("section", { "aria-label": "Waits" }, this.rows), this.mailPart());
    this.load();
    this.watch();
    if (run) this.openMailbox(run);
  }

  bar() {
    const id = newId("name");
    const input = h("input", { id, type: "search", value: this.name, placeholder: "Any signal", autocomplete: "off" });
    input.addEventListener("change", () => {
      this.name = input.value.trim();
      this.keep();
      this.load();
    });
    return h("form", { class: "sift", role: "search", onsubmit: (event) => event.preventDefault() }, h("div", { class: "sift-field" }, h("label", { for: id }, "Signal"), input));
  }

  keep() {
    setQuery({ name: this.name, run: this.run });
  }

  // No list tells of waits, but they change only when runs do.
  watch() {
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
    setTimeout(() => {
      this.resting = false;
      if (this.isWanted && !this.signal.aborted) this.soon();
    }, REST_MS);
    this.isWanted = false;
  }

  async load(cursor = "") {
    try {
      const page = await call("signals.waiting", { name: this.name, cursor, limit: PAGE }, this.signal);
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
      put(this.rows, empty(this.name ? `Nobody waits for “${this.name}”` : "No run waits for a signal", "Runs that do appear here by themselves."));
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
        h("a", { class: "mono", href: runAddress(wait.run_id) }, wait.run_id),
        h("span", { class: "quiet" }, wait.step_id !== wait.name && [wait.step_id, " · "], "has waited since ", ageOf(wait.since), wait.until && [", gives up ", ageOf(wait.until)])),
      h("div", { class: "actions" },
        h("button", { class: "button", type: "button", id: `mail ${mark}`, onclick: () => this.openMailbox(wait.run_id, true) }, "Mailbox"),
        may("signals:write") && h("button", { class: "button", type: "button", id: `send ${mark}`, onclick: () => sendDialog(wait, () => this.load()) }, "Send…")),
    );
  }

  mailPart() {
    const id = newId("run");
    this.runInput = h("input", { id, value: this.run, placeholder: "Id of a run", autocomplete: "off", class: "mono" });
    const form = h("form", { class: "mail-form" }, h("label", { for: id }, "Run"), this.runInput, h("button", { class: "button", type: "submit" }, "Look"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.openMailbox(this.runInput.value.trim());
    });
    return h("section", { class: "card mail-part", "aria-label": "Mailbox" }, h("header", {}, icon("inbox"), h("h2", {}, "Mailbox of a run")), h("div", { class: "card-body" }, h("p", { class: "hint" }, "Signals that have arrived and that no wait has taken."), form, this.mail));
  }

  async openMailbox(runId, isFar = false) {
    this.run = runId;
    this.runInput.value = runId;
    this.keep();
    if (!runId) return put(this.mail);
    put(this.mail, await mailbox(runId, this.signal));
    if (isFar) this.mail.scrollIntoView({ block: "nearest" });
    return undefined;
  }
}

function grouped(waits) {
  const names = new Map();
  for (const wait of waits) names.set(wait.name, [...(names.get(wait.name) ?? []), wait]);
  return names;
}
