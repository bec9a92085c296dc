"""Options of a node."""

from typing import Any

from msgspec import Struct

from holdfast.core.call_limits import is_limited, shown_queue
from holdfast.core.keys import check_name
from holdfast.errors import InvalidInput
from holdfast.limits import DURATION_MS, check_types
from holdfast.registry import TURN_S


class NodeOptions(Struct, frozen=True, kw_only=True):
    """How a node behaves. Durations end in `_ms` or `_s`."""

    lease_ms: int = 10_000
    """How long other nodes wait after this node's last renewal before they take over its runs."""

    claim_runs: int = 200
    """The largest number of runs in one claim."""

    activities_at_once: int = 200
    """The largest number of concurrent activities. Activities that are not async have a thread each."""

    cached_runs: int = 5_000
    """The largest number of runs in memory. Other runs are rebuilt from their histories when they continue."""

    safety_poll_s: float = 5.0
    """How often the node looks for work without a notification."""

    drain_s: float = 10.0
    """How long activities may continue after the node is asked to stop."""

    turn_s: float | None = TURN_S
    """How long workflow code may block the node before it is stopped. None or 0 sets no limit, for a debugger."""

    blocked_s: float = 60.0
    """How long the lease is renewed while the node's event loop is blocked by a turn or by other code."""

    queues: tuple[str, ...] = ()
    """The queues whose activities this node executes."""

    takes_runs: bool = True
    """Whether the node executes workflows. If not, it executes jobs of its queues, starts runs and sends signals."""

    visible_ms: int = 30_000
    """How long a job stays invisible to other nodes after this node's last heartbeat."""

    definition_grace_s: float | None = 30.0
    """How long a run may be due before it is paused if no live node has its definition. None: never paused."""

    write_latency_budget_ms: int = 3_000
    """How long a write to the store may take before it is logged, counted and raised as an alert."""

    fail_open: str = ""
    """The folder of a local journal. With it, activities may begin although the write of their start exceeds the
    budget, and a step fails if the commit of its result exceeds it. Without it (the default), everything waits for the
    store."""

    artifact_sweep_s: float = 3_600.0
    """How often artifacts and large values that belong to no run are deleted."""

    sample_s: float | None = 60.0
    """How often one process samples the installation for the health charts. None: this process takes no samples."""

    sample_keep_s: float = 86_400.0
    """How long samples are kept."""

    relays: bool | None = None
    """Whether this node relays the event bus. None: only if it executes workflows."""

    relay_events_s: int = 500
    """The largest number of events a second for each relay while the node executes runs. An idle node has no limit."""

    tune_gc: bool = False
    """Whether to run the garbage collector of the whole process less often while the node works, which saves time."""

    def __post_init__(self) -> None:
        check_types(self)
        grace_s: Any = self.definition_grace_s
        if grace_s is not None and not (isinstance(grace_s, int | float) and 0 < grace_s <= DURATION_MS / 1_000):
            text = f"definition_grace_s is a number of seconds above 0, or None, not {grace_s!r}"
            raise InvalidInput(text, field="definition_grace_s")
        for field in (
            "lease_ms",
            "claim_runs",
            "activities_at_once",
            "visible_ms",
            "write_latency_budget_ms",
            "relay_events_s",
        ):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise InvalidInput(f"{field} is a whole number from 1, not {value!r}", field=field)
        if type(self.cached_runs) is not int or self.cached_runs < 0:
            raise InvalidInput(f"cached_runs is a whole number from 0, not {self.cached_runs!r}", field="cached_runs")
        for field in ("sample_s", "sample_keep_s"):
            value = getattr(self, field)
            if value is None and field == "sample_s":
                continue
            if not isinstance(value, int | float) or not 0.1 <= value <= DURATION_MS / 1_000:
                raise InvalidInput(f"{field} is a number of seconds from 0.1, not {value!r}", field=field)
        for field in ("safety_poll_s", "drain_s", "turn_s", "blocked_s", "artifact_sweep_s"):
            value = getattr(self, field)
            if field == "turn_s" and value is None:
                continue
            if not isinstance(value, int | float) or not value >= 0:
                raise InvalidInput(f"{field} is a number of seconds, not {value!r}", field=field)
        if not isinstance(self.queues, tuple | list):
            raise InvalidInput(f'queues are a tuple of names, such as ("gpu",), not {self.queues!r}', field="queues")
        for queue in self.queues:
            problem = check_name("queues", queue)
            if problem is not None:
                raise problem
            if is_limited(queue):
                text = f"queue {queue!r}: calls under a limit are taken from it by nodes of {shown_queue(queue)!r}"
                raise InvalidInput(text, field="queues")
