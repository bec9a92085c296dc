// Where the service is mounted: below a prefix, if another application serves it beside its own pages.
//
// Addresses in the code of the page begin with "/", as if nothing were before them. What leaves the page for the browser
// (links, requests, the history) goes through `mounted`; what the browser says comes back through `unmounted`.

const prefix = document.querySelector('meta[name="holdfast-mount"]')?.content ?? "";

export function mounted(address) {
  return address.startsWith("/") ? prefix + address : address;
}

// Returns a path of the browser as the page knows it, or null if it is not of this service.
export function unmounted(path) {
  if (!prefix) return path;
  if (path === prefix) return "/";
  return path.startsWith(`${prefix}/`) ? path.slice(prefix.length) : null;
}
