// What is around every view: where one can go, who one is, and whether the service is still heard.

import { h, put } from "./lib/dom.js";
import { icon } from "./lib/icons.js";
import { mounted } from "./lib/mount.js";
import { may, signOut } from "./lib/session.js";
import { toastProblem } from "./lib/toast.js";
import { chooseTheme, chosenTheme, nextTheme } from "./theme.js";

// Each place with the scopes of which one is enough to see something there.
const PLACES = [
  ["/runs", "Runs", "runs", ["runs:read"]],
  ["/inbox", "Inbox", "inbox", ["tasks:read", "signals:read", "letters:read"]],
  ["/plans", "Plans", "plans", ["workflows:read"]],
  ["/schedules", "Schedules", "schedules", ["runs:read"]],
  ["/health", "Health", "health", ["system:read"]],
  ["/audit", "Audit", "audit", ["audit:read"]],
];

function allowedPlaces() {
  return PLACES.filter(([, , , scopes]) => scopes.some(may));
}

// Returns where "/" leads: the first place that the token allows.
export function firstPlace() {
  return allowedPlaces()[0]?.[0] ?? "/runs";
}

const banner = h("div", { class: "banner", role: "status", hidden: true });

// Shows whether what is shown is live. Views with a stream call it with the stream's state.
export function showConnection(state) {
  banner.hidden = state !== "lost";
  if (state === "lost")
    put(banner, h("span", { class: "spinner" }), "Connection lost, catching up as soon as the service answers.");
  document.documentElement.dataset.connection = state;
}

export function makeShell(session, health) {
  const places = allowedPlaces();
  const links = places.map(([address, word, name]) => h("a", { href: address }, icon(name), h("span", {}, word)));
  const outlet = h("main", { id: "main", tabindex: "-1" });
  const element = h(
    "div",
    { class: "shell" },
    h(
      "a",
      {
        class: "skip",
        href: "#main",
        onclick: (event) => {
          event.preventDefault();
          outlet.focus();
        },
      },
      "Skip to the content",
    ),
    h(
      "header",
      { class: "top" },
      h(
        "a",
        { class: "brand", href: firstPlace(), "aria-label": `Holdfast, ${health.app}` },
        mark(),
        h("span", { class: "brand-app" }, health.app),
      ),
      h("nav", { "aria-label": "Places" }, links),
      h("div", { class: "top-end" }, themeButton(), whoMenu(session, health)),
    ),
    banner,
    outlet,
  );
  function moved(path) {
    showConnection("none");
    links.forEach((link, n) => {
      const isHere = path.startsWith(places[n][0]);
      if (isHere) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    });
  }
  return { element, outlet, moved };
}

function mark() {
  return h("span", { class: "mark", "aria-hidden": "true" });
}

function themeButton() {
  const button = h("button", { class: "icon-button", type: "button" });
  const show = (choice) => {
    put(button, icon(choice));
    button.setAttribute("aria-label", `Colours: ${choice}`);
    button.title = `Colours: ${choice}`;
  };
  button.addEventListener("click", () => {
    chooseTheme(nextTheme());
    show(chosenTheme());
  });
  show(chosenTheme());
  return button;
}

function whoMenu(session, health) {
  const leave = async () => {
    try {
      await signOut();
      location.assign(mounted("/"));
    } catch (problem) {
      toastProblem(problem);
    }
  };
  const name = session.is_open ? "Open access" : session.name;
  const facts = [
    session.tenant && ["Tenant", session.tenant],
    session.roles.length > 0 && ["Roles", session.roles.join(", ")],
    ["May", session.scopes === null ? "everything" : session.scopes.join(", ") || "nothing"],
    ["Version", health.version],
    ["Node", health.node],
  ].filter(Boolean);
  return h(
    "details",
    { class: "menu who" },
    h(
      "summary",
      { "aria-label": `You: ${name}` },
      h("span", { class: "avatar", "aria-hidden": "true" }, name.slice(0, 1).toUpperCase()),
      h("span", { class: "who-name" }, name),
    ),
    h(
      "div",
      { class: "menu-body" },
      session.is_open && h("p", { class: "hint" }, "Every caller who reaches this service may do everything."),
      h(
        "dl",
        {},
        facts.map(([term, text]) => [h("dt", {}, term), h("dd", {}, text)]),
      ),
      !session.is_open && h("button", { class: "button", type: "button", onclick: leave }, "Sign out"),
    ),
  );
}

// A menu closes when one goes elsewhere, or presses Escape.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu[open]"))
    if (!menu.contains(event.target)) menu.open = false;
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
});
