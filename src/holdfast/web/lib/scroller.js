// A box that scrolls over many rows of one height, of which only the visible ones exist.

import { h, on, perFrame, placeBehind } from "./dom.js";

const SPARE = 4;

export class Scroller {
  // `make(index)` returns a row's element; `stampOf(index)` changes when one that is there is no longer right.
  constructor({ rowHeight, make, stampOf, label, role = "list", onDraw = () => {}, signal }) {
    Object.assign(this, { rowHeight, make, stampOf, onDraw });
    this.count = 0;
    this.shown = new Map();
    this.inner = h("div", { class: "scroller-inner" });
    this.element = h("div", { class: "scroller", role, "aria-label": label, tabindex: "0" }, this.inner);
    this.draw = perFrame(() => signal.aborted || this.drawNow());
    on(this.element, "scroll", this.draw, signal);
    const watch = new ResizeObserver(this.draw);
    watch.observe(this.element);
    signal.addEventListener("abort", () => watch.disconnect());
  }

  get range() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - SPARE);
    const seen = Math.ceil((this.element.clientHeight || 600) / this.rowHeight);
    return [first, Math.min(this.count, first + seen + 2 * SPARE)];
  }

  setCount(count) {
    const wasAtEnd = this.isAtEnd;
    this.count = count;
    this.inner.style.setProperty("height", `${count * this.rowHeight}px`);
    this.draw();
    return wasAtEnd;
  }

  get isAtEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.element;
    return scrollTop + clientHeight >= scrollHeight - this.rowHeight;
  }

  drawNow() {
    const [first, last] = this.range;
    const kept = new Map();
    for (const [index, { element }] of this.shown) if (index < first || index >= last) element.remove();
    let previous = null;
    for (let index = first; index < last; index += 1) {
      const stamp = this.stampOf(index);
      const old = this.shown.get(index);
      let element = old?.element;
      if (old?.stamp !== stamp) {
        element = this.make(index);
        element.style.setProperty("transform", `translateY(${index * this.rowHeight}px)`);
        if (old) {
          const hadFocus = old.element.contains(document.activeElement);
          old.element.replaceWith(element);
          if (hadFocus)
            (element.matches("button, a") ? element : element.querySelector("button, a"))?.focus({
              preventScroll: true,
            });
        } else placeBehind(this.inner, previous, element);
      }
      previous = element;
      kept.set(index, { element, stamp });
    }
    this.shown = kept;
    this.onDraw(first, last);
  }

  show(index, where = "nearest") {
    const top = index * this.rowHeight;
    const { scrollTop, clientHeight } = this.element;
    if (where === "center") this.element.scrollTop = top - clientHeight / 2;
    else if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.rowHeight > scrollTop + clientHeight)
      this.element.scrollTop = top + this.rowHeight - clientHeight;
    this.drawNow();
  }
}
