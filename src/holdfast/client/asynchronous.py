"""The client for code with an event loop: every operation as a method, in process or over HTTP."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from holdfast.app import App
from holdfast.client import resources
from holdfast.client.calls import Calls
from holdfast.client.transports import Http, InProcess, Transport
from holdfast.clock import Ids, Rng, SystemIds, SystemRng
from holdfast.core.timing import Retry
from holdfast.errors import RunCancelled, RunFailed, RunTimedOut
from holdfast.program.values import PLAIN, Converter, Values
from holdfast.service.context import OPEN, Principal
from holdfast.service.operations.runs import RunOutcome

T = TypeVar("T")

RETRY = Retry(max_attempts=5, initial_ms=100, most_ms=5_000, jitter=0.5)
"""The retry policy for failed requests: everything that changes something carries an id, except `tokens.create`."""

WAIT_S = 20.0
"""How long one request waits for a run to finish, before the next one is sent."""


class Client:
    """Calls a service by its address, or an app in this process.

    Failed requests are sent again. Requests that change something carry an id, yours or a new one, so that a repeated
    request takes effect once. Errors are those of `holdfast.errors`.
    """

    def __init__(
        self,
        to: str | App,
        *,
        token: str | None = None,
        principal: Principal = OPEN,
        retry: Retry = RETRY,
        timeout_s: float = 60.0,
        transport: Any = None,
        ids: Ids | None = None,
        rng: Rng | None = None,
        converters: Sequence[Converter[Any]] = (),
    ) -> None:
        """`token` is sent to a service; `principal` is the caller, in process. `transport` is httpx's, for tests.

        `converters` are those of the app; in process the client knows them.
        """
        self._values = to.registry.values if isinstance(to, App) else Values(converters)
        over: Transport = (
            InProcess(to, principal) if isinstance(to, App) else Http(to, token, timeout_s, transport, self._values)
        )
        self._calls = Calls(over, retry, ids or SystemIds(), rng or SystemRng())
        self.runs = resources.Runs(self._calls)
        self.signals = resources.Signals(self._calls)
        self.tasks = resources.Tasks(self._calls)
        self.activities = resources.Activities(self._calls)
        self.letters = resources.Letters(self._calls)
        self.workflows = resources.Workflows(self._calls)
        self.plans = resources.Plans(self._calls)
        self.system = resources.System(self._calls)
        self.tokens = resources.Tokens(self._calls)
        self.audit = resources.Audit(self._calls)
        self.retention = resources.Retention(self._calls)
        self.schedules = resources.Schedules(self._calls)
        self.archive = resources.Archive(self._calls)
        self.sinks = resources.Sinks(self._calls)
        self.bus = resources.Bus(self._calls)
        self.tenants = resources.Tenants(self._calls)
        self.streams = resources.Streams(self._calls)
        self.lists = resources.Lists(self._calls)
        self.artifacts = resources.Artifacts(self._calls)

    async def result(self, run_id: str, kind: Any = Any) -> Any:
        """Wait for a run to finish; return its result, as this type, or raise `RunFailed` or `RunCancelled`."""
        while not (outcome := await self.runs.result(run_id, wait_s=WAIT_S)).is_finished:
            pass
        return parse_value(outcome, kind, self._values)

    async def close(self) -> None:
        """Close connections."""
        await self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def parse_value(outcome: RunOutcome, kind: Any = Any, values: Values = PLAIN) -> Any:
    """Return the result of a finished run, as this type, or raise why it has none."""
    if outcome.error is None:
        return values.decode(outcome.result, kind)
    if outcome.error.code == RunCancelled.code:
        raise RunCancelled(outcome.error.message, run_id=outcome.run_id, reason=outcome.reason)
    if outcome.is_timed_out:
        raise RunTimedOut(f"run {outcome.run_id} failed: {outcome.error.message}", outcome.error, run_id=outcome.run_id)
    message = f"run {outcome.run_id} failed: {outcome.error}"
    raise RunFailed(message, outcome.error, run_id=outcome.run_id)
