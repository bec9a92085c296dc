// A search box that completes the word that is being typed, by keyboard and by hand.

import { h, newId, put } from "../lib/dom.js";
import { icon } from "../lib/icons.js";
import { completions } from "./query.js";

const MOST = 8;

export function queryBox({ value, known }) {
  const id = newId("completions");
  let offered = [];
  let chosen = -1;
  const list = h("ul", { id, class: "completions", role: "listbox", "aria-label": "Completions", hidden: true });
  const input = h("input", {
    type: "search",
    role: "combobox",
    placeholder: "Search, or status:failed workflow:order cents>1000",
    "aria-label": "Search runs",
    "aria-autocomplete": "list",
    "aria-controls": id,
    "aria-expanded": "false",
    "aria-keyshortcuts": "/",
    autocomplete: "off",
    spellcheck: "false",
    maxlength: 1000,
    value,
  });

  // The word at the caret, and where it begins.
  function word() {
    const at = input.selectionStart ?? input.value.length;
    const from = input.value.lastIndexOf(" ", at - 1) + 1;
    return { from, at, text: input.value.slice(from, at) };
  }

  function show(items) {
    offered = items.slice(0, MOST);
    chosen = -1;
    list.hidden = offered.length === 0;
    input.setAttribute("aria-expanded", String(offered.length > 0));
    mark();
  }

  function mark() {
    const line = (text, n) =>
      h("li", { id: `${id}-${n}`, role: "option", "aria-selected": String(n === chosen), onpointerdown: (event) => (event.preventDefault(), accept(n)) }, text);
    put(list, offered.map(line));
    if (chosen >= 0) input.setAttribute("aria-activedescendant", `${id}-${chosen}`);
    else input.removeAttribute("aria-activedescendant");
  }

  function accept(n) {
    const { from, at } = word();
    const text = offered[n];
    const isDone = !/[:=]$/.test(text);
    input.value = `${input.value.slice(0, from)}${text}${isDone ? " " : ""}${input.value.slice(at)}`;
    const caret = from + text.length + (isDone ? 1 : 0);
    input.setSelectionRange(caret, caret);
    input.dispatchEvent(new Event("input"));
    input.focus();
  }

  input.addEventListener("input", () => show(completions(word().text, known())));
  input.addEventListener("blur", () => show([]));
  input.addEventListener("keydown", (event) => {
    if (offered.length === 0) return;
    const steps = { ArrowDown: 1, ArrowUp: -1 };
    if (event.key in steps) {
      chosen = (chosen + steps[event.key] + offered.length) % offered.length;
      mark();
    } else if (event.key === "Tab" || (event.key === "Enter" && chosen >= 0)) accept(Math.max(0, chosen));
    else if (event.key === "Escape") show([]);
    else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  });
  return { element: h("div", { class: "search" }, icon("search"), input, list), input };
}
