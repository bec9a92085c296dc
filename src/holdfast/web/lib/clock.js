// The service's clock. A browser's may be wrong by hours; everything that is shown as an age goes by this one.

import { call } from "./api.js";

let offsetMs = 0;

export async function setClock() {
  const before = Date.now();
  const health = await call("system.health");
  offsetMs = Date.parse(health.time) - (before + Date.now()) / 2;
  return health;
}

export function nowMs() {
  return Date.now() + offsetMs;
}
