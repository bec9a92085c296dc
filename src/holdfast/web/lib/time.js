// Instants and durations as people read them. A <time> always carries the exact instant.

import { nowMs } from "./clock.js";
import { h } from "./dom.js";

const MINUTE = 60_000;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

// One form everywhere, which is that of the command line too: 2026-01-31 09:05:00, as the clock here shows it.
const DATE = { year: "numeric", month: "2-digit", day: "2-digit" };
const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
const LOCALE = "sv-SE"; // whose dates are written so
const clockTime = new Intl.DateTimeFormat(LOCALE, CLOCK);
const minuteTime = new Intl.DateTimeFormat(LOCALE, { ...CLOCK, second: undefined });
const fullTime = new Intl.DateTimeFormat(LOCALE, { ...DATE, ...CLOCK });

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

function coarse(ms, whole) {
  if (ms < MINUTE) return `${whole(ms / 1000)} s`;
  if (ms < HOUR) return `${whole(ms / MINUTE)} min`;
  if (ms < DAY) return `${whole(ms / HOUR)} h`;
  return `${whole(ms / DAY)} d`;
}

export function age(iso) {
  const ms = nowMs() - Date.parse(iso);
  if (Math.abs(ms) < 1000) return "now";
  return ms < 0 ? `in ${coarse(-ms, Math.round)}` : `${coarse(ms, Math.floor)} ago`;
}

export function exact(iso) {
  return fullTime.format(new Date(iso));
}

// The time of day if it is near, else the date as well.
export function moment(iso) {
  const date = new Date(iso);
  return (Math.abs(nowMs() - date.getTime()) < DAY / 2 ? clockTime : fullTime).format(date);
}

export function minuteOf(ms) {
  return minuteTime.format(new Date(ms));
}

export function precise(iso) {
  const date = new Date(iso);
  return `${clockTime.format(date)}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

// An instant as a clock in another time zone shows it.
export function inZone(iso, timeZone) {
  const form = { ...DATE, ...CLOCK, timeZone };
  try {
    return new Intl.DateTimeFormat(LOCALE, form).format(new Date(iso));
  } catch {
    return `${new Intl.DateTimeFormat(LOCALE, { ...form, timeZone: "UTC" }).format(new Date(iso))} UTC`; // a zone that this browser does not know
  }
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
