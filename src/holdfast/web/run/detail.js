// One step, or one event, with everything that is recorded of it.

import { addressOf } from "../lib/api.js";
import { h, put } from "../lib/dom.js";
import { icon, statusBadge } from "../lib/icons.js";
import { jsonView } from "../lib/json.js";
import { runAddress } from "../lib/router.js";
import { duration, exact, precise } from "../lib/time.js";
import { errorView } from "./errors.js";
import { eventWord, kindWord } from "./words.js";

const DOWNLOAD = "/v1/runs/{run_id}/artifacts/{kind}/{artifact_id}";
const micros = (value) => new Date(value / 1000).toISOString();

export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs.filter(Boolean).map(([term, text]) => [h("dt", {}, term), h("dd", {}, text)]),
  );
}

function part(title, ...children) {
  return h("section", { class: "detail-part" }, h("h3", {}, title), children);
}

function head(title, onClose) {
  return h(
    "header",
    {},
    h("h2", { class: "detail-title" }, title),
    h("button", { class: "icon-button", type: "button", "aria-label": "Close", onclick: onClose }, icon("close")),
  );
}

export function stepDetail(place, { step, model, actions, until, onClose, onEvent }) {
  const opened = step.first.data ?? {};
  const closed = step.status === "RUNNING" ? {} : (step.last.data ?? {});
  const answer = closed.result ?? closed.payload ?? closed.answer;
  const limit = opened.options?.limit;
  const queue = limit ? opened.queue.replace(/^limited:/, "") : opened.queue;
  put(
    place,
    head(h("span", { class: "mono" }, step.id), onClose),
    h(
      "div",
      { class: "card-body detail-body" },
      actions.length > 0 && h("div", { class: "actions" }, actions),
      facts([
        ["Status", statusBadge(step.status)],
        ["Kind", kindWord(step.kind)],
        opened.name && opened.name !== step.id && ["Name", opened.name],
        ["Took", duration((step.until ?? until) - step.from)],
        ["Began", exact(step.from)],
        opened.due_at && ["Due", exact(micros(opened.due_at))],
        opened.until && ["Until", exact(micros(opened.until))],
        step.attempts.length > 1 && ["Attempts", String(step.attempts.length)],
        step.logical > 1 && ["Retries", `Retry #${step.logical - 1}`],
        queue && ["Queue", queue],
        limit && ["Limit", limit.key ? `${limit.name}, key ${limit.key}` : limit.name],
        opened.idempotency_key && ["Key", h("code", {}, opened.idempotency_key)],
        opened.roles?.length && ["Roles", opened.roles.join(", ")],
        closed.actor && ["By", closed.actor],
        opened.child_run_id && [
          "Run",
          h("a", { href: runAddress(opened.child_run_id), class: "mono" }, opened.child_run_id),
        ],
        opened.task_id && [
          "Task",
          h("a", { href: `/inbox/${encodeURIComponent(opened.task_id)}` }, "Open in the inbox"),
        ],
      ]),
      step.error && part("Error", errorView(step.error)),
      opened.input !== undefined && part("Input", jsonView(opened.input, { label: "Input" })),
      opened.payload !== undefined && part("Payload", jsonView(opened.payload, { label: "Payload" })),
      answer !== undefined && part("Result", jsonView(answer, { label: "Result" })),
      closed.artifacts?.length > 0 && part("Artifacts", artifacts(model.runId, closed.artifacts)),
      step.attempts.length > 1 && part("Attempts", attempts(step, until)),
      part(
        "Events",
        h(
          "ul",
          { class: "plain-list" },
          step.events
            .map((seq) => model.events[seq - 1])
            .filter(Boolean)
            .map((event) =>
              h(
                "li",
                {},
                h(
                  "button",
                  { class: "link-button", type: "button", onclick: () => onEvent(event) },
                  `${event.run_seq} ${eventWord(event.event_type)}`,
                ),
                " ",
                h("span", { class: "quiet numbers" }, precise(event.persisted_at)),
              ),
            ),
        ),
      ),
    ),
  );
}

// A step of the graph of which the history has nothing yet.
export function nodeDetail(place, { node, labelById, onClose }) {
  const words = { PENDING: "It has not begun.", SKIPPED: "It was passed over." };
  put(
    place,
    head(h("span", { class: "mono" }, node.id), onClose),
    h(
      "div",
      { class: "card-body detail-body" },
      facts([
        ["Status", statusBadge(node.status)],
        ["Kind", kindWord(node.kind)],
        node.label !== node.id && ["Label", node.label],
        node.detail && ["Detail", node.detail],
        node.branch && ["Branch", node.branch],
        node.depends_on?.length > 0 && ["After", node.depends_on.map(labelById).join(", ")],
        node.parent && ["In", labelById(node.parent)],
      ]),
      words[node.status] && h("p", { class: "quiet" }, words[node.status]),
    ),
  );
}

// The last two parts of an artifact's uri are its kind and its id; with the run they are its address.
function artifacts(runId, found) {
  return h(
    "ul",
    { class: "plain-list" },
    found.map((artifact) => {
      const [kind, artifact_id] = artifact.uri.split("/").slice(-2);
      const [href] = addressOf(DOWNLOAD, { run_id: runId, kind, artifact_id });
      return h(
        "li",
        {},
        h("a", { href, download: `${kind}-${artifact_id}` }, kind),
        " ",
        h("span", { class: "quiet numbers" }, `${artifact.size_bytes} bytes`),
        artifact.expires_at && [" ", h("span", { class: "quiet" }, "until ", exact(micros(artifact.expires_at)))],
      );
    }),
  );
}

function attempts(step, until) {
  return h(
    "ol",
    { class: "plain-list" },
    step.attempts.map((attempt, n) =>
      h(
        "li",
        {},
        h("span", { class: "numbers" }, `${n + 1}. ${duration(Math.max(0, (attempt.until ?? until) - attempt.from))}`),
        " ",
        attempt.error &&
          h(
            "span",
            { class: "row-error" },
            `${attempt.error.code}${attempt.error.message ? `: ${attempt.error.message}` : ""}`,
          ),
      ),
    ),
  );
}

export function eventDetail(place, { event, onClose, onTravel, onStep, onFork = null }) {
  const by = event.engine_run_ref;
  put(
    place,
    head(`${event.run_seq} · ${eventWord(event.event_type)}`, onClose),
    h(
      "div",
      { class: "card-body detail-body" },
      h(
        "div",
        { class: "actions" },
        h(
          "button",
          { class: "button small", type: "button", onclick: () => onTravel(event.run_seq) },
          "See the run as it was here",
        ),
        event.step_id &&
          h("button", { class: "button small", type: "button", onclick: () => onStep(event.step_id) }, "See the step"),
        onFork && h("button", { class: "button small", type: "button", onclick: () => onFork(event.run_seq) }, "Fork from here"),
      ),
      event.data?.error && part("Error", errorView(event.data.error)),
      part("Data", jsonView(event.data, { label: "Data" })),
      facts([
        event.step_id && ["Step", h("code", {}, event.step_id)],
        event.engine_attempt_id && ["Attempt", `${event.engine_attempt_id}, logical ${event.logical_attempt_id}`],
        ["Persisted", exact(event.persisted_at)],
        ["Emitted", exact(event.emitted_at)],
        ["Node", `${by.node}, epoch ${by.epoch}`],
        event.caused_by_signal_id && ["Signal", h("code", {}, event.caused_by_signal_id)],
        ["Event id", h("code", {}, event.event_id)],
        ["Key", h("code", {}, event.idempotency_key)],
      ]),
    ),
  );
}
