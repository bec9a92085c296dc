"""The runtime: the operations on runs while an app has a node open. Each verb has one path, which is here.

`App`, `RunHandle`, the service's operations (and with them REST, JSON-RPC, the client and the command line) call these
methods. None of them accesses the node's parts. The caller of a service is an argument, `caller`: it is passed to the
authoriser, recorded in the run, and named in the audit log. Without one, the request comes from code in this process.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial
from typing import Any
from weakref import ref

from msgspec import Raw

from holdfast.clock import Ids, Rng, SystemRng
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.audit import AuditEntry, Caller, audit_entry
from holdfast.core.dead_letters import Settlement
from holdfast.core.decide import update_step_id
from holdfast.core.events import Event
from holdfast.core.index_rows import Wait
from holdfast.core.keys import (
    CALLBACK,
    ActivityToken,
    check_signal_id,
    check_signal_name,
    prefixed,
    read_activity_token,
    require_step_name,
    signal_uuid,
)
from holdfast.core.messages import UPDATE_SIGNAL, AcceptedSignalResult, SignalRequest
from holdfast.core.plans import STORE_PLAN
from holdfast.core.state import TERMINAL
from holdfast.engine.activities.async_completion import report_error, report_heartbeat, report_result
from holdfast.engine.activities.context import activity_context
from holdfast.engine.bus.relays import Relays
from holdfast.engine.history import head_of, read_history, wait_for_event
from holdfast.engine.host_locks import HeldLock
from holdfast.engine.inbox.authorization import Authoriser, Permissions
from holdfast.engine.inbox.dead_letters import DeadLetterHandle, find_dead_letters, settle_dead_letter
from holdfast.engine.inbox.operator_commands import CommandSender, OperatorCommand
from holdfast.engine.inbox.receipts import Receipt, Unconsumed, mailbox_of, open_waits, receipt_of
from holdfast.engine.inbox.signals import Outgoing, SignalSender, audited, request_of
from holdfast.engine.inbox.tasks import Tasks
from holdfast.engine.node import Node
from holdfast.engine.plan_sources import PlanSources
from holdfast.engine.plans import Plans
from holdfast.engine.retention import LOCK as RETENTION_LOCK
from holdfast.engine.retention import Retention, RetentionDuty, archive_at
from holdfast.engine.run_queries import RunQueries
from holdfast.engine.schedules import Declaration, Schedules
from holdfast.engine.start.admission import Dequeued
from holdfast.engine.start.forks import Forks
from holdfast.engine.start.requests import StartRequests, starting_activity
from holdfast.engine.stream_reading import StreamHub
from holdfast.errors import (
    ArtifactMissing,
    CallerError,
    EngineError,
    HoldfastError,
    InvalidInput,
    RunTerminal,
    StoreUnavailable,
    UpdateFailed,
)
from holdfast.limits import Limits
from holdfast.program.callbacks import CallbackTerms
from holdfast.program.definitions import (
    START_RUN,
    UPDATE_RUN,
    ActivityDefinition,
    UpdateRequest,
    WorkflowDefinition,
    built_in,
)
from holdfast.program.middleware import ClientCall, call_through
from holdfast.registry import Registry
from holdfast.store import port
from holdfast.store.artifacts import Artifacts
from holdfast.store.decisions import no_such_run
from holdfast.store.joined import JoinedStore
from holdfast.store.queries import DeadLetterQuery
from holdfast.store.types import STREAMS
from holdfast.store.validation import RECONCILIATION, id_of_request, require_conditional_batch

logger = logging.getLogger("holdfast.node")


class Runtime:
    """An app's store, node and registry while they are open, and every verb that callers have."""

    def __init__(
        self,
        store: port.Store,
        node: Node,
        registry: Registry,
        authoriser: Authoriser | None,
        ids: Ids,
        artifacts: Artifacts | None = None,
        plan_sources: PlanSources | None = None,
        retention: Retention | None = None,
        rng: Rng | None = None,
        app: str = "",
    ) -> None:
        self._rng = rng or SystemRng()
        self.store = store
        self.registry = registry
        self.ids = ids
        self._node = node
        self._middleware = registry.middleware.client
        self.artifacts = artifacts
        """Where artifacts and large values are kept, if there is artifact storage."""
        self.plans = Plans(store, registry, plan_sources or PlanSources())
        """The plans of the installation."""
        registry.built_in[STORE_PLAN] = self.plans.activity()
        registry.built_in[UPDATE_RUN] = _updating_activity(ref(self))
        registry.built_in[CALLBACK] = built_in(_await_callback, CALLBACK)
        poll_s = node.options.safety_poll_s
        registry.lacks_streams = STREAMS in store.capabilities.lacking
        if not store.capabilities.conditional_batch:
            registry.refuse_records = partial(require_conditional_batch, store, RECONCILIATION)
        self.streams = StreamHub(store, poll_s)
        """The streams that are read in this process."""
        self._queries = RunQueries(store, registry, node.run_cache, node.name, poll_s, ids)
        if node.options.takes_runs:
            node.background.append(self._queries.serve)
        self.relays: Relays | None = None
        """The relays of the event bus, if this node has them."""
        self._permissions = Permissions(authoriser, store, ids)
        self._signals = SignalSender(store, registry, self._permissions, node.turn_loop.expect)
        self._commands = CommandSender(store, registry, self._permissions, ids)
        self._requests = StartRequests(
            store, node, registry, self._permissions, self._signals, self._commands, self.plans, ids
        )
        self.start = self._requests.start
        """Start a run: see `StartRequests.start`."""
        registry.built_in[START_RUN] = starting_activity(ref(self._requests))
        self._forks = Forks(store, registry, self._commands, ids, self._requests.create_again)
        policy = retention or Retention()
        archive = archive_at(policy.archive, store)
        self.retention = RetentionDuty(node.name, store, policy, ids, archive, self._cancel_stale)
        """Deletes what is past its window; without a policy, only expired acceptance records."""
        if retention is not None and node.options.takes_runs:
            node.add_duty(RETENTION_LOCK, self.retention.run)
        self.schedules = Schedules(
            app,
            store,
            registry,
            self.plans,
            ids,
            self._requests.prepare_tick,
            self._cancel_for_tick,
            self.wait_finished,
            self._requests.permit_start,
            node.options.safety_poll_s,
        )
        """The schedules of the app."""
        if node.options.takes_runs:
            node.add_duty(prefixed("schedules of ", app), self.schedules.fire, self.schedules.until_needed)
            if artifacts is not None:
                node.add_duty(prefixed("artifacts of ", app), partial(self._sweep_artifacts, artifacts))

    async def open(self) -> None:
        """Publish what the workflows declare, and start the node."""
        await self._requests.publish()
        self._node.turn_processor.declarations = self._signals.declarations
        if self.artifacts is not None and self._node.works:
            await self._node.use_artifacts(self.artifacts)
        if self._node.options.takes_runs:
            for declared in self.registry.schedules.values():
                await self.schedules.declare(Declaration(declared))
        relays = await self._declared_relays()
        await self._node.start()
        if relays is not None:  # nothing that can fail comes after the start: a caller who gets an error has no node
            relays.start()
            self.relays = relays

    async def _declared_relays(self) -> Relays | None:
        """Store the sinks that the app declares, and return the relays of this node, if it has any."""
        node = self._node
        has_relays = node.options.takes_runs if node.options.relays is None else node.options.relays
        if not has_relays:
            return None
        relays = Relays(node.name, self.store, self.registry, self._rng, node.options, lambda: node.is_at_rest)
        await relays.declare(list(self.registry.sinks.values()))
        return relays

    async def _sweep_artifacts(self, artifacts: Artifacts, held: HeldLock) -> None:
        """Delete artifacts that belong to no run any more, periodically, for as long as this node has the lock.

        It is safe on several nodes at once: the lock only saves work, because each sweep lists the whole artifact
        store.
        """
        while True:
            await asyncio.sleep(self._node.options.artifact_sweep_s)
            try:
                count = await artifacts.sweep(self.store)
            except HoldfastError:
                logger.exception("artifacts without a run could not be deleted; retrying later")
            else:
                logger.info("%d artifacts and values without a run were deleted", count)

    async def close(self) -> None:
        """Stop sending signals, then stop the node."""
        self.streams.close()
        if self.relays is not None:
            self.relays.cancel()
        try:
            await self._signals.stop()
        except (Exception, asyncio.CancelledError):  # not GeneratorExit: a coroutine that is being closed cannot await
            await self._node.stop()
            raise
        await self._node.stop()
        if self.relays is not None:  # not before: its end must not resume a close that is abandoned here
            await self.relays.stop()

    # --- the node

    @property
    def node_name(self) -> str:
        """The node's name, including the part that is unique to this start of it."""
        return self._node.name

    @property
    def failure(self) -> EngineError | None:
        """The error with which the node has failed, or None."""
        return self._node.failure

    @property
    def limits(self) -> Limits:
        """The limits of this installation."""
        return self._node.limits

    @property
    def activities_running(self) -> int:
        """How many activities are running on the node."""
        return self._node.activities_running

    @property
    def runs_awaited(self) -> int:
        """How many runs callers of this process wait for."""
        return self._node.completion_waiters.runs_awaited

    def audit(
        self, caller: Caller | None, *, actor: str = "", subject: str = "", detail: str = ""
    ) -> AuditEntry | None:
        """Return the audit log's entry for an operation of a caller; None for code in this process."""
        return audit_entry(caller, self.ids.new_id, actor=actor, subject=subject, detail=detail)

    # --- starting runs

    async def _cancel_for_tick(self, run_id: str, signal_id: str) -> None:
        """Cancel a run of a schedule because its next tick is due."""
        command = OperatorCommand(name="CANCEL", reason="the next tick of its schedule is due", signal_id=signal_id)
        try:
            await self._commands.send(run_id, command, None, wait=False)
        except CallerError:  # it has finished, or was deleted
            logger.debug("run %s is not cancelled", run_id, exc_info=True)

    async def dequeue_and_start(self) -> list[Dequeued]:
        """Admit queued runs, start them here if the node takes runs, and return what happened to each."""
        return await self._node.run_queue.dequeue_and_start()

    # --- signals

    async def signal(
        self,
        request: SignalRequest,
        definition: WorkflowDefinition | None = None,
        caller: Caller | None = None,
        connection: Any = None,
    ) -> AcceptedSignalResult:
        """Send a signal. It is durable when this returns. `definition` is the run's workflow, if it is known.

        With a `connection` it is sent in the transaction that the caller has begun there.
        """
        check_signal_name(request.name)
        if caller is not None:
            request = audited(request, caller, self.ids)
        joined = None if connection is None else self.store.joined(connection)
        if not self._middleware:
            return await self._signals.send(request, definition, caller, joined)
        call = ClientCall(
            verb="signal", run_id=request.run_id, name=request.name, caller=caller, raw_input=request.payload
        )
        then = partial(self._send_after, request, definition, caller, joined)
        accepted: AcceptedSignalResult = await call_through(self._middleware, call, then)
        return accepted

    def _send_after(
        self,
        request: SignalRequest,
        definition: WorkflowDefinition | None,
        caller: Caller | None,
        joined: JoinedStore | None,
        _: ClientCall,
    ) -> Awaitable[AcceptedSignalResult]:
        return self._signals.send(request, definition, caller, joined)

    async def signal_many(
        self, items: Sequence[Outgoing], caller: Caller | None = None
    ) -> list[AcceptedSignalResult | CallerError]:
        """Send signals, and return for each, in order, its result or the error that refuses it."""
        given: Any = items
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            raise InvalidInput(f"signals is a list of signals to send, not {given!r}", field="signals")
        if not self._middleware:
            return await self._signals.send_many(items, caller, self.ids)
        return [await self._send_one(item, caller) for item in items]

    async def _send_one(self, item: Outgoing, caller: Caller | None) -> AcceptedSignalResult | CallerError:
        """Send one of many signals through middleware."""

        async def then(_: Any) -> AcceptedSignalResult:
            [answer] = await self._signals.send_many([item], caller, self.ids)
            if isinstance(answer, CallerError):
                raise answer
            return answer

        try:
            asked = request_of(item, self.registry.values)
            call = ClientCall(
                verb="signal", run_id=asked.run_id, name=asked.name, caller=caller, raw_input=asked.payload
            )
            accepted: AcceptedSignalResult = await call_through(self._middleware, call, then)
            return accepted
        except CallerError as refusal:
            return refusal

    async def receipt(self, run_id: str, name: str, signal_id: str, storage_key: str | None = None) -> Receipt:
        """Return what happened to a signal: the one with this storage key, otherwise the last with this name and id."""
        return await receipt_of(self.store, run_id, name, signal_id, storage_key)

    async def mailbox(self, run_id: str) -> list[Unconsumed]:
        """Return the signals that no wait has taken, oldest first, with their age."""
        return await mailbox_of(self.store, run_id)

    def waits(self, run_id: str | None = None, name: str | None = None) -> AsyncIterator[Wait]:
        """Iterate over the open waits: of a run, for a signal's name, or all."""
        return open_waits(self.store, run_id, name)

    # --- questions

    async def query(self, run_id: str, name: str, arguments: Raw, caller: Caller | None = None) -> Raw:
        """Query the present state of a run. The run's program answers; nothing is recorded."""
        require_step_name("query name", name)
        if self._middleware:
            call = ClientCall(verb="query", run_id=run_id, name=name, caller=caller, raw_input=arguments)
            answer: Raw = await call_through(
                self._middleware, call, lambda _: self._query(run_id, name, arguments, caller)
            )
            return answer
        return await self._query(run_id, name, arguments, caller)

    async def _query(self, run_id: str, name: str, arguments: Raw, caller: Caller | None) -> Raw:
        if self._permissions.is_needed:
            await self._permissions.check_query(run_id, name, arguments, caller)
        return await self._queries.ask(run_id, name, arguments)

    async def handlers(self, run_id: str) -> Raw:
        """Return which queries and updates a run answers, with JSON Schemas: `{"queries": …, "updates": …}`."""
        return await self._queries.handlers(run_id)

    async def update(
        self, run_id: str, name: str, arguments: Any, update_id: str | None = None, caller: Caller | None = None
    ) -> Raw:
        """Send an update to a run and wait for its answer. With an `update_id` a retry gets the first answer."""
        require_step_name("update name", name)
        if self._middleware:
            given = self.registry.values.encode(arguments)
            call = ClientCall(verb="update", run_id=run_id, name=name, caller=caller, raw_input=given)
            answer: Raw = await call_through(
                self._middleware, call, lambda _: self._update(run_id, name, arguments, update_id, caller)
            )
            return answer
        return await self._update(run_id, name, arguments, update_id, caller)

    async def _update(
        self, run_id: str, name: str, arguments: Any, update_id: str | None, caller: Caller | None
    ) -> Raw:
        problem = None if update_id is None else check_signal_id(update_id, "update_id")
        if problem is not None:
            raise problem
        request = SignalRequest(
            run_id=run_id,
            name=UPDATE_SIGNAL,
            payload=self.registry.values.encode({"name": name, "input": arguments}),
            signal_id=id_of_request(self.store, update_id, self.ids),
            audit=audit_entry(caller, self.ids.new_id, subject=name),
        )
        before = await head_of(self.store, run_id)
        if self._permissions.is_needed:
            await self._permissions.check_signal(request, caller)
        [answer] = await self.store.deliver([request])
        if isinstance(answer, port.Refused):
            raise answer.error
        assert answer.result is not None
        after = before.version if isinstance(answer, port.Accepted) else 0
        step_id = update_step_id(signal_uuid(answer.result.signal_storage_key))

        def is_answer(event: Event) -> bool:
            return event.step_id == step_id and isinstance(event.data, e.UpdateCompleted)

        body = (await wait_for_event(self.store, run_id, after, is_answer)).data
        assert isinstance(body, e.UpdateCompleted)
        if body.error is not None and body.error.code == RunTerminal.code:
            raise RunTerminal(f"run {run_id} ended before it had answered", run_id=run_id)
        if body.error is not None:
            raise UpdateFailed(f"update {name!r}: {body.error}", body.error)
        return body.result

    async def update_for_run(self, request: UpdateRequest) -> Raw:
        """Send an update to a run on behalf of a workflow of the same tenant, project and environment."""
        own = await head_of(self.store, activity_context().run_id)
        other = await head_of(self.store, request.run_id)
        place = own.tenant, own.project, own.environment
        is_near = (other.tenant, other.project, other.environment) == place
        if not is_near and not self.registry.allow_cross_tenant_signals:
            raise no_such_run(request.run_id)
        return await self.update(request.run_id, request.name, request.arguments, request.update_id)

    async def head(self, run_id: str) -> port.RunHead:
        """Return a run without its history."""
        return await head_of(self.store, run_id)

    async def events(self, run_id: str) -> list[Event]:
        """Return the whole history of a run."""
        events = await read_history(self.store, run_id)
        if not events:
            await head_of(self.store, run_id)  # raises if the run does not exist: every run has events
        return events

    async def wait_finished(self, run_id: str, *, is_known: bool = False) -> Event:
        """Wait for a run to finish, on any node, and return its last event.

        With `is_known` this process has started the run, so its existence need not be checked first.
        """
        node, waiters = self._node, self._node.completion_waiters
        if waiters.problem is not None and node.failure is None:
            return await self._last_event_after_close(run_id, waiters.problem)
        finished = waiters.wait(run_id)
        try:
            if not node.owned_runs.owns(run_id):
                finish = await waiters.end_of(run_id, is_known=is_known) or await finished
            else:
                finish = await finished
        finally:
            waiters.let_go(run_id, finished)
        return await self._event_at(run_id, finish.version) if finish.last is None else finish.last

    async def _last_event_after_close(self, run_id: str, problem: EngineError) -> Event:
        """Return the last event of a finished run after the node was stopped, if the store is still open."""
        try:
            head = await head_of(self.store, run_id)
        except StoreUnavailable as closed:
            none_open = f"no node is open: ask `app.run({run_id!r})` inside `async with app.node(...)`"
            raise EngineError(none_open) from closed
        if head.status not in TERMINAL:
            raise problem
        return await self._event_at(run_id, head.version)

    async def _event_at(self, run_id: str, version: int) -> Event:
        [event] = await self.store.read_events(run_id, version - 1)
        return event

    # --- artifacts

    def open_artifact(self, artifact: e.ArtifactRef) -> AsyncIterator[bytes]:
        """Yield the bytes of an artifact. `ArtifactCorrupt` is raised at the end if they are not the stored bytes."""
        if self.artifacts is None:
            raise ArtifactMissing("this process has no artifact store", uri=artifact.uri)
        return self.artifacts.open(artifact)

    # --- operators and people

    async def command(
        self, run_id: str, command: OperatorCommand, caller: Caller | None = None, *, wait: bool = False
    ) -> None:
        """Send an operator's command. It is durable when this returns; with `wait`, the run has decided.

        A rejection by the run raises `Conflict`, with the reason; one by the authoriser raises `NotPermitted`.
        """
        if not self._middleware:
            await self._commands.send(run_id, command, caller, wait=wait)
            return
        call = ClientCall(verb="command", run_id=run_id, name=command.name, caller=caller)
        await call_through(self._middleware, call, lambda _: self._commands.send(run_id, command, caller, wait=wait))

    async def _cancel_stale(self, run_id: str, reason: str) -> None:
        await self.command(run_id, OperatorCommand(name="CANCEL", reason=reason, actor="retention"))

    async def retry_run(
        self, run_id: str, command: OperatorCommand, caller: Caller | None = None, *, from_start: bool = False
    ) -> str:
        """Retry a finished run as a new run, and return its id. Raise `Conflict` if the run is unfinished.

        A failed run continues from the step that failed, unless `from_start`.
        """
        return await self._forks.retry_run(run_id, command, caller, self._node.name, from_start=from_start)

    async def fork_run(
        self,
        run_id: str,
        command: OperatorCommand,
        caller: Caller | None = None,
        *,
        at: int | None = None,
        input: Raw | None = None,
        request_id: str = "",
    ) -> tuple[str, int]:
        """Start a run with the recorded results of another up to an event; return its id, and that event's number."""
        return await self._forks.fork_run(
            run_id, at, caller, self._node.name, request_id=request_id, input=input, command=command
        )

    def tasks(self, caller: Caller | None = None, store: port.Store | None = None) -> Tasks:
        """Return the tasks of all runs; with a `store`, only those visible through it."""
        return Tasks(store or self.store, self.registry, self._permissions, self.ids, caller)

    async def dead_letters(self, query: DeadLetterQuery) -> list[DeadLetterHandle]:
        """Return the dead letters that match a query, the oldest first."""
        return await find_dead_letters(self.store, query)

    async def settle_dead_letter(
        self, letter_id: str, action: Settlement, *, actor: str = "", caller: Caller | None = None
    ) -> None:
        """Requeue a dead letter, or drop it."""
        audit = audit_entry(caller, self.ids.new_id, actor=actor)
        await settle_dead_letter(self.store, letter_id, action, actor, audit)

    # --- activities that are completed later

    def activity_token(self, token: str) -> ActivityToken:
        """Decode a completion token; raise `InvalidInput` if it was not made here."""
        return read_activity_token(token, self._node.completion_key)

    async def complete_activity(
        self, token: str, result: Any, *, actor: str = "", caller: Caller | None = None
    ) -> None:
        """Report the result of an activity that ended by `complete_later`. It is durable when this returns."""
        audit = self._audit_outcome(token, actor, caller)
        await report_result(self.store, self._node.completion_key, token, result, self.limits, self.registry, audit)

    async def fail_activity(
        self, token: str, error: BaseException | str, *, actor: str = "", caller: Caller | None = None
    ) -> None:
        """Report that such an activity has failed. It is durable when this returns."""
        audit = self._audit_outcome(token, actor, caller)
        await report_error(self.store, self._node.completion_key, token, error, self.registry, audit)

    async def heartbeat_activity(self, token: str) -> None:
        """Report that the system that answers a callback is still working."""
        await report_heartbeat(self.store, self._node.completion_key, token)

    def _audit_outcome(self, token: str, actor: str, caller: Caller | None) -> AuditEntry | None:
        if caller is None:
            return None
        return audit_entry(caller, self.ids.new_id, actor=actor, subject=self.activity_token(token).step_id)


async def _await_callback(terms: CallbackTerms) -> Any:
    """End without an outcome: the outcome of a callback is reported with its token."""
    activity_context().complete_later()


def _updating_activity(runtime: "ref[Runtime]") -> ActivityDefinition:
    """Return the activity that sends updates on behalf of workflows."""

    async def update_run(request: UpdateRequest) -> Any:
        found = runtime()
        if found is None:
            raise StoreUnavailable("the node was closed before the update was answered")
        return codec.decode(await found.update_for_run(request), Any)

    return built_in(update_run, UPDATE_RUN, takes_slot=False)
