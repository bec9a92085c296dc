// The typed state of a flow as it is now, which its query `state` returns.

import { call } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { jsonView } from "../lib/json.js";

export class FlowState {
  constructor(card, runId, signal) {
    Object.assign(this, { card, runId, signal, isThere: false, shown: null });
    this.place = card.querySelector(".card-body");
  }

  // What one reads stays where it is while the state is the same.
  async load() {
    if (!this.isThere || this.isAsking) return;
    this.isAsking = true;
    try {
      const { result } = await call("runs.query", { run_id: this.runId, name: "state", input: {} }, this.signal);
      this.show(JSON.stringify(result), jsonView(result, { label: "State" }));
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      this.show(problem.message, h("p", { class: "quiet" }, `The state cannot be shown: ${problem.message}`));
    } finally {
      this.isAsking = false;
    }
  }

  show(text, element) {
    this.card.hidden = false;
    if (text === this.shown) return;
    this.shown = text;
    put(this.place, element);
  }
}
