// Who acts on tasks, and what they may do with one. The service decides; this says what is worth offering.

import { h, newId } from "../lib/dom.js";
import { may, who } from "../lib/session.js";

const KEY = "holdfast.actor";
let given = kept();

function kept() {
  try {
    return localStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage may be forbidden; the name then lasts as long as the page
  }
}

// Where access is open there is no sign-in, so the page asks for a name: two people who approve need two names.
export function actingAs(changed) {
  const id = newId("actor");
  const input = h("input", { id, value: given, placeholder: who().name, autocomplete: "username", maxlength: 200, size: 12 });
  input.addEventListener("input", () => {
    given = input.value.trim();
    try {
      localStorage.setItem(KEY, given);
    } catch {
      given = input.value.trim();
    }
    changed();
  });
  return h("div", { class: "acting" }, h("label", { for: id }, "Acting as"), input);
}

export function me() {
  return who().is_open && given ? given : who().name;
}

// The fields that say who acts. Only where access is open does a request say so itself.
export function actor(task) {
  if (!who().is_open) return {};
  return { ...(given && { actor: given }), actor_roles: task.roles };
}

export function abilities(task) {
  const isOpen = task.status === "OPEN" && may("tasks:write");
  const roles = who().is_open ? task.roles : who().roles;
  const isMine = task.assignee === me();
  const isEffective = isMine || task.roles.some((role) => roles.includes(role)) || (task.roles.length === 0 && task.assignee === null);
  const isConcerned = isOpen && (isEffective || who().is_admin);
  const isFree = task.assignee === null && isEffective;
  return {
    claim: isOpen && isFree,
    release: isOpen && isMine,
    assign: isConcerned,
    take: isConcerned && !isMine && !isFree,
    comment: isConcerned,
    complete: isOpen && (isMine || isFree) && !task.answered_by.includes(me()),
  };
}

// Why there is no form to fill in, for who might have expected one.
export function whyNot(task) {
  if (!may("tasks:write")) return "Your token may look at tasks, and not answer them.";
  if (task.answered_by.includes(me())) return "You have answered. It waits for others.";
  if (task.assignee !== null) return `${task.assignee} has this task.`;
  return `It is for ${task.roles.join(" or ")}.`;
}

// An id by which the service knows a retry from a second operation. It works without https, too.
export function newOperationId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
