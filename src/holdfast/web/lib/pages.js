// Reading a list anew, page by page, as far as it was shown before: what somebody has scrolled to stays there.

export async function readAgain(ask, count) {
  const items = [];
  let next = "";
  do {
    const page = await ask(next);
    items.push(...page.items);
    next = page.next;
  } while (next !== null && items.length < count);
  return { items, next };
}
