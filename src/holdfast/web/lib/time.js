// Instants and durations as people read them. A <time> always carries the exact instant.

import { nowMs } from "./clock.js";
import { h } from "./dom.js";

const MINUTE = 60_000;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

const clockTime = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});
const dayTime = new Intl.DateTimeFormat(undefined, {
  month: "short",
  day: "numeric",
  hour: "2-digit",
  minute: "2-digit",
  hourCycle: "h23",
});
const fullTime = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });

export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "";
  if (ms < 1) return "<1 ms";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10_000) return `${(ms / 1000).toFixed(2)} s`;
  if (ms < MINUTE) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < HOUR) return `${Math.floor(ms / MINUTE)} min ${Math.floor((ms % MINUTE) / 1000)} s`;
  if (ms < DAY) return `${Math.floor(ms / HOUR)} h ${Math.floor((ms % HOUR) / MINUTE)} min`;
  return `${Math.floor(ms / DAY)} d ${Math.floor((ms % DAY) / HOUR)} h`;
}

function coarse(ms) {
  if (ms < MINUTE) return `${Math.floor(ms / 1000)} s`;
  if (ms < HOUR) return `${Math.floor(ms / MINUTE)} min`;
  if (ms < DAY) return `${Math.floor(ms / HOUR)} h`;
  return `${Math.floor(ms / DAY)} d`;
}

export function age(iso) {
  const ms = nowMs() - Date.parse(iso);
  if (Math.abs(ms) < 1000) return "now";
  return ms < 0 ? `in ${coarse(-ms)}` : `${coarse(ms)} ago`;
}

export function exact(iso) {
  return fullTime.format(new Date(iso));
}

export function moment(iso) {
  const date = new Date(iso);
  return Math.abs(nowMs() - date.getTime()) < DAY / 2 ? clockTime.format(date) : dayTime.format(date);
}

export function precise(iso) {
  const date = new Date(iso);
  return `${clockTime.format(date)}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

// An age that goes on: `tickAges` brings all of them up to date.
export function ageOf(iso) {
  if (!iso) return "";
  return h("time", { datetime: iso, title: exact(iso), "data-age": "" }, age(iso));
}

export function tickAges(root = document) {
  for (const element of root.querySelectorAll("time[data-age]")) {
    const text = age(element.dateTime);
    if (element.textContent !== text) element.textContent = text;
  }
  for (const element of root.querySelectorAll("[data-since]")) {
    element.textContent = duration(Math.max(0, nowMs() - Date.parse(element.dataset.since)));
  }
}

setInterval(() => {
  if (!document.hidden) tickAges();
}, 1000);

// How long something has taken; it goes on while there is no end.
export function elapsedOf(from, until = null) {
  if (!from) return "";
  const ms = (until ? Date.parse(until) : nowMs()) - Date.parse(from);
  return h("span", { class: "numbers", "data-since": until ? null : from }, duration(Math.max(0, ms)));
}
