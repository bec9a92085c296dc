// JSON whose numbers stay as they are written. A browser's numbers end at 2^53 and do not know 1.0 from 1; what is shown
// here, or sent back, must be what was stored.

const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;
// What may not come back as it was: too many digits, zeros at the end, exponents. Some strings look so too; no matter.
const ODD = /(?:^|[:,[\s])(?:-?(?:9\d{15}|[\d.]{17}|\d+\.\d*0(?=[,}\]\s]|$)|\d+(?:\.\d+)?[eE])|-0(?![.\d]))/;
const canKeep = typeof JSON.rawJSON === "function";

// A number as it is written. It counts, shows and is sent as such.
export class Exact {
  constructor(source) {
    this.source = source;
  }

  valueOf() {
    return Number(this.source);
  }

  toString() {
    return this.source;
  }

  toJSON() {
    return canKeep ? JSON.rawJSON(this.source) : Number(this.source);
  }
}

function asWritten(source) {
  const number = Number(source);
  return !canKeep || String(number) === source ? number : new Exact(source);
}

export function parse(text) {
  if (!canKeep || !ODD.test(text)) return JSON.parse(text);
  return JSON.parse(text, (_, value, { source }) => (typeof value === "number" ? asWritten(source) : value));
}

// The number that somebody has typed, or null if it is none.
export function typed(text) {
  if (NUMBER.test(text)) return asWritten(text);
  return text === "" || Number.isNaN(Number(text)) ? null : Number(text);
}

export function isPlain(value) {
  return value === null || typeof value !== "object" || value instanceof Exact;
}
