"""The store suite, plans: bodies by hash, registered versions, runs of plans, and how long bodies are kept."""

from hashlib import sha256
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.plans import ANY_PLAN, RegisteredPlan
from holdfast.errors import Conflict, InvalidInput, NotFound, PayloadTooLarge
from holdfast.limits import PLAN_BYTES
from holdfast.store.port import AuditQuery, OrphanedDefinition, PlanQuery, PurgePolicy, Refused, Store
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run, wait
from holdfast.testing.store_suite.audit import entry
from holdfast.testing.store_suite.base import SuiteBase, unchanged

BODY = b'{"plan":"etl","version":"1"}\n\x00\xff'
HASH = sha256(BODY).hexdigest()
ETL = RegisteredPlan(plan_id="etl", plan_version="1", sha256=HASH, uri="file:///etl.json", registered_by="ann")
DAY_MS = 24 * 3_600_000
PURGE = PurgePolicy(finished_run_ms=0)


class StoredPlanSuite(SuiteBase):
    """Plans as data: the store has what a run of a plan needs, for as long as the run exists."""

    @pytest.mark.contract("WF-1")
    async def test_a_body_is_found_by_its_tenant_and_hash(self, store: Store, peer: Store) -> None:
        """It is unchanged byte for byte, in every process, and hidden from other tenants."""
        await store.put_plan("acme", HASH, BODY)
        await store.put_plan("acme", HASH, BODY)
        assert await peer.get_plan("acme", HASH) == BODY
        assert await store.get_plan("globex", HASH) is None
        assert await store.get_plan("acme", "0" * 64) is None
        large = b"x" * PLAN_BYTES
        await store.put_plan("acme", sha256(large).hexdigest(), large)
        assert await peer.get_plan("acme", sha256(large).hexdigest()) == large

    @pytest.mark.contract("WF-1")
    async def test_a_version_is_registered_once_with_one_body(
        self, store: Store, peer: Store, clock: VirtualClock
    ) -> None:
        """Registering it again gets the same answer; a different body is refused."""
        with pytest.raises(NotFound, match="put it first"):
            await store.register_plan(ETL)
        await store.put_plan("default", HASH, BODY)
        first = await store.register_plan(ETL, entry("e-1", "plans.register"))
        assert first == replace(ETL, registered_at=START)
        clock.advance(ms=5)
        assert await peer.register_plan(replace(ETL, uri="elsewhere", registered_by="bob")) == first
        other = sha256(b"other").hexdigest()
        await store.put_plan("default", other, b"other")
        with pytest.raises(Conflict) as refused:
            await store.register_plan(replace(ETL, sha256=other))
        assert refused.value.details == {"plan_id": "etl", "plan_version": "1", "sha256": HASH}
        second = await store.register_plan(replace(ETL, sha256=other, plan_version="2"))
        assert await peer.find_plans(PlanQuery()) == [first, second]
        assert [kept.entry_id for kept in await store.find(AuditQuery())] == ["e-1"]

    async def test_registered_versions_are_found_page_by_page(self, store: Store) -> None:
        """The order is by tenant, plan and version."""
        plans = []
        for tenant, plan_id, version in (("a", "etl", "1"), ("a", "etl", "2"), ("a", "étude", "1"), ("b", "etl", "1")):
            await store.put_plan(tenant, HASH, BODY)
            plan = replace(ETL, tenant=tenant, plan_id=plan_id, plan_version=version)
            plans.append(await store.register_plan(plan))
        found: list[RegisteredPlan] = []
        after = ("", "", "")
        while page := await store.find_plans(PlanQuery(after=after, limit=1)):
            found += page
            after = (page[0].tenant, page[0].plan_id, page[0].plan_version)
        assert found == plans
        assert await store.find_plans(PlanQuery(tenant="a")) == plans[:3]
        assert await store.find_plans(PlanQuery(plan_id="etl")) == [plans[0], plans[1], plans[3]]
        assert await store.find_plans(PlanQuery(tenant="a", plan_id="etl", plan_version="2")) == [plans[1]]
        assert await store.find_plans(PlanQuery(tenant="c")) == []

    async def test_the_version_that_was_registered_last_is_found_among_any_number(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """Version names do not matter; of versions registered at the same time, the one that sorts last is returned."""
        await store.put_plan("default", HASH, BODY)
        newest = PlanQuery(tenant="default", plan_id="etl", newest_first=True, limit=1)
        for version in ("2", "9", "1"):
            last = await store.register_plan(replace(ETL, plan_version=version))
            assert await store.find_plans(newest) == [last]
            clock.advance(ms=5)
        for version in ("0", "00", "000"):
            await store.register_plan(replace(ETL, plan_version=version))
        found = await store.find_plans(replace(newest, limit=10))
        assert [plan.plan_version for plan in found] == ["000", "00", "0", "1", "9", "2"]

    # --- runs

    @pytest.mark.contract("WF-1", "WF-3")
    async def test_runs_of_plans_are_claimed_by_one_definition(self, store: Store, clock: VirtualClock) -> None:
        """Their names and versions do not matter; runs of code are not claimed by it."""
        first = SampleNode(store, "node-a")
        await first.start("lost", wait("go"), plan_id="plan:etl", plan=HASH)
        await store.create(
            [
                new_run("free", plan_id="plan:étude", plan_version="7", plan=HASH),
                new_run("code", plan_id="plan"),
                new_run("near", plan_id="plan;etl"),
            ]
        )
        clock.advance(ms=first.lease_ms)
        await store.renew("node-b", 60_000, [("plan:etl", "1"), ("plan", "1"), ("plan;etl", "1")])
        assert await store.find_orphaned(0) == [OrphanedDefinition(ANY_PLAN, START)]
        assert {run.head.run_id for run in await store.claim("node-b", 9, [("plan:etl", "1"), ("plan", "1")])} == {
            "code"
        }
        assert await store.next_due("node-c", [("plan:étude", "7")]) is None
        assert await store.next_due("node-c", [ANY_PLAN]) == START
        claimed = await store.claim("node-b", 10, [ANY_PLAN])
        assert {(run.head.run_id, run.head.plan_id) for run in claimed} == {
            ("lost", "plan:etl"),
            ("free", "plan:étude"),
        }
        await store.renew("node-b", 60_000, [ANY_PLAN, ("plan", "1"), ("plan;etl", "1")])
        assert await store.find_orphaned(0) == []

    @pytest.mark.contract("WF-1")
    async def test_a_run_of_a_plan_names_its_body(self, store: Store) -> None:
        """Otherwise no node could ever execute it."""
        [refused] = await store.create([new_run("run-1", plan_id="plan:etl")])
        assert isinstance(refused, Refused)
        assert refused.error.details == {"field": "plan"}

    # --- how long bodies are kept

    @pytest.mark.contract("FMT-2", "WF-1")
    async def test_a_body_is_kept_while_anything_refers_to_it(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """References are runs, finished or not, and registered versions; a new body is kept for a day."""
        names = ("registered", "open", "done", "fresh", "unused")
        hashes = {name: sha256(name.encode()).hexdigest() for name in names}
        for name in names[:-2]:
            await store.put_plan("default", hashes[name], name.encode())
        await store.put_plan("default", hashes["unused"], b"unused")
        await store.register_plan(replace(ETL, sha256=hashes["registered"]))
        await node.start("open", wait("go"), plan_id="plan:etl", plan=hashes["open"])
        await node.start("done", complete(), plan_id="plan:etl", plan=hashes["done"])

        async def kept() -> list[str]:
            return [name for name in names if await store.get_plan("default", hashes[name]) is not None]

        assert (await store.purge(PurgePolicy(finished_run_ms=DAY_MS))).plans == 0
        clock.advance(ms=2 * DAY_MS)
        await store.put_plan("default", hashes["fresh"], b"fresh")
        for unconcerned in (PurgePolicy(), PurgePolicy(finished_run_ms=0, tenant="acme"), replace(PURGE, run_ids=())):
            assert (await store.purge(unconcerned)).plans == 0
        kept_runs = PurgePolicy(finished_run_ms=3 * DAY_MS)
        assert (await store.purge(kept_runs)).plans == 0
        dry = await store.purge(replace(PURGE, dry_run=True))
        assert (dry.runs, dry.plans) == (1, 2)
        assert await kept() == list(names)
        assert (await store.purge(replace(PURGE, limit=1))).has_more
        assert (await store.purge(PURGE)).plans == 1
        assert await kept() == ["registered", "open", "fresh"]
        await node.step("open", complete())
        await store.put_plan("default", hashes["open"], b"open")
        assert (await store.purge(PURGE)).plans == 0
        clock.advance(ms=DAY_MS)
        assert (await store.purge(PURGE)).plans == 2
        assert await kept() == ["registered"]

    @pytest.mark.contract("FMT-2", "API-4")
    async def test_the_plans_of_a_tenant_are_deleted_with_it(self, store: Store, node: SampleNode) -> None:
        """The bodies that unfinished runs need stay, and so do the plans of others."""
        for tenant in ("acme", "globex"):
            await store.put_plan(tenant, HASH, BODY)
            await store.register_plan(replace(ETL, tenant=tenant))
        await store.put_plan("acme", sha256(b"open").hexdigest(), b"open")
        await node.start("open", wait("go"), tenant="acme", plan_id="plan:x", plan=sha256(b"open").hexdigest())
        whole = PurgePolicy(tenant="acme", finished_run_ms=0, plans=True)
        assert (await store.purge(replace(whole, dry_run=True))).plans == 1
        assert (await store.purge(whole)).plans == 1
        assert [plan.tenant for plan in await store.find_plans(PlanQuery())] == ["globex"]
        assert await store.get_plan("acme", HASH) is None
        assert await store.get_plan("acme", sha256(b"open").hexdigest()) == b"open"
        assert await store.get_plan("globex", HASH) == BODY
        with pytest.raises(InvalidInput):
            await store.purge(PurgePolicy(plans=True))

    async def test_malformed_plans_are_refused(self, store: Store) -> None:
        """Nothing changes."""
        bad: Any
        async with unchanged(store):
            for bad in (
                ("", HASH, b""),
                ("a", "0", b""),
                ("a", HASH.upper(), b""),
                ("a", HASH, "text"),
                (7, HASH, b""),
            ):
                with pytest.raises(InvalidInput):
                    await store.put_plan(*bad)
            with pytest.raises(PayloadTooLarge):
                await store.put_plan("a", HASH, bytes(4 * PLAN_BYTES))
            for bad in ({"plan_id": ""}, {"plan_version": "\ud800"}, {"sha256": "x"}, {"uri": "\x00"}, {"uri": None}):
                with pytest.raises(InvalidInput):
                    await store.register_plan(replace(ETL, **bad))
            with pytest.raises(InvalidInput):
                await store.register_plan("etl")  # type: ignore[arg-type]
            with pytest.raises(InvalidInput):
                await store.find_plans(PlanQuery(plan_id="\ud800"))
