// Leaving out the long times in which a run only waits. A warp takes instants to places on a line, and back; the plain
// one changes nothing. What is left out is marked where it was.

import { WORK } from "./event-tables.js";

const LONGEST = 1;
const SHOWN = 0.05;

export const PLAIN = { to: (ms) => ms, from: (place) => place, gaps: [] };

// The stretches in which nothing is carried out, between any two things that happen.
function idle(state, until) {
  const marks = [];
  for (const step of state.steps.values()) {
    const end = step.until ?? until;
    marks.push([step.from, WORK.has(step.kind) ? 1 : 0], [end, WORK.has(step.kind) ? -1 : 0]);
  }
  marks.push([state.from, 0], [until, 0]);
  for (const pause of state.pauses) marks.push([pause.from, 0], [pause.until ?? until, 0]);
  marks.sort((one, other) => one[0] - other[0] || other[1] - one[1]);
  const stretches = [];
  let busy = 0;
  for (let n = 0; n < marks.length - 1; n += 1) {
    busy += marks[n][1];
    const [from, to] = [marks[n][0], marks[n + 1][0]];
    if (busy === 0 && to > from) stretches.push({ from, until: to });
  }
  return stretches;
}

// Keeps a bit of both ends of each long wait, and leaves out the middle.
export function squeezed(state, until) {
  const stretches = idle(state, until);
  const total = until - state.from;
  const busy = Math.max(1, total - stretches.reduce((sum, each) => sum + each.until - each.from, 0));
  const kept = Math.max(busy * SHOWN, 20);
  const gaps = stretches
    .filter((each) => each.until - each.from > Math.max(busy * LONGEST, 4 * kept))
    .map((each) => ({ from: each.from + kept, until: each.until - kept, room: kept }));
  if (gaps.length === 0) return PLAIN;
  let left = 0;
  for (const gap of gaps) {
    gap.place = gap.from - left;
    gap.lost = gap.until - gap.from - gap.room;
    gap.ratio = gap.room / (gap.until - gap.from);
    left += gap.lost;
    gap.after = left;
  }
  return { to: (ms) => to(gaps, ms), from: (place) => back(gaps, place), gaps };
}

// The last of the gaps that begin before a place, by halving.
function before(gaps, value, field) {
  let low = 0;
  let high = gaps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (gaps[middle][field] <= value) low = middle + 1;
    else high = middle;
  }
  return gaps[low - 1];
}

function to(gaps, ms) {
  const gap = before(gaps, ms, "from");
  if (!gap) return ms;
  return ms >= gap.until ? ms - gap.after : gap.place + (ms - gap.from) * gap.ratio;
}

function back(gaps, place) {
  const gap = before(gaps, place, "place");
  if (!gap) return place;
  return place >= gap.place + gap.room ? place + gap.after : gap.from + (place - gap.place) / gap.ratio;
}
