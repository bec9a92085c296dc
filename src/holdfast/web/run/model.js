// One run as this page knows it: its events without a gap, what they add up to, and whether more may be missing.

import { call } from "../lib/api.js";
import { Stream } from "../lib/stream.js";
import { apply, fold, newState } from "./fold.js";

export class RunModel {
  constructor(runId, signal, { onChange, onState }) {
    Object.assign(this, { runId, signal, onChange, onState });
    this.events = [];
    this.state = newState();
    this.head = null;
    this.isStale = false;
    this.missing = null;
    this.isComplete = false;
    this.waiters = new Map();
  }

  get seq() {
    return this.events.length;
  }

  // The history begins to come after `before` has come, or failed: a long one would keep the service from answering.
  async open(before = null) {
    this.head = await call("runs.get", { run_id: this.runId }, this.signal);
    await before?.catch(() => {});
    this.stream = new Stream({
      address: () => `/v1/runs/${encodeURIComponent(this.runId)}/stream?after=${this.seq}`,
      onEvent: (name, data) => this.hear(name, data),
      onState: this.onState,
      signal: this.signal,
    });
  }

  async readHead() {
    this.head = await call("runs.get", { run_id: this.runId }, this.signal);
    this.onChange();
  }

  hear(name, data) {
    if (name === "message") return this.take(data);
    if (name === "stale") this.becomeStale(data.last_event_seq);
    if (name === "end") {
      this.isComplete = true;
      this.stream.close();
      this.onState("ended");
      this.onChange();
    }
    return true;
  }

  // Takes the next event. One that was here before changes nothing; one too far ahead means that some are missing.
  take(event) {
    if (event.run_seq <= this.seq) return true;
    if (event.run_seq > this.seq + 1) {
      this.becomeStale(this.seq);
      queueMicrotask(() => this.stream.reopen({ forget: true }));
      return false;
    }
    this.events.push(event);
    apply(this.state, event);
    this.isStale = false;
    this.notify(event);
    this.onChange(event);
    return true;
  }

  async becomeStale(seq) {
    if (this.isStale) return;
    this.isStale = true;
    this.onChange();
    try {
      this.missing = await call("runs.snapshot", { run_id: this.runId }, this.signal);
    } catch (problem) {
      if (problem.code === undefined) return;
      this.missing = { last_event_seq: seq, status: this.state.status };
    }
    this.onChange();
  }

  at(seq) {
    return seq >= this.seq ? this.state : fold(this.events, seq);
  }

  // Calls once, when the run takes this signal.
  whenTaken(signalId, done) {
    this.waiters.set(signalId, done);
  }

  notify(event) {
    const id = event.data?.signal_id;
    if (event.event_type !== "SignalReceived" || !this.waiters.has(id)) return;
    this.waiters.get(id)(event);
    this.waiters.delete(id);
  }
}
