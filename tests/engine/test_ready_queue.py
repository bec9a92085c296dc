"""Batches of turns: how many runs take a turn together, and which of them."""

from holdfast.engine.turns.owned_runs import BATCH, PATIENCE, ReadyQueue


def test_a_batch_takes_everything_there_is() -> None:
    ready = ReadyQueue()
    ready.add("b")
    ready.add("a")
    ready.add("b")

    assert ready.take() == ["b", "a"]
    assert len(ready) == 0
    assert ready.take() == []


def test_a_batch_is_bounded_and_the_rest_comes_next() -> None:
    ready = ReadyQueue()
    names = [f"run {number}" for number in range(2 * BATCH + 1)]
    ready.add_again(names)

    assert [ready.take(), ready.take(), ready.take()] == [names[:BATCH], names[BATCH : 2 * BATCH], names[2 * BATCH :]]


def test_runs_that_have_begun_go_before_new_ones() -> None:
    ready = ReadyQueue()
    for number in range(BATCH):
        ready.add(f"new {number}", is_new=True)
    ready.add("begun")

    batch = ready.take()

    assert batch[0] == "begun"
    assert batch[1:] == [f"new {number}" for number in range(BATCH - 1)]
    assert ready.take() == [f"new {BATCH - 1}"]


def test_a_run_is_in_a_batch_once() -> None:
    ready = ReadyQueue()
    ready.add("a", is_new=True)
    ready.add("a")

    assert ready.take() == ["a"]


def test_more_is_wanted_while_there_is_room() -> None:
    ready = ReadyQueue()
    assert ready.wants_more
    ready.add_again(str(number) for number in range(BATCH))
    assert not ready.wants_more


def test_nothing_is_claimed_while_new_runs_are_left_that_had_no_room() -> None:
    ready = ReadyQueue()
    for number in range(BATCH):
        ready.add(f"new {number}", is_new=True)
    ready.add("begun")
    ready.take()

    assert len(ready) == 1
    assert not ready.wants_more, "it would be claimed again"
    ready.take()
    ready.add("newer", is_new=True)
    assert ready.wants_more


def test_a_full_node_still_asks_for_other_work_from_time_to_time() -> None:
    ready = ReadyQueue()
    for _ in range(PATIENCE):
        ready.add_again(str(number) for number in range(BATCH))
        assert not ready.wants_more
        ready.take()
    ready.add_again(str(number) for number in range(BATCH))
    assert ready.wants_more


def test_patience_begins_again_after_a_batch_that_was_not_full() -> None:
    ready = ReadyQueue()
    for full_batches in (PATIENCE - 1, PATIENCE):
        for _ in range(full_batches):
            ready.add_again(str(number) for number in range(BATCH))
            assert not ready.wants_more
            ready.take()
        if full_batches < PATIENCE:
            ready.take()


def test_a_batch_that_is_just_full_leaves_nothing() -> None:
    ready = ReadyQueue()
    names = [f"run {number}" for number in range(BATCH)]
    ready.add_again(names)

    assert [ready.take(), ready.take()] == [names, []]
