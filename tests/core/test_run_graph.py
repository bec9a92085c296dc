"""The graph of a run: how its steps stand, and how much of it is shown."""

from collections.abc import Iterable
from time import thread_time

import pytest
from msgspec import Raw

from holdfast.core.commands import RecordMarker
from holdfast.core.graph import Graph, GraphNode, compared, layers_of
from holdfast.core.run_graph import MOST_NODES, GraphFold, NodeStatus, RunGraph, RunNode
from holdfast.core.snapshot import RunSnapshot, StepSnapshot, StepStatus, incremental_project, project_run
from holdfast.core.state import RunStatus
from tests.core.driver import Driver
from tests.core.test_graph import chain, fan, layered, node, plan


def step(
    step_id: str, status: str = "SUCCESS", begin: int = 1, end: int | None = None, kind: str = "activity"
) -> StepSnapshot:
    """A step that began and ended then; one that runs has no end."""
    return StepSnapshot(
        step_id=step_id,
        status=StepStatus(status),
        kind=kind,
        started_at=begin,
        completed_at=None if status == "RUNNING" else (begin + 1 if end is None else end),
    )


def snapshot(*steps: StepSnapshot, status: RunStatus = RunStatus.RUNNING) -> RunSnapshot:
    return RunSnapshot(run_id="r", status=status, steps=steps, last_event_seq=1)


def drawn(
    graph: Graph, *steps: StepSnapshot, status: RunStatus = RunStatus.RUNNING, expand: Iterable[str] = ()
) -> dict[str, RunNode]:
    found = GraphFold(graph).of_run(snapshot(*steps, status=status), tuple(expand))
    return {each.id: each for each in found.nodes}


def statuses(found: dict[str, RunNode]) -> dict[str, str]:
    return {id: each.status.value for id, each in found.items()}


ORDER = Graph(
    kind="flow",
    nodes=(
        node("check"),
        node("cue", "check", kind="cue"),
        node("cue/approval", kind="signal", parent="cue", branch="then"),
        node("cue/remind", kind="timer", parent="cue", branch="else"),
        node("both", "cue", kind="chorus"),
        node("both/charge", parent="both"),
        node("both/reserve", parent="both"),
        node("ship", "both"),
    ),
)


def test_nodes_stand_as_their_steps_and_groups_as_what_is_in_them() -> None:
    found = drawn(ORDER, step("check"), step("cue/approval", "RUNNING", 2, kind="signal"))

    assert statuses(found) == {
        "check": "SUCCESS",
        "cue": "WAITING",
        "cue/approval": "WAITING",
        "cue/remind": "SKIPPED",  # the other branch was chosen
        "both": "PENDING",
        "both/charge": "PENDING",
        "both/reserve": "PENDING",
        "ship": "PENDING",
    }
    assert found["cue"].counts == {NodeStatus.WAITING: 1, NodeStatus.SKIPPED: 1}
    assert (found["cue"].started_at, found["cue"].completed_at) == (2, None)
    assert (found["check"].started_at, found["check"].completed_at, found["check"].attempts) == (1, 2, 1)


def test_what_was_passed_is_skipped() -> None:
    found = drawn(ORDER, step("check"), step("both/charge", begin=3), step("both/reserve", "FAILED", 3))

    assert statuses(found) == {
        "check": "SUCCESS",
        "cue": "SKIPPED",
        "cue/approval": "SKIPPED",
        "cue/remind": "SKIPPED",
        "both": "FAILED",
        "both/charge": "SUCCESS",
        "both/reserve": "FAILED",
        "ship": "PENDING",
    }


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (RunStatus.RUNNING, ("RUNNING", "PENDING")),
        (RunStatus.COMPLETED, ("SUCCESS", "SKIPPED")),
        (RunStatus.CANCELLED, ("SKIPPED", "PENDING")),
    ],
)
def test_what_never_began_is_skipped_if_the_run_is_completed(status: RunStatus, expected: tuple[str, str]) -> None:
    found = drawn(ORDER, step("check"), step("both/charge"), status=status)

    assert (found["both"].status, found["ship"].status) == expected


def critical(found: dict[str, RunNode]) -> set[tuple[str, str | None]]:
    return {(id, each.critical_after) for id, each in found.items() if each.is_critical}


def test_the_critical_path_goes_through_what_ended_last() -> None:
    graph = plan(node("a"), node("b", "a"), node("c", "a"), node("d", "b", "c"), node("e", "a", "d"), node("f", "a"))
    steps = [
        step("a", end=2),
        step("b", begin=2, end=9),
        step("c", begin=2, end=5),
        step("d", begin=9, end=11),
        step("e", "RUNNING", 11),
        step("f", begin=2, end=12),
    ]

    assert critical(drawn(graph, *steps)) == {("a", None), ("b", "a"), ("d", "b"), ("e", "d")}
    done = [*steps[:4], step("e", begin=11, end=12), step("f", begin=2, end=40)]
    assert critical(drawn(graph, *done)) == {("a", None), ("f", "a")}


def test_the_critical_path_goes_into_groups() -> None:
    found = drawn(
        ORDER,
        step("check"),
        step("both/charge", begin=3, end=5),
        step("both/reserve", begin=3, end=9),
        step("ship", begin=9),
    )

    assert critical(found) == {
        ("check", None),
        ("cue", "check"),  # which was skipped; its branches are not on the path
        ("both", "cue"),
        ("both/reserve", None),
        ("ship", "both"),
    }


def test_items_of_a_for_each_are_its_nodes() -> None:
    graph = plan(node("list"), node("load", "list", kind="for_each"), node("end", "load"))
    steps = [step("list"), step("load[0]"), step("load[10]", "FAILED"), step("load[2]", "RUNNING")]

    folded_away = drawn(graph, *steps)
    assert folded_away.keys() == {"list", "load", "end"}
    assert folded_away["load"].counts == {NodeStatus.SUCCESS: 1, NodeStatus.FAILED: 1, NodeStatus.RUNNING: 1}
    shown = drawn(graph, *steps, expand=["load"])
    assert [id for id, each in shown.items() if each.parent == "load"] == ["load[0]", "load[2]", "load[10]"]
    assert shown["load[10]"].label == "load[10]"


def test_what_is_there_for_a_step_says_how_the_step_stands() -> None:
    graph = plan(node("load"), node("each", "load", kind="for_each"))

    asked = drawn(graph, step("load:approval", "RUNNING", 3, kind="task"))
    assert statuses(asked) == {"load": "WAITING", "each": "PENDING"}
    assert asked["load"].started_at == 3
    running = [
        step("load:approval", kind="task"),
        step("load", "RUNNING", 4),
        step("load:timeout", "RUNNING", kind="timer"),
    ]
    assert drawn(graph, *running)["load"].status == "RUNNING"
    again = drawn(graph, step("load", "FAILED"), step("load:retry2", "RUNNING", 5, kind="timer"))
    assert (again["load"].status, again["load"].completed_at) == ("WAITING", None)
    undone = drawn(graph, step("load"), step("load:compensate", begin=5), step("each[0]"), step("each[0]:compensate"))
    assert (undone["load:compensate"].status, undone["load:compensate"].depends_on) == ("SUCCESS", ("load",))
    assert undone["each"].counts == {NodeStatus.SUCCESS: 2}


def test_what_the_program_has_decided_is_shown_at_once() -> None:
    graph = plan(
        node("a"),
        node("b"),
        node("c"),
        node("d"),
        node("g", kind="scene"),
        node("g/x", parent="g"),
        node("each", kind="for_each"),
    )
    markers = {"a:when": "false", "b:when": "true", "c:skipped": '"why"', "d:failed": '"why"', "g:condition": "false"}
    markers |= {"each[3]:failed": '"why"', "a": "false", ":state": "{}"}
    driver = Driver("r").start()
    driver.ask(*(RecordMarker(step_id=id, name="x", value=Raw(value.encode())) for id, value in markers.items()))

    run = project_run("r", driver.events)

    assert run == incremental_project(project_run("r", driver.events[:5]), driver.events[5:])
    found = {each.id: each.status.value for each in GraphFold(graph).of_run(run, ["each"]).nodes}
    assert found == {
        "a": "SKIPPED",
        "b": "PENDING",
        "c": "SKIPPED",
        "d": "FAILED",
        "g": "SKIPPED",
        "g/x": "SKIPPED",
        "each": "FAILED",
        "each[3]": "FAILED",
    }


def test_many_items_are_folded_and_keep_their_groups_while_they_become_more() -> None:
    graph = plan(node("load", kind="for_each"))
    fold = GraphFold(graph)

    def groups(count: int, *expand: str) -> RunGraph:
        return fold.of_run(snapshot(*(step(f"load[{number}]") for number in range(count))), expand)

    few = groups(200, "load")
    assert [each.label for each in few.nodes if each.parent == "load"] == [
        "load[0] … load[59]",
        "load[60] … load[119]",
        "load[120] … load[179]",
        "load[180] … load[199]",
    ]
    assert "load[60-119]" in {each.id for each in few.nodes}
    many = groups(10_000, "load[77]")  # a step is found, wherever it is
    assert many.steps == 10_000
    shown = {each.id: each for each in many.nodes}
    assert shown["load[77]"].parent == "load[60-119]"
    assert shown["load[0-3599]"].label == "load[0] … load[3599]"
    assert len(shown) < 200


def test_steps_that_the_graph_does_not_name_are_shown_apart() -> None:
    found = drawn(
        plan(node("a"), node("~others")), step("a"), step("refund", "RUNNING"), step("x[1]"), expand=["~~others"]
    )

    assert found["~~others"].label == "Other steps"
    assert {id for id, each in found.items() if each.parent == "~~others"} == {"refund", "x[1]"}


def test_groups_of_a_flow_are_expanded_while_there_is_room() -> None:
    def flow(groups: int, size: int) -> Graph:
        nodes: list[GraphNode] = []
        for group in range(groups):
            nodes.append(node(f"g{group}", kind="scene"))
            nodes += [node(f"g{group}/{number}", parent=f"g{group}") for number in range(size)]
        return Graph(kind="flow", nodes=tuple(nodes))

    assert all(each.is_expanded for each in drawn(flow(5, 10)).values() if each.kind == "scene")
    large = drawn(flow(50, 50))
    assert [id for id, each in large.items() if each.is_expanded] == ["g0", "g1"]
    again = GraphFold(flow(5, 10)).of_run(snapshot(), (), ("g3",))
    assert [each.id for each in again.nodes if each.kind == "scene" and not each.is_expanded] == ["g3"]


@pytest.mark.parametrize("graph", [chain(10_000), fan(9_998), layered(100, 100)], ids=["chain", "fan", "layers"])
def test_ten_thousand_steps_are_bounded_whatever_is_asked_for(graph: Graph) -> None:
    fold = GraphFold(graph)
    steps = tuple(step(each.id, begin=number) for number, each in enumerate(graph.nodes) if number < 5_000)
    run = snapshot(*steps)

    before = thread_time()
    first = fold.of_run(run)
    took_s = thread_time() - before
    everything = fold.of_run(run, [each.id for each in graph.nodes])

    assert first.steps == 10_000
    assert sum(first.counts.values()) == 10_000
    assert first.counts[NodeStatus.SUCCESS] == 5_000
    assert len(first.nodes) <= 60
    assert len(everything.nodes) <= MOST_NODES + 60
    parents = {each.id for each in everything.nodes if each.is_expanded}
    assert {each.parent for each in everything.nodes} == parents | {None}
    assert took_s < 2.0, f"{took_s} s"
    print(f"{took_s * 1_000:.0f} ms")


# --- two versions


def test_two_versions_are_one_graph_with_what_differs() -> None:
    before = plan(node("a"), node("old", "a"), node("older", "old"), node("b", "old"), node("c", "b"))
    after = plan(node("a"), node("new", "a"), node("b", "new"), node("c", "b"))

    merged, changes = compared(before, after, ["b", "nothing"])

    assert changes == {"new": "added", "b": "changed", "old": "removed", "older": "removed"}
    assert {each.id: each.depends_on for each in merged.nodes} == {
        "a": (),
        "new": ("a",),
        "b": ("new",),
        "c": ("b",),
        "old": ("a",),
        "older": ("old",),
    }
    shown = GraphFold(merged).of_versions(changes)
    assert {each.id: each.change for each in shown.nodes} == {**changes, "a": None, "c": None}


def test_a_fold_with_a_difference_in_it_is_marked() -> None:
    before, after = chain(1_000), chain(1_001)

    merged, changes = compared(before, after, ["s500"])
    shown = GraphFold(merged).of_versions(changes)

    marked = [each.label for each in shown.nodes if each.change is not None]
    assert len(marked) == 2
    assert marked[-1].endswith("s1000")
    deep = GraphFold(merged).of_versions(changes, ["s500"])
    assert next(each for each in deep.nodes if each.id == "s500").change == "changed"


def test_steps_that_turn_around_make_no_cycle() -> None:
    before = plan(node("a"), node("x", "a"), node("b", "x"))
    after = plan(node("b"), node("a", "b"))

    merged, _ = compared(before, after, [])

    assert [[each.id for each in layer] for layer in layers_of(merged.nodes)] == [["b"], ["a"], ["x"]]
