// The whole run in a strip: how much was going on when, and what failed. Dragging over it zooms.

import { h, on, put, s } from "../lib/dom.js";
import { Scale } from "./scale.js";

const HEIGHT = 40;
const BUCKET = 2;

export class Overview {
  constructor({ onZoom, onFit, signal }) {
    this.svg = s("svg", { class: "overview", height: HEIGHT, "aria-hidden": "true" });
    this.element = h("div", { class: "overview-box", title: "Drag to zoom, double-click to see all" }, this.svg);
    let start = null;
    on(
      this.element,
      "pointerdown",
      (event) => {
        start = this.at(event);
        this.element.setPointerCapture(event.pointerId);
      },
      signal,
    );
    on(this.element, "pointermove", (event) => start !== null && this.showBrush(start, this.at(event)), signal);
    on(
      this.element,
      "pointerup",
      (event) => {
        const end = this.at(event);
        if (start !== null && Math.abs(this.xOf(end) - this.xOf(start)) > 6)
          onZoom(Math.min(start, end), Math.max(start, end));
        start = null;
      },
      signal,
    );
    on(this.element, "dblclick", onFit, signal);
  }

  at(event) {
    return this.scale.place(event.clientX - this.element.getBoundingClientRect().left);
  }

  xOf(place) {
    return ((place - this.scale.from) / (this.scale.until - this.scale.from)) * this.scale.width;
  }

  showBrush(from, until) {
    const [one, other] = [from, until].map((place) => this.xOf(place));
    this.brush?.setAttribute("x", Math.min(one, other));
    this.brush?.setAttribute("width", Math.abs(one - other));
  }

  draw(state, { domain, zoom, until, cursor, warp }) {
    const width = this.element.clientWidth;
    if (width === 0) return;
    this.svg.setAttribute("width", width);
    const scale = new Scale(domain.from, domain.until, width, warp);
    this.scale = scale;
    this.brush = s("rect", {
      class: "brush",
      x: this.xOf(zoom.from),
      y: 0,
      width: Math.max(2, this.xOf(zoom.until) - this.xOf(zoom.from)),
      height: HEIGHT,
    });
    const marks = [...state.steps.values()]
      .filter((step) => step.status === "FAILED")
      .map((step) => s("path", { class: "fail", d: `M${scale.x(step.until) - 3} 3h6l-3 5z` }));
    put(
      this.svg,
      state.pauses.map((pause) =>
        s("rect", {
          class: "pause",
          x: scale.x(pause.from),
          y: 0,
          width: Math.max(1, scale.x(pause.until ?? until) - scale.x(pause.from)),
          height: HEIGHT,
        }),
      ),
      s("path", { class: "busy", d: this.busy(state, scale, until) }),
      marks,
      this.brush,
      cursor !== null && s("line", { class: "cursor", x1: scale.x(cursor), x2: scale.x(cursor), y1: 0, y2: HEIGHT }),
    );
  }

  busy(state, scale, until) {
    const count = Math.ceil(scale.width / BUCKET) + 1;
    const changes = new Float64Array(count + 1);
    for (const step of state.steps.values()) {
      const first = Math.max(0, Math.floor(scale.x(step.from) / BUCKET));
      const last = Math.min(count - 1, Math.floor(scale.x(step.until ?? until) / BUCKET));
      changes[first] += 1;
      changes[last + 1] -= 1;
    }
    let level = 0;
    let most = 1;
    const levels = [];
    for (let n = 0; n < count; n += 1) {
      level += changes[n];
      levels.push(level);
      most = Math.max(most, level);
    }
    const points = levels.map((each, n) => `L${n * BUCKET} ${HEIGHT - (each / most) * (HEIGHT - 12)}`);
    return `M0 ${HEIGHT}${points.join("")}L${count * BUCKET} ${HEIGHT}Z`;
  }
}
