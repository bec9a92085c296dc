// From instants to places on the screen and back, and where to put the marks of an axis.

import { PLAIN } from "./warp.js";

const STEPS = [
  1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000, 600_000,
  900_000, 1_800_000, 3_600_000, 7_200_000, 14_400_000, 21_600_000, 43_200_000, 86_400_000, 172_800_000, 604_800_000,
  2_592_000_000, 31_536_000_000,
];

const APART = 84;

export class Scale {
  // `from` and `until` are places of the warp, which for the plain one are instants.
  constructor(from, until, width, warp = PLAIN) {
    Object.assign(this, { from, until: Math.max(until, from + 0.001), width, warp });
  }

  x(ms) {
    return ((this.warp.to(ms) - this.from) / (this.until - this.from)) * this.width;
  }

  place(x) {
    return this.from + (x / this.width) * (this.until - this.from);
  }

  // Marks at round distances from the run's beginning, none too near to the one before.
  ticks(origin) {
    const wanted = ((this.until - this.from) * APART) / this.width;
    const step = STEPS.find((each) => each >= wanted) ?? STEPS.at(-1);
    const ticks = [];
    let last = -Infinity;
    const add = (ms) => {
      const x = this.x(ms);
      if (x - last < APART * 0.8 || x < 0 || x > this.width || this.isLeftOut(ms)) return;
      ticks.push(ms);
      last = x;
    };
    let begin = this.warp.from(this.from);
    for (const gap of [...this.warp.gaps, { from: Infinity, until: Infinity }]) {
      const end = Math.min(gap.from, this.warp.from(this.until));
      const first = Math.ceil((begin - origin) / step);
      for (let n = first; origin + n * step <= end && n < first + 60; n += 1) add(origin + n * step);
      begin = Math.max(begin, gap.until);
    }
    return { ticks, step };
  }

  // The words over a gap need the room of a mark.
  isLeftOut(ms) {
    const x = this.x(ms);
    return this.warp.gaps.some((gap) => Math.abs((this.x(gap.from) + this.x(gap.until)) / 2 - x) < APART * 0.8);
  }
}

export function tickWord(ms, step) {
  if (ms === 0) return "0";
  const sign = ms < 0 ? "−" : "";
  const total = Math.abs(ms);
  if (step < 1000) return total >= 1000 ? `${sign}${+(total / 1000).toFixed(3)} s` : `${sign}${total} ms`;
  if (step < 60_000)
    return total >= 60_000
      ? `${sign}${Math.floor(total / 60_000)} min${total % 60_000 ? ` ${Math.round((total % 60_000) / 1000)} s` : ""}`
      : `${sign}${total / 1000} s`;
  if (step < 3_600_000)
    return total >= 3_600_000
      ? `${sign}${Math.floor(total / 3_600_000)} h ${Math.round((total % 3_600_000) / 60_000)} min`
      : `${sign}${total / 60_000} min`;
  if (step < 86_400_000) return `${sign}${+(total / 3_600_000).toFixed(1)} h`;
  return `${sign}${+(total / 86_400_000).toFixed(1)} d`;
}
