// A drawing that can be moved and zoomed: by dragging, with two fingers, by keyboard, and by the wheel with Ctrl.

import { on, s } from "../lib/dom.js";

const LEAST = 0.08;
const MOST = 2.5;
export const LEGIBLE = 0.6;
export const READABLE = 0.75;
const MARGIN = 20;

export class Viewport {
  constructor({ element, signal, onScale = () => {} }) {
    Object.assign(this, { element, onScale, k: 1, x: 0, y: 0, isMoved: false, pointers: new Map() });
    this.world = s("g", {});
    this.svg = s("svg", { class: "run-graph-svg" }, this.world);
    element.append(this.svg);
    on(element, "wheel", (event) => this.wheel(event), signal);
    on(element, "pointerdown", (event) => this.down(event), signal);
    on(element, "pointermove", (event) => this.move(event), signal);
    for (const kind of ["pointerup", "pointercancel"]) on(element, kind, (event) => this.up(event), signal);
  }

  get width() {
    return this.element.clientWidth;
  }

  get height() {
    return this.element.clientHeight;
  }

  set(k, x, y) {
    this.k = Math.min(MOST, Math.max(LEAST, k));
    Object.assign(this, { x, y });
    this.world.setAttribute("transform", `translate(${x.toFixed(2)} ${y.toFixed(2)}) scale(${this.k.toFixed(4)})`);
    this.onScale(this.k);
  }

  // Shows all of it if that can still be read, else the part around `focus`, a box.
  fit({ width, height }, focus = null, { isWhole = false } = {}) {
    this.isMoved = false;
    const room = [this.width - 2 * MARGIN, this.height - 2 * MARGIN];
    const whole = Math.min(1, room[0] / Math.max(1, width), room[1] / Math.max(1, height));
    const k = isWhole ? whole : Math.max(LEGIBLE, whole);
    const place = (size, space, from, extent) => {
      if (size * k <= space - 2 * MARGIN) return (space - size * k) / 2;
      const wanted = space / 2 - (from + extent / 2) * k;
      return Math.min(MARGIN, Math.max(space - MARGIN - size * k, wanted));
    };
    const at = focus ?? { x: 0, y: 0, w: 0, h: 0 };
    this.set(k, place(width, this.width, at.x, at.w), place(height, this.height, at.y, at.h));
  }

  zoomBy(factor, [px, py] = [this.width / 2, this.height / 2]) {
    const k = Math.min(MOST, Math.max(LEAST, this.k * factor));
    this.isMoved = true;
    this.set(k, px - ((px - this.x) / this.k) * k, py - ((py - this.y) / this.k) * k);
  }

  panBy(dx, dy) {
    this.isMoved = true;
    this.set(this.k, this.x + dx, this.y + dy);
  }

  // Moves as little as needed for a box to be seen.
  reveal(box) {
    const move = (from, size, space, shift) => {
      const [begin, end] = [from * this.k + shift, (from + size) * this.k + shift];
      if (begin < MARGIN) return MARGIN - begin;
      return end > space - MARGIN ? Math.max(space - MARGIN - end, MARGIN - begin) : 0;
    };
    const [dx, dy] = [move(box.x, box.w, this.width, this.x), move(box.y, box.h, this.height, this.y)];
    if (dx !== 0 || dy !== 0) this.panBy(dx, dy);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoomBy(Math.exp(-event.deltaY * 0.002), this.at(event));
  }

  at(event) {
    const box = this.element.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  down(event) {
    if (event.button !== 0) return;
    this.pointers.set(event.pointerId, this.at(event));
    this.wasDragged = false;
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const here = this.at(event);
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const spread = ([ax, ay], [bx, by]) => Math.max(1, Math.hypot(ax - bx, ay - by));
      this.zoomBy(spread(here, other) / spread(before, other), other);
    } else {
      if (!this.wasDragged && Math.hypot(here[0] - before[0], here[1] - before[1]) < 4) return;
      this.panBy(here[0] - before[0], here[1] - before[1]);
    }
    if (!this.wasDragged) this.element.setPointerCapture(event.pointerId);
    this.wasDragged = true;
    this.pointers.set(event.pointerId, here);
  }

  up(event) {
    this.pointers.delete(event.pointerId);
  }
}
