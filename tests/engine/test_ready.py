"""Waves: how many runs take a turn together, and which of them."""

from holdfast.engine.turns.ready_queue import PATIENCE, WAVE, Ready


def test_a_wave_takes_everything_there_is() -> None:
    ready = Ready()
    ready.add("b")
    ready.add("a")
    ready.add("b")

    assert ready.take() == ["b", "a"]
    assert len(ready) == 0
    assert ready.take() == []


def test_a_wave_is_bounded_and_the_rest_comes_next() -> None:
    ready = Ready()
    names = [f"run {number}" for number in range(2 * WAVE + 1)]
    ready.add_again(names)

    assert [ready.take(), ready.take(), ready.take()] == [names[:WAVE], names[WAVE : 2 * WAVE], names[2 * WAVE :]]


def test_runs_that_have_begun_go_before_new_ones() -> None:
    ready = Ready()
    for number in range(WAVE):
        ready.add(f"new {number}", is_new=True)
    ready.add("begun")

    wave = ready.take()

    assert wave[0] == "begun"
    assert wave[1:] == [f"new {number}" for number in range(WAVE - 1)]
    assert ready.take() == [f"new {WAVE - 1}"]


def test_a_run_is_in_a_wave_once() -> None:
    ready = Ready()
    ready.add("a", is_new=True)
    ready.add("a")

    assert ready.take() == ["a"]


def test_more_is_wanted_while_there_is_room() -> None:
    ready = Ready()
    assert ready.wants_more
    ready.add_again(str(number) for number in range(WAVE))
    assert not ready.wants_more


def test_a_full_node_still_asks_for_other_work_from_time_to_time() -> None:
    ready = Ready()
    for _ in range(PATIENCE):
        ready.add_again(str(number) for number in range(WAVE))
        assert not ready.wants_more
        ready.take()
    ready.add_again(str(number) for number in range(WAVE))
    assert ready.wants_more


def test_patience_begins_again_after_a_wave_that_was_not_full() -> None:
    ready = Ready()
    for full_waves in (PATIENCE - 1, PATIENCE):
        for _ in range(full_waves):
            ready.add_again(str(number) for number in range(WAVE))
            assert not ready.wants_more
            ready.take()
        if full_waves < PATIENCE:
            ready.take()


def test_a_wave_that_is_just_full_leaves_nothing() -> None:
    ready = Ready()
    names = [f"run {number}" for number in range(WAVE)]
    ready.add_again(names)

    assert [ready.take(), ready.take()] == [names, []]
