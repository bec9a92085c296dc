// The bars of one step, to scale. What is done is a filled bar, what is waited for an outlined one, a timer a thin one:
// kinds can be distinguished without colour, and so can what failed, which ends in a cross.

import { s } from "../lib/dom.js";
import { duration } from "../lib/time.js";

export const ROW = 30;
const HEIGHTS = { activity: 14, update: 14, signal: 14, task: 14, child: 14, timer: 6 };
const LABEL_ROOM = 62;

export function barsOf(step, scale, until) {
  const end = step.until ?? until;
  const left = scale.x(step.from);
  const right = scale.x(end);
  if (right < -2 || left > scale.width + 2)
    return [pointer(left > scale.width ? scale.width - 8 : 2, left > scale.width)];
  const parts = step.attempts.map((attempt, n) => bar(step, attempt, n === step.attempts.length - 1, scale, until));
  const line =
    step.attempts.length > 1 &&
    s("line", { class: "between", x1: clip(left, scale), x2: clip(right, scale), y1: ROW / 2, y2: ROW / 2 });
  return [line, ...parts.flat(), label(step, left, right, scale, end)];
}

function bar(step, attempt, isLast, scale, until) {
  const isOpen = isLast && step.status === "RUNNING";
  const from = clip(scale.x(attempt.from), scale);
  const to = clip(scale.x(Math.max(attempt.until ?? until, attempt.from)), scale);
  const width = Math.max(3, to - from);
  const height = HEIGHTS[step.kind] ?? 14;
  const status = isLast ? step.status : attempt.error ? "FAILED" : "SKIPPED";
  const shape = s("rect", {
    class: `bar bar-${step.kind}${isOpen ? " open" : ""}`,
    "data-status": status,
    x: from,
    y: (ROW - height) / 2,
    width,
    height,
    rx: Math.min(4, height / 2, width / 2),
  });
  if (!attempt.error) return [shape];
  const x = from + width;
  return [shape, s("path", { class: "cross", d: `M${x - 3} ${ROW / 2 - 3}l6 6m0 -6l-6 6` })];
}

// Far outside the drawing nothing is lost by stopping early, and browsers draw huge shapes badly.
function clip(x, scale) {
  return Math.max(-20, Math.min(scale.width + 20, x));
}

function label(step, left, right, scale, end) {
  const text = duration(end - step.from);
  const open = Math.max(right, left + 3);
  if (open + LABEL_ROOM < scale.width) return s("text", { class: "took", x: open + 8, y: ROW / 2 + 4 }, text);
  if (left > LABEL_ROOM) return s("text", { class: "took", x: left - 8, y: ROW / 2 + 4, "text-anchor": "end" }, text);
  if (clip(open, scale) - clip(left, scale) < LABEL_ROOM) return null;
  const last = clip(scale.x(step.attempts.at(-1)?.from ?? step.from), scale);
  const isThin = step.kind === "timer" || open - last < LABEL_ROOM; // then it stands above what is thin
  return s("text", { class: "took inside", x: Math.min(open, scale.width) - 8, y: ROW / 2 + (isThin ? -4 : 4), "text-anchor": "end" }, text);
}

function pointer(x, isRight) {
  const d = isRight ? `M${x} ${ROW / 2 - 4}l5 4l-5 4` : `M${x + 5} ${ROW / 2 - 4}l-5 4l5 4`;
  return s("path", { class: "elsewhere", d });
}
