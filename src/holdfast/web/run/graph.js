// The graph of a flow or a plan with how each step stands, drawn from what the service answers and kept up to date.
// `ask({expand, collapse})` gets it; for a plan without a run, it says what differs from another version.
//
// The service folds what is too large, so there are never more than some hundred nodes here. A change of status redraws the
// nodes that it concerns; only a change of the graph itself lays it out again.

import { h, on, put, s } from "../lib/dom.js";
import { statusWord } from "../lib/icons.js";
import { isGroup, NodeView, sizeOf } from "./graph-node.js";
import { layout } from "./layout.js";
import { LEGIBLE, READABLE, Viewport } from "./viewport.js";

const PAUSE_MS = 400;
const MANY_PAUSE_MS = 1500;
const MANY = 1000;
const DRAWN = "graph-drawn";
const MOST_NAMED = 100;
const MOST_HEIGHT = 620;
const ORDER = ["FAILED", "RUNNING", "WAITING", "SUCCESS", "SKIPPED", "PENDING"];
const ACTIVE = ["FAILED", "RUNNING", "WAITING"];
const WAYS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };

export class RunGraph {
  constructor({ ask, signal, onPick, onGraph = () => {}, label = "Graph of the run", hasRun = true }) {
    Object.assign(this, { asker: ask, signal, onPick, onGraph, graph: null, selected: null, isDown: null });
    this.expand = new Set();
    this.collapse = new Set();
    this.views = new Map();
    this.structure = "";
    this.timer = 0;
    this.element = h("div", { class: "run-graph", role: "group", "aria-label": label });
    this.view = new Viewport({ element: this.element, signal, onScale: (k) => this.scaled(k) });
    this.frames = s("g", {});
    this.edges = s("g", { class: "graph-edges", "aria-hidden": "true" });
    this.nodes = s("g", {});
    this.view.world.append(arrows(), this.frames, this.edges, this.nodes);
    this.words = h("span", { class: "quiet numbers", role: "status" });
    this.tools = this.makeTools(hasRun);
    this.listen();
  }

  makeTools(hasRun) {
    const button = (word, label, act) =>
      h("button", { class: "button small", type: "button", "aria-label": label, title: label, onclick: act }, word);
    const path = button("Critical path", "Mark the critical path: what the run waits for, or has waited for, longest", () => {
      const isOn = path.getAttribute("aria-pressed") !== "true";
      path.setAttribute("aria-pressed", String(isOn));
      this.element.dataset.path = String(isOn);
    });
    path.setAttribute("aria-pressed", "true");
    this.element.dataset.path = "true";
    return h(
      "div",
      { class: "graph-tools" },
      this.words,
      hasRun && path,
      button("⇄", "Turn the graph", () => this.turn()),
      button("−", "Zoom out of the graph", () => this.view.zoomBy(0.7)),
      button("+", "Zoom into the graph", () => this.view.zoomBy(1.4)),
      button("Fit", "Show the whole graph", () => this.view.fit(this.drawn, null, { isWhole: true })),
    );
  }

  listen() {
    const { element, signal } = this;
    on(element, "click", (event) => this.click(event), signal);
    on(element, "keydown", (event) => this.key(event), signal);
    on(element, "focusin", (event) => this.noteFocus(event), signal);
    const watch = new ResizeObserver(() => this.drawn && !this.view.isMoved && this.fit());
    watch.observe(element);
    const beat = setInterval(() => !document.hidden && this.graph && this.showNodes(), 1000);
    signal.addEventListener("abort", () => {
      watch.disconnect();
      clearInterval(beat);
      clearTimeout(this.timer);
    });
  }

  ask() {
    return this.asker({ expand: [...this.expand], collapse: [...this.collapse] });
  }

  // Asks before there is a place to draw in; `load` takes the answer.
  askEarly() {
    this.early = this.ask();
    this.early.catch(() => {}); // `load` says what is wrong
  }

  // Asks for the graph. While an answer is awaited nothing else is asked; what has changed meanwhile is asked for then.
  async load() {
    if (this.isAsking) {
      this.isDue = true;
      return;
    }
    this.isAsking = true;
    this.isDue = false;
    clearTimeout(this.timer);
    this.timer = 0;
    try {
      this.show(await (this.early ?? this.ask()));
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.code === undefined) throw problem;
      this.isMissing = problem.status === 404; // the service does not have this workflow
    } finally {
      this.isAsking = false;
      this.early = null;
    }
    if (this.isDue) this.soon();
  }

  soon() {
    if (this.timer !== 0) return;
    this.timer = setTimeout(
      () => {
        this.timer = 0;
        this.load();
      },
      this.graph?.steps > MANY ? MANY_PAUSE_MS : PAUSE_MS,
    );
  }

  // An event has come: what the service knows already is not asked for again.
  changed(event) {
    if (this.graph?.kind === "code" || this.isMissing || event.run_seq <= (this.graph?.last_event_seq ?? 0)) return;
    this.soon();
  }

  show(graph) {
    this.graph = graph;
    this.byId = new Map(graph.nodes.map((node) => [node.id, node]));
    this.onGraph(graph);
    if (graph.nodes.length === 0) return;
    this.showWords();
    const structure = JSON.stringify(
      graph.nodes.map((node) => [node.id, node.parent, node.depends_on, node.is_expanded, node.label, node.branch]),
    );
    if (structure === this.structure) {
      this.showNodes();
      this.follow();
    } else this.arrange(structure);
    this.markEdges();
    if (performance.getEntriesByName(DRAWN).length === 0) performance.mark(DRAWN);
  }

  // The graph is always as it is now, also where the rest of the page shows an earlier event.
  setPast(isPast) {
    if (isPast === this.isPast) return;
    this.isPast = isPast;
    if (this.graph?.nodes.length) this.showWords();
  }

  showWords() {
    this.words.textContent = (this.isPast ? "As it is now: " : "") + wordsOf(this.graph);
  }

  arrange(structure) {
    const anchor = this.anchor && this.drawn?.boxes.get(this.anchor);
    const isFirst = this.structure === "";
    this.structure = structure;
    this.isDown ??= this.bestWay();
    this.drawn = layout(this.graph.nodes, sizeOf, this.shape(this.isDown));
    for (const [id, view] of this.views)
      if (!this.byId.has(id)) {
        view.element.remove();
        this.views.delete(id);
      }
    const frames = [];
    const nodes = [];
    for (const node of this.graph.nodes) {
      if (!this.views.has(node.id)) this.views.set(node.id, new NodeView(node.id));
      (node.is_expanded ? frames : nodes).push(this.views.get(node.id));
    }
    frames.sort((one, other) => this.drawn.boxes.get(one.id).depth - this.drawn.boxes.get(other.id).depth);
    const focused = document.activeElement?.closest?.(".graph-node")?.dataset.id;
    put(this.frames, frames.map((view) => view.element));
    put(this.nodes, nodes.map((view) => view.element));
    this.drawEdges();
    this.showNodes();
    this.views.get(this.focus ?? this.graph.nodes[0].id)?.element.setAttribute("tabindex", "0");
    if (!this.views.has(this.focus)) this.noteNode(this.graph.nodes[0].id);
    if (focused !== undefined) this.views.get(focused)?.element.focus({ preventScroll: true });
    const moved = anchor && this.drawn.boxes.get(this.anchor);
    if (moved) this.keepInPlace(anchor, moved);
    else if (isFirst || !this.view.isMoved) this.fit();
    if (this.drawn.boxes.has(this.sought)) this.view.reveal(this.drawn.boxes.get(this.sought));
    this.anchor = null;
    this.sought = null;
  }

  // What was folded or unfolded stays where it was on the screen.
  keepInPlace(before, now) {
    const { view } = this;
    this.setHeight();
    view.isMoved = true;
    view.set(view.k, view.x + (before.x - now.x) * view.k, view.y + (before.y - now.y) * view.k);
    view.reveal({ ...now, w: Math.min(now.w, view.width / view.k), h: Math.min(now.h, view.height / view.k) });
  }

  // Rows of layers are as long as can be seen and read at once.
  shape(isDown) {
    const room = isDown ? Math.min(MOST_HEIGHT, innerHeight * 0.6) : this.element.clientWidth;
    return { isDown, most: (Math.max(320, room) - 40) / READABLE };
  }

  // The direction in which more of it can be seen at once. Where there is little room, that is downwards.
  bestWay() {
    const room = [Math.max(200, this.element.clientWidth), Math.min(MOST_HEIGHT, innerHeight * 0.6)];
    if (room[0] < 560) return true;
    const scales = [false, true].map((isDown) => {
      const { width, height } = layout(this.graph.nodes, sizeOf, this.shape(isDown));
      return Math.min(1, room[0] / width, room[1] / height);
    });
    return scales[1] > scales[0] * 1.4;
  }

  turn() {
    if (!this.graph?.nodes.length) return;
    this.isDown = !this.isDown;
    this.view.isMoved = false;
    this.arrange(this.structure);
    this.markEdges();
  }

  setHeight() {
    const most = Math.min(MOST_HEIGHT, innerHeight * 0.6);
    const k = Math.min(1, Math.max(LEGIBLE, (this.element.clientWidth - 40) / Math.max(1, this.drawn.width)));
    this.element.style.setProperty("height", `${Math.round(Math.min(most, Math.max(150, this.drawn.height * k + 48)))}px`);
  }

  fit() {
    this.setHeight();
    const leaves = this.graph.nodes.filter((node) => !node.is_expanded);
    const active = ACTIVE.map((status) => leaves.find((node) => node.status === status)).find(Boolean);
    this.view.fit(this.drawn, this.drawn.boxes.get((active ?? leaves[0]).id));
  }

  // What is active now comes into view, unless somebody has moved the drawing or uses it.
  follow() {
    if (!this.view.isMoved && !this.element.contains(document.activeElement)) this.fit();
  }

  scaled(k) {
    this.element.dataset.scale = k < 0.34 ? "far" : k < 0.55 ? "middle" : "near";
  }

  drawEdges() {
    this.lines = this.drawn.edges.map(({ from, to, points }) => {
      const line = s("path", { class: "graph-edge", d: lineOf(points, this.isDown) });
      return { from, to, line };
    });
    put(this.edges, this.lines.map(({ line }) => line));
  }

  markEdges() {
    for (const { from, to, line } of this.lines) {
      const node = this.byId.get(to);
      const isCritical = node?.is_critical === true && node.critical_after === from;
      line.dataset.critical = String(isCritical);
      line.dataset.ahead = String(node?.status === "PENDING");
      line.setAttribute("marker-end", `url(#graph-arrow${isCritical ? "-critical" : ""})`);
      if (isCritical && line.nextSibling) this.edges.append(line); // above the others
    }
  }

  showNodes() {
    if (!this.drawn) return;
    const labelById = (id) => this.labelOf(id);
    for (const [id, view] of this.views) {
      const isSelected = id === this.selected;
      view.show(this.byId.get(id), this.drawn.boxes.get(id), { labelById, isSelected });
    }
  }

  // Marks a step. One that is folded away is shown, if it was chosen elsewhere.
  select(stepId, { isSought = false } = {}) {
    if (stepId === this.selected) return;
    this.selected = stepId;
    if (!this.graph || this.graph.kind === "code") return;
    this.showNodes();
    if (stepId === null || !isSought) return;
    if (this.byId.has(stepId)) this.view.reveal(this.drawn.boxes.get(stepId));
    else {
      this.name(this.expand, stepId);
      this.sought = stepId;
      this.load();
    }
  }

  nodeOf(id) {
    return this.byId?.get(id) ?? null;
  }

  labelOf(id) {
    return this.byId?.get(id)?.label ?? id;
  }

  name(set, id) {
    set.add(id);
    while (set.size > MOST_NAMED) set.delete(set.values().next().value);
  }

  act(id) {
    const node = this.byId.get(id);
    if (!node) return;
    this.noteNode(id);
    if (!isGroup(node)) return this.onPick(node);
    this.anchor = id;
    if (node.is_expanded) {
      this.expand.delete(id);
      this.name(this.collapse, id);
    } else {
      this.collapse.delete(id);
      this.name(this.expand, id);
    }
    this.load();
  }

  click(event) {
    const found = event.target.closest?.(".graph-node");
    if (!found || this.view.wasDragged) return;
    // Inside a frame one drags; only its head folds it.
    const node = this.byId.get(found.dataset.id);
    if (node?.is_expanded && event.detail > 0 && !event.target.closest(".graph-grip, .graph-label, .graph-small, .graph-sign, .icon"))
      return;
    this.act(found.dataset.id);
  }

  noteNode(id) {
    this.views.get(this.focus)?.element.setAttribute("tabindex", "-1");
    this.focus = id;
    this.views.get(id)?.element.setAttribute("tabindex", "0");
  }

  noteFocus(event) {
    const id = event.target.closest?.(".graph-node")?.dataset.id;
    if (id !== undefined && id !== this.focus) this.noteNode(id);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = {
      "+": () => this.view.zoomBy(1.4),
      "-": () => this.view.zoomBy(0.7),
      0: () => this.view.fit(this.drawn, null, { isWhole: true }),
      Enter: () => this.act(this.focus),
      " ": () => this.act(this.focus),
    };
    if (event.key in WAYS) this.go(WAYS[event.key]);
    else if (event.key in acts) acts[event.key]();
    else return;
    event.preventDefault();
  }

  // To the nearest node in this direction.
  go([dx, dy]) {
    const from = this.drawn?.boxes.get(this.focus);
    if (!from) return;
    const middle = ({ x, y, w, h: height }, id) => [x + w / 2, y + (this.byId.get(id)?.is_expanded ? 15 : height / 2)];
    const [fx, fy] = middle(from, this.focus);
    let best = null;
    for (const [id, box] of this.drawn.boxes) {
      const [x, y] = middle(box, id);
      const along = (x - fx) * dx + (y - fy) * dy;
      const across = Math.abs((x - fx) * dy) + Math.abs((y - fy) * dx);
      if (id === this.focus || along < 4) continue;
      const distance = along + 2.5 * across;
      if (best === null || distance < best.distance) best = { id, distance };
    }
    if (best === null) return;
    this.noteNode(best.id);
    this.views.get(best.id).element.focus({ preventScroll: true });
    const box = this.drawn.boxes.get(best.id);
    this.view.reveal(this.byId.get(best.id).is_expanded ? { ...box, h: 30 } : box);
  }
}

function wordsOf({ counts, steps }) {
  if (counts === undefined) return `${steps.toLocaleString()} steps`;
  return ORDER.filter((status) => counts[status])
    .map((status) => `${counts[status].toLocaleString()} ${statusWord(status).toLowerCase()}`)
    .join(", ");
}

function arrows() {
  const arrow = (id) =>
    s(
      "marker",
      { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" },
      s("path", { class: id, d: "M0.5 0.5 7.5 4 0.5 7.5z" }),
    );
  return s("defs", {}, arrow("graph-arrow"), arrow("graph-arrow-critical"));
}

// Straight along a layer, curved from one to the next.
function lineOf(points, isDown) {
  const parts = [`M${points[0][0]} ${points[0][1]}`];
  for (let n = 1; n < points.length; n += 1) {
    const [ax, ay] = points[n - 1];
    const [bx, by] = points[n];
    if (Math.abs(ax - bx) < 0.5 || Math.abs(ay - by) < 0.5) parts.push(`L${bx} ${by}`);
    else if (isDown) parts.push(`C${ax} ${(ay + by) / 2} ${bx} ${(ay + by) / 2} ${bx} ${by}`);
    else parts.push(`C${(ax + bx) / 2} ${ay} ${(ax + bx) / 2} ${by} ${bx} ${by}`);
  }
  return parts.join("");
}
