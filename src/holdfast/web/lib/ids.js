// Ids of requests: the same one again is harmless, so a user who presses twice starts one run and sends one signal.

export function requestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // randomUUID is not there without https
  return `page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

const MADE = /^(.+)\/((?:fork|retry)-[0-9a-f]{4})[0-9a-f]*$/; // a run that continues another one, or does it again
const MOST_OF_MADE = 24;

// A child is called by what its parent calls it: the end of its id says which one it is, the beginning whose. A run that
// does another one again is known by that one.
export function shortId(id) {
  const [, whose, made] = MADE.exec(id) ?? [];
  if (made) return `${whose.length <= MOST_OF_MADE ? whose : shortId(whose)}/${made}…`;
  const slash = id.lastIndexOf("/");
  if (slash > 0 && id.length > 22) return `…${id.slice(Math.max(slash, id.length - 40))}`;
  return id.length <= 22 ? id : `${id.slice(0, 8)}…${id.slice(-6)}`;
}
