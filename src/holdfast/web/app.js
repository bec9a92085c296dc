// The page: its shell, and which view is at which address.

import { onSignedOut } from "./lib/api.js";
import { setClock } from "./lib/clock.js";
import { h, put } from "./lib/dom.js";
import { go, render, route, startRouter } from "./lib/router.js";
import { loadSession, who } from "./lib/session.js";
import { failed, loading } from "./lib/states.js";
import { firstPlace, makeShell } from "./shell.js";
import { showAudit } from "./views/audit.js";
import { showCompare } from "./views/compare.js";
import { showHealth } from "./views/health.js";
import { showInbox } from "./views/inbox.js";
import { showPlans } from "./views/plans.js";
import { showRun } from "./views/run.js";
import { showRuns } from "./views/runs.js";
import { showSchedules } from "./views/schedules.js";
import { askAgain, showSignIn } from "./views/sign-in.js";

route("/", () => go(firstPlace() + location.search, { replace: true }));
route("/runs", showRuns);
route("/runs/{run_id}", showRun);
route("/runs/{run_id}/compare/{other_id}", showCompare);
route("/inbox", showInbox);
route("/inbox/{task_id}", showInbox);
route("/plans", showPlans);
route("/schedules", showSchedules);
route("/health", showHealth);
route("/audit", showAudit);

async function start() {
  put(document.body, h("main", {}, loading()));
  try {
    const [health] = await Promise.all([setClock(), loadSession()]);
    const shell = makeShell(who(), health);
    put(document.body, shell.element);
    startRouter(shell.outlet, shell.moved);
  } catch (problem) {
    if (problem.code === undefined) throw problem;
    if (problem.isSignedOut) showSignIn(document.body, start);
    else put(document.body, h("main", {}, failed(problem, start)));
  }
}

onSignedOut(() => askAgain(render));
start();
