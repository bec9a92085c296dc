// Making elements. Children and attributes are only ever set as text or as nodes: data cannot become markup.

import { mounted } from "./mount.js";

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked" || name === "indeterminate") element[name] = value;
    else if (name === "href") element.setAttribute("href", safeAddress(value));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

function safeAddress(value) {
  const address = String(value);
  return /^(https?:|\/|#|\?)/i.test(address) ? mounted(address) : "#";
}

export function h(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function s(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

export function put(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

// Puts an element where it is read: in the order of the page, not where it was made.
export function placeBehind(parent, previous, element) {
  parent.insertBefore(element, previous === null ? parent.firstChild : previous.nextSibling);
}

export function on(target, kind, listener, signal) {
  target.addEventListener(kind, listener, { signal });
}

// Calls at most once per frame, with the last arguments.
export function perFrame(work) {
  let pending = null;
  return (...args) => {
    if (pending === null) {
      requestAnimationFrame(() => {
        const last = pending;
        pending = null;
        work(...last);
      });
    }
    pending = args;
  };
}

export function debounced(work, ms) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...args), ms);
  };
}

let ids = 0;
export function newId(prefix = "f") {
  ids += 1;
  return `${prefix}-${ids}`;
}
