// Signals that no wait has taken: of one run, or of all, with how long they have been there.

import { call } from "../lib/api.js";
import { h, newId, put } from "../lib/dom.js";
import { icon, statusBadge } from "../lib/icons.js";
import { shortId } from "../lib/ids.js";
import { jsonView } from "../lib/json.js";
import { readAgain } from "../lib/pages.js";
import { runAddress } from "../lib/router.js";
import { failed, loading } from "../lib/states.js";
import { ageOf } from "../lib/time.js";

const PAGE = 100;
const FINISHED = new Set(["COMPLETED", "FAILED", "CANCELLED"]);

export class Mailbox {
  // `changed` hears when something else is looked for; `asked` says what is at first.
  constructor(asked, changed, signal) {
    Object.assign(this, { run: asked.run, isAll: Boolean(asked.finished), changed, signal, items: null, cursor: null });
    this.kept = new Map();
    this.list = h("div", { class: "mail", "aria-live": "off" }, loading("Loading signals"));
    this.element = h(
      "section",
      { class: "card mail-part", "aria-label": "Mailbox" },
      h("header", {}, icon("inbox"), h("h2", {}, "Mailbox")),
      h(
        "div",
        { class: "card-body" },
        h("p", { class: "hint" }, "Signals that have arrived and that no wait has taken."),
        this.form(),
        this.list,
      ),
    );
    this.load();
  }

  form() {
    const id = newId("run");
    this.input = h("input", { id, value: this.run, placeholder: "Any run", autocomplete: "off", class: "mono" });
    const finished = h("input", { type: "checkbox", checked: this.isAll });
    finished.addEventListener("change", () => {
      this.isAll = finished.checked;
      this.open(this.run);
    });
    const form = h(
      "form",
      { class: "mail-form" },
      h("label", { for: id }, "Run"),
      this.input,
      h("button", { class: "button", type: "submit" }, "Look"),
      h("label", { class: "check" }, finished, "Of finished runs too"),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.open(this.input.value.trim());
    });
    return form;
  }

  open(run) {
    Object.assign(this, { run, items: null });
    this.input.value = run;
    this.changed();
    return this.load();
  }

  ask(cursor) {
    if (this.run) return call("signals.mailbox", { run_id: this.run, cursor, limit: PAGE }, this.signal);
    return call("signals.unconsumed", { finished: this.isAll ? "true" : "", cursor, limit: PAGE }, this.signal);
  }

  async load(cursor = "") {
    const asked = this.run;
    try {
      const page = cursor ? await this.ask(cursor) : await readAgain((each) => this.ask(each), this.items?.length ?? 0);
      if (asked !== this.run) return;
      this.items = cursor ? [...this.items, ...page.items] : page.items;
      this.cursor = page.next;
      this.draw();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      if (this.items === null || !problem.isUnreachable) put(this.list, failed(problem));
    }
  }

  draw() {
    if (this.items.length === 0) {
      const whose = this.run ? ["The mailbox of ", h("a", { href: runAddress(this.run) }, "this run"), " is empty."] : "Every signal was taken.";
      put(this.list, h("p", { class: "note" }, whose));
      return;
    }
    const rows = this.items.map((mail) => this.entry(mail));
    for (const [key, row] of this.kept) if (!rows.includes(row)) this.kept.delete(key);
    const more = this.cursor !== null && h("button", { class: "button more", type: "button", onclick: () => this.load(this.cursor) }, "Show more");
    put(this.list, h("ul", { class: "letters" }, rows), more);
  }

  // A payload that was unfolded stays so: what says the same is the same element.
  entry(mail) {
    const key = `${mail.run_id ?? this.run}/${mail.name}/${mail.signal_id}/${mail.accepted_at}/${mail.run_status}`;
    if (!this.kept.has(key)) this.kept.set(key, entry(mail));
    return this.kept.get(key);
  }
}

function entry(mail) {
  const whose = mail.run_id && [
    h("a", { href: runAddress(mail.run_id), title: mail.run_id, class: mail.reference_key ? "" : "mono" }, mail.reference_key ?? shortId(mail.run_id)),
    h("span", { class: "quiet" }, mail.workflow),
    FINISHED.has(mail.run_status) && [statusBadge(mail.run_status), h("span", { class: "quiet" }, "no wait will take it")],
  ];
  return h(
    "li",
    {},
    h(
      "p",
      { class: "mail-head" },
      h("strong", {}, mail.name),
      whose,
      h("span", { class: "quiet" }, "here since ", ageOf(mail.accepted_at), mail.step_id && [", for ", mail.step_id]),
    ),
    jsonView(mail.payload, { label: mail.name }),
  );
}
