// Addresses and views. A view is `show(place, signal)`: it fills `place`, and stops when the signal aborts.

import { h, put } from "./dom.js";
import { mounted, unmounted } from "./mount.js";

const routes = [];
let current = null;

export function route(pattern, show) {
  const names = [];
  const source = pattern.replace(/\{(\w+)\}/g, (_, name) => {
    names.push(name);
    return "([^/]+)";
  });
  routes.push({ expression: new RegExp(`^${source}/?$`), names, show });
}

function match(path) {
  if (path === null) return null;
  for (const { expression, names, show } of routes) {
    const found = expression.exec(path);
    if (found) return { show, fields: Object.fromEntries(names.map((name, n) => [name, decode(found[n + 1])])) };
  }
  return null;
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function runAddress(runId) {
  return `/runs/${encodeURIComponent(runId)}`;
}

export function compareAddress(runId, otherId) {
  return `${runAddress(runId)}/compare/${encodeURIComponent(otherId)}`;
}

export function go(address, { replace = false } = {}) {
  setAddress(address, { replace });
  render();
}

// Changes the address without showing the view anew.
export function setAddress(address, { replace = false } = {}) {
  if (replace) history.replaceState(null, "", mounted(address));
  else history.pushState(null, "", mounted(address));
}

// Changes the query of the address without showing the view anew.
export function setQuery(fields) {
  const query = new URLSearchParams(Object.entries(fields).filter(([, value]) => value));
  const text = query.toString();
  history.replaceState(null, "", location.pathname + (text && `?${text}`));
}

export function getQuery() {
  return Object.fromEntries(new URLSearchParams(location.search));
}

let outlet = null;
let onMove = () => {};

export function startRouter(element, moved) {
  outlet = element;
  onMove = moved;
  window.addEventListener("popstate", render);
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href]");
    const isPlain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
    if (!link || !isPlain || link.target || link.origin !== location.origin || event.defaultPrevented) return;
    const path = unmounted(link.pathname);
    if (!match(path) || link.hasAttribute("download")) return;
    event.preventDefault();
    go(path + link.search);
    window.scrollTo(0, 0);
  });
  render();
}

export function render() {
  current?.abort();
  current = new AbortController();
  const path = unmounted(location.pathname);
  const found = match(path);
  const place = h("div", { class: "view" });
  put(outlet, place);
  onMove(path ?? "");
  if (found) found.show(place, current.signal, found.fields);
  else
    put(
      place,
      h("section", { class: "state" }, h("h1", {}, "Nothing is here"), h("a", { href: "/runs" }, "See all runs")),
    );
}
