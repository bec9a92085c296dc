// A list that shows everything says how much that is, for the tab above it. A list that shows a part of it says that
// something has changed, so that it is counted again.

export function counted(place, count, isAll) {
  place.dispatchEvent(new CustomEvent("counted", { bubbles: true, detail: { count, isAll } }));
}

export function recount(place) {
  place.dispatchEvent(new CustomEvent("recount", { bubbles: true }));
}
