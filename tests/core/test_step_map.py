"""The steps of a run: a mapping like a `dict`, whose copies share what they have in common."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from holdfast.core import commands as c
from holdfast.core.messages import ActivityErrored, ActivitySucceeded
from holdfast.core.state import fold_onto, own_copy, state_of
from holdfast.core.step_map import LARGE, StepMap, copy_of
from holdfast.core.timing import NO_RETRY
from tests.core.driver import BROKEN, Driver, activity

_KEYS = st.integers(0, 2 * LARGE).map(str)
_ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), _KEYS, st.integers()),
        st.tuples(st.just("delete"), _KEYS, st.just(0)),
        st.tuples(st.just("delete many"), st.integers(0, LARGE).map(str), st.just(0)),
        st.tuples(st.just("copy"), st.just(""), st.just(0)),
        st.tuples(st.just("clear"), st.just(""), st.sampled_from([0, 0, 0, 1])),
    ),
    max_size=60,
)


@given(_ACTS)
def test_a_large_map_is_like_a_dict_and_its_copies_are_its_own(acts: list[tuple[str, str, int]]) -> None:
    model = {str(number): number for number in range(LARGE)}
    steps = copy_of(model)
    assert isinstance(steps, StepMap)
    before: list[tuple[dict[str, int], dict[str, int]]] = []
    for act, key, value in acts:
        if act == "set":
            model[key] = steps[key] = value
        elif act == "delete":
            assert model.pop(key, None) == steps.pop(key, None)
        elif act == "delete many":
            for number in range(int(key)):
                model.pop(str(number), None)
                steps.pop(str(number), None)
        elif act == "copy":
            before.append((model.copy(), steps))
            steps = copy_of(steps)
        elif value:
            model.clear()
            steps.clear()
        assert (len(steps), bool(steps), list(steps)) == (len(model), bool(model), list(model))
        assert steps.get(key) == model.get(key)
        assert (key in steps) is (key in model)
    before.append((model, steps))
    for expected, found in before:
        assert list(found.items()) == list(expected.items())
        assert found == expected
        assert expected == found


def test_a_map_that_has_become_small_is_a_dict_again() -> None:
    steps = copy_of({str(number): number for number in range(LARGE)})
    for number in range(LARGE - 3):
        del steps[str(number)]
    with pytest.raises(KeyError):
        del steps["0"]
    assert type(copy_of(steps)) is dict
    assert copy_of(steps) == {str(number): number for number in range(LARGE - 3, LARGE)}
    assert type(copy_of(dict.fromkeys("abc", 1))) is dict


@pytest.mark.contract("EVT-5")
@pytest.mark.parametrize("open_steps", [LARGE, 10 * LARGE])
def test_a_run_with_many_open_and_failed_steps_has_the_state_of_its_events(open_steps: int) -> None:
    run = Driver().start()
    run.ask(*(activity(f"s{number}") for number in range(open_steps)))
    for number in range(0, open_steps, 16):
        run.tell(ActivityErrored(f"s{number}", 1, 1, BROKEN, NO_RETRY))
        run.tell(ActivitySucceeded(f"s{number + 1}", 1, Raw(b"1")))
        run.ask(activity(f"t{number}"))
    steps = (*run.state.open_steps, *run.state.failed_steps)
    run.ask(c.ContinueAsNew(steps=steps))
    assert state_of("run-1", run.events) == run.state == state_of("run-1", run.events[-1:])
    assert list(state_of("run-1", run.events).open_steps) == list(run.state.open_steps)
    assert run.state.local_activities == len(run.state.open_steps)


def copied_bytes(open_steps: int) -> int:
    """Return how much memory the state of a turn takes that opens and closes a step, beside what is shared."""
    run = Driver().start()
    run.ask(*(activity(f"s{number}") for number in range(open_steps)))
    run.tell(ActivitySucceeded("s0", 1, Raw(b"1")))
    state, events = run.state, []
    for number in range(1, 30):
        before = len(run.events)
        run.tell(ActivitySucceeded(f"s{number}", 1, Raw(b"1")))
        run.ask(activity(f"t{number}"))
        events.append(run.events[before:])
    copies = []
    tracemalloc.start()
    try:
        for of_turn in events:
            before_bytes, _ = tracemalloc.get_traced_memory()
            state = own_copy(state)
            fold_onto(state, of_turn)
            copies.append(tracemalloc.get_traced_memory()[0] - before_bytes)
    finally:
        tracemalloc.stop()
    return max(copies)


@pytest.mark.contract("WF-1")
def test_a_turn_copies_what_it_changes_and_not_what_is_open() -> None:
    assert copied_bytes(10_000) < 16_384
    assert copied_bytes(10_000) < 4 * copied_bytes(1_000)
