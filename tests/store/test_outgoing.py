"""Whom what a run sends reaches, as far as that is the same in every store."""

import pytest
from msgspec.structs import replace

from holdfast.core.index_rows import RuntimeSnapshot
from holdfast.core.messages import cancel_request
from holdfast.core.state import RUNNING
from holdfast.errors import NotFound
from holdfast.store.outgoing import Whose, unreachable
from holdfast.store.port import Turn
from holdfast.testing.samples import message, signal

TURN = Turn(run_id="run-1", expected_version=1, epoch=1, snapshot=RuntimeSnapshot(status=RUNNING, state_version=1))
OURS = Whose("acme", "shop", "prod", None)


@pytest.mark.contract("API-4")
def test_a_run_of_which_nobody_knows_whose_it_is_is_not_reached() -> None:
    """It may have come since the runs were looked at: even where signals may cross, to be sure is cheap."""
    for turn in (TURN, replace(TURN, crosses_tenants=True)):
        refused = unreachable(turn, signal("late"), {"run-1": OURS})
        assert refused is not None
        assert isinstance(refused.error, NotFound)


@pytest.mark.contract("API-4", "WF-4")
def test_messages_go_wherever_the_family_is_and_commands_to_children() -> None:
    runs = {"run-1": OURS, "run-2": Whose("other", "shop", "prod", "run-1"), "run-3": OURS}
    assert unreachable(TURN, message("run-2"), {}) is None
    assert unreachable(TURN, cancel_request("run-2", "parent:run-1", ""), runs) is None
    assert unreachable(TURN, cancel_request("run-3", "parent:run-1", ""), runs) is not None
    assert unreachable(replace(TURN, crosses_tenants=True), cancel_request("run-3", "x", ""), runs) is not None
    assert unreachable(TURN, signal("run-2"), runs) is not None
    assert unreachable(TURN, signal("run-3"), runs) is None
    assert unreachable(TURN, signal("run-1"), runs) is None
