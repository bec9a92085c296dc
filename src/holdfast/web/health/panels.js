// What stands beside the charts: nodes, runs, queues, alerts, and limits.

import { nowMs } from "../lib/clock.js";
import { h } from "../lib/dom.js";
import { icon, statusBadge } from "../lib/icons.js";
import { runAddress } from "../lib/router.js";
import { filterOf } from "../runs/query.js";
import { ageOf, duration } from "../lib/time.js";

const STATUSES = ["RUNNING", "PENDING", "APPROVED", "PAUSED", "FAILED", "COMPLETED", "CANCELLED"];
const RECENT_MS = 15 * 60_000;
const LAG_S = 5;
const number = new Intl.NumberFormat();
const isNumber = (value) => typeof value === "number";

export function panel(title, mark, body, hint = "") {
  return h("section", { class: "card panel" }, h("header", {}, icon(mark), h("h2", {}, title), hint && h("span", { class: "hint" }, hint)), h("div", { class: "card-body" }, body));
}

// What is wrong at this moment, in words; nothing if nothing is.
export function concerns({ latest, nodes, alerts, points, takeovers }, report) {
  const here = [...nodes.values()];
  const away = here.filter((node) => node.isGone);
  const gone = away.filter((node) => !node.hasStopped && nowMs() - node.seenAt < RECENT_MS);
  const recent = alerts.filter((alert) => nowMs() - Date.parse(alert.raised_at) < RECENT_MS);
  const taken = merged(takeovers.filter((each) => nowMs() - Date.parse(each.at) < RECENT_MS));
  const lost = points.slice(-12).some((point) => point.lost > 0);
  return [
    here.length === away.length && ["FAILED", "No node is there: nothing goes on.", null],
    gone.length > 0 && here.length > away.length && ["PAUSED", `${gone.length === 1 ? "A node is" : `${gone.length} nodes are`} gone: ${gone.map((node) => node.name).join(", ")}`, null],
    taken.length === 1 && ["PAUSED", `${takeoverWords(taken[0])} in the last quarter of an hour: see why the process ended.`, null],
    taken.length > 1 && ["PAUSED", `${severalWords(taken)} in the last quarter of an hour: see why they ended.`, null],
    latest.lag > LAG_S && ["FAILED", `A run has been due for ${duration(latest.lag * 1000)}: too few nodes, or none that can run it.`, "/runs"],
    latest.letters > 0 && !report && ["FAILED", `${number.format(latest.letters)} dead ${latest.letters === 1 ? "letter waits" : "letters wait"} for somebody to look.`, "/inbox/letters"],
    recent.length > 0 && [recent.some((alert) => alert.priority === 1) ? "FAILED" : "PAUSED", `${recent.length} ${recent.length === 1 ? "alert" : "alerts"} in the last quarter of an hour.`, null],
    lost && ["PAUSED", "Turns were lost within the last minute: two nodes may own the same runs.", null],
  ].filter(Boolean);
}

const NOTED = new Set(["retries", "failed runs", "tasks"]);

// What the doctor has found, over all nodes, with what to do about it.
export function findings(report) {
  const LEVELS = { wrong: "FAILED", note: "PAUSED" };
  return (report?.items ?? [])
    .filter(({ level, subject }) => level === "wrong" || (level === "note" && NOTED.has(subject)))
    .map(({ level, subject, sentence, advice, search, run_ids: ids = [] }) => {
      const address = search ? `/runs?${new URLSearchParams(filterOf(search))}` : subject === "tasks" ? "/inbox?due=overdue" : subject === "dead letters" ? "/inbox/letters" : ids.length ? runAddress(ids[0]) : null;
      return [LEVELS[level], `${subject[0].toUpperCase()}${subject.slice(1)}: ${sentence}.`, address, advice];
    });
}

// What is worst is first.
export function verdict(all) {
  const found = [...all].sort((one, other) => (one[0] === "FAILED" ? 0 : 1) - (other[0] === "FAILED" ? 0 : 1));
  if (found.length === 0) return h("div", { class: "verdict fine" }, icon("COMPLETED"), h("p", {}, "All is well."));
  return h("ul", { class: "verdict" }, found.map(([status, text, address, advice]) => h("li", { dataset: { status } }, icon("warning"), h("span", {}, text, advice && h("small", { class: "advice quiet" }, withCode(advice))), address && h("a", { href: address }, "Look"))));
}

// An advice has commands in it, between backticks. Their words are not broken at hyphens: `--text` is one.
function withCode(text) {
  return (text[0].toUpperCase() + text.slice(1)).split("`").map((part, at) => (at % 2 ? h("code", {}, part.split(" ").map((word, n) => [n > 0 && " ", h("span", { class: "word" }, word)])) : part));
}

export function runCounts({ latest }) {
  const known = [...STATUSES, ...Object.keys(latest.runs).filter((each) => !STATUSES.includes(each))];
  const rows = known.filter((status) => latest.runs[status]).map((status) => h("li", {}, h("a", { href: `/runs?status=${status}&children=1` }, statusBadge(status), h("b", { class: "numbers" }, number.format(latest.runs[status])))));
  return panel("Runs", "runs", rows.length === 0 ? h("p", { class: "hint" }, "There are none yet.") : h("ul", { class: "tallies" }, rows));
}

export function work({ latest }) {
  const rows = [
    ["Runs whose turn is due", latest.ready], ["Runs that a node has", latest.leased], ["Activities under way here", latest.running],
    ["Messages in inboxes", latest.messages], ["Signals that no wait has taken", latest.signals, "/inbox/signals"],
    ["Open tasks", latest.tasks, "/inbox"], ["Dead letters", latest.letters, "/inbox/letters"], ["Open streams here", latest.streams],
  ];
  return panel("Work", "activity", h("dl", { class: "counts" }, rows.map(([term, count, address]) => [h("dt", {}, address ? h("a", { href: address }, term) : term), h("dd", {}, number.format(count))])));
}

export function nodeList({ nodes }) {
  const sorted = [...nodes.values()].sort((one, other) => one.isGone - other.isGone || one.name.localeCompare(other.name));
  const rows = sorted.map((node) => h(
    "li", { class: node.isGone ? "gone" : null },
    icon(!node.isGone ? "COMPLETED" : node.hasStopped ? "CANCELLED" : "FAILED"), h("span", { class: "node-name" }, node.name, node.is_here && !node.isGone && h("span", { class: "tag" }, "answers here")),
    h("span", { class: "quiet", title: (node.workflows ?? []).join(", ") }, [node.version && `${node.version}`, node.workflows?.length && `${node.workflows.length} workflows`, node.queues?.length && `queue ${node.queues.join(", ")}`, isNumber(node.runs) && `${number.format(node.runs)} runs, ${number.format(node.activities)} activities`].filter(Boolean).join(" · ")),
    h("span", { class: "quiet" }, node.hasStopped && node.isGone ? ["stopped, last seen ", ageOf(new Date(node.seenAt).toISOString())] : [node.isGone ? "gone, lease ended " : "lease ends ", ageOf(node.lease_until)]),
  ));
  return panel("Nodes", "system", rows.length === 0 ? h("p", { class: "hint" }, "No node is there: nothing goes on.") : h("ul", { class: "nodes" }, rows));
}

// A name that was made up is long: its ends are enough.
function shortName(name) {
  return name.length > 28 ? `${name.slice(0, 12)}…${name.slice(-6)}` : name;
}

function takeoverWords({ node, taken_from: from, runs }) {
  const what = `${number.format(runs)} ${runs === 1 ? "run" : "runs"}`;
  return from === node ? `${shortName(node)} was started again and has gone on with ${what}` : `${shortName(node)} has taken over ${what} of ${shortName(from)}`;
}

function severalWords(taken) {
  const gone = new Set(taken.map(({ taken_from: from }) => from)).size;
  const runs = taken.reduce((total, each) => total + each.runs, 0);
  return `${gone === 1 ? "A node" : `${gone} nodes`} ended without stopping, and others have taken over ${number.format(runs)} ${runs === 1 ? "run" : "runs"}`;
}

// Runs are taken over in batches; of one node by another they are one takeover, as late as the last of them.
function merged(takeovers) {
  const pairs = new Map();
  for (const each of takeovers) {
    const key = JSON.stringify([each.node, each.taken_from]);
    const known = pairs.get(key);
    pairs.set(key, known ? { ...known, runs: known.runs + each.runs } : each);
  }
  return [...pairs.values()];
}

// Which nodes have gone on with the runs of others that were gone, within a day.
export function takeoverList({ takeovers }) {
  const rows = merged(takeovers).slice(0, 20).map((each) => h("li", { title: `${each.node} from ${each.taken_from}` }, icon("warning"), h("span", {}, takeoverWords(each)), h("span", { class: "quiet" }, ageOf(each.at))));
  return panel("Takeovers", "system", rows.length === 0 ? h("p", { class: "hint" }, "No node was gone within a day.") : h("ul", { class: "nodes takeovers" }, rows));
}

// What only one node does at a time, such as schedules and retention, and which node that is.
export function lockList({ locks }) {
  const rows = locks.map((lock) => h(
    "li", { class: lock.is_expired ? "gone" : null },
    icon(lock.is_expired ? "PAUSED" : "COMPLETED"), h("span", { class: "node-name" }, lock.name, " ", h("span", { class: "tag" }, lock.is_expired ? "no node" : lock.node)),
    h("span", { class: "quiet" }, lock.is_expired ? ["free since "] : ["held since "], ageOf(lock.is_expired ? lock.lease_until : lock.acquired_at)),
  ));
  return panel("Locks", "system", rows.length === 0 ? h("p", { class: "hint" }, "No duty of a single node is under way.") : h("ul", { class: "nodes locks" }, rows));
}

export function queueList({ latest }) {
  const queues = Object.entries(latest.queues).sort(([, one], [, other]) => other - one);
  const most = Math.max(1, ...queues.map(([, jobs]) => jobs));
  const rows = queues.map(([name, jobs]) => h("li", {}, h("span", { class: "queue-name" }, name || "default"), h("meter", { min: 0, max: most, value: jobs, "aria-label": `${name}: ${jobs} jobs` }), h("b", { class: "numbers" }, number.format(jobs))));
  return panel("Queues", "inbox", rows.length === 0 ? h("p", { class: "hint" }, "Every queue is empty.") : h("ul", { class: "queues" }, rows));
}

export function alertList({ alerts }) {
  const rows = alerts.slice(0, 50).map((alert) => h(
    "li", { dataset: { status: alert.priority === 1 ? "FAILED" : "PAUSED" } },
    h("span", { class: "status", dataset: { status: alert.priority === 1 ? "FAILED" : "PAUSED" } }, icon("warning"), `P${alert.priority}`),
    h("div", {}, h("p", {}, h("code", {}, alert.code), " ", h("span", { class: "quiet" }, ageOf(alert.raised_at))), h("p", { class: "alert-detail" }, alert.detail), alert.run_id && h("a", { class: "mono", href: runAddress(alert.run_id) }, alert.run_id)),
  ));
  return panel("Alerts", "warning", rows.length === 0 ? h("p", { class: "hint" }, "None since this process began.") : h("ul", { class: "alerts" }, rows));
}

function limitWords({ at_once: atOnce, per_key: perKey, starts, period_ms: period, overload }) {
  const bounds = [atOnce && `${atOnce} at once`, perKey && `${perKey} of one key`, starts && `${starts} starts in ${duration(period)}`].filter(Boolean);
  return `${bounds.join(", ")}; beyond that: ${overload}`;
}

export function limitList({ latest }, workflows) {
  const limited = workflows.filter((workflow) => workflow.limit);
  const waiting = h("p", {}, h("b", { class: "numbers" }, number.format(latest.queued)), " ", latest.queued === 1 ? "run waits" : "runs wait", " for a place. ", latest.queued > 0 && h("a", { href: "/runs?status=PENDING" }, "See them"));
  const rows = limited.map((workflow) => [h("dt", {}, workflow.name), h("dd", {}, limitWords(workflow.limit))]);
  return panel("Limits", "PAUSED", [waiting, limited.length > 0 ? h("dl", { class: "facts" }, rows) : h("p", { class: "hint" }, "No workflow here has a limit.")]);
}
