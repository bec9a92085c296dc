// The workflows that can be started, asked for once in a while.

import { call } from "./api.js";
import { may } from "./session.js";

let known = null;

export function knownWorkflows() {
  if (!may("workflows:read")) return Promise.resolve([]);
  known ??= call("workflows.list").then(({ items }) => items);
  known.catch(() => {
    known = null;
  });
  setTimeout(() => {
    known = null;
  }, 60_000);
  return known;
}

export async function workflowNamed(name) {
  return (await knownWorkflows()).find((each) => each.name === name) ?? null;
}
