// Reading a list anew, page by page, as far as it was shown before: what somebody has scrolled to stays there.

// A page may be short, or empty, and have another behind it: a search looks at so much at a time.

export async function readAgain(ask, count, from = "") {
  const items = [];
  let next = from;
  do {
    const page = await ask(next);
    items.push(...page.items);
    next = page.next;
  } while (next !== null && items.length < count);
  return { items, next };
}
