// The history of a run, line by line, in the order of run_seq.

import { h, put } from "../lib/dom.js";
import { Scroller } from "../lib/scroller.js";
import { precise } from "../lib/time.js";
import { TONES } from "./event-tables.js";
import { eventWord, gistOf } from "./words.js";

const LINE = 34;

export class EventLog {
  constructor({ onSeek, onOpen, signal }) {
    Object.assign(this, { onSeek, onOpen, events: [], seq: 0, selected: null });
    this.scroller = new Scroller({
      rowHeight: LINE,
      label: "Events",
      signal,
      make: (index) => this.line(index),
      stampOf: (index) => `${index + 1 > this.seq}:${index + 1 === this.seq}:${this.isOfSelected(index)}`,
    });
    this.scroller.element.classList.add("log");
    this.scroller.element.tabIndex = -1;
    this.state = h("p", { class: "log-state", role: "status" });
    this.element = h("div", {}, this.state, this.scroller.element);
    this.scroller.element.addEventListener("keydown", (event) => this.key(event), { signal });
  }

  isOfSelected(index) {
    const { step_id: id } = this.events[index];
    return id !== null && id === this.selected;
  }

  set(model, seq, selected) {
    const isLive = seq >= model.seq;
    Object.assign(this, { events: model.events, seq: isLive ? model.seq : seq, selected });
    const wasAtEnd = this.scroller.setCount(this.events.length);
    if (isLive && wasAtEnd) this.scroller.element.scrollTop = this.scroller.element.scrollHeight;
    this.scroller.draw();
    put(this.state, model.isStale ? this.stale(model) : null);
    this.state.hidden = !model.isStale;
  }

  stale(model) {
    const { last_event_seq: to = 0, status = "being read" } = model.missing ?? {};
    const known = to > model.seq ? `; there are ${to}` : "";
    return [
      h("strong", { class: "stale" }, "STALE"),
      ` Events are missing behind ${model.seq}${known}. The run is ${status}; this goes on when they come.`,
    ];
  }

  line(index) {
    const event = this.events[index];
    const seq = index + 1;
    return h(
      "div",
      {
        class: "log-row",
        role: "listitem",
        dataset: {
          tone: TONES[event.event_type] ?? "plain",
          seq,
          later: String(seq > this.seq),
          here: String(seq === this.seq),
          same: String(this.isOfSelected(index)),
        },
      },
      h(
        "button",
        {
          type: "button",
          class: "log-line",
          tabindex: seq === this.seq || (index === 0 && this.seq === 0) ? "0" : "-1",
          onclick: () => this.onOpen(event),
        },
        h("span", { class: "log-seq numbers" }, seq),
        h("span", { class: "log-type" }, eventWord(event.event_type)),
        h(
          "span",
          { class: "log-gist" },
          event.event_type === "UpdateAccepted" && [gistOf(event), " "],
          event.step_id && h("span", { class: "mono" }, event.step_id),
          event.event_type !== "UpdateAccepted" && [" ", gistOf(event)],
        ),
        h("time", { class: "log-time", datetime: event.persisted_at }, precise(event.persisted_at)),
      ),
    );
  }

  key(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1 };
    const row = event.target.closest(".log-row");
    if (!(event.key in steps) || !row) return;
    event.preventDefault();
    const index = Math.min(this.events.length - 1, Math.max(0, Number(row.dataset.seq) - 1 + steps[event.key]));
    this.scroller.show(index);
    this.scroller.shown.get(index)?.element.querySelector("button").focus({ preventScroll: true });
  }

  show(seq) {
    this.scroller.show(seq - 1, "center");
  }
}
