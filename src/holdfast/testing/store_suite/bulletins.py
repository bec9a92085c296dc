"""The store suite, bulletins: short texts outside of all runs, by the store's clock, which expire."""

import asyncio
from typing import Any

import pytest
from msgspec import Raw

from holdfast.errors import InvalidInput, PayloadTooLarge
from holdfast.store.port import Bulletin, BulletinQuery, Store
from holdfast.testing import START, VirtualClock
from holdfast.testing.store_suite.base import BAD_NAMES, STRANGE_NAMES, SuiteBase

MINUTE_MS = 60_000


async def ids(store: Store, kind: str = "sample", **query: Any) -> list[str]:
    """Return the ids of the bulletins that a query finds."""
    return [found.bulletin_id for found in await store.find_bulletins(BulletinQuery(kind=kind, **query))]


class BulletinSuite(SuiteBase):
    """What processes leave for each other and for operators."""

    async def test_a_bulletin_is_found_until_it_expires(self, store: Store, clock: VirtualClock) -> None:
        """It is not found a microsecond longer, whether or not another one is put meanwhile."""
        assert await store.put_bulletins("sample", {"s-1": Raw(b'{"ready":1}')}, MINUTE_MS) == [True]
        end = START + MINUTE_MS * 1_000
        assert list(await store.find_bulletins(BulletinQuery(kind="sample"))) == [
            Bulletin(kind="sample", bulletin_id="s-1", at=START, expires_at=end, body=Raw(b'{"ready":1}'))
        ]
        clock.advance(us=MINUTE_MS * 1_000 - 1)
        assert await ids(store) == ["s-1"]
        clock.advance(us=1)
        assert await ids(store) == []
        assert await store.put_bulletins("sample", {"s-1": Raw(b"2")}, MINUTE_MS) == [True]
        assert [found.body for found in await store.find_bulletins(BulletinQuery(kind="sample"))] == [Raw(b"2")]

    async def test_the_first_under_an_id_stays(self, store: Store, peer: Store) -> None:
        """Each kind has its own ids. Of concurrent writers, one is first."""
        assert await store.put_bulletins("answer", {"q": Raw(b"1")}, MINUTE_MS) == [True]
        assert await peer.put_bulletins("answer", {"q": Raw(b"2"), "r": Raw(b"3")}, 2 * MINUTE_MS) == [False, True]
        assert await store.put_bulletins("sample", {"q": Raw(b"4")}, MINUTE_MS) == [True]
        found = await peer.find_bulletins(BulletinQuery(kind="answer", bulletin_ids=("q",)))
        assert [each.body for each in found] == [Raw(b"1")]
        both = await asyncio.gather(
            store.put_bulletins("answer", {"race": Raw(b"1")}, MINUTE_MS),
            peer.put_bulletins("answer", {"race": Raw(b"2")}, MINUTE_MS),
        )
        assert sorted(both) == [[False], [True]]

    async def test_bulletins_are_found_by_kind_time_and_id_in_pages(self, store: Store, clock: VirtualClock) -> None:
        """The order is by time, and by id where the times are equal."""
        for number in range(4):
            bodies = {f"s-{number}-{letter}": Raw(b"null") for letter in "ba"}
            assert await store.put_bulletins("sample", bodies, 10 * MINUTE_MS) == [True, True]
            clock.advance(ms=1_000)
        await store.put_bulletins("takeover", {"t": Raw(b"null")}, MINUTE_MS)
        every = [f"s-{number}-{letter}" for number in range(4) for letter in "ab"]
        assert await ids(store) == every
        assert await ids(store, since=START + 2_000_000) == every[4:]
        assert await ids(store, bulletin_ids=("s-3-a", "s-0-b", "none")) == ["s-0-b", "s-3-a"]
        assert await ids(store, bulletin_ids=()) == []
        seen: list[str] = []
        after = (-1, "")
        while page := await store.find_bulletins(BulletinQuery(kind="sample", after=after, limit=3)):
            seen += [each.bulletin_id for each in page]
            after = page[-1].at, page[-1].bulletin_id
        assert seen == every

    async def test_what_has_expired_is_deleted_and_the_rest_stays(self, store: Store, clock: VirtualClock) -> None:
        """Over days, what is kept does not grow."""
        for hour in range(5):
            await store.put_bulletins("sample", {f"hour-{hour}": Raw(b"null")}, 2 * 3_600_000)
            clock.advance(ms=3_600_000)
        assert await ids(store) == ["hour-4"]
        await store.put_bulletins("other", {"now": Raw(b"null")}, MINUTE_MS)
        assert await ids(store) == ["hour-4"]

    @pytest.mark.parametrize("name", STRANGE_NAMES)
    async def test_any_name_can_be_an_id(self, store: Store, name: str) -> None:
        """The id is returned as it was given."""
        assert await store.put_bulletins(name, {name: Raw(b'"\\u0000"')}, MINUTE_MS) == [True]
        [found] = await store.find_bulletins(BulletinQuery(kind=name, bulletin_ids=(name,)))
        assert (found.kind, found.bulletin_id, found.body) == (name, name, Raw(b'"\\u0000"'))

    async def test_bad_bulletins_are_refused_and_none_is_stored(self, store: Store) -> None:
        """The valid ones in the same call are not stored either."""
        for bad in BAD_NAMES:
            with pytest.raises(InvalidInput):
                await store.put_bulletins("sample", {"fine": Raw(b"1"), bad: Raw(b"1")}, MINUTE_MS)  # type: ignore[dict-item]
            with pytest.raises(InvalidInput):
                await store.put_bulletins(bad, {"fine": Raw(b"1")}, MINUTE_MS)  # type: ignore[arg-type]
        for keep_ms in (0, -1, 2**70, 1.5, None):
            with pytest.raises(InvalidInput):
                await store.put_bulletins("sample", {"fine": Raw(b"1")}, keep_ms)  # type: ignore[arg-type]
        for body in (Raw(b""), Raw(b"{"), Raw(b"\xff"), "text", None):
            with pytest.raises(InvalidInput):
                await store.put_bulletins("sample", {"fine": Raw(b"1"), "bad": body}, MINUTE_MS)  # type: ignore[dict-item]
        with pytest.raises(PayloadTooLarge):
            await store.put_bulletins("sample", {"big": Raw(b'"%s"' % (b"x" * 40_000_000))}, MINUTE_MS)
        assert await ids(store) == []
