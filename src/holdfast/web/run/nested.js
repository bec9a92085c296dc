// Timelines of children that are open in place. Each is read when it is opened, and again and again until its run has ended; no
// stream is held, because browsers open few of them at once.

import { call } from "../lib/api.js";
import { toast, toastProblem } from "../lib/toast.js";
import { apply, fold, newState, timeOf } from "./fold.js";
import { TERMINAL } from "./event-tables.js";

const EVERY_MS = 2000;
const PAGE = 500;

export class NestedRuns {
  constructor(signal, onChange) {
    Object.assign(this, { signal, onChange, open: new Map() });
    const timer = setInterval(() => !document.hidden && this.readAll(), EVERY_MS);
    signal.addEventListener("abort", () => clearInterval(timer));
  }

  has(runId) {
    return this.open.has(runId);
  }

  toggle(runId) {
    if (this.open.delete(runId)) return this.onChange();
    this.open.set(runId, { events: [], state: newState(), isReading: false });
    return this.read(runId, true);
  }

  readAll() {
    for (const [runId, { state }] of this.open) if (!TERMINAL.has(state.status)) this.read(runId);
  }

  async read(runId, isFirst = false) {
    const child = this.open.get(runId);
    if (!child || child.isReading) return;
    child.isReading = true;
    try {
      for (let isMore = true; isMore;) {
        const { items } = await call("runs.events", { run_id: runId, after: child.events.length, limit: PAGE }, this.signal);
        for (const event of items) if (event.run_seq === child.events.length + 1) child.events.push(event) && apply(child.state, event);
        isMore = items.length === PAGE;
      }
      if (isFirst && child.state.steps.size === 0) toast("It has no steps yet.");
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      if (isFirst) this.open.delete(runId);
      if (isFirst) toastProblem(problem);
    } finally {
      child.isReading = false;
    }
    this.onChange();
  }

  // A child as it is, or as it was at an instant.
  stateOf(runId, cursor) {
    const { events, state } = this.open.get(runId);
    if (cursor === null) return state;
    const later = events.findIndex((event) => timeOf(event) > cursor);
    return later < 0 ? state : fold(events, later);
  }
}
