// Doing something to many runs: first those that it concerns are counted, then it is done, and what was refused is shown.
// It is done to the runs that were selected, or to all that the filter finds, however many they are.

import { call } from "../lib/api.js";
import { openDialog, reasonField } from "../lib/dialog.js";
import { h, newId, put } from "../lib/dom.js";
import { schemaForm } from "../lib/forms.js";
import { requestId, shortId } from "../lib/ids.js";
import { may } from "../lib/session.js";
import { toast } from "../lib/toast.js";
import { workflowNamed } from "../lib/workflows.js";
import { FINISHED } from "./row.js";
import { csvOf, save } from "./view-menu.js";

const AT_ONCE = 100; // which the service takes in one request
const COUNTED = 500;
const MOST_SHOWN = 200;
const MOST_SIGNALS = 500;

const COMMANDS = {
  cancel: { word: "Cancel", title: "Cancel runs", done: "asked to cancel", danger: true, hint: "They may clean up first." },
  retry_failed: {
    word: "Retry from the failed step",
    title: "Continue failed runs",
    done: "continued as new runs",
    hint: "New runs begin with what was recorded, and continue from the step that failed. Those that have undone steps since begin again.",
  },
  retry_from_start: {
    word: "Retry from the start",
    title: "Do finished runs again from the start",
    done: "started again",
    hint: "New runs start, with the same input. Nothing that was recorded is kept.",
  },
  retry_step: {
    word: "Retry step",
    title: "Try the failed steps again",
    done: "tried again",
    hint: "Of runs that a failed step has paused, the step is tried again, and they go on.",
  },
  try_now: {
    word: "Try now",
    title: "Try again now",
    done: "tried now",
    hint: "What has failed and would be tried again later is tried now. No attempt is lost by it.",
  },
  pause: { word: "Pause", title: "Hold runs", done: "paused", hint: "Results are still recorded, but the programs do not go on." },
  resume: {
    word: "Resume",
    title: "Let paused runs go on",
    done: "resumed",
    hint: "Runs that an error in their code has paused run that code again, and are paused again if it is the same.",
  },
  approve: { word: "Approve", title: "Let runs go ahead", done: "approved" },
  skip_step: {
    word: "Skip the failed step",
    title: "Skip the failed steps",
    done: "skipped",
    danger: true,
    hint: "The workflows get null in place of the step’s result.",
  },
  raise: {
    word: "Resume with the error",
    title: "Raise the steps’ errors in the workflows",
    done: "resumed with the error",
    danger: true,
    hint: "A workflow that does not catch the error fails for good.",
  },
  terminate: {
    word: "Terminate",
    title: "End runs at once",
    done: "ended",
    danger: true,
    needed: true,
    hint: "They are not given a chance to clean up.",
  },
};

// What helps runs like these stands first; everything else is under More. To approve is offered where some run waits for
// it, or where runs are meant that are not loaded.
function buttonsFor(runs) {
  const some = (isIt) => runs.some(isIt);
  const helps = {
    retry_step: some((run) => run.status === "PAUSED" && run.failed_step_ids?.length > 0),
    approve: some((run) => run.waiting_kind === "approval"),
    try_now: some((run) => run.retrying),
    resume: some((run) => run.status === "PAUSED" && !run.failed_step_ids?.length),
    retry_failed: some((run) => run.status === "FAILED"),
    retry_from_start: some((run) => FINISHED.has(run.status)),
    pause: some((run) => run.status === "RUNNING" && !run.retrying),
    cancel: some((run) => !FINISHED.has(run.status)),
  };
  return Object.keys(helps).filter((name) => helps[name]).slice(0, 4);
}

// `scope()` says what is meant: `{ runs, asked, count }`, with `asked` for all that the filter finds.
// `onAll` chooses everything that the filter finds; it is offered when `update` learns that there is more.
export function bulkBar(scope, done, onAll) {
  const count = h("strong", {});
  const all = h("button", { class: "link-button", type: "button", hidden: true, onclick: onAll }, "");
  const act = (name) => () => commandMany(name, scope(), done);
  const button = (name) => h("button", { class: "button small", type: "button", onclick: act(name) }, `${COMMANDS[name].word}…`);
  const item = (name) =>
    h(
      "button",
      { class: `menu-item${COMMANDS[name].danger ? " danger" : ""}`, type: "button", onclick: () => ((menu.open = false), act(name)()) },
      `${COMMANDS[name].word}…`,
    );
  const buttons = h("span", { class: "bulk-buttons" });
  const items = h("div", { class: "menu-body items" });
  const menu = h("details", { class: "menu" }, h("summary", { class: "button small", "aria-label": "More for the selected runs" }, "More"), items);
  let offered = "";
  const element = h(
    "div",
    { class: "bulk card", role: "region", "aria-label": "Selected runs", hidden: true },
    count,
    all,
    may("runs:control") && [buttons, menu],
    may("signals:write") &&
      h("button", { class: "button small", type: "button", onclick: () => signalMany(scope(), done) }, "Signal…"),
    h("button", { class: "link-button", type: "button", onclick: done }, "Clear"),
  );
  const update = (matching = null) => {
    const { count: found, runs, asked } = scope();
    const names = buttonsFor(runs);
    const others = Object.keys(COMMANDS).filter((name) => !names.includes(name) && (name !== "approve" || asked));
    if (found > 0 && [...names, others.length].join() !== offered) {
      offered = [...names, others.length].join();
      put(buttons, names.map(button));
      put(items, others.map(item));
    }
    all.hidden = matching === null;
    all.textContent = matching ? `Select all ${matching.toLocaleString()} that match` : "Select all that match"; // not counted yet
    element.hidden = found === 0;
    count.textContent = `${found.toLocaleString()} selected`;
  };
  return { element, update };
}

// What one request asks for: some of the runs, or the filter, page by page.
function partsOf({ runs, asked }) {
  if (asked) return [asked];
  const ids = runs.map((run) => run.run_id);
  return Array.from({ length: Math.ceil(ids.length / AT_ONCE) }, (_, n) => ({ run_ids: ids.slice(n * AT_ONCE, (n + 1) * AT_ONCE) }));
}

async function eachAnswer(scope, given, limit, signal, take) {
  for (const part of partsOf(scope)) {
    for (let cursor = ""; cursor !== null;) {
      const answer = await call("runs.command_many", { ...given, ...part, cursor, limit }, signal);
      take(answer);
      cursor = answer.next;
    }
  }
}

function commandMany(name, scope, done) {
  const { word, title, done: verb, hint, danger = false, needed = false } = COMMANDS[name];
  const given = { command: name, request_id: requestId(), only_once: true };
  const found = { seen: 0, hit: [], why: new Map() };
  const counted = h("p", { role: "status" }, h("span", { class: "spinner" }), " Counting…");
  const list = h("ul", { tabindex: "0", "aria-label": "Runs that are concerned", hidden: true });
  const reason = reasonField({ needed });
  const progress = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Progress" });
  const result = h("div", {});
  const closed = new AbortController();
  const names = new Map(scope.runs.map((run) => [run.run_id, run.reference_key]));
  const dialog = openDialog({
    title,
    action: word,
    danger,
    wide: true,
    body: [hint && h("p", { class: "hint" }, hint), h("div", { class: "preview" }, counted, list), reason.element, progress, result],
    act: async () => {
      if (!reason.check()) return false;
      progress.hidden = false;
      const answers = [];
      await eachAnswer(scope, { ...given, reason: reason.value() }, AT_ONCE, closed.signal, (answer) => {
        answers.push(...answer.items);
        progress.value = answers.length / Math.max(1, found.seen);
      });
      return report(verb, answers, found.seen, result, done);
    },
  });
  const go = dialog.querySelector("button[type=submit]");
  go.disabled = true;
  dialog.addEventListener("close", () => closed.abort());

  function showCount(isWhole) {
    const reasons = [...found.why].map(([why, count]) => `${count.toLocaleString()} not: ${why}`);
    put(
      counted,
      !isWhole && h("span", { class: "spinner" }),
      h("strong", {}, `${found.hit.length.toLocaleString()} of ${found.seen.toLocaleString()}`),
      ` ${found.seen === 1 ? "run is" : "runs are"} concerned${reasons.length ? `; ${reasons.join("; ")}` : ""}.`,
    );
  }

  async function preview() {
    await eachAnswer(scope, { ...given, preview: true }, COUNTED, closed.signal, ({ items }) => {
      found.seen += items.length;
      for (const { run_id, not_concerned: why } of items)
        if (why) found.why.set(why, (found.why.get(why) ?? 0) + 1);
        else found.hit.push(run_id);
      showCount(false);
    });
    showCount(true);
    put(
      list,
      found.hit.slice(0, MOST_SHOWN).map((id) => h("li", {}, h("span", { class: "mono" }, names.get(id) ?? shortId(id)))),
      found.hit.length > MOST_SHOWN && h("li", { class: "quiet" }, `… and ${(found.hit.length - MOST_SHOWN).toLocaleString()} more`),
    );
    list.hidden = found.hit.length === 0;
    go.textContent = `${word}: ${found.hit.length.toLocaleString()} ${found.hit.length === 1 ? "run" : "runs"}`;
    go.disabled = found.hit.length === 0;
  }

  preview().catch((problem) => {
    if (problem.name === "AbortError") return;
    if (problem.code === undefined) throw problem;
    put(counted, h("span", { class: "problem" }, problem.message));
  });
}

// Which runs were left alone, and why: somebody else may have been faster.
function leftAlone(answers) {
  const counts = new Map();
  for (const { error, not_concerned: why } of answers) if (!error && why) counts.set(why, (counts.get(why) ?? 0) + 1);
  return [...counts].map(([why, count]) => `; ${count.toLocaleString()} left alone: ${why}`).join("");
}

// What was refused stays to be read, and can be kept as a file. Each run has recorded what was done to it.
function report(verb, answers, counted, result, done) {
  const refused = answers.filter(({ error }) => error);
  const total = answers.filter(({ error, not_concerned: why }) => !error && !why).length;
  const gone = Math.max(0, counted - answers.length); // a search finds them no more
  const others = gone > 0 ? `; ${gone.toLocaleString()} no longer matched` : "";
  toast(`${total.toLocaleString()} ${verb}${leftAlone(answers)}${others}.`, { kind: total === 0 ? "bad" : "fine" });
  if (refused.length === 0) {
    done();
    return true;
  }
  const rows = answers.map(({ run_id, made, not_concerned, error }) => ({ run_id, outcome: error ? "refused" : not_concerned ? "left alone" : "done", why: error?.detail ?? not_concerned, made }));
  put(
    result,
    h("p", { class: "problem", role: "alert" }, `${total.toLocaleString()} ${verb}; ${refused.length.toLocaleString()} refused:`),
    h(
      "ul",
      { class: "refused" },
      refused.slice(0, MOST_SHOWN).map(({ run_id, error }) => h("li", {}, h("span", { class: "mono" }, shortId(run_id)), " ", error.detail)),
    ),
    h("button", { class: "link-button", type: "button", onclick: () => save("report.csv", csvOf(rows, ["run_id", "outcome", "why", "made"])) }, "Save the report"),
  );
  return false;
}

// Signals go to the runs that are loaded: each is answered by itself.
async function signalMany({ runs }, done) {
  const hit = runs.filter((run) => !FINISHED.has(run.status));
  const kinds = [...new Set(hit.map((run) => run.workflow))];
  const workflow = kinds.length === 1 ? await workflowNamed(kinds[0]) : null;
  const id = newId();
  const known = Object.keys(workflow?.signals ?? {});
  const name = h("input", { id, required: true, list: `${id}-names`, autocomplete: "off", value: known[0] ?? "" });
  const place = h("div", {});
  let form;
  const show = () => {
    form = schemaForm(workflow?.signals?.[name.value] ?? {}, { what: "Payload", value: undefined });
    put(place, form.element);
  };
  name.addEventListener("change", show);
  show();
  const result = h("div", {});
  const signal_id = requestId();
  openDialog({
    title: "Signal runs",
    action: `Signal ${hit.length}`,
    wide: true,
    body: [
      h("p", {}, h("strong", {}, `${hit.length} of ${runs.length}`), " will be signalled", hit.length < runs.length && "; the others have finished", "."),
      h(
        "div",
        { class: "field" },
        h("label", { for: id }, "Signal"),
        name,
        h(
          "datalist",
          { id: `${id}-names` },
          known.map((each) => h("option", { value: each })),
        ),
      ),
      place,
      result,
    ],
    act: async () => {
      const found = form.read();
      if (!found || !name.value) return false;
      const answers = [];
      for (let from = 0; from < hit.length; from += MOST_SIGNALS) {
        const part = hit.slice(from, from + MOST_SIGNALS);
        const { items } = await call("signals.send_many", {
          signals: part.map((run) => ({ run_id: run.run_id, name: name.value, payload: found.value, signal_id })),
        });
        items.forEach((item, n) => answers.push({ run_id: part[n].run_id, error: item.problem ?? undefined }));
      }
      return report("signalled", answers, answers.length, result, done);
    },
  });
}
