"""The runs to which things belong that are listed: asked for once for a whole page of them."""

from collections.abc import Iterable

from holdfast.store.port import RunHead, RunQuery, Store


async def heads_of(store: Store, run_ids: Iterable[str]) -> dict[str, RunHead]:
    """Return the heads of runs by their ids. Of one that has gone meanwhile there is none."""
    asked = tuple(dict.fromkeys(run_ids))
    found: dict[str, RunHead] = {}
    query = RunQuery(run_ids=asked, limit=len(asked) or 1)
    while (page := await store.find(query)) or page.cursor is not None:
        found |= {head.run_id: head for head in page}
        if len(found) == len(asked):
            break
        query = RunQuery(run_ids=asked, after=page.cursor or page[-1].run_id, limit=len(asked))
    return found
