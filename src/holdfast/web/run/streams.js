// What a run writes to its streams, as it is written: texts as text, everything else line by line.
//
// One stream is followed at a time, and only so much of it is on the page: what is older gives way.

import { call } from "../lib/api.js";
import { h, newId, perFrame, put } from "../lib/dom.js";
import { Stream } from "../lib/stream.js";
import { TERMINAL } from "./event-tables.js";

const EVERY_MS = 3000;
const FIRST_CHUNKS = 5000;
const MOST_CHARS = 200_000;
const MOST_PARTS = 2000;

export class RunStreams {
  constructor({ card, place, model, signal }) {
    Object.assign(this, { card, place, model, signal, streams: [], name: null });
    this.body = h("div", { class: "stream-body", role: "log", tabindex: "0", "aria-label": "Stream", id: newId("stream") });
    this.state = h("p", { class: "quiet stream-state", role: "status" });
    this.tabs = h("div", { class: "stream-tabs", role: "tablist", "aria-label": "Streams" });
    put(place, this.tabs, this.body, this.state);
    this.draw = perFrame(() => signal.aborted || this.drawNow());
    const timer = setInterval(() => !document.hidden && !this.isOver && this.load(), EVERY_MS);
    signal.addEventListener("abort", () => {
      clearInterval(timer);
      this.following?.abort();
    });
  }

  // Streams are no events: which there are is asked for now and then, until the run has ended.
  get isOver() {
    return TERMINAL.has(this.model.state.status) && this.isListed;
  }

  async load() {
    if (this.isAsking) return;
    this.isAsking = true;
    const isEnded = TERMINAL.has(this.model.state.status);
    try {
      this.streams = (await call("streams.list", { run_id: this.model.runId }, this.signal)).items;
      this.isListed = isEnded;
    } catch (problem) {
      if (problem.code === undefined && problem.name !== "AbortError") throw problem;
      return;
    } finally {
      this.isAsking = false;
    }
    this.card.hidden = this.streams.length === 0;
    if (this.name === null && this.streams.length > 0) this.follow(this.streams[0]);
    this.showTabs();
  }

  showTabs() {
    const stamp = this.streams.map((stream) => `${stream.name} ${stream.name === this.name}`).join("\n");
    if (stamp === this.shownTabs) return;
    this.shownTabs = stamp;
    this.tabs.hidden = this.streams.length < 2;
    const buttons = this.streams.map((stream) =>
      h(
        "button",
        {
          type: "button",
          class: "stream-tab",
          role: "tab",
          "aria-selected": String(stream.name === this.name),
          "aria-controls": this.body.id,
          onclick: () => this.pick(stream.name),
        },
        stream.name,
      ),
    );
    put(this.tabs, buttons);
  }

  async pick(name) {
    if (name === this.name) return;
    await this.load(); // how far it goes by now
    const found = this.streams.find((stream) => stream.name === name);
    if (found) this.follow(found);
    this.showTabs();
    this.tabs.querySelector('[aria-selected="true"]')?.focus();
  }

  // Of a long stream only the end is read.
  follow({ name, last_seq: last }) {
    this.following?.abort();
    this.following = new AbortController();
    const from = Math.max(0, last - FIRST_CHUNKS);
    Object.assign(this, { name, leftOut: from, chars: 0, count: 0, dropped: 0, ending: null, pending: [], last: null });
    this.body.setAttribute("aria-label", `Stream ${name}`);
    put(this.body);
    const { runId } = this.model;
    this.stream = new Stream({
      address: () => `/v1/runs/${encodeURIComponent(runId)}/streams/${encodeURIComponent(name)}/follow?after=${from}`,
      onEvent: (kind, data) => this.hear(kind, data),
      onState: (state, problem) => state === "refused" && this.end(problem.message),
      signal: this.following.signal,
    });
    this.draw();
  }

  hear(kind, data) {
    if (kind === "message") {
      this.pending.push(data);
      this.draw();
    }
    if (kind === "end") {
      this.dropped = data.dropped;
      this.stream.close();
      this.end("");
    }
    return true;
  }

  end(why) {
    this.ending = why;
    this.draw();
  }

  drawNow() {
    const { body } = this;
    const isAtEnd = body.scrollHeight - body.scrollTop - body.clientHeight < 40;
    for (const chunk of this.pending.splice(0)) this.add(chunk);
    while (body.childElementCount > 1 && (this.chars > MOST_CHARS || body.childElementCount > MOST_PARTS)) {
      const oldest = body.firstElementChild;
      this.chars -= oldest.textContent.length;
      this.leftOut = Number(oldest.dataset.last ?? this.leftOut);
      oldest.remove();
    }
    if (isAtEnd) body.scrollTop = body.scrollHeight;
    const said = [
      this.leftOut > 0 && `The first ${this.leftOut.toLocaleString()} chunks are left out.`,
      this.dropped > 0 && `The stream was full: ${this.dropped.toLocaleString()} chunks were dropped.`,
      this.ending === null ? "" : this.ending || (this.count === 0 ? "Nothing was written." : "This is all."),
    ];
    this.state.textContent = said.filter(Boolean).join(" ");
  }

  add(chunk) {
    this.count += 1;
    if (chunk.restarted_from !== undefined) this.beginAnew(chunk);
    const { seq, value, step_id: step } = chunk;
    const isText = typeof value === "string";
    const text = isText ? value : JSON.stringify(value);
    this.chars += text.length;
    const last = this.last;
    if (isText && last?.dataset.kind === "text" && last.dataset.step === step && last.textContent.length < MOST_CHARS / 10) {
      last.append(text);
      last.dataset.last = seq;
      return;
    }
    const dataset = { kind: isText ? "text" : "json", step, first: seq, last: seq };
    this.last = h(isText ? "span" : "div", { class: isText ? "stream-text" : "stream-row", dataset }, text);
    this.body.append(this.last);
  }

  // A later attempt writes the same again: what the step wrote before does not count any more.
  beginAnew({ seq, step_id: step, attempt, restarted_from: from }) {
    for (const part of this.body.children)
      if (part.dataset.step === step && Number(part.dataset.first) >= from) part.dataset.void = "true";
    const mark = `${step} begins anew with attempt ${attempt}: what it wrote before does not count any more`;
    this.body.append(h("div", { class: "stream-mark", dataset: { kind: "mark", last: seq - 1 } }, mark));
    this.last = null;
  }
}
