// One node of a graph as it is drawn: a step, a group that is folded, or the frame around one that is not.
//
// A status has a shape, a border and a word, not only a colour. Labels come from authors and agents: they are only ever text.

import { nowMs } from "../lib/clock.js";
import { put, s } from "../lib/dom.js";
import { icon, statusWord } from "../lib/icons.js";
import { duration } from "../lib/time.js";
import { kindWord } from "./words.js";

const LEAF = 46;
const FOLD = 58;
const LEAST = 112;
const MOST = 236;
const ICON = 34;
const BAR = ["SUCCESS", "SKIPPED", "RUNNING", "WAITING", "FAILED", "PENDING"];
const CHANGES = { added: "Added", removed: "Removed", changed: "Changed" };
const GROUPS = {
  scene: "Scene",
  chorus: "Chorus",
  cue: "Cue",
  for_each: "For each",
  steps: "Steps",
};

export function isGroup(node) {
  return Object.keys(node.counts ?? {}).length > 0;
}

export function kindOfNode(node) {
  return GROUPS[node.kind] ?? kindWord(node.kind);
}

let pen = null;
const widths = new Map();

function widthOf(text, font) {
  const key = `${font}\u0000${text}`;
  if (!widths.has(key)) {
    pen ??= document.createElement("canvas").getContext("2d");
    pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
    if (widths.size > 5000) widths.clear();
    widths.set(key, pen.measureText(text).width);
  }
  return widths.get(key);
}

const LABEL = "600 13px";
const SMALL = "400 11px";

// The text as far as there is room for it.
function cut(text, font, room) {
  const line = text.replaceAll(/\s+/g, " ").trim();
  if (line.length < 300 && widthOf(line, font) <= room) return line;
  let [least, most] = [0, Math.min(line.length, 300)];
  while (least < most) {
    const middle = Math.ceil((least + most) / 2);
    if (widthOf(`${line.slice(0, middle)}…`, font) <= room) least = middle;
    else most = middle - 1;
  }
  return `${line.slice(0, least)}…`;
}

// What is drawn of how it stands; where versions are compared, of what becomes of it.
function signOf(node) {
  return node.change ?? node.status;
}

function signWord(node) {
  return node.change ? CHANGES[node.change] : statusWord(node.status);
}

function labelOf(node) {
  return node.branch ? `${node.branch}: ${node.label}` : node.label;
}

export function sizeOf(node) {
  const wanted = ICON + 30 + widthOf(labelOf(node).slice(0, 80), LABEL);
  const small = ICON + 76 + widthOf(isGroup(node) ? countWords(node) : aboutOf(node).slice(0, 60), SMALL);
  return [Math.round(Math.min(MOST, Math.max(LEAST, wanted, small))), isGroup(node) ? FOLD : LEAF];
}

function tookOf(node) {
  if (!node.started_at) return "";
  const until = node.completed_at ? Date.parse(node.completed_at) : nowMs();
  return duration(Math.max(0, until - Date.parse(node.started_at)));
}

function countWords(node) {
  const { counts } = node;
  const all = Object.values(counts).reduce((sum, each) => sum + each, 0);
  const done = (counts.SUCCESS ?? 0) + (counts.SKIPPED ?? 0);
  return `${done.toLocaleString()} of ${all.toLocaleString()}${counts.FAILED ? `, ${counts.FAILED} failed` : ""}`;
}

function aboutOf(node) {
  return isGroup(node) ? countWords(node) : node.detail || kindOfNode(node);
}

function timeWords(node) {
  return [tookOf(node), node.attempts > 1 && `×${node.attempts}`].filter(Boolean).join(" ");
}

function smallWords(node) {
  return [aboutOf(node), timeWords(node)].filter(Boolean).join(" · ");
}

// What it is, cut, and how long it took, whole; or only the first, if there is no room for both.
function cutWords(node, room) {
  const time = timeWords(node);
  const left = room - (time ? widthOf(` · ${time}`, SMALL) : 0);
  if (!time || left < 36) return cut(aboutOf(node), SMALL, room);
  return `${cut(aboutOf(node), SMALL, left)} · ${time}`;
}

// What is read out: everything that is drawn.
export function spokenNode(node, labelById) {
  const after = (node.depends_on ?? []).slice(0, 3).map((id) => labelById(id));
  return [
    labelOf(node),
    kindOfNode(node),
    signWord(node).toLowerCase(),
    isGroup(node) && countWords(node),
    node.attempts > 1 && `${node.attempts} attempts`,
    tookOf(node),
    node.is_critical && "on the critical path",
    after.length > 0 && `after ${after.join(", ")}${node.depends_on.length > 3 ? " and others" : ""}`,
    node.parent && `in ${labelById(node.parent)}`,
  ]
    .filter(Boolean)
    .join(", ");
}

function placed(shape, x, y, size) {
  for (const [name, value] of Object.entries({ x, y, width: size, height: size })) shape.setAttribute(name, value);
  return shape;
}

function bar(node, width, y) {
  const all = Object.values(node.counts).reduce((sum, each) => sum + each, 0);
  let x = 10;
  return BAR.filter((status) => node.counts[status]).map((status) => {
    const size = Math.max(3, (node.counts[status] / all) * (width - 20));
    const piece = s("rect", { class: "graph-count", x, y, width: size, height: 5, dataset: { status } });
    x += size;
    return piece;
  });
}

export class NodeView {
  constructor(id) {
    this.id = id;
    this.element = s("g", { class: "graph-node", role: "button", tabindex: "-1" });
    this.element.dataset.id = id;
    this.stamp = "";
  }

  // Draws only what has changed: while a run goes on most nodes stay as they are.
  show(node, box, { labelById, isSelected }) {
    this.node = node;
    this.box = box;
    const { element } = this;
    const isFrame = node.is_expanded === true;
    element.setAttribute("transform", `translate(${box.x} ${box.y})`);
    element.dataset.status = node.status;
    element.dataset.change = node.change ?? "";
    element.dataset.kind = node.kind;
    element.dataset.critical = String(node.is_critical === true);
    element.setAttribute("aria-pressed", String(isSelected));
    if (isGroup(node)) element.setAttribute("aria-expanded", String(isFrame));
    else element.removeAttribute("aria-expanded");
    const small = smallWords(node);
    const stamp = JSON.stringify([signOf(node), node.counts, small, box.w, box.h, isFrame, node.is_critical, node.label]);
    if (stamp === this.stamp) return;
    this.stamp = stamp;
    element.setAttribute("aria-label", spokenNode(node, labelById));
    put(element, isFrame ? this.frame(node, box) : this.card(node, box, small));
  }

  card(node, { w, h }, small) {
    const isFold = isGroup(node);
    return [
      isFold && s("rect", { class: "graph-behind", x: 4, y: 4, width: w, height: h, rx: 8 }),
      s("rect", { class: "graph-card", width: w, height: h, rx: 8 }),
      placed(icon(signOf(node)), 10, 14, 17),
      s("text", { class: "graph-label", x: ICON, y: 20 }, cut(labelOf(node), LABEL, w - ICON - 26)),
      s("text", { class: "graph-small", x: ICON, y: 36 }, cutWords(node, w - ICON - 8)),
      node.is_critical && s("rect", { class: "graph-critical", x: 0, y: 9, width: 4, height: h - 18, rx: 2 }),
      isFold
        ? s("path", { class: "graph-sign", d: `M${w - 20} 15h9M${w - 15.5} 10.5v9` })
        : placed(icon(node.kind), w - 22, 9, 13),
      isFold && bar(node, w, 46),
      s("title", {}, `${labelOf(node)}\n${signWord(node)} · ${small}`),
    ];
  }

  frame(node, { w, h }) {
    const words = smallWords(node);
    const room = w - ICON - 34;
    const label = cut(labelOf(node), LABEL, room);
    const rest = room - widthOf(label, LABEL) - 10;
    return [
      s("rect", { class: "graph-box", width: w, height: h, rx: 10 }),
      s("rect", { class: "graph-grip", width: w, height: 30, rx: 10 }),
      placed(icon(signOf(node)), 11, 7, 16),
      s("text", { class: "graph-label", x: ICON, y: 20 }, label),
      rest > 40 &&
        s("text", { class: "graph-small", x: ICON + widthOf(label, LABEL) + 10, y: 20 }, cutWords(node, rest)),
      s("path", { class: "graph-sign", d: `M${w - 22} 15h10` }),
      s("title", {}, `${kindOfNode(node)} ${labelOf(node)}\n${signWord(node)} · ${words}`),
    ];
  }
}
