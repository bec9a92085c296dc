// Puts what the service says about a value next to the field that it is about.
// It names the place as "… - at `$.address.city`", or as "…: .address.city: …".

const BEHIND = /^(?:.*?: )?(.*?)\s*-\s*at `\$([^`]*)`\.?$/s;
const BEFORE = /^(?:.*?: )?(\.[^:]+): (.*)$/s;

function parts(message) {
  const behind = BEHIND.exec(message);
  if (behind) return [behind[2], behind[1]];
  const before = BEFORE.exec(message);
  return before ? [before[1], before[2]] : ["", message];
}

// `named` is the field that the service names beside its words, if it does.
// Returns whether a field was found. What has no field of its own is for the caller to show.
export function showMisfit(form, message, named = "") {
  const [found, words] = parts(message);
  const path = found || named;
  let field = form;
  for (const name of path
    .split(".")
    .map((part) => part.replace(/\[.*$/, ""))
    .filter(Boolean)) {
    const next = [...field.querySelectorAll("[data-name]")].find((each) => each.dataset.name === name);
    if (!next) break;
    field = next;
  }
  const error = field === form ? null : field.querySelector(".error");
  const input = field.querySelector("input, textarea, select");
  if (!error || !input) return false;
  error.textContent = words.charAt(0).toUpperCase() + words.slice(1);
  error.hidden = false;
  input.setAttribute("aria-invalid", "true");
  input.focus();
  return true;
}
