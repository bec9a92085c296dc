// Server-sent events over fetch: unlike EventSource it says why it was refused, and notices a silence.
//
// One stream is open at a time for a view, and none while the page is hidden: browsers allow few connections to one place.

import { OWN_HEADER, problemOf, tellSignedOut } from "./api.js";
import { parse } from "./exact.js";
import { mounted } from "./mount.js";

const FIRST_MS = 500;
const MOST_MS = 15_000;
const SILENT_MS = 40_000; // the service says something every 15 seconds
const HIDDEN_MS = 60_000;

// Splits text into events. Fields are as the standard has them; comments count as a sign of life.
export function parser(onEvent) {
  let rest = "";
  return (text) => {
    const blocks = (rest + text).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { event: "message", id: null, data: "" };
      for (const line of block.split("\n")) {
        const at = line.indexOf(":");
        if (at <= 0) continue;
        const value = line.slice(at + 1).replace(/^ /, "");
        if (line.startsWith("data")) event.data += (event.data && "\n") + value;
        else if (line.startsWith("event")) event.event = value;
        else if (line.startsWith("id")) event.id = value;
      }
      if (event.data) onEvent(event);
    }
  };
}

export class Stream {
  // `address()` is asked before each attempt. `onEvent(name, data, id)` may return false: come back from there.
  // `onState` hears "live", "lost" and "refused".
  constructor({ address, onEvent, onState = () => {}, signal }) {
    Object.assign(this, { address, onEvent, onState, signal });
    this.lastId = null;
    this.failures = 0;
    this.isOver = false;
    this.isResting = false;
    this.hidden = 0;
    this.waiting = 0;
    document.addEventListener("visibilitychange", () => this.look(), { signal });
    window.addEventListener("online", () => this.retryNow(), { signal });
    signal.addEventListener("abort", () => this.close());
    this.open();
  }

  look() {
    clearTimeout(this.hidden);
    if (document.hidden) {
      this.hidden = setTimeout(() => {
        this.isResting = true;
        this.rest();
      }, HIDDEN_MS);
    } else {
      this.isResting = false;
      this.retryNow();
    }
  }

  rest() {
    this.reading?.abort();
    this.reading = null;
  }

  close() {
    this.isOver = true;
    clearTimeout(this.waiting);
    clearTimeout(this.hidden);
    this.rest();
  }

  retryNow() {
    if (this.reading || this.isOver || this.isResting) return;
    clearTimeout(this.waiting);
    this.open();
  }

  // Begins again, from the last event or from what `address` says.
  reopen({ forget = false } = {}) {
    if (forget) this.lastId = null;
    this.isOver = this.signal.aborted;
    clearTimeout(this.waiting);
    this.rest();
    this.open();
  }

  async open() {
    const reading = new AbortController();
    this.reading = reading;
    try {
      await this.read(reading);
    } catch (problem) {
      if (problem.status >= 400 && problem.status < 500 && problem.status !== 429) {
        this.isOver = true;
        this.onState("refused", problem);
        if (problem.isSignedOut) tellSignedOut();
        return;
      }
      if (this.reading === reading) this.onState("lost", problem);
    }
    if (this.reading !== reading || this.isOver) return; // closed, resting, or opened anew
    this.reading = null;
    this.failures += 1;
    const wait = Math.min(MOST_MS, FIRST_MS * 2 ** (this.failures - 1)) * (0.75 + Math.random() / 2);
    this.waiting = setTimeout(() => this.retryNow(), wait);
  }

  async read(reading) {
    const headers = { Accept: "text/event-stream", ...OWN_HEADER };
    if (this.lastId !== null) headers["Last-Event-ID"] = this.lastId;
    const response = await fetch(mounted(this.address()), { headers, credentials: "same-origin", signal: reading.signal });
    if (response.status === 204) {
      this.isOver = true;
      return;
    }
    if (!response.ok) throw await problemOf(response);
    this.failures = 0;
    this.onState("live");
    await this.take(response.body.pipeThrough(new TextDecoderStream()).getReader(), reading);
  }

  async take(reader, reading) {
    const feed = parser(({ event, data, id }) => {
      if (this.reading !== reading || this.isOver) return;
      if (this.onEvent(event, parse(data), id) !== false && id !== null) this.lastId = id;
    });
    let silence = 0;
    const notSilent = () => {
      clearTimeout(silence);
      silence = setTimeout(() => reading.abort(), SILENT_MS);
    };
    try {
      for (notSilent(); ; notSilent()) {
        const { value, done } = await reader.read();
        if (done) break;
        feed(value);
      }
    } finally {
      clearTimeout(silence);
    }
    // The service has ended it, such as for a reader that is behind: that it is lost is known when it cannot be opened again.
  }
}
