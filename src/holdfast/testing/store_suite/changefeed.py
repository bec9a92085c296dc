"""The store suite, the changefeed: which histories have grown since the last read."""

import pytest

from holdfast.errors import InvalidInput
from holdfast.store.port import Change, Changes, PurgePolicy, Store
from holdfast.testing.samples import SampleNode, complete, marker, new_run, signal, task, wait
from holdfast.testing.store_suite.base import SuiteBase


def versions(changes: Changes) -> dict[str, int]:
    """Return the runs that have grown, with their versions."""
    return {change.run_id: change.version for change in changes.runs}


def is_nothing(changes: Changes) -> bool:
    """Return whether nothing has grown. The cursors may still differ."""
    return not (changes.runs or changes.has_more or changes.is_lost)


class ChangefeedSuite(SuiteBase):
    """Finding what has changed."""

    async def test_nothing_has_changed_since_the_present_cursor(self, store: Store, node: SampleNode) -> None:
        """This holds whatever the store had before, and for an empty store."""
        for number in range(2):
            cursor = (await store.changes()).cursor
            assert is_nothing(await store.changes(cursor))
            await node.start(f"run-{number}", wait("go"))

    @pytest.mark.contract("EVT-6")
    async def test_runs_that_are_created_or_take_a_turn_have_changed(self, store: Store, node: SampleNode) -> None:
        """Each run is returned once, with its version, whatever happened to it."""
        await node.start("run-0", wait("go"))
        before = await store.changes()
        await store.create([new_run("run-1"), new_run("run-2")])
        created = await store.changes(before.cursor)
        assert versions(created) == {"run-1": 1, "run-2": 1}
        await node.claim()
        await node.step("run-1", marker("a"))
        run = await node.step("run-1", marker("b"))
        assert versions(await store.changes(created.cursor)) == {"run-1": run.head.version}
        everything = await store.changes(before.cursor)
        assert versions(everything) == {"run-1": run.head.version, "run-2": 1}
        assert (everything.has_more, everything.is_lost) == (False, False)

    async def test_what_does_not_become_part_of_a_history_is_no_change(self, store: Store, node: SampleNode) -> None:
        """Examples are a waiting signal, a lease, a turn that lost."""
        run = await node.start("run-1", wait("go"))
        turn = await node.turn(run, marker("a"))
        await node.commit(turn)
        cursor = (await store.changes()).cursor
        await store.deliver([signal("run-1", "other")])
        await store.renew("node-b", 1_000)
        await store.commit([turn])
        await store.create([new_run("run-1")])
        assert is_nothing(await store.changes(cursor))

    async def test_a_cursor_is_valid_in_other_processes(self, store: Store, peer: Store, node: SampleNode) -> None:
        """This holds whichever process wrote, and whichever read before."""
        cursor = (await peer.changes()).cursor
        await node.start("run-1", wait("go"))
        assert versions(await peer.changes(cursor)) == versions(await store.changes(cursor)) == {"run-1": 3}

    async def test_runs_say_whether_tasks_may_be_concerned(self, store: Store, node: SampleNode) -> None:
        """So no reader looks for tasks where there are none; a store that does not know answers True."""
        cursor = (await store.changes()).cursor
        await node.start("run-1", task("approve"))
        assert [change.has_tasks for change in (await store.changes(cursor)).runs] == [True]
        assert Change("run-1", 1).has_tasks

    async def test_from_cursor_to_cursor_nothing_is_missed(self, store: Store, node: SampleNode) -> None:
        """This holds however small each read is."""
        changes = await store.changes()
        for number in range(10):
            await node.start(f"run-{number}", wait("go"))
        seen: dict[str, int] = {}
        has_more = True
        while has_more:
            changes = await store.changes(changes.cursor, limit=4)
            seen |= versions(changes)
            has_more = changes.has_more
        assert seen == {f"run-{number}": 3 for number in range(10)}
        for limit in (0, -1):
            with pytest.raises(InvalidInput):
                await store.changes(changes.cursor, limit)

    async def test_an_unknown_cursor_is_lost(self, store: Store, node: SampleNode) -> None:
        """Reading continues from the current cursor."""
        await node.start("run", wait("go"))
        for number, cursor in enumerate(["nonsense", "99999999:x", "-1", "\ud800", "1" * 400]):
            lost = await store.changes(cursor)
            assert (lost.is_lost, lost.runs, lost.has_more) == (True, (), False), ascii(cursor)
            assert is_nothing(await store.changes(lost.cursor)), ascii(cursor)
            await node.start(f"run-{number}", wait("go"))
            assert versions(await store.changes(lost.cursor)) == {f"run-{number}": 3}, ascii(cursor)

    async def test_after_a_purge_a_cursor_is_lost_or_misses_nothing(self, store: Store, node: SampleNode) -> None:
        """This holds even if what was purged came last."""
        await node.start("run-0", wait("go"))
        await node.start("run-1", complete())
        cursor = (await store.changes()).cursor
        await store.purge(PurgePolicy(finished_run_ms=0))
        for number in range(2, 5):
            await node.start(f"run-{number}", wait("go"))
        changes = await store.changes(cursor)
        assert changes.is_lost or versions(changes) == {f"run-{number}": 3 for number in range(2, 5)}
