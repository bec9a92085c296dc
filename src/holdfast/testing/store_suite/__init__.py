"""The conformance suite: what every store must do, as tests.

A store's author subclasses it in a test module and defines how to create a store, and how to lose a record::

    class TestMyStore(StoreSuite):
        async def make_store(self, clock, limits):
            return MyStore(clock=clock, limits=limits)

        async def lose_acceptance_record(self, store, run_id, name, signal_id):
            ...

A store that other processes can open should override `make_peer` too. The tests are async methods: pytest-asyncio must
be in auto mode. The `contract` markers name the rules of `docs/contract.md`; a separate project registers the marker in
its pytest settings. The suite requires what the port requires and no more: where the port leaves a choice, it does not
check.
"""

from holdfast.testing.store_suite.admission import AdmissionSuite
from holdfast.testing.store_suite.audit import AuditSuite
from holdfast.testing.store_suite.bulletins import BulletinSuite
from holdfast.testing.store_suite.bus import BusSuite
from holdfast.testing.store_suite.call_limits import CallLimitSuite
from holdfast.testing.store_suite.changefeed import ChangefeedSuite
from holdfast.testing.store_suite.commit import CommitSuite
from holdfast.testing.store_suite.create import CreateSuite
from holdfast.testing.store_suite.dead_letters import DeadLetterSuite
from holdfast.testing.store_suite.debounce import DebounceSuite
from holdfast.testing.store_suite.definitions import DefinitionSuite
from holdfast.testing.store_suite.deletion import DeletionSuite
from holdfast.testing.store_suite.families import FamilySuite
from holdfast.testing.store_suite.first_signals import FirstSignalSuite
from holdfast.testing.store_suite.heartbeats import HeartbeatSuite
from holdfast.testing.store_suite.host_locks import HostLockSuite
from holdfast.testing.store_suite.inbox import InboxSuite
from holdfast.testing.store_suite.jobs import JobSuite
from holdfast.testing.store_suite.leases import LeaseSuite
from holdfast.testing.store_suite.lifecycle import LifecycleSuite
from holdfast.testing.store_suite.node_lives import LostNodeSuite, NodeLifeSuite
from holdfast.testing.store_suite.outcomes import OutcomeSuite
from holdfast.testing.store_suite.plans import PlanSuite
from holdfast.testing.store_suite.queries import QuerySuite
from holdfast.testing.store_suite.retention import RetentionSuite
from holdfast.testing.store_suite.reuse import ReuseSuite
from holdfast.testing.store_suite.schedules import ScheduleSuite
from holdfast.testing.store_suite.search import SearchSuite
from holdfast.testing.store_suite.signals import SignalSuite
from holdfast.testing.store_suite.stored_plans import StoredPlanSuite
from holdfast.testing.store_suite.streams import StreamSuite
from holdfast.testing.store_suite.tokens import TokenSuite
from holdfast.testing.store_suite.turns import TurnSuite


class StoreSuite(
    CreateSuite,
    SignalSuite,
    FirstSignalSuite,
    ReuseSuite,
    DebounceSuite,
    InboxSuite,
    OutcomeSuite,
    CommitSuite,
    TurnSuite,
    LeaseSuite,
    NodeLifeSuite,
    LostNodeSuite,
    HostLockSuite,
    PlanSuite,
    StoredPlanSuite,
    ScheduleSuite,
    JobSuite,
    CallLimitSuite,
    AdmissionSuite,
    HeartbeatSuite,
    DeadLetterSuite,
    FamilySuite,
    QuerySuite,
    SearchSuite,
    TokenSuite,
    DefinitionSuite,
    AuditSuite,
    ChangefeedSuite,
    BusSuite,
    BulletinSuite,
    StreamSuite,
    RetentionSuite,
    DeletionSuite,
    LifecycleSuite,
):
    """Every test of every verb. Subclass it once for each store."""
