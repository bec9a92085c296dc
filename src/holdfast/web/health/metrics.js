// Reads the text format of Prometheus, as far as our own metrics use it.

import { OWN_HEADER, problemOf, unreachable } from "../lib/api.js";
import { mounted } from "../lib/mount.js";

const LINE = /^holdfast_(\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Returns name → [{labels, value}].
export function parse(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, (_, each) => (each === "n" ? "\n" : each));
    if (!families.has(found[1])) families.set(found[1], []);
    families.get(found[1]).push({ labels, value: Number(found[3]) });
  }
  return families;
}

export async function readMetrics(signal) {
  let response;
  try {
    response = await fetch(mounted("/metrics"), { headers: OWN_HEADER, credentials: "same-origin", signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (!response.ok) throw await problemOf(response);
  return parse(await response.text());
}

export function one(families, name) {
  return families.get(name)?.[0]?.value ?? 0;
}

export function by(families, name, label) {
  return Object.fromEntries((families.get(name) ?? []).map(({ labels, value }) => [labels[label], value]));
}

// The cumulative counts of a histogram, by upper bound in order.
export function buckets(families, name) {
  return (families.get(`${name}_bucket`) ?? []).map(({ labels, value }) => [labels.le === "+Inf" ? Infinity : Number(labels.le), value]);
}

// Estimates a quantile of what came between two readings of a histogram; null if nothing came.
export function quantile(before, after, share) {
  const added = after.map(([bound, value], n) => [bound, value - (before[n]?.[1] ?? 0)]);
  const total = added.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const wanted = share * total;
  let [low, below] = [0, 0];
  for (const [bound, count] of added) {
    if (count >= wanted) return bound === Infinity ? low : low + ((bound - low) * (wanted - below)) / Math.max(1, count - below);
    [low, below] = [bound, count];
  }
  return low;
}
