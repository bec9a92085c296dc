// Signing in with a token. It goes to the service once; from then on a cookie that no script can read identifies the caller.

import { h, put } from "../lib/dom.js";
import { signIn, signInWays } from "../lib/session.js";

function signInForm(done, text) {
  const input = h("input", {
    id: "token",
    type: "password",
    autocomplete: "current-password",
    required: true,
    placeholder: "holdfast_…",
    "aria-describedby": "token-problem",
  });
  const problem = h("p", { class: "problem", id: "token-problem", role: "alert", hidden: true });
  const button = h("button", { class: "button primary", type: "submit" }, "Sign in");
  const other = h("a", { class: "button", href: "/session/oidc", hidden: true }, "Sign in with your organisation");
  signInWays().then((ways) => {
    other.hidden = !ways.oidc;
  });
  const form = h(
    "form",
    { class: "sign-in-form", novalidate: true },
    h("span", { class: "mark large", "aria-hidden": "true" }),
    h("h1", {}, "Holdfast"),
    h("p", { class: "quiet" }, text),
    h("div", { class: "field" }, h("label", { for: "token" }, "Token"), input, problem),
    button,
    other,
    h("p", { class: "hint" }, "An operator of this service makes one with ", h("code", {}, "holdfast token create"), "."),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    problem.hidden = true;
    try {
      await signIn(input.value.trim());
      await done();
    } catch (refusal) {
      if (refusal.code === undefined) throw refusal;
      problem.textContent = refusal.isSignedOut ? "This token is not known, or no longer valid." : refusal.message;
      problem.hidden = false;
      input.focus();
    } finally {
      button.disabled = false;
    }
  });
  return { form, input };
}

export function showSignIn(body, done) {
  const { form, input } = signInForm(done, "Sign in to see your runs.");
  put(body, h("main", { class: "sign-in-page" }, form));
  input.focus();
}

// A session that ended while the page was open: what is on it stays, and is shown anew when one is back.
export function askAgain(done) {
  if (document.querySelector("dialog.sign-in") !== null) return;
  const { form, input } = signInForm(() => {
    dialog.close();
    done();
  }, "Your session has ended. Sign in again to go on here.");
  const dialog = h("dialog", { class: "sign-in", "aria-label": "Sign in" }, form);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  input.focus();
}
