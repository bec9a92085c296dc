"""The store suite, deletion: one run, or the data of a tenant, and never what an unfinished family needs."""

import pytest

from holdfast.errors import InvalidInput
from holdfast.store.port import PurgePolicy, RunQuery, Store
from holdfast.store.queries import AuditQuery, TokenQuery
from holdfast.testing.samples import SampleNode, access_token, complete, signal, task, wait
from holdfast.testing.store_suite.audit import entry
from holdfast.testing.store_suite.base import SuiteBase, unchanged


async def left(store: Store) -> list[str]:
    """Return the runs that remain."""
    return [head.run_id for head in await store.find(RunQuery())]


def one(run_id: str, **more: bool) -> PurgePolicy:
    """Return the policy that deletes one run."""
    return PurgePolicy(run_ids=(run_id,), finished_run_ms=0, **more)  # type: ignore[arg-type]


class DeletionSuite(SuiteBase):
    """What is named is deleted, and nothing else."""

    @pytest.mark.contract("FMT-2")
    async def test_one_finished_run_is_deleted_with_all_that_is_its_own(self, store: Store, node: SampleNode) -> None:
        """A dry run counts the same, and other runs stay."""
        for run_id in ("run-1", "run-2"):
            await node.start(run_id, task("approve"), wait("go"))
            await store.deliver([signal(run_id, "other", signal_id="s")])
            await node.step(run_id, complete())
        async with unchanged(store):
            planned = await store.purge(one("run-1", dry_run=True))
        report = await store.purge(one("run-1"), entry(run_id="run-1"))
        assert planned == report
        assert (report.runs, report.tasks, report.signals, report.has_more) == (1, 1, 1, False)
        assert report.events > 0
        assert await left(store) == ["run-2"]
        assert [found.run_id for found in await store.find(AuditQuery())] == ["run-1"]
        assert (await store.purge(one("run-1"))).runs == 0

    @pytest.mark.contract("FMT-2", "INV")
    async def test_a_run_of_a_family_that_goes_on_is_not_deleted(self, store: Store, node: SampleNode) -> None:
        """Neither is a run that has not finished itself."""
        await node.start("parent", wait("go"))
        await node.start("child", complete(), parent="parent")
        await node.start("other", complete())
        await node.start("grandchild", wait("go"), parent="other")
        async with unchanged(store):
            for run_id in ("parent", "child", "other", "grandchild", "nowhere"):
                assert (await store.purge(one(run_id))).runs == 0
        await node.step("parent", complete())
        assert (await store.purge(one("child"))).runs == 1

    @pytest.mark.contract("FMT-2", "API-4")
    async def test_what_a_tenant_has_is_deleted_and_nothing_of_others(self, store: Store, node: SampleNode) -> None:
        """Runs go in batches, with tokens and audit entries; unfinished runs stay."""
        for number in range(3):
            await node.start(f"acme-{number}", complete(), tenant="acme")
            await node.start(f"globex-{number}", complete(), tenant="globex")
        await node.start("acme-open", wait("go"), tenant="acme")
        await store.put_tokens([access_token("a" * 16, tenant="acme"), access_token("b" * 16, tenant="globex")])
        await store.put_tokens([access_token("c" * 16)])
        await store.append_audit([entry("e-1", tenant="acme"), entry("e-2", tenant="globex"), entry("e-3")])
        policy = PurgePolicy(tenant="acme", finished_run_ms=0, audit_ms=0, tokens=True, limit=2)
        first = await store.purge(policy, entry("gone", "tenants.delete", subject="acme"))
        assert (first.runs, first.tokens, first.audit_entries, first.has_more) == (2, 1, 1, True)
        second = await store.purge(policy)
        assert (second.runs, second.tokens, second.audit_entries, second.has_more) == (1, 0, 0, False)
        assert await left(store) == ["acme-open", "globex-0", "globex-1", "globex-2"]
        assert [token.token_id[0] for token in await store.find_tokens(TokenQuery())] == ["b", "c"]
        assert {found.entry_id for found in await store.find(AuditQuery())} == {"e-2", "e-3", "gone"}

    @pytest.mark.contract("API-2")
    async def test_a_deletion_that_is_malformed_is_refused(self, store: Store, node: SampleNode) -> None:
        """Most importantly, one that would delete the tokens of all tenants."""
        await node.start("run-1", complete())
        async with unchanged(store):
            for policy in (
                PurgePolicy(tokens=True),
                PurgePolicy(run_ids=(7,), finished_run_ms=0),  # type: ignore[arg-type]
                PurgePolicy(tenant="\ud800", finished_run_ms=0),
            ):
                with pytest.raises(InvalidInput):
                    await store.purge(policy)
            assert (await store.purge(PurgePolicy(run_ids=(), finished_run_ms=0))).runs == 0
