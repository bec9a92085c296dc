// The event bus: how each sink does, and what was given up, to be sent again or dropped.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, put } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { letterBulk } from "../inbox/letter-bulk.js";
import { runAddress } from "../lib/router.js";
import { may } from "../lib/session.js";
import { ageOf } from "../lib/time.js";
import { toast, toastProblem } from "../lib/toast.js";
import { panel } from "./panels.js";

const MOST = 100;
const MOST_LETTERS = 20;
const SETTLED = { requeue: "Their sinks get them at once. What fails again comes back here.", drop: "Their sinks never get them. This cannot be undone." };
const number = new Intl.NumberFormat();

export class BusPanel {
  constructor(signal) {
    Object.assign(this, { signal, shown: "" });
    this.body = h("div", { class: "bus" }, h("p", { class: "hint" }, "Loading…"));
    this.element = panel("Event bus", "signal", this.body);
    this.read();
  }

  async read() {
    try {
      const [sinks, letters] = await Promise.all([call("sinks.list", { limit: MOST }, this.signal), call("bus.letters", { limit: MOST_LETTERS }, this.signal)]);
      this.show(sinks, letters);
    } catch (problem) {
      if (problem.code === undefined && problem.name !== "AbortError") throw problem;
      if (problem.code === undefined || (this.shown && problem.isUnreachable)) return;
      this.shown = "";
      put(this.body, h("p", { class: "hint" }, problem.message));
    }
  }

  // It is put there again only when it says something else, so that a button that has the focus stays.
  show(sinks, letters) {
    const text = JSON.stringify([sinks, letters]);
    if (text === this.shown) return;
    this.shown = text;
    const rows = letters.items.map((letter) => this.letter(letter));
    put(
      this.body,
      sinks.items.length === 0 ? h("p", { class: "hint" }, "There are no sinks.") : h("ul", { class: "nodes" }, sinks.items.map(sinkRow)),
      sinks.next !== null && h("p", { class: "hint" }, `The first ${MOST} sinks are shown.`),
      rows.length > 0 && [h("h3", {}, "Given up"), rows.length > 1 && may("letters:write") && this.forAll(), h("ul", { class: "bus-letters" }, rows)],
      letters.next !== null && h("p", { class: "hint" }, `The oldest ${MOST_LETTERS} are shown.`),
    );
  }

  forAll() {
    const act = () =>
      letterBulk("bus", {}, SETTLED, () => this.read()).catch((problem) => {
        if (problem.code === undefined) throw problem;
        toastProblem(problem);
      });
    return h("button", { class: "link-button for-all", type: "button", onclick: act }, "Requeue or drop all…");
  }

  letter(letter) {
    const about = letter.run_id ? [h("a", { class: "mono", href: runAddress(letter.run_id) }, letter.run_id), ` events ${letter.from_seq} to ${letter.to_seq}`] : "Alerts";
    const button = (word, how, kind = "") =>
      h("button", { class: `button small ${kind}`, type: "button", "aria-label": `${word} ${letter.letter_id}`, onclick: () => this.settle(letter, how) }, word);
    return h(
      "li",
      {},
      h("p", {}, h("strong", {}, letter.sink), " ", h("span", { class: "quiet" }, ageOf(letter.died_at), `, ${number.format(letter.attempts)} attempts`)),
      h("p", {}, about),
      h("p", { class: "alert-detail" }, letter.detail),
      may("letters:write") && h("div", { class: "actions" }, button("Requeue", "requeue"), button("Drop", "drop", "danger")),
    );
  }

  settle(letter, how) {
    const isDrop = how === "drop";
    openDialog({
      title: isDrop ? "Drop these events?" : "Send these events again?",
      body: h("p", {}, isDrop ? `${letter.sink} never gets them. This cannot be undone.` : `${letter.sink} gets them at once. If that fails again they come back here.`),
      action: isDrop ? "Drop" : "Requeue",
      danger: isDrop,
      act: async () => {
        await call(`bus.${how}`, { letter_id: letter.letter_id });
        toast(isDrop ? "Dropped." : "Put back.");
        this.read();
      },
    });
  }
}

function sinkRow(sink) {
  const isFailing = sink.failures > 0;
  const counts = [`${number.format(sink.backlog)} wait`, `${number.format(sink.delivered)} delivered`, sink.dead_letters > 0 && `${number.format(sink.dead_letters)} given up`].filter(Boolean);
  return h(
    "li",
    { class: isFailing ? "gone" : null },
    icon(isFailing ? "FAILED" : sink.is_paused ? "PAUSED" : "COMPLETED"),
    h("span", { class: "node-name" }, sink.name, h("span", { class: "tag" }, sink.kind), sink.is_paused && h("span", { class: "tag" }, "paused")),
    h("span", { class: "quiet" }, counts.join(", "), sink.oldest_at && ["; oldest: ", ageOf(sink.oldest_at)]),
    isFailing && h("span", { class: "quiet" }, `Failed ${number.format(sink.failures)} times in a row: ${sink.error}`, sink.next_at && [". Tried again ", ageOf(sink.next_at)]),
  );
}
