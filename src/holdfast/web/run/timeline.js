// The steps of a run over time, to scale. Only the rows that are seen exist, so thousands of steps cost what forty do.

import { h, on, perFrame, put, s } from "../lib/dom.js";
import { icon, statusWord } from "../lib/icons.js";
import { nowMs } from "../lib/clock.js";
import { Scroller } from "../lib/scroller.js";
import { duration } from "../lib/time.js";
import { barsOf, ROW } from "./bars.js";
import { TERMINAL } from "./event-tables.js";
import { NestedRuns } from "./nested.js";
import { Overview } from "./overview.js";
import { Scale, tickWord } from "./scale.js";
import { PLAIN, squeezed } from "./warp.js";
import { kindWord, nameOf, spokenStep } from "./words.js";

const AXIS = 24;
const DEEPEST = 8;
const EDGE = 20;

const MANY = 20;
const WORST = ["FAILED", "RUNNING", "PENDING", "SUCCESS", "SKIPPED"];

// The words of a mark stay inside: the first begin there, the last end there.
function anchorOf(x, width) {
  if (x < EDGE) return "start";
  return x > width - EDGE ? "end" : "middle";
}

// Many steps of one name and kind are one row, until it is opened: `pick ×60`. One that is chosen opens its row.
export function foldRepeated(steps, unfolded, selected = null) {
  const keyOf = (step) => `${step.kind} ${step.id.replace(/#\d+$/, "")}`;
  const groups = new Map();
  for (const step of steps) {
    const key = keyOf(step);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(step);
  }
  const isOpen = new Map();
  return steps.flatMap((step) => {
    const key = keyOf(step);
    const group = groups.get(key);
    if (group.length < MANY) return [step];
    if (isOpen.has(key)) return isOpen.get(key) ? [step] : [];
    isOpen.set(key, unfolded.has(key) || group.some((each) => each.id === selected));
    return [foldOf(key, group), ...(isOpen.get(key) ? [step] : [])];
  });
}

function foldOf(key, steps) {
  const isOpen = steps.some((step) => step.until === null);
  const until = isOpen ? null : steps.reduce((last, step) => Math.max(last, step.until), 0);
  const from = steps.reduce((first, step) => Math.min(first, step.from), Infinity);
  const name = steps[0].id.replace(/#\d+$/, "");
  const failed = steps.filter((step) => step.status === "FAILED").length;
  return {
    ...steps[0],
    id: `${name} ×${steps.length}${failed ? `, ${failed} failed` : ""}`,
    folds: key,
    status: WORST.find((status) => steps.some((step) => step.status === status)) ?? steps[0].status,
    from,
    until,
    error: null,
    logical: 1,
    attempts: [{ from, until, logical: 1, error: null }],
  };
}

export class Timeline {
  constructor({ onPick, onPickIn, signal }) {
    this.onPick = onPick;
    this.onPickIn = onPickIn;
    this.nested = new NestedRuns(signal, () => this.redraw());
    this.zoom = null;
    this.warp = PLAIN;
    this.steps = [];
    this.unfolded = new Set();
    this.version = 0;
    this.active = 0;
    this.scroller = new Scroller({
      rowHeight: ROW,
      label: "Steps",
      signal,
      make: (index) => this.row(index),
      stampOf: (index) => `${this.version}:${this.steps[index].inRun ?? ""}:${this.steps[index].id}`,
    });
    this.scroller.element.classList.add("steps");
    this.scroller.element.tabIndex = -1;
    this.axis = s("svg", { class: "axis", height: AXIS, "aria-hidden": "true" });
    this.back = s("svg", { class: "chart-back", "aria-hidden": "true" });
    this.tip = h("div", { class: "tip", role: "tooltip", hidden: true });
    this.overview = new Overview({
      signal,
      onZoom: (from, until) => this.zoomTo(from, until),
      onFit: () => this.fit(),
    });
    this.span = h("span", { class: "quiet numbers", "aria-live": "off" });
    const button = (word, label, act) =>
      h("button", { class: "button small", type: "button", "aria-label": label, title: label, onclick: act }, word);
    const squeeze = h(
      "button",
      {
        class: "button small",
        type: "button",
        "aria-pressed": "false",
        title: "Leave out the long times in which the run only waits",
      },
      "Squeeze waits",
    );
    squeeze.addEventListener("click", () => {
      this.isSqueezed = !this.isSqueezed;
      squeeze.setAttribute("aria-pressed", String(this.isSqueezed));
      this.fit();
    });
    this.isSqueezed = false;
    this.tools = h(
      "div",
      { class: "timeline-tools" },
      this.span,
      squeeze,
      button("−", "Zoom out", () => this.scaleBy(2)),
      button("+", "Zoom in", () => this.scaleBy(0.5)),
      button("Fit", "Show the whole run", () => this.fit()),
    );
    this.chart = h("div", { class: "chart" }, this.back, this.scroller.element);
    this.element = h(
      "div",
      { class: "timeline" },
      h("div", { class: "label-gap" }, this.overview.element),
      h("div", { class: "label-gap" }, this.axis),
      this.chart,
      this.tip,
    );
    this.redraw = perFrame(() => signal.aborted || this.drawNow());
    this.listen(signal);
  }

  listen(signal) {
    const watch = new ResizeObserver(() => this.redraw());
    watch.observe(this.element);
    const beat = setInterval(() => {
      if (this.state && !this.isPast && !TERMINAL.has(this.state.status) && !document.hidden) this.redraw();
    }, 500);
    signal.addEventListener("abort", () => {
      watch.disconnect();
      clearInterval(beat);
    });
    on(this.chart, "wheel", (event) => this.wheel(event), signal);
    on(this.chart, "keydown", (event) => this.key(event), signal);
    on(this.chart, "pointermove", (event) => this.hover(event), signal);
    on(
      this.chart,
      "pointerleave",
      () => {
        this.tip.hidden = true;
      },
      signal,
    );
    on(this.scroller.element, "focusin", (event) => this.noteFocus(event), signal);
  }

  // `whole` is the run as it is; `state` as it was at the event that one looks at.
  set(whole, state, { cursor = null, selected = null } = {}) {
    Object.assign(this, { whole, state, cursor, selected, isPast: cursor !== null });
    this.redraw();
  }

  get end() {
    return TERMINAL.has(this.whole.status) ? this.whole.last : Math.max(this.whole.last, nowMs());
  }

  get domain() {
    const from = this.warp.to(this.whole.from);
    const until = this.warp.to(this.end);
    const room = Math.max(2, (until - from) * 0.03);
    return { from: from - room / 3, until: until + room };
  }

  get until() {
    if (this.cursor !== null) return this.cursor;
    return TERMINAL.has(this.state.status) ? this.state.last : Math.max(this.state.last, nowMs());
  }

  get scale() {
    const { from, until } = this.zoom ?? this.domain;
    return new Scale(from, until, Math.max(50, this.axis.parentElement.clientWidth - this.labelWidth), this.warp);
  }

  get labelWidth() {
    return parseFloat(getComputedStyle(this.element).getPropertyValue("--label"));
  }

  drawNow() {
    if (!this.state || this.state.from === null) return;
    this.version += 1;
    this.warp = this.isSqueezed ? squeezed(this.whole, this.end) : PLAIN;
    const scale = this.scale;
    this.current = scale;
    this.drawAxis(scale);
    this.overview.draw(this.state, {
      domain: this.domain,
      zoom: this.zoom ?? this.domain,
      until: this.until,
      cursor: this.cursor,
      warp: this.warp,
    });
    this.steps = this.rowsOf(this.state, this.cursor);
    this.scroller.setCount(this.steps.length);
    // It must not jump while one goes through history.
    const most = this.isPast ? this.rowsOf(this.whole, null).length : this.steps.length;
    this.chart.style.setProperty("min-height", `min(56vh, 620px, ${most * ROW}px)`);
    this.scroller.drawNow();
    this.span.textContent = duration(this.warp.from(scale.until) - this.warp.from(scale.from));
  }

  // The steps of a run as rows, and below a child that is open its steps, as deep as they go.
  rowsOf(state, cursor, inRun = null, depth = 0) {
    const unfolded = { has: (key) => this.unfolded.has(`${inRun ?? ""} ${key}`) };
    const until = this.untilOf(state, cursor);
    return foldRepeated([...state.steps.values()], unfolded, inRun === null ? this.selected : null).flatMap((step) => {
      const row = { ...step, inRun, depth, now: until, folds: step.folds && `${inRun ?? ""} ${step.folds}`, child: (!step.folds && step.kind === "child" && step.first?.data.child_run_id) || null };
      if (row.child === null || depth >= DEEPEST || !this.nested.has(row.child)) return [row];
      return [row, ...this.rowsOf(this.nested.stateOf(row.child, cursor), cursor, row.child, depth + 1)];
    });
  }

  untilOf(state, cursor) {
    if (cursor !== null) return cursor;
    return TERMINAL.has(state.status) ? state.last : Math.max(state.last ?? 0, nowMs());
  }

  drawAxis(scale) {
    const { ticks, step } = scale.ticks(this.whole.from);
    this.axis.setAttribute("width", scale.width);
    put(
      this.axis,
      ticks.map((tick) =>
        s(
          "text",
          { x: Math.min(scale.x(tick), scale.width - 2), y: 16, "text-anchor": anchorOf(scale.x(tick), scale.width) },
          tickWord(tick - this.whole.from, step),
        ),
      ),
      this.warp.gaps.map((gap) =>
        s(
          "text",
          { class: "left-out-word", x: (scale.x(gap.from) + scale.x(gap.until)) / 2, y: 16, "text-anchor": "middle" },
          `⋯ ${duration(gap.until - gap.from)}`,
        ),
      ),
    );
    const height = Math.max(this.chart.clientHeight, 40);
    this.back.setAttribute("width", scale.width);
    this.back.setAttribute("height", height);
    const line = (ms, name) => s("line", { class: name, x1: scale.x(ms), x2: scale.x(ms), y1: 0, y2: height });
    const until = this.until;
    put(
      this.back,
      this.state.pauses.map((pause) =>
        s("rect", {
          class: "pause",
          x: scale.x(pause.from),
          y: 0,
          width: Math.max(1, scale.x(pause.until ?? until) - scale.x(pause.from)),
          height,
        }),
      ),
      ticks.map((tick) => line(tick, "grid")),
      this.warp.gaps.map((gap) =>
        s("rect", {
          class: "left-out",
          x: scale.x(gap.from),
          y: 0,
          width: scale.x(gap.until) - scale.x(gap.from),
          height,
        }),
      ),
      this.state.rotations.map(({ at }) => line(at, "rotation")),
      !this.isPast && !TERMINAL.has(this.whole.status) && line(until, "now"),
      this.cursor !== null && line(this.cursor, "cursor"),
    );
  }

  // A row of many steps of one name: it opens, and so do they fold again.
  act(step) {
    if (!step.folds) return step.inRun === null ? this.onPick(step.id) : this.onPickIn(step.inRun, step.id);
    if (!this.unfolded.delete(step.folds)) this.unfolded.add(step.folds);
    return this.redraw();
  }

  row(index) {
    const step = this.steps[index];
    const until = step.now;
    const tries =
      !step.folds &&
      step.attempts.length > 1 &&
      h("span", { class: "tries", title: `${step.attempts.length} attempts` }, `×${step.attempts.length}`);
    const retry = step.logical > 1 && h("span", { class: "tries" }, `Retry #${step.logical - 1}`);
    const button = h(
      "button",
      {
        type: "button",
        class: "step-label",
        dataset: { status: step.status, index },
        tabindex: index === this.active ? "0" : "-1",
        "aria-label": spokenStep(step, until),
        "aria-pressed": String(step.inRun === null && step.id === this.selected),
        "aria-expanded": step.folds ? String(this.unfolded.has(step.folds)) : null,
        onclick: () => this.act(step),
      },
      icon(step.status === "RUNNING" && step.kind !== "activity" ? step.kind : step.status),
      h("span", { class: "step-name", title: step.id }, nameOf(step)),
      retry,
      tries,
    );
    const svg = s(
      "svg",
      { class: "bars", width: this.current.width, height: ROW, "aria-hidden": "true" },
      barsOf(step, this.current, until).filter(Boolean),
    );
    const opener = step.child ? this.opener(step, index) : step.folds ? h("span", { class: "opens", "aria-hidden": "true" }, this.unfolded.has(step.folds) ? "▾" : "▸") : null;
    return h(
      "div",
      {
        class: `step-row${opener ? " opens-row" : ""}`,
        role: "listitem",
        style: step.depth > 0 ? { "--depth": String(step.depth) } : null,
        dataset: { index, depth: step.depth },
        onclick: (event) => {
          if (!button.contains(event.target) && !opener?.contains(event.target)) this.act(step);
        },
        ondblclick: () => this.zoomToStep(step),
      },
      opener,
      button,
      svg,
    );
  }

  // Opens the steps of a child below its row, and closes them again.
  opener(step, index) {
    const isOpen = this.nested.has(step.child);
    const label = `${isOpen ? "Hide" : "Show"} the steps of ${nameOf(step)}`;
    return h("button", { type: "button", class: "opens", "aria-expanded": String(isOpen), "aria-label": label, title: label, tabindex: index === this.active ? "0" : "-1", onclick: () => this.nested.toggle(step.child) }, isOpen ? "▾" : "▸");
  }

  zoomTo(from, until) {
    const { domain } = this;
    this.zoom = until - from >= domain.until - domain.from ? null : { from, until: Math.max(until, from + 0.5) };
    this.redraw();
  }

  zoomToStep(step) {
    const until = step.until ?? step.now;
    const [from, to] = [this.warp.to(step.from), this.warp.to(until)];
    const room = Math.max(1, (to - from) * 0.15);
    this.zoomTo(from - room, to + room);
  }

  scaleBy(factor, around = 0.5) {
    const { from, until } = this.zoom ?? this.domain;
    const middle = from + (until - from) * around;
    this.zoomTo(middle - (middle - from) * factor, middle + (until - middle) * factor);
  }

  pan(part) {
    if (!this.zoom) return;
    const by = (this.zoom.until - this.zoom.from) * part;
    this.zoomTo(this.zoom.from + by, this.zoom.until + by);
  }

  fit() {
    this.zoom = null;
    this.redraw();
  }

  wheel(event) {
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const x = event.clientX - this.back.getBoundingClientRect().left;
      this.scaleBy(Math.exp(event.deltaY / 300), Math.min(1, Math.max(0, x / this.current.width)));
    } else if (sideways && this.zoom) {
      event.preventDefault();
      this.pan(sideways / this.current.width);
    }
  }

  key(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    const acts = {
      "+": () => this.scaleBy(0.5),
      "=": () => this.scaleBy(0.5),
      "-": () => this.scaleBy(2),
      0: () => this.fit(),
      ArrowLeft: () => (this.zoom ? this.pan(-0.2) : this.openChild(false)),
      ArrowRight: () => (this.zoom ? this.pan(0.2) : this.openChild(true)),
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      const next = Math.min(this.steps.length - 1, Math.max(0, this.active + moves[event.key]));
      this.scroller.show(next);
      this.scroller.shown.get(next)?.element.querySelector("button").focus({ preventScroll: true });
    } else if (event.key in acts) acts[event.key]();
    else return;
    event.preventDefault();
  }

  openChild(isOpen) {
    const child = this.steps[this.active]?.child;
    if (child && this.nested.has(child) !== isOpen) this.nested.toggle(child);
  }

  noteFocus(event) {
    const found = event.target.closest(".step-label");
    if (!found) return;
    this.scroller.shown.get(this.active)?.element.querySelector("button").setAttribute("tabindex", "-1");
    found.setAttribute("tabindex", "0");
    this.active = Number(found.dataset.index);
  }

  hover(event) {
    const row = event.target.closest?.(".step-row");
    const step = row && this.steps[Number(row.dataset.index)];
    this.tip.hidden = !step;
    if (!step) return;
    const until = step.until ?? step.now;
    put(
      this.tip,
      h("strong", {}, nameOf(step)),
      h("span", {}, `${kindWord(step.kind)} · ${statusWord(step.status)} · ${duration(until - step.from)}`),
      h(
        "span",
        { class: "quiet" },
        `from ${duration(Math.max(0, step.from - this.whole.from))} on`,
        step.attempts.length > 1 && ` · ${step.attempts.length} attempts`,
      ),
      step.error && h("span", { class: "row-error" }, `${step.error.code}: ${step.error.message}`),
    );
    const box = this.element.getBoundingClientRect();
    this.tip.style.setProperty("left", `${Math.min(event.clientX - box.left + 14, box.width - 300)}px`);
    this.tip.style.setProperty("top", `${event.clientY - box.top + 16}px`);
  }
}
