// The runs that a filter finds, newest first: read page by page, and kept up to date by the stream.

import { call } from "../lib/api.js";
import { nowMs } from "../lib/clock.js";
import { readAgain } from "../lib/pages.js";
import { fieldsOfStatus, parseQuery } from "./query.js";

const PAGE = 200;
const SPANS = { "1h": 3_600_000, "24h": 86_400_000, "7d": 604_800_000, "30d": 2_592_000_000 };

function isNewer(one, other) {
  if (one.created_at !== other.created_at) return one.created_at > other.created_at;
  return one.run_id > other.run_id;
}

// A filter as the service is asked. Runs that others have started are left out, unless they are asked for.
export function askedOf(filter) {
  const since = SPANS[filter.time] ? new Date(nowMs() - SPANS[filter.time]).toISOString() : undefined;
  const { children, unknown, ...typed } = parseQuery(filter.text ?? "");
  const fields = {
    workflow: filter.workflow || undefined,
    ...(filter.status ? fieldsOfStatus(filter.status) : {}),
    tag: filter.tag || undefined,
    created_from: since,
    ...typed,
  };
  if (unknown) fields.text = `${fields.text} ${unknown}`.trim();
  if (!filter.children && !children && !fields.parent_run_id) fields.roots = true;
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined && value !== ""));
}

export class RunSource {
  constructor(filter, signal) {
    this.filter = filter;
    this.signal = signal;
    this.asked = askedOf(filter);
    this.clear();
  }

  clear() {
    this.items = [];
    this.ids = new Set();
    this.cursor = "";
    this.isWhole = false;
  }

  // What the stream is asked; the rest of the filter is applied here.
  get watched() {
    const { text, created_from, ...watched } = this.asked;
    return { kinds: "runs", ...watched };
  }

  has(run) {
    const { created_from: since, text } = this.asked;
    return (!since || run.created_at >= since) && matches(run, text);
  }

  async more() {
    const ask = (cursor) => call("runs.list", { ...this.asked, cursor, order: "newest", limit: PAGE }, this.signal);
    const found = await readAgain(ask, 1, this.cursor);
    this.cursor = found.next ?? "";
    this.isWhole = found.next === null;
    for (const run of found.items) this.upsert(run, true);
  }

  // What another list knows better, by its last event, of the runs that are here.
  takeNewer(other) {
    for (const run of other.items) if (this.ids.has(run.run_id)) this.upsert(run, true);
  }

  // Puts a run where it belongs. Returns its place if it is new, else -1.
  upsert(run, isRead = false) {
    if (!isRead && !this.has(run)) return -1;
    if (this.ids.has(run.run_id)) {
      const at = this.items.findIndex((each) => each.run_id === run.run_id);
      if (run.last_event_seq >= this.items[at].last_event_seq) this.items[at] = run;
      return -1;
    }
    let low = 0;
    let high = this.items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isNewer(this.items[middle], run)) low = middle + 1;
      else high = middle;
    }
    if (!isRead && low === this.items.length && !this.isWhole) return -1; // it will come with its page
    this.items.splice(low, 0, run);
    this.ids.add(run.run_id);
    return low;
  }

  remove(runId) {
    if (!this.ids.delete(runId)) return false;
    this.items.splice(
      this.items.findIndex((each) => each.run_id === runId),
      1,
    );
    return true;
  }
}

const lowered = (text) => text.replace(/[A-Z]/g, (letter) => letter.toLowerCase());

// The same words in the same places as the service looks for them.
function matches(run, text) {
  const { code, message } = run.last_error ?? {};
  const all = [run.run_id, run.workflow, run.reference_key, ...run.tags, code, message];
  const whole = lowered(all.filter(Boolean).join("\n"));
  return lowered(text ?? "")
    .split(/\s+/)
    .every((word) => whole.includes(word));
}
