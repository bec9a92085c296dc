// A small chart, drawn by hand: lines over time, the last value in words, and a cursor for mouse and keyboard.

import { h, put, s } from "../lib/dom.js";
import { minuteOf, moment } from "../lib/time.js";

const [HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [150, 52, 20, 8, 4];

const HOLE = 2.5; // how many samples in a row are missing before there is a hole

const isThere = (value) => value !== null && value !== undefined;

// The next number above that people like to read.
export function niceTop(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 4, 6, 8, 10].map((each) => each * power).find((each) => each >= most * 0.999) ?? 10 * power;
}

// `lines` are [{name, word, mark}]; `show` puts a value into words.
export class Chart {
  constructor({ title, hint = "", lines, show, least = 0, isLive = false }) {
    Object.assign(this, { title, isLive, lines, show, least, points: [], from: 0, until: 1, at: null, width: 560 });
    this.now = h("p", { class: "graph-now" });
    this.drawing = s("svg", { class: "graph-drawing", height: HEIGHT, "aria-hidden": "true" });
    this.said = h("span", { class: "graph-said" });
    this.frame = h("div", { class: "graph-frame", tabindex: "0", role: "img", "aria-label": title }, this.drawing);
    this.element = h("figure", { class: "card graph" }, h("figcaption", {}, h("h2", {}, title), hint && h("p", { class: "hint" }, hint), this.said), this.now, this.frame);
    this.frame.addEventListener("pointermove", (event) => this.point(event));
    this.frame.addEventListener("pointerleave", () => this.move(null));
    this.frame.addEventListener("blur", () => this.move(null));
    this.frame.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw(this.points, this.from, this.until)).observe(this.frame);
  }

  draw(points, from, until) {
    Object.assign(this, { points: points.filter((each) => each.at >= from && this.lines.some(({ name }) => isThere(each[name]))), from, until });
    const values = this.points.flatMap((each) => this.lines.map(({ name }) => each[name] ?? 0));
    this.top = niceTop(Math.max(this.least, ...values));
    this.width = this.frame.clientWidth || this.width;
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    put(this.drawing, this.grid(), this.lines.map((line) => this.line(line)), this.cursor());
    this.say();
  }

  x(at) {
    return LEFT + ((at - this.from) / (this.until - this.from)) * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return HEIGHT - BOTTOM - (value / this.top) * (HEIGHT - BOTTOM - TOP);
  }

  grid() {
    const heights = [0, 0.5, 1].map((share) => {
      const y = this.y(share * this.top);
      return [s("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }), s("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.show(share * this.top))];
    });
    const times = [0, 0.5, 1].map((share) => {
      const at = this.from + share * (this.until - this.from);
      return s("text", { x: this.x(at), y: HEIGHT - 4, "text-anchor": ["start", "middle", "end"][share * 2] }, minuteOf(at));
    });
    return [heights, times];
  }

  // A stretch without samples is a hole, and not a line through it.
  line({ name, mark }) {
    let path = "";
    let last = null;
    for (const each of this.points) {
      const value = each[name];
      if (!isThere(value)) continue;
      const isNew = last === null || each.at - last.at > HOLE * Math.max(each.every, last.every);
      path += `${isNew ? "M" : "L"}${this.x(each.at).toFixed(1)} ${this.y(value).toFixed(1)}`;
      last = each;
    }
    const end = this.lastOf(name);
    const dot = end && s("circle", { class: `dot ${mark}`, cx: this.x(end.at), cy: this.y(end[name]), r: 2.5 });
    return [s("path", { class: `line ${mark}`, d: path }), dot];
  }

  lastOf(name) {
    return this.points.findLast((each) => isThere(each[name]));
  }

  cursor() {
    if (this.at === null || this.points.length === 0) return null;
    const x = this.x(this.at.at);
    return [s("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }), this.lines.map(({ name, mark }) => isThere(this.at[name]) && s("circle", { class: `dot ${mark}`, cx: x, cy: this.y(this.at[name]), r: 3.5 }))];
  }

  words(point) {
    return this.lines.map(({ name, word, mark }) => {
      const value = (point ?? this.lastOf(name))?.[name];
      return h("span", { class: `reading ${mark}` }, h("i", { "aria-hidden": "true" }), h("b", {}, isThere(value) ? this.show(value) : "–"), ` ${word}`);
    });
  }

  say() {
    put(this.now, this.words(this.at));
    put(this.said, this.at ? moment(this.at.at) : this.points.length === 0 ? this.isLive ? "collecting the first samples…" : "no samples yet" : "");
    this.frame.setAttribute("aria-label", `${this.title}: ${this.now.textContent}. Arrow keys move through time.`);
  }

  move(point) {
    this.at = point;
    this.draw(this.points, this.from, this.until);
  }

  point(event) {
    const box = this.drawing.getBoundingClientRect();
    const at = this.from + (((event.clientX - box.left) / box.width) * this.width - LEFT) / (this.width - LEFT - RIGHT) * (this.until - this.from);
    const nearest = this.points.reduce((best, each) => (best === null || Math.abs(each.at - at) < Math.abs(best.at - at) ? each : best), null);
    if (nearest !== this.at) this.move(nearest);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || this.points.length === 0) return;
    event.preventDefault();
    const now = this.at === null ? this.points.length : this.points.indexOf(this.at);
    this.move(this.points[Math.min(this.points.length - 1, Math.max(0, now + step))]);
  }
}
