// Doing something to many runs: first what would be hit is shown, then it is done, and reported one by one.

import { call } from "../lib/api.js";
import { openDialog, reasonField } from "../lib/dialog.js";
import { h, newId, put } from "../lib/dom.js";
import { schemaForm } from "../lib/forms.js";
import { requestId, shortId } from "../lib/ids.js";
import { statusBadge } from "../lib/icons.js";
import { may } from "../lib/session.js";
import { toast } from "../lib/toast.js";
import { workflowNamed } from "../lib/workflows.js";
import { FINISHED } from "./row.js";

const AT_ONCE = 6;
const MOST_SHOWN = 200;
const MOST_SIGNALS = 500;

const isOpen = (run) => !FINISHED.has(run.status);
const isFinished = (run) => FINISHED.has(run.status);

// `onAll` selects everything that the filter finds; it is offered when `update` learns that there is more.
export function bulkBar(selected, done, onAll) {
  const count = h("strong", {});
  const all = h("button", { class: "link-button", type: "button", hidden: true, onclick: onAll }, "Select all that match");
  const act = (show) => () => show([...selected.values()], done);
  const element = h(
    "div",
    { class: "bulk card", role: "region", "aria-label": "Selected runs", hidden: true },
    count,
    all,
    may("runs:control") && [
      h("button", { class: "button small", type: "button", onclick: act(cancelMany) }, "Cancel…"),
      h("button", { class: "button small", type: "button", onclick: act(retryMany) }, "Retry…"),
    ],
    may("signals:write") && h("button", { class: "button small", type: "button", onclick: act(signalMany) }, "Signal…"),
    h("button", { class: "link-button", type: "button", onclick: done }, "Clear"),
  );
  const update = (hasMore = false) => {
    all.hidden = !hasMore;
    element.hidden = selected.size === 0;
    count.textContent = `${selected.size.toLocaleString()} selected`;
  };
  return { element, update };
}

function preview(runs, isHit, why) {
  const hit = runs.filter(isHit);
  const left = runs.length - hit.length;
  const list = hit
    .slice(0, MOST_SHOWN)
    .map((run) =>
      h(
        "li",
        {},
        statusBadge(run.status),
        h("span", { class: "mono" }, run.reference_key ?? shortId(run.run_id)),
        h("span", { class: "quiet" }, run.workflow),
      ),
    );
  const element = h(
    "div",
    { class: "preview" },
    h(
      "p",
      {},
      h("strong", {}, `${hit.length} of ${runs.length}`),
      " will be hit",
      left > 0 && `; ${left} not, because ${why}`,
      ".",
    ),
    h(
      "ul",
      { tabindex: "0", "aria-label": "Runs that will be hit" },
      list,
      hit.length > MOST_SHOWN && h("li", { class: "quiet" }, `… and ${hit.length - MOST_SHOWN} more`),
    ),
  );
  return { hit, element };
}

async function eachOf(runs, work, progress) {
  const refused = [];
  let next = 0;
  let finished = 0;
  const worker = async () => {
    while (next < runs.length) {
      const run = runs[next];
      next += 1;
      try {
        await work(run);
      } catch (problem) {
        if (problem.code === undefined) throw problem;
        refused.push([run, problem]);
      }
      finished += 1;
      progress.value = finished / runs.length;
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  return refused;
}

function report(verb, total, refused, result, done) {
  if (refused.length === 0) {
    toast(`${total} ${verb}.`);
    done();
    return true;
  }
  const lines = refused
    .slice(0, MOST_SHOWN)
    .map(([run, problem]) => h("li", {}, h("span", { class: "mono" }, shortId(run.run_id)), " ", problem.message));
  put(
    result,
    h("p", { class: "problem", role: "alert" }, `${total - refused.length} ${verb}; ${refused.length} refused:`),
    h("ul", { class: "refused" }, lines),
  );
  return false;
}

function commandMany({ title, action, verb, runs, isHit, why, danger, operation, done }) {
  const { hit, element } = preview(runs, isHit, why);
  const reason = reasonField();
  const progress = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Progress" });
  const result = h("div", {});
  const signal_id = requestId();
  openDialog({
    title,
    action: `${action} ${hit.length}`,
    danger,
    wide: true,
    body: [element, reason.element, progress, result],
    act: async () => {
      progress.hidden = false;
      const refused = await eachOf(
        hit,
        (run) => call(operation, { run_id: run.run_id, reason: reason.value(), signal_id }),
        progress,
      );
      return report(verb, hit.length, refused, result, done);
    },
  });
}

function cancelMany(runs, done) {
  commandMany({
    title: "Cancel runs",
    action: "Cancel",
    verb: "asked to cancel",
    runs,
    isHit: isOpen,
    why: "they have finished",
    danger: true,
    operation: "runs.cancel",
    done,
  });
}

function retryMany(runs, done) {
  commandMany({
    title: "Do finished runs again",
    action: "Retry",
    verb: "started again",
    runs,
    isHit: isFinished,
    why: "they have not finished",
    danger: false,
    operation: "runs.retry",
    done,
  });
}

async function signalMany(runs, done) {
  const { hit, element } = preview(runs, isOpen, "they have finished");
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
      element,
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
      const refused = [];
      for (let from = 0; from < hit.length; from += MOST_SIGNALS) {
        const part = hit.slice(from, from + MOST_SIGNALS);
        const { items } = await call("signals.send_many", {
          signals: part.map((run) => ({ run_id: run.run_id, name: name.value, payload: found.value, signal_id })),
        });
        items.forEach((item, n) => item.problem && refused.push([part[n], { message: item.problem.detail }]));
      }
      return report("signalled", hit.length, refused, result, done);
    },
  });
}
