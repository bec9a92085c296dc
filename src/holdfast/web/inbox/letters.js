// Messages that could not be handled: why, what is in them, and what is to become of them.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, newId, on, perFrame, put } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { jsonView } from "../lib/json.js";
import { readAgain } from "../lib/pages.js";
import { getQuery, runAddress, setQuery } from "../lib/router.js";
import { denied, empty, failed, loading } from "../lib/states.js";
import { may } from "../lib/session.js";
import { Stream } from "../lib/stream.js";
import { ageOf } from "../lib/time.js";
import { toast, toastProblem } from "../lib/toast.js";
import { showConnection } from "../shell.js";
import { counted, recount } from "./counted.js";
import { letterBulk } from "./letter-bulk.js";

const PAGE = 200;
const SETTLED = { requeue: "Their runs get them again at once. What still cannot be handled comes back here.", drop: "They will never be handled. This cannot be undone." };
const REASONS = ["undecodable", "definition missing", "history irreparable", "retries exhausted", "refused", "payload does not fit"];

export function showLetters(place, signal) {
  if (!may("letters:read")) return put(place, denied({ details: { scope: "letters:read" } }));
  return new LetterList(place, signal);
}

class LetterList {
  constructor(place, signal) {
    const { reason = "", settled = "" } = getQuery();
    Object.assign(this, { signal, filter: { reason: REASONS.includes(reason) ? reason : "", settled }, letters: new Map(), elements: new Map(), cursor: null });
    this.rows = h("div", { class: "letters-place" }, loading("Loading dead letters"));
    this.draw = perFrame(() => !signal.aborted && this.drawNow());
    put(place, this.bar(), this.rows);
    on(document, "visibilitychange", () => document.hidden || this.load(), signal); // others may have settled some
    new Stream({
      address: () => "/v1/stream?kinds=letters&settled=true",
      onEvent: (name, letter) => {
        if (name === "reset") this.load();
        else if (name === "letter" && (!this.filter.reason || letter.reason === this.filter.reason)) this.take(letter);
      },
      onState: (state, problem) => {
        showConnection(state === "refused" ? "none" : state);
        if (state === "refused") put(this.rows, failed(problem));
      },
      signal,
    });
  }

  bar() {
    const id = newId("reason");
    const reason = h("select", { id }, ["", ...REASONS].map((each) => h("option", { value: each, selected: each === this.filter.reason }, each || "Any")));
    const settled = h("input", { type: "checkbox", checked: Boolean(this.filter.settled) });
    const changed = () => {
      this.filter = { reason: reason.value, settled: settled.checked ? "1" : "" };
      setQuery(this.filter);
      this.load();
    };
    reason.addEventListener("change", changed);
    settled.addEventListener("change", changed);
    return h("form", { class: "sift", onsubmit: (event) => event.preventDefault() }, h("div", { class: "sift-field" }, h("label", { for: id }, "Reason"), reason), h("label", { class: "check" }, settled, "Settled ones too"));
  }

  async load(cursor = "") {
    try {
      const { reason, settled } = this.filter;
      const ask = (each) => call("letters.list", { reason, settled: settled ? "true" : "", cursor: each, limit: PAGE }, this.signal);
      const page = cursor ? await ask(cursor) : await readAgain(ask, this.letters.size);
      if (!cursor) this.letters.clear();
      for (const letter of page.items) this.letters.set(letter.letter_id, letter);
      this.cursor = page.next;
      this.draw();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      if (this.letters.size === 0 || !problem.isUnreachable) put(this.rows, failed(problem, () => this.load()));
    }
  }

  // After a change, which may have changed what the tab counts, too.
  reload() {
    if (!this.isWhole()) recount(this.rows);
    this.load();
  }

  isWhole() {
    return !this.filter.reason && !this.filter.settled;
  }

  take(letter) {
    if (letter.settled !== null && !this.filter.settled) this.letters.delete(letter.letter_id);
    else this.letters.set(letter.letter_id, letter);
    this.elements.delete(letter.letter_id);
    this.draw();
  }

  drawNow() {
    if (this.isWhole()) counted(this.rows, this.letters.size, this.cursor === null);
    if (this.letters.size === 0) {
      put(this.rows, empty(this.filter.reason ? "None for this reason" : "No dead letters", "Messages that cannot be handled are kept here until an operator settles them."));
      return;
    }
    const items = [...this.letters.values()].map((letter) => this.element(letter));
    const more = this.cursor !== null && h("button", { class: "button more", type: "button", onclick: () => this.load(this.cursor) }, "Show more");
    const open = [...this.letters.values()].filter((letter) => letter.settled === null).length;
    put(this.rows, open > 1 && may("letters:write") && this.forAll(), h("ul", { class: "dead-letters" }, items), more);
  }

  forAll() {
    const act = () =>
      letterBulk("letters", { reason: this.filter.reason }, SETTLED, () => this.reload()).catch((problem) => {
        if (problem.code === undefined) throw problem;
        toastProblem(problem);
      });
    this.all ??= h("button", { class: "link-button for-all", type: "button", onclick: act }, "Requeue or drop all of these…");
    return this.all;
  }

  // A letter that is open stays open: its element is made again only when the letter has changed.
  element(letter) {
    const text = JSON.stringify(letter);
    const kept = this.elements.get(letter.letter_id);
    if (kept?.text === text) return kept.element;
    const element = this.item(letter);
    this.elements.set(letter.letter_id, { text, element });
    return element;
  }

  item(letter) {
    const message = h("div", { class: "letter-message" });
    const details = h("details", { class: "letter-details" }, h("summary", {}, "The message"), message);
    details.addEventListener("toggle", () => details.open && !message.hasChildNodes() && this.open(letter, message));
    const isOpen = letter.settled === null && may("letters:write");
    return h(
      "li", { class: "card dead-letter" },
      h("div", { class: "letter-head" },
        icon("warning"),
        h("div", { class: "letter-about" },
          h("p", {}, h("strong", {}, letter.reason.charAt(0).toUpperCase() + letter.reason.slice(1)), " ", h("span", { class: "quiet" }, ageOf(letter.died_at), " on ", letter.node.split("#")[0])),
          h("p", { class: "letter-detail" }, letter.detail),
          h("p", {}, h("a", { class: "mono", href: runAddress(letter.run_id) }, letter.run_id)),
          letter.settled !== null && h("p", { class: "quiet" }, letter.settled === "drop" ? "Dropped by " : "Put back by ", h("strong", {}, letter.settled_by), " ", ageOf(letter.settled_at))),
        isOpen && h("div", { class: "actions" },
          h("button", { class: "button", type: "button", onclick: () => this.settle(letter, "requeue") }, "Requeue"),
          h("button", { class: "button danger", type: "button", onclick: () => this.settle(letter, "drop") }, "Drop…"))),
      details,
    );
  }

  async open(letter, place) {
    put(place, loading("Opening"));
    try {
      const { message, text } = await call("letters.get", { letter_id: letter.letter_id }, this.signal);
      put(place, text === null ? jsonView(message, { label: "Message" }) : h("pre", { class: "letter-text" }, text));
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      put(place, failed(problem));
    }
  }

  settle(letter, how) {
    const isDrop = how === "drop";
    openDialog({
      title: isDrop ? "Drop this message?" : "Put this message back?",
      body: h("p", {}, isDrop ? "It will never be handled. This cannot be undone." : "Its run gets it again at once. If it still cannot be handled it comes back here.", " ", h("code", {}, letter.run_id)),
      action: isDrop ? "Drop" : "Requeue",
      danger: isDrop,
      act: async () => {
        await call(`letters.${how}`, { letter_id: letter.letter_id });
        toast(isDrop ? "Dropped." : "Put back.");
        this.reload(); // another process may have done it, which notifies those who watch there
      },
    });
  }
}
