// What is typed to find runs: words, conditions on attributes, and what one knows of a run.
// `status:failed workflow:order is:retrying cents>1000 ann`

import { RUN_STATUSES } from "../lib/icons.js";

const VALUE = `"(?:[^"\\\\]|\\\\.)*"|[^\\s"]\\S*`;
const CONDITION = new RegExp(`(?<=^|\\s)[A-Za-z][\\w.]*(?:<=|>=|!=|=|<|>)(?:${VALUE})(?=\\s|$)`, "g");
const FIELD = new RegExp(`(?<=^|\\s)(status|workflow|tag|reference|parent|is|with):(${VALUE})(?=\\s|$)`, "g");
const FIELDS = { parent: "parent_run_id", reference: "reference_key" };
const STATES = { is: { retrying: { retrying: true } }, with: { children: { children: true } } };

function unquoted(text) {
  if (!text.startsWith('"')) return text;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

// What was typed, as the service is asked: words to look for, conditions on attributes, and fields.
export function parseQuery(typed) {
  const asked = {};
  const rest = typed.replace(FIELD, (whole, name, given) => {
    const value = unquoted(given);
    if (STATES[name]) Object.assign(asked, STATES[name][value.toLowerCase()] ?? { unknown: whole });
    else if (name === "status") Object.assign(asked, fieldsOfStatus(value.toUpperCase()));
    else asked[FIELDS[name] ?? name] = value;
    return " ";
  });
  asked.where = (rest.match(CONDITION) ?? []).join(" ");
  asked.text = rest.replace(CONDITION, " ").trim().replace(/\s+/g, " ");
  return asked;
}

// What was typed as the filter of the list, with its fields where one sees them.
export function filterOf(typed) {
  const { status, retrying, children, where, text, workflow, tag, ...rest } = parseQuery(typed);
  const others = Object.entries(FIELDS).map(([name, field]) => rest[field] && `${name}:${JSON.stringify(rest[field])}`);
  const fields = {
    text: [text, where, ...others, rest.unknown].filter(Boolean).join(" "),
    status: status ?? (retrying ? "RETRYING" : ""),
    children: children ? "1" : "",
    workflow,
    tag,
  };
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value));
}

// Retrying is no status of a run, but what it is doing; people look for it beside them.
export function fieldsOfStatus(status) {
  if (status === "RETRYING") return { retrying: true };
  return RUN_STATUSES.includes(status) ? { status } : {}; // while it is being typed it is none
}

// What could stand in place of the word that is being typed.
export function completions(word, { workflows = [], attributes = [] }) {
  const [name, value] = word.includes(":") ? [word.slice(0, word.indexOf(":")), word.slice(word.indexOf(":") + 1)] : [word, null];
  const quoted = (text) => (/[\s"]/.test(text) ? JSON.stringify(text) : text);
  const values = {
    status: [...RUN_STATUSES, "RETRYING"].map((status) => status.toLowerCase()),
    workflow: workflows.map(quoted),
    is: Object.keys(STATES.is),
    with: Object.keys(STATES.with),
  };
  if (value === null) {
    const keys = ["status:", "workflow:", "tag:", "reference:", "parent:", "is:retrying", "with:children", ...attributes.map((each) => `${each}=`)];
    return word === "" ? [] : keys.filter((key) => key.startsWith(word) && key !== word);
  }
  return (values[name] ?? []).filter((each) => each.startsWith(value) && each !== value).map((each) => `${name}:${each}`);
}
