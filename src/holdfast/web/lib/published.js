// What a run has published about itself: its words, and how far it has come as progress.

import { h } from "./dom.js";

const MOST = 4;

export function publishedOf(run) {
  const { done, ...others } = run.published ?? {};
  const number = Number(String(done)); // numbers are kept as they were written
  const share = done !== undefined && number >= 0 && number <= 1 ? number : null;
  const words = Object.entries(others)
    .slice(0, MOST)
    .map(([name, value]) => (name === "stage" ? String(value) : `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`));
  if (share === null && done !== undefined) words.push(`done ${done}`);
  if (!words.length && share === null) return null;
  const percent = share === null ? null : `${Math.round(share * 100)} %`;
  return h(
    "span",
    { class: "published" },
    share !== null && h("progress", { max: "1", value: String(share), "aria-label": "Progress" }, percent),
    h("span", {}, [percent, ...words].filter(Boolean).join(" · ")),
  );
}
