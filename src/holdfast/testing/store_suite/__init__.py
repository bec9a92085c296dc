"""The conformance suite: what every store must do, as tests.

A store's author subclasses it in a test module and says how to make a store, and how to lose a record::

    class TestMyStore(StoreSuite):
        async def make_store(self, clock, limits):
            return MyStore(clock=clock, limits=limits)

        async def lose_acceptance_record(self, store, run_id, name, signal_id):
            ...

A store that other processes can open should override `make_peer` too. The tests are async methods: pytest-asyncio
must be in auto mode. The `contract` markers name the rules of `docs/contract.md`; a project of its own registers the
marker in its pytest settings. The suite says what the port says and no more: where the port leaves a choice, it does
not look.
"""

from holdfast.testing.store_suite.admission import AdmissionSuite
from holdfast.testing.store_suite.audit import AuditSuite
from holdfast.testing.store_suite.changefeed import ChangeSuite
from holdfast.testing.store_suite.commit import CommitSuite
from holdfast.testing.store_suite.create import CreateSuite
from holdfast.testing.store_suite.dead_letters import LetterSuite
from holdfast.testing.store_suite.definitions import DefinitionSuite
from holdfast.testing.store_suite.deletion import DeletionSuite
from holdfast.testing.store_suite.families import FamilySuite
from holdfast.testing.store_suite.first_signals import FirstSignalSuite
from holdfast.testing.store_suite.heartbeats import BeatSuite
from holdfast.testing.store_suite.inbox import DeliverySuite
from holdfast.testing.store_suite.jobs import QueueSuite
from holdfast.testing.store_suite.leases import ClaimSuite
from holdfast.testing.store_suite.lifecycle import LifecycleSuite
from holdfast.testing.store_suite.node_lives import LivesSuite, LossSuite
from holdfast.testing.store_suite.outcomes import OutcomeSuite
from holdfast.testing.store_suite.plans import PlanSuite
from holdfast.testing.store_suite.queries import FindSuite
from holdfast.testing.store_suite.retention import PurgeSuite
from holdfast.testing.store_suite.signals import SignalSuite
from holdfast.testing.store_suite.tokens import AccessSuite
from holdfast.testing.store_suite.turns import TurnSuite


class StoreSuite(
    CreateSuite,
    SignalSuite,
    FirstSignalSuite,
    DeliverySuite,
    OutcomeSuite,
    CommitSuite,
    TurnSuite,
    ClaimSuite,
    LivesSuite,
    LossSuite,
    PlanSuite,
    QueueSuite,
    AdmissionSuite,
    BeatSuite,
    LetterSuite,
    FamilySuite,
    FindSuite,
    AccessSuite,
    DefinitionSuite,
    AuditSuite,
    ChangeSuite,
    PurgeSuite,
    DeletionSuite,
    LifecycleSuite,
):
    """Every test of every verb. Subclass it once for each store."""
