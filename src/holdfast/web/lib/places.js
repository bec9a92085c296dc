// How far a run has come that waits for a place because of a limit: "5 of 5 taken, 4th in line".

import { h } from "./dom.js";
import { ageOf } from "./time.js";

const ordinals = new Intl.PluralRules("en", { type: "ordinal" });
const ENDINGS = { one: "st", two: "nd", few: "rd", other: "th" };

function ordinal(number) {
  return `${number.toLocaleString()}${ENDINGS[ordinals.select(number)]}`;
}

function takenWords(taken, most) {
  return `${taken.toLocaleString()}${most ? ` of ${most.toLocaleString()}` : ""} taken`;
}

function lineWords({ taken, taken_of_key, at_once, per_key, key, in_line, waiting }) {
  const parts = [];
  if (taken !== null) parts.push(takenWords(taken, at_once));
  if (key) parts.push(`${takenWords(taken_of_key, per_key)} for ${key}`);
  parts.push(`${ordinal(in_line)} in line`);
  if (waiting > 1) parts.push(`${waiting.toLocaleString()} calls`);
  return parts.join(", ");
}

export function placeWords({ place, queued_at }) {
  return [
    "Waits for a place",
    place?.step_id && [" of ", h("b", {}, place.limit)],
    queued_at && [", queued ", ageOf(queued_at)],
    place && `: ${lineWords(place)}`,
  ].flat();
}
