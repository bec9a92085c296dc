// What a place shows when it has nothing to show: still loading, empty, refused, or out of reach.

import { h } from "./dom.js";
import { icon } from "./icons.js";

export function loading(what = "Loading") {
  return h(
    "section",
    { class: "state", role: "status", "aria-busy": "true" },
    h("span", { class: "spinner" }),
    h("p", {}, `${what}…`),
  );
}

export function empty(title, text = "", action = null) {
  return h("section", { class: "state" }, h("h2", {}, title), text && h("p", {}, text), action);
}

export function failed(problem, retry = null) {
  if (problem.isDenied) return denied(problem);
  const again = retry && h("button", { class: "button", type: "button", onclick: retry }, "Try again");
  const runs = problem.status === 404 && h("a", { class: "button", href: "/runs" }, "All runs");
  const trace =
    problem.correlationId && h("p", { class: "quiet" }, "Correlation id ", h("code", {}, problem.correlationId));
  const title =
    problem.status === 404
      ? "There is nothing here"
      : problem.isUnreachable
        ? "The service does not answer"
        : "This did not work";
  return h(
    "section",
    { class: "state", role: "alert" },
    icon("warning"),
    h("h2", {}, title),
    h("p", {}, problem.message),
    trace,
    h("div", { class: "actions" }, again, runs),
  );
}

export function denied(problem) {
  const scope = problem.details?.scope;
  return h(
    "section",
    { class: "state" },
    icon("CANCELLED"),
    h("h2", {}, "Not for this token"),
    h(
      "p",
      {},
      scope ? ["It needs the scope ", h("code", {}, scope), ". Ask the operator who gave you the token."] : problem.message,
    ),
  );
}
