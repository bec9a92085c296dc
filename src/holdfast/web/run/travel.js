// Going through history: a slider over the events, and what the run was then.

import { h, newId, on } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { precise } from "../lib/time.js";
import { eventWord } from "./words.js";

export function travelBar(onSeek, signal) {
  const id = newId("travel");
  const range = h("input", { id, type: "range", min: 1, max: 1, value: 1, step: 1 });
  const words = h("output", { class: "travel-words", for: id });
  const live = h("button", { class: "button small", type: "button", onclick: () => onSeek(null) }, "Now");
  const step = (by, label, name) =>
    h(
      "button",
      {
        class: "icon-button",
        type: "button",
        "aria-label": label,
        title: label,
        onclick: () => onSeek(Number(range.value) + by),
      },
      icon(name),
    );
  const element = h(
    "div",
    { class: "travel" },
    h("label", { for: id }, "History"),
    step(-1, "One event back", "back"),
    range,
    h("span", { class: "flip" }, step(1, "One event on", "back")),
    live,
    words,
  );
  on(range, "input", () => onSeek(Number(range.value), true), signal);
  on(range, "change", () => onSeek(Number(range.value)), signal);

  function set(model, seq) {
    const at = seq ?? model.seq;
    range.max = String(Math.max(1, model.seq));
    range.value = String(at);
    const event = model.events[at - 1];
    live.disabled = seq === null;
    element.dataset.past = String(seq !== null);
    const what = event && [eventWord(event.event_type), event.step_id].filter(Boolean).join(" ");
    words.textContent = event ? `Event ${at} of ${model.seq} · ${what} · ${precise(event.persisted_at)}` : "";
    range.setAttribute("aria-valuetext", words.textContent);
  }
  return { element, set };
}
