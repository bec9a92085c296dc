"""For tests of stores and of what is built on Holdfast: public, and as stable as the rest.

`TestNode` runs an app's workflows in virtual time, with fakes in place of activities. `explore` plays a workflow once
for each point at which its process can crash. `assert_replays` checks changed code against recorded histories.
`secrets` gives secrets values in tests that call an activity's function without a node. `view_of` and `system_view` are
views of a store for `holdfast.core.invariants`, which a test uses to check invariants. The conformance suite needs
pytest, so it is not imported here: ``from holdfast.testing.store_suite import StoreSuite``.
"""

from holdfast.program.secrets import revealed as secrets
from holdfast.store.inspect import system_view, view_of
from holdfast.testing.clock import START as START
from holdfast.testing.clock import VirtualClock
from holdfast.testing.explorer import Exploration, Finding, explore
from holdfast.testing.fakes import Call
from holdfast.testing.replay import assert_replays, read_history
from holdfast.testing.test_node import NothingDue, TestNode

__all__ = [
    "START",
    "Call",
    "Exploration",
    "Finding",
    "NothingDue",
    "TestNode",
    "VirtualClock",
    "assert_replays",
    "explore",
    "read_history",
    "secrets",
    "system_view",
    "view_of",
]
