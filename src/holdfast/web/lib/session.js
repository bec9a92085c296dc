// Who is signed in, and what they may do. The service decides; this only hides what it would refuse.

import { request } from "./api.js";

let session = null;

export async function loadSession() {
  session = await request("GET", "/session");
  return session;
}

export async function signIn(token) {
  session = await request("POST", "/session", { token });
  return session;
}

export async function signInWays() {
  try {
    return await request("GET", "/session/ways");
  } catch {
    return { oidc: false }; // a token can still be given
  }
}

export async function signOut() {
  await request("DELETE", "/session");
  session = null;
}

export function who() {
  return session;
}

export function may(scope) {
  if (session === null) return false;
  if (scope === "system:read" && session.tenant) return false; // it is about all tenants together
  return session.scopes === null || session.scopes.includes(scope);
}
