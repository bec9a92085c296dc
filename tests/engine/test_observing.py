"""What a process has done is counted where it passes, once for each batch, and only what was committed."""

import holdfast as hf
from holdfast.engine.observe.metrics import Histogram, ObservedStore, observed, observer_of
from holdfast.store.port import CommitConflict
from holdfast.testing.samples import SampleNode, complete, dead_letter, message, signal, wait


async def test_what_is_committed_created_and_delivered_is_counted() -> None:
    store = observed(hf.MemoryStore())
    counts, node = observer_of(store).counts, SampleNode(store)
    run = await node.start("run-1", wait("go"))
    await store.deliver([signal("run-1", signal_id="s"), signal("run-1", signal_id="s"), signal("nowhere")])
    await store.deliver([message("run-1")])
    stale = await node.turn(run, complete())
    await node.step("run-1", complete())
    assert isinstance((await store.commit([stale]))[0], CommitConflict)
    assert counts.runs_created == 1
    assert counts.signals == {"accepted": 1, "duplicate": 1, "NotFound": 1}
    assert counts.finished == {"COMPLETED": 1}
    assert counts.events["RunCompleted"] == counts.events["SignalWaiting"] == 1
    assert sum(counts.conflicts.values()) == 1
    assert counts.renewals == 1
    assert sum(counts.commit_s.counts) == sum(counts.batch_turns.counts) == 3
    assert observed(store) is store


async def test_who_asks_is_told_of_commits_until_they_do_not_want_to() -> None:
    store = observed(hf.MemoryStore())
    observer, node = observer_of(store), SampleNode(store)
    told: list[str] = []
    end = observer.subscribe(lambda turns: told.extend(turn.run_id for turn in turns))
    await node.start("run-1", wait("go"))
    end()
    await node.start("run-2", wait("go"))
    assert set(told) == {"run-1"}
    assert isinstance(observer, ObservedStore)
    assert dead_letter().reason not in observer.counts.dead_letters


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((1, 10))
    for value in (0.5, 1, 2, 10, 11):
        histogram.add(value)
    assert (histogram.counts, histogram.sum) == ([2, 2, 1], 24.5)
