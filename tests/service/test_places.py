"""Runs that wait for a place under a limit say so, and how far they have come: in a list, by themselves, in words."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

import holdfast as hf
from holdfast.cli.run_words import now_of, ordinal, sentences_of
from holdfast.client import Client
from holdfast.service.auth.tenancy import seen_by
from holdfast.service.context import Principal
from holdfast.settings import load_settings
from holdfast.store.open import open_store
from holdfast.store.port import PlaceQuery, Store
from tests.engine.harness import wait_for_event

pytestmark = [pytest.mark.contract("ACT-7", "API-1")]


class Desk:
    """An app with two limits, and what waits for them."""

    def __init__(self) -> None:
        self.app = app = hf.App("desk")
        self.begun, self.door = 0, asyncio.Event()
        limit = hf.ActivityLimit("bank API", at_once=2, per_key=1, key=lambda user: user)

        @app.activity(limit=limit)
        async def ask(user: str) -> str:
            self.begun += 1
            await self.door.wait()
            return user

        @app.workflow
        async def order(user: str, times: int = 1) -> None:
            await asyncio.gather(*(ask(user) for _ in range(times)))

        @app.workflow(at_once=1)
        async def narrow(user: str) -> None:
            await hf.wait_signal("go", str)

        self.order, self.narrow = order, narrow

    async def has_begun(self, count: int) -> None:
        """Wait until so many calls are under way."""
        async with asyncio.timeout(60):
            while self.begun < count:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[tuple[Desk, Store]]:
    """Open a store with a node on it."""
    desk, store = Desk(), await open_store(load_settings({}, store=address))
    try:
        async with asyncio.timeout(60), desk.app.node(store):
            yield desk, store
    finally:
        await store.close()


@pytest.fixture(params=["memory", "sqlite"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where the store is."""
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/places.db"


async def shown(client: Client, run_id: str) -> dict[str, Any]:
    """Return a run as the service shows it."""
    view: dict[str, Any] = to_builtins(await client.runs.get(run_id), str_keys=True)
    return view


async def start(desk: Desk, *users: str) -> list[str]:
    """Start runs that wait, one after the other."""
    runs = []
    for user in users:
        run = await desk.app.start(desk.order, user)
        await wait_for_event(run, "StepStarted")
        runs.append(run.run_id)
    return runs


async def test_a_call_that_waits_says_what_is_taken_and_how_far_it_has_come(address: str) -> None:
    async with opened(address) as (desk, _), Client(desk.app) as client:
        ann, bob, second, third = await start(desk, "ann", "bob", "ann", "ann")
        eve = await desk.app.start(desk.order, "eve", 3)
        await wait_for_event(eve, "StepStarted", 3)
        await desk.has_begun(2)
        for run_id in (ann, bob):
            assert (await shown(client, run_id))["place"] is None
        place = (await shown(client, third))["place"]
        assert place == {
            "step_id": "ask",
            "limit": "bank API",
            "key": "ann",
            "in_line": 2,
            "taken": 2,
            "taken_of_key": 1,
            "at_once": 2,
            "per_key": 1,
            "waiting": 1,
        }
        words = "waits for a place of bank API: 2 of 2, 1 of 1 for ann, 2nd in line"
        run = await shown(client, third)
        assert words in list(sentences_of(run))
        assert now_of(run) == words
        place = (await shown(client, eve.run_id))["place"]
        assert (place["in_line"], place["taken_of_key"], place["waiting"]) == (1, 0, 3)
        assert any(words.endswith("1st in line, 3 calls") for words in sentences_of(await shown(client, eve.run_id)))
        desk.door.set()
        for run_id in (ann, bob, second, third, eve.run_id):
            await client.result(run_id)
            assert (await shown(client, run_id))["place"] is None


async def test_a_list_asks_once_for_all_that_wait(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(address) as (desk, store), Client(desk.app) as client:
        runs = await start(desk, *["ann"] * 6)
        await desk.has_begun(1)
        asked: list[PlaceQuery] = []
        find = type(store).find

        async def counted(self: Any, query: Any) -> Any:
            asked.extend([query] if isinstance(query, PlaceQuery) else [])
            return await find(self, query)

        monkeypatch.setattr(type(store), "find", counted)
        page = await client.runs.list(order="newest")
        lines = {run.run_id: None if run.place is None else run.place.in_line for run in page.items}
        assert lines == dict(zip(runs, (None, 1, 2, 3, 4, 5), strict=True))
        assert len(asked) == 1
        desk.door.set()
        for run_id in runs:
            await client.result(run_id)
        assert {run.place for run in (await client.runs.list()).items} == {None}
        assert len(asked) == 1, "nothing waits, so nothing was asked for"


@pytest.mark.contract("QUE-2")
async def test_a_run_that_is_queued_says_how_far_it_has_come(address: str) -> None:
    async with opened(address) as (desk, _), Client(desk.app) as client:
        runs = [await desk.app.start(desk.narrow, "ann") for _ in range(4)]
        last = await shown(client, runs[3].run_id)
        assert (last["place"]["step_id"], last["place"]["limit"], last["place"]["in_line"]) == (None, "narrow", 3)
        assert now_of(last).startswith("waits for a place: 1 of 1, 3rd in line, queued ")
        page = await client.runs.list()
        assert sorted(run.place.in_line for run in page.items if run.place) == [1, 2, 3]
        for run in runs:
            await run.cancel()


@pytest.mark.contract("API-4")
async def test_a_tenant_sees_its_own_place_and_not_what_others_have(address: str) -> None:
    async with opened(address) as (desk, store):
        runs = []
        for tenant in ("acme", "acme", "zeta", "zeta"):
            runs.append(await desk.app.start(desk.order, "ann", tenant=tenant))
            await wait_for_event(runs[-1], "StepStarted")
        await desk.has_begun(2)
        view = seen_by("acme", store)
        found = await view.find(PlaceQuery(run_ids=tuple(run.run_id for run in runs)))
        assert [(each.run_id, each.taken, each.taken_of_key, each.before) for each in found] == [
            (runs[1].run_id, None, 1, 0)
        ]
        async with Client(desk.app, principal=Principal(name="ann", tenant="acme")) as client:
            words = now_of(await shown(client, runs[1].run_id))
            assert words == "waits for a place of bank API: 1 of 1 for ann, 1st in line"
        desk.door.set()
        for run in runs:
            await run.result()


@pytest.mark.parametrize(
    ("number", "word"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (112, "112th"), (121, "121st")]
)
def test_a_place_is_an_ordinal(number: int, word: str) -> None:
    assert ordinal(number) == word
