// The top of a run's page: what it is, how it stands, and what can be done.

import { nowMs } from "../lib/clock.js";
import { h, put } from "../lib/dom.js";
import { shortId } from "../lib/ids.js";
import { icon, statusBadge } from "../lib/icons.js";
import { publishedOf } from "../lib/published.js";
import { compareAddress, runAddress } from "../lib/router.js";
import { toast } from "../lib/toast.js";
import { ageOf, elapsedOf, moment } from "../lib/time.js";
import { commandsFor, othersFor } from "./actions.js";
import { TERMINAL } from "./event-tables.js";
import { failuresToSettle } from "./fold.js";

const iso = (ms) => new Date(ms).toISOString();
const IN_MENU = new Set(["raise", "terminate", "again"]);
const FIRST = ["approve", "retry-step", "resume", "retry", "signal"]; // what helps most is the primary action
const SUBSTATUS = { AWAITING_APPROVAL: "waits for approval", CANCELLING: "is being cancelled" };

export class RunHead {
  constructor() {
    this.title = h("h1", {});
    this.marks = h("span", { class: "head-marks", role: "status" });
    this.facts = h("dl", { class: "head-facts" });
    this.actions = h("div", { class: "actions" });
    this.shown = "";
    this.element = h(
      "header",
      { class: "run-head-card" },
      h(
        "div",
        { class: "view-head" },
        h("a", { class: "icon-button", href: "/runs", "aria-label": "All runs" }, icon("back")),
        this.title,
        this.marks,
        this.actions,
      ),
      this.facts,
    );
  }

  set(model, state, isPast) {
    const { head } = model;
    put(this.title, head.reference_key ?? shortId(head.run_id));
    put(
      this.marks,
      statusBadge(state.status),
      state.substatus && failuresToSettle(state).length === 0 && h("span", { class: "tag", title: state.substatus }, SUBSTATUS[state.substatus] ?? state.substatus),
      model.isStale && h("span", { class: "stale", title: "Events are missing" }, "STALE"),
      isPast && h("span", { class: "past" }, `as it was at event ${state.seq}`),
    );
    this.showFacts(model, head);
    this.showActions(model);
  }

  showFacts(model, head) {
    const { state } = model;
    const copy = async () => {
      await navigator.clipboard.writeText(head.run_id);
      toast("The id was copied.");
    };
    const retryOf = state.queued?.retry_of;
    const madeFrom = retryOf?.run_id ?? state.queued?.forked_from?.run_id;
    const until = TERMINAL.has(state.status) && state.last ? iso(state.last) : null;
    const pairs = [
      [
        "Workflow",
        [
          h("a", { href: `/runs?workflow=${encodeURIComponent(head.workflow)}` }, head.workflow),
          h("span", { class: "quiet" }, ` version ${head.workflow_version}`),
        ],
      ],
      ["Run", h("button", { class: "copy-id mono", type: "button", title: "Copy the id", onclick: copy }, head.run_id)],
      [state.status === "PENDING" || state.status === "APPROVED" ? "Queued" : "Started", ageOf(head.created_at)],
      [until ? "Took" : "So far", elapsedOf(head.created_at, until)],
      ["Events", h("span", { class: "numbers" }, String(model.seq))],
      head.parent_run_id && [
        "Parent",
        h("a", { class: "mono", href: runAddress(head.parent_run_id) }, shortId(head.parent_run_id)),
      ],
      madeFrom && [
        retryOf ? `Attempt ${retryOf.attempt ?? 2}, after` : "Forked from",
        [
          h("a", { class: "mono", href: runAddress(madeFrom) }, shortId(madeFrom)),
          " ",
          h("a", { href: compareAddress(madeFrom, head.run_id) }, "Compare"),
        ],
      ],
      head.done_again_by && ["Done again by", h("a", { class: "mono", href: runAddress(head.done_again_by) }, shortId(head.done_again_by))],
      publishedOf(head) && ["Published", publishedOf(head)],
      head.waiting_until && !TERMINAL.has(state.status) && [head.waiting_kind === "task" && Date.parse(head.waiting_until) < nowMs() ? "Overdue since" : head.waiting_kind === "start" ? "Starts at" : "Waits until", moment(head.waiting_until)],
      head.tenant !== "default" && ["Tenant", head.tenant],
      head.environment !== "default" && ["Environment", head.environment],
      head.tags.length > 0 && [
        "Tags",
        head.tags.map((tag) => h("a", { class: "tag", href: `/runs?tag=${encodeURIComponent(tag)}` }, tag)),
      ],
    ];
    put(
      this.facts,
      pairs.filter(Boolean).map(([term, text]) => h("div", {}, h("dt", {}, term), h("dd", {}, text))),
    );
  }

  // Buttons stay the same elements while the same things can be done: a user who is about to press one must not miss it.
  // When others can be done, the one that has the focus keeps it, if it is still there.
  showActions(model) {
    const all = [...othersFor(model), ...commandsFor(model)];
    const isDone = Boolean(model.head.done_again_by);
    const shown = [...all.map(({ name, step = "" }) => `${name} ${step}`), isDone, model.head.waiting_kind].join();
    if (shown === this.shown) return;
    this.shown = shown;
    const wasOpen = this.actions.querySelector("details.menu")?.open ?? false;
    const focused = this.actions.contains(document.activeElement) ? document.activeElement.dataset.name : undefined;
    const helps = (each) => each.name !== "signal" || model.head.waiting_kind === "signal";
    const first = !isDone && FIRST.map((name) => all.find((each) => each.name === name && helps(each))).find(Boolean);
    const isLess = ({ name }) => IN_MENU.has(name) || (name === "retry-from-start" && first?.name === "retry") || (isDone && name.startsWith("retry"));
    const buttons = all.filter((each) => !isLess(each));
    const rest = all.filter(isLess);
    put(
      this.actions,
      buttons.map(({ name, word, danger, act }) =>
        h(
          "button",
          {
            class: `button${name === first?.name ? " primary" : ""}${danger ? " danger" : ""}`,
            type: "button",
            dataset: { name },
            onclick: act,
          },
          word,
        ),
      ),
      rest.length > 0 &&
        h(
          "details",
          { class: "menu" },
          h("summary", { class: "button", "aria-label": "More actions", dataset: { name: "more" } }, icon("more")),
          h(
            "div",
            { class: "menu-body items" },
            rest.map(({ name, word, danger, act }) =>
              h(
                "button",
                {
                  class: `menu-item${danger ? " danger" : ""}`,
                  type: "button",
                  dataset: { name },
                  onclick: (event) => {
                    event.target.closest("details").open = false;
                    act();
                  },
                },
                word,
              ),
            ),
          ),
        ),
    );
    const menu = this.actions.querySelector("details.menu");
    if (menu) menu.open = wasOpen;
    if (focused !== undefined) this.actions.querySelector(`[data-name="${focused}"]`)?.focus({ preventScroll: true });
  }
}
