"""A store whose payloads are encrypted passes the conformance suite: sealing changes nothing that a caller sees.

Only what the store itself would have to read is different: searches do not find encrypted text, and bounds of bytes
are for what is stored.
"""

from __future__ import annotations

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.commands import ContinueAsNew
from holdfast.core.events import ErrorInfo
from holdfast.core.messages import ActivityErrored
from holdfast.core.state import state_of
from holdfast.core.timing import NO_RETRY
from holdfast.limits import Limits
from holdfast.store.encryption import Encryption
from holdfast.store.memory import MemoryStore
from holdfast.store.payloads import SealingStore
from holdfast.store.port import MailboxQuery, RunQuery, Store, TaskQuery
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, activity, fail, task
from holdfast.testing.store_suite import StoreSuite

KEYS = {"k1": b"1" * 32}


@pytest.mark.contract("EVT-1", "SIG-5")
class TestEncryptedStore(StoreSuite):
    async def make_store(self, clock: VirtualClock, limits: Limits) -> Store:
        return SealingStore(MemoryStore(clock, limits), [Encryption(KEYS)])

    async def lose_acceptance_record(self, store: Store, run_id: str, name: str, signal_id: str) -> None:
        assert isinstance(store, SealingStore)
        assert isinstance(store.inner, MemoryStore)
        del store.inner._runs[run_id].acceptances[name, signal_id]

    async def test_runs_are_found_by_words_in_what_is_shown_of_them(self, store: Store, node: SampleNode) -> None:
        """The message of an error is encrypted, so only its code is found."""
        await node.start("run-1", fail("Payment declined"), tags=("eu",))
        assert [head.run_id for head in await store.find(RunQuery(text="EU outofst"))] == ["run-1"]
        [head] = await store.find(RunQuery())
        assert head.snapshot is not None
        assert head.snapshot.last_error is not None
        assert head.snapshot.last_error.message == "Payment declined"
        assert await store.find(RunQuery(text="declined")) == []

    async def test_tasks_are_found_by_words_in_names_and_payloads(self, store: Store, node: SampleNode) -> None:
        """The payload is encrypted, so only the name is found."""
        await node.start("run-1", replace(task("a"), name="Approve order", payload=Raw(b'{"who":"Annabella"}')))
        [found] = await store.find(TaskQuery(text="ORDER"))
        assert found.payload == Raw(b'{"who":"Annabella"}')
        assert await store.find(TaskQuery(text="annabella order")) == []  # a shorter name may be in what is random

    async def test_rows_end_where_they_are_large_enough_together(
        self, store: Store, node: SampleNode, clock: VirtualClock
    ) -> None:
        """A bound is for what is stored, which is larger; there is at least one row."""
        large = Raw(b'"' + b"x" * 1_000 + b'"')
        await node.start("run-1", *(replace(task(f"task-{number}"), payload=large) for number in range(5)))
        assert len(await store.find(TaskQuery(most_bytes=1))) == 1
        assert len(await store.find(TaskQuery(most_bytes=2_600))) == 2
        assert [task.payload for task in await store.find(TaskQuery(most_bytes=10**6))] == [large] * 5
        assert await store.find(MailboxQuery(run_id="run-1", most_bytes=1)) == []


@pytest.mark.contract("SEC-2", "CAN-1")
async def test_the_values_of_steps_that_a_rotation_carries_over_are_encrypted_and_the_steps_are_not() -> None:
    inner = MemoryStore(VirtualClock())
    await inner.migrate()
    store = SealingStore(inner, [Encryption(KEYS)])
    node = SampleNode(store)
    await node.start(
        "run-1", replace(task("ask"), payload=Raw(b'"hush"')), replace(activity("charge"), input=Raw(b'["hush"]'))
    )
    await node.step("run-1", inputs=[ActivityErrored("charge", 1, 1, ErrorInfo("Broken", "hush"), NO_RETRY)])
    await node.step("run-1", ContinueAsNew(input=Raw(b"1"), steps=("ask", "charge")))
    stored = await inner.read_events("run-1")
    assert b"hush" not in b"".join(codec.encode_body(event.data).encode() for event in stored)
    state = state_of("run-1", stored[-1:])
    assert (list(state.open_steps), list(state.failed_steps)) == (["ask"], ["charge"])
    opened = await store.read_events("run-1")
    assert state_of("run-1", opened[-1:]) == state_of("run-1", opened)
    assert state_of("run-1", opened).failed_steps["charge"].error.message == "hush"
