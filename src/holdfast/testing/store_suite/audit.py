"""The store suite, the audit log: appended along with the change, found by page, and never modified."""

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.admission import AdmissionRequest, RunLimit
from holdfast.core.audit import AuditEntry
from holdfast.core.events import CallerRef
from holdfast.errors import InvalidInput
from holdfast.store.port import Accepted, Created, Duplicate, Existing, PurgePolicy, Refused, Store
from holdfast.store.queries import AuditQuery
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, access_token, complete, new_run, signal, wait
from holdfast.testing.store_suite.base import SuiteBase
from holdfast.testing.store_suite.dead_letters import let_die

ANN = CallerRef("0123456789abcdef", "ann")


def entry(entry_id: str = "e-1", operation: str = "runs.start", **fields: Any) -> AuditEntry:
    """Return an entry as a service creates it."""
    return AuditEntry(entry_id=entry_id, operation=operation, **{"actor": "ann", "by": ANN, **fields})


async def ids(store: Store, **query: Any) -> list[str]:
    """Return the ids of the entries that a query finds."""
    return [found.entry_id for found in await store.find(AuditQuery(**query))]


class AuditSuite(SuiteBase):
    """The changes that callers make stay known."""

    @pytest.mark.contract("API-4")
    async def test_a_start_is_in_the_audit_log_with_the_commit_that_creates_the_run(
        self, store: Store, peer: Store
    ) -> None:
        """It is there once, with the run's id and tenant: a retry and a refusal add nothing."""
        new = replace(new_run("run-1", now=START, tenant="acme"), audit=entry(subject="order"))
        assert isinstance((await store.create([new]))[0], Created)
        assert isinstance((await store.create([replace(new, audit=entry("e-2"))]))[0], Existing)
        other = replace(new, input_sha256="0" * 64, audit=entry("e-3"))
        assert isinstance((await store.create([other]))[0], Refused)
        [found] = await peer.find(AuditQuery())
        assert found == entry(
            subject="order", tenant="acme", project="default", environment="default", run_id="run-1", at=START
        )

    @pytest.mark.contract("API-4")
    async def test_a_start_with_an_admission_request_is_in_the_audit_log_too(self, store: Store) -> None:
        """A rejected start is not."""
        request = AdmissionRequest(limit=RunLimit(at_once=1, overload="reject"))
        for number in (1, 2):
            new = replace(new_run(f"run-{number}", now=START), admission=request, audit=entry(f"e-{number}"))
            [answer] = await store.create([new])
            assert isinstance(answer, Created if number == 1 else Refused)
        assert await ids(store) == ["e-1"]

    @pytest.mark.contract("API-4", "SIG-5")
    async def test_a_signal_is_kept_with_its_caller_and_in_the_audit_log(self, store: Store, node: SampleNode) -> None:
        """A retry by another caller is still the same signal, and the entry names the first caller."""
        await node.start("run-1", wait("stop"), tenant="acme")
        first = replace(signal("run-1", "go", signal_id="s-1"), audit=entry(subject="go"))
        again = replace(first, audit=entry("e-2", by=CallerRef("fedcba9876543210", "bob")))
        assert isinstance((await store.deliver([first]))[0], Accepted)
        assert isinstance((await store.deliver([again]))[0], Duplicate)
        assert isinstance((await store.deliver([replace(first, run_id="nowhere")]))[0], Refused)
        assert [found.by for found in (await node.load("run-1")).signals] == [ANN]
        [found] = await store.find(AuditQuery())
        assert (found.entry_id, found.run_id, found.tenant, found.subject) == ("e-1", "run-1", "acme", "go")
        await store.deliver([signal("run-1", "plain")])
        assert [found.by for found in (await node.load("run-1")).signals] == [ANN, None]

    @pytest.mark.contract("API-4")
    async def test_signals_that_come_with_a_run_are_in_the_audit_log(self, store: Store) -> None:
        """Each signal has its own entry."""
        first = replace(signal("run-1", "go"), audit=entry("e-2"))
        [answer] = await store.create([replace(new_run("run-1", now=START), signals=(first,), audit=entry("e-1"))])
        assert isinstance(answer, Created)
        assert await ids(store) == ["e-1", "e-2"]

    @pytest.mark.contract("API-4")
    async def test_letters_tokens_and_purges_are_in_the_audit_log_of_their_commit(
        self, store: Store, node: SampleNode, clock: VirtualClock
    ) -> None:
        """Operations that change nothing are not."""
        [letter] = await let_die(node, "run-1", "a")
        for number in (1, 2):
            await store.settle_dead_letters([letter], "drop", "ann", entry(f"d{number}", "letters.drop"))
        await store.settle_dead_letters(["nowhere"], "drop", "ann", entry("d3", "letters.drop"))
        await store.put_tokens([access_token()], [entry("t", "tokens.create", subject="0123456789abcdef")])
        await node.step("run-1", complete())
        clock.advance(ms=1)
        await store.purge(PurgePolicy(finished_run_ms=0, dry_run=True), entry("p1", "store.purge"))
        await store.purge(PurgePolicy(finished_run_ms=0), entry("p2", "store.purge"))
        found = {each.operation: each for each in await store.find(AuditQuery())}
        assert len(found) == len(await ids(store)) == 3
        assert (found["letters.drop"].subject, found["letters.drop"].run_id) == (letter, "run-1")
        assert found["tokens.create"].subject == "0123456789abcdef"
        assert "runs 1" in found["store.purge"].detail

    @pytest.mark.contract("API-4")
    async def test_entries_are_found_by_time_tenant_run_actor_token_and_operation(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """They are returned in their order, or the newest first, and by page."""
        for number in range(45):
            who = "ann" if number % 2 else "bob"
            by = CallerRef(f"{number % 3}", who)
            fields = {"tenant": f"t{number % 3}", "run_id": f"run-{number % 5}", "actor": who, "by": by}
            await store.append_audit([entry(f"e-{number:02}", f"op.{number % 4}", **fields)])
            clock.advance(ms=1)
        everything = [f"e-{number:02}" for number in range(45)]
        for newest in (False, True):
            found: list[AuditEntry] = []
            while page := await store.find(
                AuditQuery(newest=newest, after=(found[-1].at, found[-1].entry_id) if found else None)
            ):
                found += page
            assert [each.entry_id for each in found] == (everything[::-1] if newest else everything)
        assert await ids(store, tenant="t1") == everything[1::3]
        assert await ids(store, run_id="run-2") == everything[2::5]
        assert await ids(store, actor="bob", limit=3) == everything[0:6:2]
        assert await ids(store, token_id="2") == everything[2::3]
        assert await ids(store, operation="op.3") == everything[3::4]
        ms = 1_000
        assert await ids(store, since=START + 10 * ms, until=START + 13 * ms) == everything[10:13]
        assert await ids(store, tenant="none-such") == []

    @pytest.mark.contract("API-4", "FMT-2")
    async def test_entries_go_when_retention_says_so_and_not_before(self, store: Store, clock: VirtualClock) -> None:
        """A purge without `audit_ms` keeps all entries, and deleting their runs does not delete them."""
        for number in range(5):
            await store.append_audit([entry(f"e-{number}", run_id="gone")])
            clock.advance(ms=10)
        assert (await store.purge(PurgePolicy(finished_run_ms=0))).audit_entries == 0
        report = await store.purge(PurgePolicy(audit_ms=25, limit=2, dry_run=True))
        assert (report.audit_entries, report.has_more, len(await ids(store))) == (2, True, 5)
        assert (await store.purge(PurgePolicy(audit_ms=25, limit=2))).audit_entries == 2
        assert await ids(store) == ["e-2", "e-3", "e-4"]
        assert not (await store.purge(PurgePolicy(audit_ms=25))).has_more
        assert await ids(store) == ["e-3", "e-4"]

    @pytest.mark.contract("API-2")
    async def test_a_malformed_entry_is_refused_with_all_that_goes_with_it(self, store: Store) -> None:
        """Nothing is partially stored."""
        malformed: list[dict[str, Any]] = [
            {"entry_id": ""},
            {"operation": ""},
            {"operation": 7},
            {"actor": "\ud800"},
            {"actor": None},
            {"tenant": ""},
            {"run_id": "\x00"},
            {"by": CallerRef("")},
            {"by": CallerRef("a", "\ud800")},
        ]
        for fields in malformed:
            bad = replace(entry(), **fields)
            with pytest.raises(InvalidInput):
                await store.append_audit([entry("fine"), bad])
            with pytest.raises(InvalidInput):
                await store.put_tokens([access_token()], [bad])
            [answer] = await store.create([replace(new_run("run-1", now=START), audit=bad)])
            assert isinstance(answer, Refused), fields
            assert await ids(store) == [], fields
            assert await store.load(["run-1"]) == [None], fields

    @pytest.mark.contract("API-4")
    async def test_what_people_are_called_is_kept_whatever_it_is(self, store: Store) -> None:
        """An actor's name does not have to follow our rules for names."""
        await store.append_audit([entry(actor="a\x00b\n' --", detail="\x00")])
        [found] = await store.find(AuditQuery())
        assert (found.actor, found.detail) == ("a\x00b\n' --", "\x00")
