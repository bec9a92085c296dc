// One field for each kind of value. A field is {element, read()}; `read` returns undefined for what is left out, and
// throws `Unfit` with what is wrong, which is shown beside the field.

import { h, newId } from "./dom.js";
import { Exact, parse, typed } from "./exact.js";
import { icon } from "./icons.js";
import { inputType, kindOf, resolve, titleOf, whenGiven } from "./schema.js";

export class Unfit extends Error {}

// Label, hint and error around an input, bound to it for those who hear the page.
function labelled(title, schema, input, { isNeeded, isGroup = false }) {
  const id = newId();
  const target = isGroup
    ? input
    : input.matches?.("input, textarea, select")
      ? input
      : input.querySelector("input, textarea, select");
  const error = h("p", { class: "error", id: `${id}-error`, hidden: true });
  const hint = schema.description && h("p", { class: "hint", id: `${id}-hint` }, schema.description);
  const mark = isNeeded ? h("span", { class: "needed" }, " required") : h("span", { class: "quiet" }, " optional");
  target.setAttribute("aria-describedby", [hint && `${id}-hint`, `${id}-error`].filter(Boolean).join(" "));
  if (isNeeded && !isGroup) target.setAttribute("aria-required", "true");
  let element;
  if (isGroup) {
    element = h("fieldset", { class: "field" }, h("legend", {}, title, mark), hint, input, error);
  } else {
    target.id = id;
    element = h("div", { class: "field" }, h("label", { for: id }, title, mark), input, hint, error);
  }
  const checked = (read) => () => {
    error.hidden = true;
    target.removeAttribute("aria-invalid");
    try {
      return read();
    } catch (unfit) {
      if (!(unfit instanceof Unfit)) throw unfit;
      if (!unfit.isShown) {
        error.textContent = unfit.message;
        error.hidden = false;
        target.setAttribute("aria-invalid", "true");
        unfit.isShown = true;
        unfit.target ??= isGroup ? target.querySelector("input, textarea, select") : target;
      }
      throw unfit;
    }
  };
  return { element, checked };
}

function textField(title, schema, value, isNeeded) {
  const isLong = !schema.format && (schema.maxLength ?? 0) > 200;
  const type = inputType(schema);
  const shown =
    value === undefined || value === null ? "" : type === "datetime-local" ? localTime(value) : String(value);
  const input = isLong
    ? h("textarea", { rows: 3, value: shown })
    : h("input", { type, value: shown, autocomplete: "off", step: type === "datetime-local" ? 1 : null });
  const { element, checked } = labelled(title, schema, input, { isNeeded });
  const read = () => {
    const text = input.value;
    if (text === "" && !isNeeded) return undefined;
    if (text === "" && (schema.minLength ?? 0) > 0) throw new Unfit("Please fill this in.");
    if (text.length < (schema.minLength ?? 0)) throw new Unfit(`At least ${schema.minLength} characters.`);
    if (schema.maxLength !== undefined && text.length > schema.maxLength)
      throw new Unfit(`At most ${schema.maxLength} characters.`);
    if (schema.pattern && !matches(schema.pattern, text)) throw new Unfit("This does not have the expected form.");
    if (type === "datetime-local") {
      if (Number.isNaN(Date.parse(text))) throw new Unfit("Please give a date and a time.");
      return new Date(text).toISOString();
    }
    return text;
  };
  return { element, read: checked(read) };
}

function matches(pattern, text) {
  try {
    return new RegExp(pattern, "u").test(text);
  } catch {
    return true; // a pattern of another dialect: the service decides
  }
}

function localTime(iso) {
  const date = new Date(iso);
  return Number.isNaN(date.getTime())
    ? ""
    : new Date(date.getTime() - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}

function isInteger(number) {
  return number instanceof Exact ? /^-?\d+$/.test(number.source) : Number.isSafeInteger(number);
}

function numberField(title, schema, value, isNeeded) {
  const isWhole = schema.type === "integer";
  const input = h("input", { inputmode: isWhole ? "numeric" : "decimal", value: value ?? "", autocomplete: "off" });
  const { element, checked } = labelled(title, schema, input, { isNeeded });
  const read = () => {
    const text = input.value.trim();
    if (text === "" && !isNeeded) return undefined;
    const number = typed(text);
    if (number === null) throw new Unfit("Please give a number.");
    if (isWhole && !isInteger(number)) throw new Unfit("Please give a whole number.");
    if (schema.minimum !== undefined && number < schema.minimum) throw new Unfit(`At least ${schema.minimum}.`);
    if (schema.maximum !== undefined && number > schema.maximum) throw new Unfit(`At most ${schema.maximum}.`);
    if (schema.exclusiveMinimum !== undefined && number <= schema.exclusiveMinimum)
      throw new Unfit(`More than ${schema.exclusiveMinimum}.`);
    if (schema.exclusiveMaximum !== undefined && number >= schema.exclusiveMaximum)
      throw new Unfit(`Less than ${schema.exclusiveMaximum}.`);
    return number;
  };
  return { element, read: checked(read) };
}

// A few choices are shown side by side; nothing is chosen beforehand unless there is a default.
function choiceField(title, schema, value, isNeeded, choices) {
  const name = newId("choice");
  const radios = choices.map(([word, choice]) =>
    h(
      "label",
      { class: "choice" },
      h("input", { type: "radio", name, value: word, checked: choice === value }),
      h("span", {}, word),
    ),
  );
  const group =
    choices.length <= 5
      ? h("div", { class: "choices", role: "radiogroup", "aria-label": title }, radios)
      : h(
          "select",
          { "aria-label": title },
          h("option", { value: "" }, "Choose…"),
          choices.map(([word, choice]) => h("option", { value: word, selected: choice === value }, word)),
        );
  const { element, checked } = labelled(title, schema, group, { isNeeded, isGroup: true });
  const read = () => {
    const word = group.matches("select") ? group.value : group.querySelector("input:checked")?.value;
    const found = choices.find(([each]) => each === word);
    if (!found && isNeeded) throw new Unfit("Please choose.");
    return found?.[1];
  };
  return { element, read: checked(read) };
}

function jsonField(title, schema, value, isNeeded) {
  const input = h("textarea", {
    rows: 5,
    class: "code",
    spellcheck: "false",
    value: value === undefined ? "" : JSON.stringify(value, null, 2),
  });
  const { element, checked } = labelled(title, { description: "JSON", ...schema }, input, { isNeeded });
  return { element, read: checked(() => readJson(input.value, isNeeded)) };
}

export function readJson(text, isNeeded) {
  if (text.trim() === "") {
    if (isNeeded) throw new Unfit("Please fill this in; null is a value too.");
    return undefined;
  }
  try {
    return parse(text);
  } catch (problem) {
    throw new Unfit(`This is no JSON: ${problem.message}`);
  }
}

function listField(title, schema, root, value, isNeeded) {
  const rows = h("div", { class: "rows" });
  const fields = new Map();
  const add = (item) => {
    const field = fieldFor(`${title} ${fields.size + 1}`, schema.items, root, item, true);
    const remove = h(
      "button",
      {
        class: "icon-button",
        type: "button",
        "aria-label": "Remove",
        onclick: () => {
          fields.delete(row);
          row.remove();
        },
      },
      icon("close"),
    );
    const row = h("div", { class: "row" }, field.element, remove);
    fields.set(row, field);
    rows.append(row);
    return field;
  };
  (value ?? []).forEach(add);
  const more = h(
    "button",
    {
      class: "button small",
      type: "button",
      onclick: () => add(undefined).element.querySelector("input, select")?.focus(),
    },
    icon("plus"),
    "Add",
  );
  const { element, checked } = labelled(title, schema, h("div", {}, rows, more), { isNeeded, isGroup: true });
  const read = () => (fields.size === 0 && !isNeeded ? undefined : [...fields.values()].map((field) => field.read()));
  return { element, read: checked(read) };
}

// What is stored has its keys in the order of the alphabet; what is required is still in the author's.
function inOrder(properties, needed) {
  const names = [
    ...needed.filter((name) => name in properties),
    ...Object.keys(properties).filter((name) => !needed.includes(name)),
  ];
  return names.map((name) => [name, properties[name]]);
}

function objectField(title, schema, root, value, isNeeded) {
  const needed = schema.required ?? [];
  const fields = inOrder(schema.properties, needed).map(([name, each]) => {
    const found = resolve(each, root);
    const field = fieldFor(titleOf(name, found), each, root, value?.[name] ?? found.default, needed.includes(name));
    field.element.dataset.name = name;
    return [name, field];
  });
  const read = () => {
    const answer = {};
    let first = null;
    for (const [name, field] of fields) {
      try {
        const found = field.read();
        if (found !== undefined) answer[name] = found;
      } catch (unfit) {
        if (!(unfit instanceof Unfit)) throw unfit;
        first ??= unfit;
      }
    }
    if (first) throw first;
    return Object.keys(answer).length === 0 && !isNeeded ? undefined : answer;
  };
  const inner = fields.map(([, field]) => field.element);
  const hint = schema.description && title && h("p", { class: "hint" }, schema.description);
  const element = title
    ? h("fieldset", { class: "group" }, h("legend", {}, title), hint, inner)
    : h("div", { class: "fields" }, inner);
  return { element, read };
}

export function fieldFor(title, schema, root, value, isNeeded) {
  const found = resolve(schema, root);
  switch (kindOf(found, root)) {
    case "object":
      return objectField(title, found, root, value, isNeeded);
    case "optional":
      return fieldFor(
        title,
        { ...resolve(whenGiven(found, root), root), description: found.description },
        root,
        value ?? undefined,
        false,
      );
    case "choice":
      return choiceField(
        title,
        found,
        value,
        isNeeded,
        found.enum.map((each) => [String(each), each]),
      );
    case "boolean":
      return choiceField(title, found, value, isNeeded, [
        ["Yes", true],
        ["No", false],
      ]);
    case "list":
      return listField(title, found, root, value, isNeeded);
    case "integer":
    case "number":
      return numberField(title, found, value, isNeeded);
    case "string":
      return textField(title || "Value", found, value, isNeeded);
    case "const":
      return {
        element: h("p", { class: "hint" }, `${title}: ${JSON.stringify(found.const)}`),
        read: () => found.const,
      };
    case "null":
      return { element: h("p", { class: "hint" }, "Nothing is to be filled in."), read: () => null };
    default:
      return jsonField(title || "Value", found, value, isNeeded);
  }
}
