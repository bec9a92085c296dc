// One run: drawn over time, with its history beside it, as it is and as it was.

import { call } from "../lib/api.js";
import { debounced, h, on, perFrame, put } from "../lib/dom.js";
import { getQuery, go, runAddress, setQuery } from "../lib/router.js";
import { may } from "../lib/session.js";
import { failed, loading } from "../lib/states.js";
import { APPROVAL, forkAt, stepActions } from "../run/actions.js";
import { showArchived } from "../run/archived.js";
import { Asking } from "../run/asking.js";
import { eventDetail, nodeDetail, stepDetail } from "../run/detail.js";
import { failuresToSettle, isPausedByError, timeOf } from "../run/fold.js";
import { RunGraph } from "../run/graph.js";
import { RunHead } from "../run/head.js";
import { EventLog } from "../run/log.js";
import { RunModel } from "../run/model.js";
import { FlowState, inputPanel, mailboxPanel, needs, outcomePanel } from "../run/panels.js";
import { RunStreams } from "../run/streams.js";
import { Timeline } from "../run/timeline.js";
import { travelBar } from "../run/travel.js";
import { showTree } from "../run/tree.js";
import { showConnection } from "../shell.js";

const DRAWN_EVERY = 2000;

export function showRun(place, signal, { run_id: runId }) {
  document.title = `${runId} · Holdfast`;
  put(place, loading("Loading the run"));
  const open = async () => {
    const page = new RunPage(place, signal, runId);
    try {
      await page.model.open(page.graph.early);
      page.begin();
    } catch (problem) {
      if (problem.status === 404 && (await showArchived(place, signal, runId))) return;
      if (problem.code !== undefined) put(place, failed(problem, open));
      else if (problem.name !== "AbortError") throw problem;
    }
  };
  open();
}

function card(title, body, { hidden = false, extra = null } = {}) {
  const heading = h("h2", {}, title);
  return { heading, element: h("section", { class: "card", hidden }, h("header", {}, heading, extra), body) };
}

class RunPage {
  constructor(place, signal, runId) {
    Object.assign(this, { place, signal, seq: null, step: null, event: null });
    this.show = perFrame(() => signal.aborted || this.showNow());
    this.model = new RunModel(runId, signal, {
      onChange: (event) => this.changed(event),
      onState: (state, problem) => this.heard(state, problem),
    });
    this.graph = new RunGraph({
      ask: (named) => call("runs.graph", { run_id: runId, ...named }, signal),
      signal,
      onPick: (node) => this.pickStep(node.id),
      onGraph: (graph) => this.showGraph(graph),
    });
    this.graph.askEarly();
    this.lookAgain = debounced(() => signal.aborted || this.readAround(), 400);
    this.keepSoon = debounced(() => signal.aborted || this.remember(), 200);
  }

  begin() {
    const { signal } = this;
    const asked = getQuery();
    this.seq = Number(asked.at) > 0 ? Number(asked.at) : null;
    this.step = asked.step ?? null;
    this.head = new RunHead();
    this.needs = h("div", { class: "needs" });
    this.timeline = new Timeline({
      onPick: (id) => this.pickStep(id),
      onPickIn: (runId, id) => go(`${runAddress(runId)}?step=${encodeURIComponent(id)}`),
      signal,
    });
    this.travel = travelBar((seq, isMoving) => this.seek(seq, isMoving), signal);
    this.log = new EventLog({ onOpen: (event) => this.pickEvent(event), signal });
    this.logCard = card("Events", this.log.element);
    this.detail = h("section", { class: "card detail", tabindex: "-1", "aria-label": "Detail", hidden: true });
    const bodies = [1, 2, 3, 4, 5, 6].map(() => h("div", { class: "card-body" }));
    [this.input, this.outcome, this.family, this.mail, this.questions, this.written] = bodies;
    this.inputCard = card("Input", this.input);
    this.outcomeCard = card("Result", this.outcome, { hidden: true });
    this.treeCard = card("Family", this.family, { hidden: true });
    this.mailCard = card("Mailbox", this.mail, { hidden: true });
    this.streamCard = card("Streams", this.written, { hidden: true });
    const shown = { card: this.streamCard.element, place: this.written, model: this.model, signal };
    this.streams = new RunStreams(shown);
    this.askCard = card("Queries and updates", this.questions, { hidden: true });
    this.asking = new Asking(this.askCard.element, this.questions, this.model, signal);
    this.graphCard = card("Graph", this.graph.element, { hidden: true, extra: this.graph.tools });
    this.graphCard.element.classList.add("graph-panel");
    this.stateCard = card("State", h("div", { class: "card-body" }), { hidden: true });
    this.flowState = new FlowState(this.stateCard.element, this.model.runId, signal);
    const timeline = card("Timeline", [this.timeline.element, this.travel.element], { extra: this.timeline.tools });
    timeline.element.classList.add("timeline-card");
    this.trouble = h("div", { class: "trouble" });
    this.pair = h("div", { class: "run-pair" }, this.inputCard.element, this.outcomeCard.element);
    put(
      this.place,
      this.head.element,
      this.needs,
      this.trouble,
      h(
        "div",
        { class: "run-grid" },
        h(
          "div",
          { class: "run-main" },
          this.graphCard.element,
          this.stateCard.element,
          timeline.element,
          this.streamCard.element,
          this.pair,
          this.askCard.element,
          this.mailCard.element,
          this.treeCard.element,
        ),
        h("aside", { class: "run-side" }, this.detail, this.logCard.element),
      ),
    );
    document.title = `${this.model.head.reference_key ?? this.model.runId} · Holdfast`;
    on(
      document,
      "keydown",
      (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && this.closeDetail(),
      signal,
    );
    this.graph.load();
    this.lookAgain();
    this.show();
  }

  showGraph({ kind, nodes }) {
    this.graphCard.element.hidden = nodes.length === 0;
    this.flowState.isThere = kind === "flow";
    this.detailed = null; // a step that has not begun is known from here
    if (kind === "flow") this.flowState.load();
    this.show();
  }

  heard(state, problem) {
    showConnection(state);
    if (state === "lost") this.show();
    if (state === "refused" && problem.status !== 401) put(this.place, failed(problem));
  }

  changed(event) {
    if (!this.head || this.isFarBehind(event)) return;
    if (event) {
      this.lookAgain();
      this.graph.changed(event);
    }
    this.show();
  }

  // While a long history comes in it is drawn now and then: drawing it with each part would take longer than reading it.
  isFarBehind(event) {
    return event && event.run_seq < this.model.head.last_event_seq && event.run_seq % DRAWN_EVERY !== 0;
  }

  get isPast() {
    return this.seq !== null && this.seq < this.model.seq;
  }

  get state() {
    return this.isPast ? this.model.at(this.seq) : this.model.state;
  }

  showNow() {
    const { model, isPast, state } = this;
    if (!this.head || model.head === null) return;
    this.head.set(model, state, isPast);
    this.showNeeds(state);
    this.place.dataset.past = String(isPast);
    const cursor = isPast ? timeOf(model.events[this.seq - 1]) : null;
    if (model.seq > 0) this.timeline.set(model.state, state, { cursor, selected: this.step });
    this.travel.set(model, isPast ? this.seq : null);
    this.log.set(model, isPast ? this.seq : model.seq, this.step);
    this.graph.select(this.step);
    this.graph.setPast(isPast);
    this.showPanels(state);
    this.showDetail(state);
  }

  // The cards stay the same elements while they say the same: a user who is about to press a button must not miss it.
  showNeeds(state) {
    const toSettle = new Set(failuresToSettle(state));
    const open = [...state.steps.values()].filter((step) => step.status === "RUNNING" || toSettle.has(step));
    const stamp = `${this.isPast}:${state.status}:${state.substatus}:${open.map((step) => `${step.id} ${step.status} ${step.attempts.length}`)}:${this.model.head.pause?.since}:${this.model.head.queued_at}`;
    if (stamp === this.needed) return;
    this.needed = stamp;
    put(this.needs, this.isPast ? [] : needs(this.model, state));
  }

  // Panels are filled anew only when they would say something else: what was unfolded stays so.
  showPanels(state) {
    const stamp = `${state.inputSeq}:${state.status}:${state.substatus}:${state.error?.message}`;
    if (stamp === this.panels) return;
    this.panels = stamp;
    inputPanel(this.input, state);
    outcomePanel(this.outcomeCard.element, this.outcome, this.outcomeCard.heading, state);
    const isTrouble = state.status === "FAILED" || isPausedByError(state) || failuresToSettle(state).length > 0;
    (isTrouble ? this.trouble : this.pair).append(this.outcomeCard.element); // what is wrong is on top
  }

  showDetail(state) {
    const step = this.step && (state.steps.get(this.step) ?? state.steps.get(`${this.step}${APPROVAL}`));
    const node = !step && !this.isPast && this.step ? this.graph.nodeOf(this.step) : null;
    const stamp = this.event
      ? `e${this.event.run_seq}`
      : step
        ? `s${step.id}:${step.events.length}:${step.status}:${this.isPast}`
        : node
          ? `n${node.id}:${node.status}`
          : "";
    if (stamp === this.detailed) return;
    this.detailed = stamp;
    this.detail.hidden = stamp === "";
    const onClose = () => this.closeDetail();
    if (this.event)
      eventDetail(this.detail, {
        event: this.event,
        onClose,
        onTravel: (seq) => this.seek(seq),
        onStep: (id) => this.pickStep(id),
        onFork: may("runs:control") ? (seq) => forkAt(this.model.runId, seq) : null,
      });
    else if (step)
      stepDetail(this.detail, {
        step,
        model: this.model,
        actions: this.isPast ? [] : stepActions(this.model, step),
        until: state.last,
        onClose,
        onEvent: (event) => this.pickEvent(event),
      });
    else if (node) nodeDetail(this.detail, { node, labelById: (id) => this.graph.labelOf(id), onClose });
  }

  async readAround() {
    const { model, signal } = this;
    try {
      await Promise.all([
        model.readHead(),
        showTree(this.treeCard.element, this.family, model.head, signal),
        mailboxPanel(this.mailCard.element, this.mail, model.runId, signal),
        this.asking.load(),
        this.flowState.load(),
        this.streams.load(),
      ]);
    } catch (problem) {
      if (problem.code === undefined && problem.name !== "AbortError") throw problem;
    }
  }

  remember() {
    setQuery({ at: this.isPast ? this.seq : "", step: this.step ?? "" });
  }

  // While the slider moves its place is kept in the address only now and then: browsers count changes of an address.
  seek(seq, isMoving = false) {
    this.seq = seq === null || seq >= this.model.seq ? null : Math.max(1, seq);
    if (this.seq !== null) this.log.show(this.seq);
    if (isMoving) this.keepSoon();
    else this.remember();
    this.show();
  }

  pickStep(id) {
    this.graph.select(id, { isSought: true });
    this.step = id;
    this.event = null;
    this.remember();
    this.showNow();
    this.revealDetail();
  }

  pickEvent(event) {
    this.event = event;
    this.showNow();
    this.revealDetail();
  }

  revealDetail() {
    this.back ??= document.activeElement;
    this.detail.focus({ preventScroll: true });
    if (window.innerWidth < 1100) this.detail.scrollIntoView({ block: "nearest" });
  }

  closeDetail() {
    if (this.detail.hidden) return;
    this.step = null;
    this.event = null;
    this.remember();
    this.showNow();
    if (this.back?.isConnected) this.back.focus();
    this.back = null;
  }
}
