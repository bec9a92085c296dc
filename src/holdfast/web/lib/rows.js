// A long list of which only the visible rows exist. Rows have one height; the window scrolls.

import { h, on, perFrame, placeBehind } from "./dom.js";

const SPARE = 8;

export class Rows {
  // `make(item, index)` returns a row; it is made anew only when its item is another object.
  constructor({ make, keyOf, onNearEnd = () => {}, signal }) {
    Object.assign(this, { make, keyOf, onNearEnd });
    this.items = [];
    this.shown = new Map();
    this.active = 0;
    this.element = h("div", { class: "rows-body", role: "rowgroup" });
    this.draw = perFrame(() => this.drawNow());
    on(window, "scroll", this.draw, signal);
    on(window, "resize", this.draw, signal);
    on(this.element, "keydown", (event) => this.key(event), signal);
    on(this.element, "focusin", (event) => this.noteFocus(event), signal);
  }

  get height() {
    return parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row"));
  }

  set(items) {
    this.items = items;
    this.active = Math.min(this.active, Math.max(0, items.length - 1));
    this.element.style.setProperty("height", `${items.length * this.height}px`);
    this.drawNow();
  }

  range() {
    const top = this.element.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / this.height) - SPARE);
    const last = Math.min(this.items.length, Math.ceil((window.innerHeight - top) / this.height) + SPARE);
    return [first, Math.max(first, last)];
  }

  drawNow() {
    const [first, last] = this.range();
    const { height } = this;
    const kept = new Map();
    const keys = new Set(this.items.slice(first, last).map(this.keyOf));
    for (const [key, { row }] of this.shown) if (!keys.has(key)) row.remove();
    let previous = null;
    for (let index = first; index < last; index += 1) {
      const item = this.items[index];
      const key = this.keyOf(item);
      const old = this.shown.get(key);
      const row = old?.item === item ? old.row : this.remake(item, index, old);
      row.style.setProperty("transform", `translateY(${index * height}px)`);
      row.setAttribute("aria-rowindex", index + 2);
      row.dataset.index = index;
      row.querySelector("[data-main]").tabIndex = index === this.active ? 0 : -1;
      if (row.previousElementSibling !== previous || !row.isConnected) placeBehind(this.element, previous, row);
      previous = row;
      kept.set(key, { item, row });
    }
    this.shown = kept;
    if (last > this.items.length - 20) this.onNearEnd();
  }

  remake(item, index, old) {
    const row = this.make(item, index);
    if (!old) return row;
    const hadFocus = old.row.contains(document.activeElement);
    old.row.replaceWith(row);
    if (hadFocus) row.querySelector("[data-main]").focus({ preventScroll: true });
    return row;
  }

  // Draws every row that is shown anew, for when something beside its item has changed.
  refresh() {
    for (const entry of this.shown.values()) entry.item = null;
    this.drawNow();
  }

  noteFocus(event) {
    const row = event.target.closest("[data-index]");
    if (row) this.active = Number(row.dataset.index);
  }

  key(event) {
    const page = Math.max(1, Math.floor(window.innerHeight / this.height) - 3);
    const steps = {
      ArrowDown: 1,
      ArrowUp: -1,
      j: 1,
      k: -1,
      PageDown: page,
      PageUp: -page,
      Home: -Infinity,
      End: Infinity,
    };
    if (
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      !(event.key in steps) ||
      event.target.matches("input:not([type=checkbox])")
    )
      return;
    event.preventDefault();
    this.focus(Math.min(this.items.length - 1, Math.max(0, this.active + steps[event.key])));
  }

  focus(index) {
    if (this.items.length === 0) return;
    this.active = index;
    const top = this.element.getBoundingClientRect().top + index * this.height;
    const headroom = 130;
    if (top < headroom) window.scrollBy(0, top - headroom);
    else if (top + this.height > window.innerHeight - 20)
      window.scrollBy(0, top + this.height - window.innerHeight + 20);
    this.drawNow();
    this.shown.get(this.keyOf(this.items[index]))?.row.querySelector("[data-main]").focus({ preventScroll: true });
  }
}
