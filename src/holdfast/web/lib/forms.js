// A form for whatever a JSON Schema describes, with the same value as JSON for who prefers that.

import { h, newId, put } from "./dom.js";
import { fieldFor, readJson, Unfit } from "./fields.js";
import { isEmptyObject, kindOf } from "./schema.js";

// Returns {element, read()}. `read` returns the value, or undefined after it has shown what is wrong.
export function schemaForm(schema, { value = undefined, what = "Value" } = {}) {
  const root = schema ?? {};
  const place = h("div", {});
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const isPlain = kindOf(root, root) === "json";
  let field;

  function showFields(given) {
    const title = ["object"].includes(kindOf(root, root)) ? "" : what;
    field = fieldFor(title, root, root, given, true);
    put(place, isEmptyObject(root, root) ? h("p", { class: "hint" }, "It takes no input.") : field.element);
  }

  function showJson(given) {
    const id = newId("json");
    const input = h("textarea", {
      id,
      class: "code",
      rows: 10,
      spellcheck: "false",
      value: given === undefined ? "" : JSON.stringify(given, null, 2),
    });
    field = { read: () => readJson(input.value, true) };
    put(place, h("div", { class: "field" }, h("label", { for: id }, `${what} as JSON`), input));
  }

  const swap = h("button", { class: "link-button", type: "button", "aria-pressed": "false" }, "Edit as JSON");
  swap.addEventListener("click", () => {
    const isJson = swap.getAttribute("aria-pressed") === "true";
    let given;
    try {
      given = field.read();
    } catch (unfit) {
      if (!(unfit instanceof Unfit) || isJson) return say(unfit);
      given = value;
    }
    error.hidden = true;
    if (isJson) showFields(given);
    else showJson(given);
    swap.setAttribute("aria-pressed", String(!isJson));
    swap.textContent = isJson ? "Edit as JSON" : "Edit as a form";
  });

  function say(unfit) {
    error.textContent = unfit.isShown ? "" : unfit.message;
    error.hidden = Boolean(unfit.isShown);
    unfit.target?.focus();
  }

  function read() {
    error.hidden = true;
    try {
      return { value: field.read() ?? null };
    } catch (unfit) {
      if (!(unfit instanceof Unfit)) throw unfit;
      say(unfit);
      return undefined;
    }
  }

  showFields(value);
  return { element: h("div", { class: "schema-form" }, place, error, isPlain ? null : swap), read };
}
