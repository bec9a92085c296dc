// What a run can be asked, and asked for: the queries and updates that it has said it answers, with forms and answers.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, put } from "../lib/dom.js";
import { schemaForm } from "../lib/forms.js";
import { requestId } from "../lib/ids.js";
import { jsonView } from "../lib/json.js";
import { showMisfit } from "../lib/misfit.js";
import { isEmptyObject } from "../lib/schema.js";
import { may } from "../lib/session.js";
import { ageOf } from "../lib/time.js";
import { nowMs } from "../lib/clock.js";
import { TERMINAL } from "./event-tables.js";

const KINDS = {
  query: { operation: "runs.query", word: "Ask", title: "Ask the run", hint: "It answers, and nothing is recorded." },
  update: { operation: "runs.update", word: "Update", title: "Update the run", hint: "It is recorded with its answer." },
};

export class Asking {
  constructor(card, place, model, signal) {
    Object.assign(this, { card, place, model, signal, shown: "", answers: new Map() });
  }

  // Which there are a run says when it runs, so this is asked for again as it goes on.
  async load() {
    const found = await call("runs.handlers", { run_id: this.model.runId }, this.signal).catch((problem) => {
      if (problem.code === undefined) throw problem;
      return { queries: {}, updates: {} }; // no node that lives has its code, or it is set aside
    });
    const canUpdate = may("runs:write") && !TERMINAL.has(this.model.state.status);
    this.show([
      ...Object.entries(found.queries).map(([each, { input }]) => ["query", each, input]),
      ...(canUpdate ? Object.entries(found.updates).map(([each, { input }]) => ["update", each, input]) : []),
    ]);
  }

  show(items) {
    const text = JSON.stringify(items);
    if (text === this.shown) return; // an answer that somebody reads stays where it is
    this.shown = text;
    this.card.hidden = items.length === 0;
    put(
      this.place,
      h(
        "ul",
        { class: "plain-list asking" },
        items.map(([kind, name, input]) => this.row(kind, name, input)),
      ),
    );
  }

  row(kind, name, input) {
    const key = `${kind} ${name}`;
    const answer = this.answers.get(key) ?? h("div", { class: "answered", role: "status" });
    this.answers.set(key, answer);
    const act = () => (kind === "query" && isEmptyObject(input, input) ? this.askNow(name, answer) : this.askWith(kind, name, input, answer));
    return h(
      "li",
      {},
      h(
        "div",
        { class: "asking-line" },
        h("code", {}, name),
        h("span", { class: "quiet" }, kind === "query" ? "query" : "update"),
        h("button", { class: "button small", type: "button", onclick: act, "aria-label": `${KINDS[kind].word} ${name}` }, KINDS[kind].word),
      ),
      answer,
    );
  }

  async ask(kind, name, input, more = {}) {
    return (await call(KINDS[kind].operation, { run_id: this.model.runId, name, input, ...more }, this.signal)).result;
  }

  say(place, name, result) {
    put(place, h("p", { class: "hint" }, "Answered ", ageOf(new Date(nowMs()).toISOString())), jsonView(result, { label: `Answer to ${name}` }));
  }

  async askNow(name, place) {
    try {
      this.say(place, name, await this.ask("query", name, {}));
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      put(place, h("p", { class: "problem" }, problem.message));
    }
  }

  askWith(kind, name, input, place) {
    const { word, title, hint } = KINDS[kind];
    const form = schemaForm(input, { what: "Input" });
    let attempt = null; // the same update again has the same id; another one, or one after a refusal, has not
    openDialog({
      title,
      action: word,
      body: [h("p", {}, h("code", {}, name), " ", hint), form.element],
      act: async () => {
        const found = form.read();
        if (!found) return false;
        const text = JSON.stringify(found.value);
        if (attempt?.text !== text) attempt = { text, update_id: requestId() };
        const more = kind === "update" ? { update_id: attempt.update_id } : {};
        try {
          this.say(place, name, await this.ask(kind, name, found.value ?? {}, more));
        } catch (problem) {
          if (problem.code === "UpdateFailed") attempt = null;
          if (problem.code === "InvalidInput" && showMisfit(form.element, problem.message)) return false;
          throw problem;
        }
        return true;
      },
    });
  }
}
