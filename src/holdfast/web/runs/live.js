// A list of runs that is kept as it is in the service: read once, then updated by what changes, and read again when too much
// has changed at once.

import { queryOf } from "../lib/api.js";
import { Stream } from "../lib/stream.js";
import { RunSource } from "./source.js";

const REST_MS = 1500;

export class LiveRuns {
  // `onChange(place)` hears where something was put in, or -1; `wanted()` says how many rows are looked at.
  constructor(filter, { onChange, onState, wanted, signal }) {
    Object.assign(this, { filter, onChange, wanted, signal });
    this.source = new RunSource(filter, signal);
    this.isBusy = true;
    this.problem = null;
    this.isReading = false;
    this.isOutdated = false;
    this.meanwhile = null;
    new Stream({
      address: () => `/v1/stream${queryOf(this.source.watched)}`,
      onEvent: (event, data) => this.hear(event, data),
      onState,
      signal,
    });
  }

  get items() {
    return this.source.items;
  }

  // What arrives while the list is being read counts too: it may be newer than what is read.
  hear(event, data) {
    if (event === "reset") {
      this.refill();
      return;
    }
    this.meanwhile?.push([event, data]);
    this.apply(event, data);
  }

  apply(event, data) {
    if (event === "run") this.onChange(this.source.upsert(data));
    else if (event === "run_left" && this.source.remove(data.run_id)) this.onChange(-1);
  }

  // Reads the list anew, as far as somebody looks. What is shown stays until the new list is there; however often this
  // is asked for, it is done once at a time, with a rest in between.
  async refill() {
    if (this.isReading) {
      this.isOutdated = true;
      return;
    }
    this.isReading = true;
    await this.during(async () => {
      const fresh = new RunSource(this.filter, this.signal);
      const meanwhile = [];
      this.meanwhile = meanwhile;
      do await fresh.more();
      while (!fresh.isWhole && fresh.items.length < this.wanted());
      fresh.takeNewer(this.source);
      this.source = fresh;
      this.meanwhile = null;
      for (const [event, data] of meanwhile) this.apply(event, data);
    });
    setTimeout(() => this.rested(), REST_MS);
  }

  rested() {
    this.isReading = false;
    if (!this.isOutdated || this.signal.aborted) return;
    this.isOutdated = false;
    this.refill();
  }

  async more() {
    if (this.isBusy || this.source.isWhole) return;
    await this.during(() => this.source.more());
  }

  async during(work) {
    this.isBusy = true;
    this.problem = null;
    this.onChange(-1);
    try {
      await work();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      this.problem = problem;
    }
    this.isBusy = false;
    this.onChange(-1);
  }
}
