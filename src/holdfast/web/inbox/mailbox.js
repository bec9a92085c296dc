// The signals of a run that no wait has taken, oldest first.

import { call } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { jsonView } from "../lib/json.js";
import { runAddress } from "../lib/router.js";
import { failed } from "../lib/states.js";
import { ageOf } from "../lib/time.js";

const PAGE = 100;

export async function mailbox(runId, signal) {
  try {
    const { items, next } = await call("signals.mailbox", { run_id: runId, limit: PAGE }, signal);
    if (items.length === 0) return h("p", { class: "note" }, "The mailbox of ", h("a", { href: runAddress(runId) }, "this run"), " is empty.");
    return [h("ul", { class: "letters" }, items.map(entry)), next !== null && h("p", { class: "hint" }, `The first ${PAGE}.`)];
  } catch (problem) {
    if (problem.name === "AbortError") return null;
    if (problem.code === undefined) throw problem;
    return failed(problem);
  }
}

function entry(mail) {
  return h(
    "li", {},
    h("p", {}, h("strong", {}, mail.name), " ", h("span", { class: "quiet" }, "here since ", ageOf(mail.accepted_at), mail.step_id && [", for ", mail.step_id])),
    jsonView(mail.payload, { label: mail.name }),
  );
}
