// A list that shows everything says how much that is, for the tab above it.

export function counted(place, count, isAll) {
  place.dispatchEvent(new CustomEvent("counted", { bubbles: true, detail: { count, isAll } }));
}
