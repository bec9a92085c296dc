"""What event types mean stands once, on the bodies: every kind of step is whole, and the page's tables follow."""

import re
from typing import get_args

import pytest

from holdfast.cli.run_words import now_of
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.graph import Graph, GraphNode, NodeKind
from holdfast.core.snapshot import StepStatus
from holdfast.program.coroutine import ON_EVENT
from tools.event_tables import SCRIPT, script

PAGE = SCRIPT.parent.parent


def test_the_tables_of_the_page_are_the_generated_ones() -> None:
    assert SCRIPT.read_text(encoding="utf-8") == script(), "run `make tables`"


@pytest.mark.parametrize("kind", get_args(e.StepKind))
def test_every_kind_of_step_is_opened_by_one_event_and_closed_by_one_of_its_own(kind: e.StepKind) -> None:
    assert list(e.OPENING.values()).count(kind) == 1
    assert any(kinds == {kind} for kinds in e.CLOSING.values())


def test_people_have_a_word_for_every_kind_of_step() -> None:
    assert all(body.LABEL for body in e.OPENING)
    assert not any(body.LABEL or body.IS_WORK for body in e.BODIES.values() if body not in e.OPENING)


@pytest.mark.parametrize("kind", get_args(e.StepKind))
@pytest.mark.parametrize(
    ("file", "table"), [("lib/icons.js", "PATHS"), ("run/bars.js", "HEIGHTS"), ("runs/row.js", "WAITS")]
)
def test_the_page_draws_and_names_every_kind_of_step(kind: str, file: str, table: str) -> None:
    found = re.search(rf"const {table} = \{{(.*?)\}};", (PAGE / file).read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    assert re.search(rf"(^|[{{,\s]){kind}: ", found[1]), f"{table} in {file}"


@pytest.mark.parametrize("kind", get_args(e.StepKind))
def test_the_command_line_has_a_word_for_every_kind_of_step(kind: str) -> None:
    assert not now_of({"status": "RUNNING", "waiting_kind": kind}).startswith(kind)


def test_graphs_have_a_shape_for_every_kind_of_step() -> None:
    """But for updates, which are no part of what a workflow does."""
    kinds = [kind for kind in get_args(e.StepKind) if kind != "update"]
    assert set(kinds) <= set(get_args(NodeKind))
    nodes = [GraphNode(id="n", label="n", kind=kind) for kind in kinds]
    assert len({Graph(kind="plan", nodes=(node,)).mermaid() for node in nodes}) == len(kinds)


def test_no_event_both_opens_and_closes_or_changes_a_step() -> None:
    for body in e.BODIES.values():
        assert sum((body.OPENS is not None, bool(body.CLOSES), body.CHANGES is not None)) <= 1, body


def test_events_of_steps_that_are_outcomes_close_a_step_or_ask_something_of_the_program() -> None:
    others = {e.RunCancelRequested, e.UpdateAccepted}
    assert all(body in e.CLOSING for body in e.OUTCOMES - others)


def test_a_closed_step_has_a_status_that_operators_know() -> None:
    assert {body.CLOSED_AS for body in e.CLOSING} <= set(StepStatus)


def test_a_program_takes_what_begins_it_and_every_outcome() -> None:
    assert set(ON_EVENT) == e.OUTCOMES | {e.RunStarted, e.ContinuedAsNew}


def test_an_end_of_a_run_closes_all_of_its_steps() -> None:
    ends = {body for body in e.BODIES.values() if body.LEADS_TO in e.TERMINAL}
    assert ends | {e.ContinuedAsNew} == e.CLOSING_ALL


def test_every_command_of_a_program_is_recorded_as_an_event_of_its_own() -> None:
    commands = [command for command in get_args(c.Command) if command is not c.PauseRun]
    assert len({command.RECORDED_AS for command in commands}) == len(commands)
