// The runs that a filter finds, newest first: read page by page, and kept up to date by the stream.

import { call } from "../lib/api.js";
import { nowMs } from "../lib/clock.js";

const PAGE = 200;
const OLDER_SERVICE_PAGES = 8;
const SEARCH_PAGES = 20;
const SPANS = { "1h": 3_600_000, "24h": 86_400_000, "7d": 604_800_000, "30d": 2_592_000_000 };

let knowsNewest = true;

function isNewer(one, other) {
  if (one.created_at !== other.created_at) return one.created_at > other.created_at;
  return one.run_id > other.run_id;
}

export class RunSource {
  constructor(filter, signal) {
    this.filter = filter;
    this.signal = signal;
    this.since = SPANS[filter.time] ? new Date(nowMs() - SPANS[filter.time]).toISOString() : null;
    this.clear();
  }

  clear() {
    this.items = [];
    this.ids = new Set();
    this.cursor = "";
    this.isWhole = false;
    this.looked = 0;
  }

  // What the stream is asked; the rest of the filter is applied here.
  get watched() {
    const { workflow, status, tag } = this.filter;
    return { kinds: "runs", workflow, status, tag };
  }

  has(run) {
    return (!this.since || run.created_at >= this.since) && matches(run, this.filter.text);
  }

  async page(limit) {
    const { workflow, status, tag } = this.filter;
    const asked = { workflow, status, tag, created_from: this.since, cursor: this.cursor, limit };
    if (knowsNewest) {
      try {
        return await call("runs.list", { ...asked, order: "newest" }, this.signal);
      } catch (problem) {
        if (problem.code !== "InvalidInput" || this.cursor) throw problem;
        knowsNewest = false; // an older service: read on, and put in order here
      }
    }
    return call("runs.list", { ...asked, limit: 500 }, this.signal);
  }

  // Reads on, until there is something more to show. `onPart` hears of each page.
  async more() {
    const before = this.items.length;
    const most = knowsNewest ? SEARCH_PAGES : OLDER_SERVICE_PAGES;
    for (let pages = 0; !this.isWhole && pages < most; pages += 1) {
      const found = await this.page(this.filter.text ? 500 : PAGE);
      this.looked += found.items.length;
      this.cursor = found.next ?? "";
      this.isWhole = found.next === null;
      for (const run of found.items) if (this.has(run)) this.upsert(run, true);
      if (knowsNewest && this.items.length - before >= 50) break;
    }
  }

  async exact() {
    const text = this.filter.text?.trim();
    if (!text) return;
    const found = await Promise.allSettled([
      call("runs.get", { run_id: text }, this.signal),
      call("runs.list", { reference_key: text }, this.signal),
    ]);
    const runs = found.flatMap(({ value }) => value?.items ?? (value ? [value] : []));
    for (const run of runs) if (this.isListed(run)) this.upsert(run, true);
  }

  // What another list knows better, by its last event, of the runs that are here.
  takeNewer(other) {
    for (const run of other.items) if (this.ids.has(run.run_id)) this.upsert(run, true);
  }

  isListed(run) {
    const { workflow, status, tag } = this.filter;
    return (
      this.has(run) &&
      (!workflow || run.workflow === workflow) &&
      (!status || run.status === status) &&
      (!tag || run.tags.includes(tag))
    );
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

function matches(run, text) {
  const words = (text ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return true;
  const all = [
    run.run_id,
    run.workflow,
    run.reference_key,
    run.parent_run_id,
    ...run.tags,
    run.last_error?.code,
    run.last_error?.message,
  ];
  const whole = all.filter(Boolean).join("\n").toLowerCase();
  return words.every((word) => whole.includes(word));
}
