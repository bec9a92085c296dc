// Dialogs: the browser's own element, which keeps the focus inside and gives it back.

import { h, newId } from "./dom.js";
import { icon } from "./icons.js";

// `body` is what is asked; `act()` does it and may throw a Problem, which is shown in the dialog.
export function openDialog({ title, body = [], action = "OK", danger = false, act, wide = false }) {
  const titleId = newId("title");
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const go = h("button", { class: `button primary${danger ? " danger" : ""}`, type: "submit" }, action);
  const form = h(
    "form",
    { method: "dialog", novalidate: true },
    h(
      "header",
      {},
      h("h2", { id: titleId }, title),
      closeButton(() => dialog.close()),
    ),
    h("div", { class: "dialog-body" }, body, problem),
    h("footer", {}, h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Back"), go),
  );
  const dialog = h("dialog", { class: wide ? "wide" : "", "aria-labelledby": titleId }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (go.disabled) return;
    problem.hidden = true;
    go.disabled = true;
    try {
      if ((await act()) !== false) dialog.close();
    } catch (refusal) {
      if (refusal.code === undefined) throw refusal;
      problem.textContent = refusal.message;
      problem.hidden = false;
    } finally {
      go.disabled = false;
    }
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  dialog.querySelector(".dialog-body :is(input, textarea, select):not([readonly])")?.focus();
  return dialog;
}

function closeButton(onclick) {
  return h("button", { class: "icon-button", type: "button", "aria-label": "Close", onclick }, icon("close"));
}

// A field for why something is done. It is kept in the run's history. `check` returns whether it is there if it must be.
export function reasonField({ needed = false } = {}) {
  const id = newId("reason");
  const input = h("textarea", {
    id,
    rows: 2,
    maxlength: 1000,
    "aria-required": needed,
    "aria-describedby": `${id}-hint`,
  });
  const mark = h("span", { class: "quiet" }, needed ? " required" : " optional");
  const element = h(
    "div",
    { class: "field" },
    h("label", { for: id }, "Reason", mark),
    input,
    h("p", { class: "hint", id: `${id}-hint` }, "It is kept in the run’s history, with your name."),
  );
  const check = () => {
    const isFine = !needed || input.value.trim() !== "";
    input.setAttribute("aria-invalid", String(!isFine));
    if (!isFine) input.focus();
    return isFine;
  };
  return { element, check, value: () => input.value.trim() };
}
