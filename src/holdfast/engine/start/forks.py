"""Runs that are made from other runs: retries of finished runs, and forks that begin with recorded results.

The core decides which part of a history is kept (`core/fork.py`). This module reads the history, compares it with the
code of this process where only the code can decide, and creates the new run, once for each command or request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from re import compile as pattern
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from holdfast.clock import Ids
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.audit import AuditEntry, Caller, audit_entry
from holdfast.core.events import EngineRunRef, Event
from holdfast.core.fork import (
    Fork,
    Kept,
    attempt_of,
    events_of,
    failures_since_rotation,
    find_cut,
    fork,
    has_handled_failure,
    kept_to_continue,
    kept_until,
    without,
)
from holdfast.core.index_rows import index_changes, record_changes, runtime_snapshot
from holdfast.core.instants import Instant
from holdfast.core.keys import check_name, descended, fork_tag, is_lock, retry_tag
from holdfast.core.plans import is_plan
from holdfast.core.state import FAILED, TERMINAL, RunState
from holdfast.engine.history import head_of, read_history, since_rotation
from holdfast.engine.inbox.operator_commands import CommandSender, OperatorCommand, conflict
from holdfast.engine.plans import input_of_retry
from holdfast.engine.turns.draft import prepare_run, start_key
from holdfast.engine.turns.execute import rebuild
from holdfast.errors import Conflict, CorruptHistory, InvalidInput, RunTerminal
from holdfast.limits import NAME_BYTES
from holdfast.registry import Registry
from holdfast.store import port
from holdfast.store.artifacts import SCHEME, runs_of_artifacts
from holdfast.store.decisions import no_such_run
from holdfast.store.payloads import refuse_sealed

MOST_REPLAYED = 20_000
"""How many events are replayed to find those earlier failures of a failed run that a retry can omit."""

_REFERENCE = pattern(rb'"(%b[^"]+)"' % SCHEME.encode())

Create = Callable[[port.NewRun, Instant], Awaitable[port.Created | port.Existing | port.Refused]]


class Forks:
    """Creates runs from other runs of one store. `create` creates a run that starts from the beginning."""

    def __init__(
        self, store: port.Store, registry: Registry, commands: CommandSender, ids: Ids, create: Create
    ) -> None:
        self._store = store
        self._registry = registry
        self._commands = commands
        self._ids = ids
        self._create = create

    async def retry_run(
        self, run_id: str, command: OperatorCommand, caller: Caller | None, node: str, *, from_start: bool = False
    ) -> str:
        """Retry a finished run as a new run, and return its id. Raise `Conflict` if the run is unfinished.

        A failed run continues from the step that failed, with the recorded results. With `from_start`, or after another
        outcome, the new run starts with the same input.
        """
        command = self._commands.checked(command)
        flag: Any = from_start
        if not isinstance(flag, bool):
            raise InvalidInput(f"from_start is True or False, not {flag!r}", field="from_start")
        await self._commands.authorise(run_id, command, "", caller)
        head = await head_of(self._store, run_id)
        _refuse_lock(head, command)
        if head.status not in TERMINAL:
            try:
                await self._commands.deliver(run_id, command, caller)
            except RunTerminal:
                head = await head_of(self._store, run_id)  # it has finished meanwhile
            else:
                raise Conflict(f"run {run_id} has not finished", run_id=run_id, command=command.name)
        kept = None if from_start else await self._kept_of_failed(head, command)
        if kept is None:
            return await self._start_again(head, command, caller, node, from_start=from_start)
        return await self._continue(head, kept, command, caller, node)

    async def _kept_of_failed(self, head: port.RunHead, command: OperatorCommand) -> Kept | None:
        """Return what a retry keeps of a failed run; None if it starts from the beginning.

        That is so if the workflow has compensated steps, or executed others, after the failed one. It is always so for
        a run of a plan, which keeps the results of its steps in another way (`input_of_retry`).
        """
        if head.status is not FAILED or is_plan(head.plan_id):
            return None
        history = await read_history(self._store, head.run_id, head.version)
        refuse_sealed(history)
        kept = kept_to_continue(history)
        first = kept.events[0].data
        assert isinstance(first, e.RunQueued)
        own = 0 if first.forked_from is None else first.forked_from.run_seq
        seen = [place for place in failures_since_rotation(kept) if place >= own]
        has_code = (first.plan_id, first.plan_version) in self._registry.workflows
        settled = await self._without(kept, seen) if seen and has_code else kept
        if settled is kept and has_handled_failure(history):
            if not has_code:
                problem = "after its failure it may have undone steps, which only a process with its code can decide"
                raise conflict(head.run_id, command, f"{problem}: retry it there, or from the start")
            return None
        return settled if len(settled.events) > 1 else None

    async def _without(self, kept: Kept, places: Sequence[int]) -> Kept:
        """Return the kept events without those failures at these positions that the program has not acted on.

        An example is a failure in a `gather` that waits for others: the events recorded afterwards are valid without
        it.
        """
        if self._fits(without(kept, places)):
            return without(kept, places)
        dropped: set[int] = set()
        tries = MOST_REPLAYED // len(kept.events)
        for place in places[: -tries - 1 : -1]:  # the last ones
            await asyncio.sleep(0)  # a replay blocks the event loop, which turns and leases share
            if self._fits(without(kept, dropped | {place})):
                dropped.add(place)
        return without(kept, dropped) if dropped else kept

    def _fits(self, kept: Kept) -> bool:
        """Return whether the code here matches the kept events."""
        try:
            cached, problem = rebuild(kept.events[0].run_id, since_rotation(events_of(kept)), self._registry)
        except CorruptHistory:
            return False
        cached.close()
        return problem is None

    async def _start_again(
        self, head: port.RunHead, command: OperatorCommand, caller: Caller | None, node: str, *, from_start: bool
    ) -> str:
        """Start the run that retries this one, once for each command, and return its id."""
        run_id = head.run_id
        page = await self._store.read_events(run_id, 0, 1)
        if not page:
            raise no_such_run(run_id)  # it was deleted since
        [first] = page
        refuse_sealed(page)
        assert isinstance(first.data, e.RunQueued)
        new_id, number = self._named_retry(run_id, command)
        queued = replace(
            first.data,
            run_request_id=f"retry:{number}",
            parent_run_id=None,
            parent_step_id=None,
            parent_token=None,
            depth=0,
            input=await self._input_of(head, first.data),
            start_at=None,
            debounce=None,
            needs=0,
            forked_from=None,
            retry_of=_retry_of(run_id, first.data, command),
            by=None if caller is None else caller.ref,
        )
        if queued.plan is not None:
            again = await input_of_retry(self._registry, self._store, head, queued, from_start=from_start)
            what = "what the steps that have succeeded have given to others"
            queued = replace(queued, input=codec.bounded(again, self._registry.limits.value_bytes, what))
        now = await self._store.now()
        new = prepare_run(
            new_id,
            queued,
            now,
            node,
            reference_key=head.reference_key,
            tags=descended(head.tags, retry_tag(run_id), lambda: _owners_named_in(queued.input)),
        )
        audit = audit_entry(caller, self._ids.new_id, actor=command.actor, subject=run_id, detail=command.reason)
        answer = await self._create(replace(new, audit=audit), now)
        if isinstance(answer, port.Refused):
            raise answer.error
        return answer.run_id

    async def _input_of(self, head: port.RunHead, queued: e.RunQueued) -> Raw:
        """Return the initial input of a run: that of its start, or of the last debounced start."""
        if queued.debounce is None:
            return queued.input
        bodies = [event.data for event in await read_history(self._store, head.run_id, head.version)]
        return next((body.input for body in reversed(bodies) if isinstance(body, e.InputReplaced)), queued.input)

    async def fork_run(
        self,
        run_id: str,
        at: int | None,
        caller: Caller | None,
        node: str,
        *,
        request_id: str = "",
        input: Raw | None = None,
        command: OperatorCommand,
    ) -> tuple[str, int]:
        """Start a run with the recorded results of another up to an event, once for each request.

        Return its id, and how many events it shares with the other: a history is cut at the end of a commit. Without
        `at` it continues from the failures that have ended a run (`kept_to_continue`).
        """
        command.check()
        if request_id != "" and (problem := check_name("request_id", request_id)) is not None:
            raise problem
        await self._commands.authorise(run_id, command, "", caller)
        head = await head_of(self._store, run_id)
        _refuse_lock(head, command)
        if at is not None and (type(at) is not int or not 1 <= at <= head.version):
            raise InvalidInput(f"at: the run has the events 1 to {head.version}, not {at}", field="at")
        history = await read_history(self._store, run_id, head.version)
        refuse_sealed(history)
        kept = kept_to_continue(history) if at is None else kept_until(history, find_cut(history, at))
        request_id = request_id or self._ids.new_id()
        number = codec.digest(f"{run_id}|fork|{request_id}".encode())
        fork_id = _fitting(f"{run_id}/fork-{number[:12]}", f"fork-{number}")
        forked = fork(kept, fork_id, await self._store.now(), EngineRunRef(node), input)
        place = "end" if at is None else forked.copied  # the end moves while the run continues
        new = _new_run(
            head,
            forked,
            run_request_id=f"fork:{number}",
            request_key=number,
            input_sha256=codec.digest(f"{run_id}|{place}|{codec.value_digest(forked.queued.input)}".encode()),
            tags=descended(head.tags, fork_tag(run_id), lambda: _owners_of_artifacts(forked.events)),
            audit=audit_entry(caller, self._ids.new_id, actor=command.actor, subject=run_id, detail=command.reason),
        )
        answer = await self._create_from(new)
        count = forked.copied if isinstance(answer, port.Created) else await self._count_copied(answer.run_id)
        return answer.run_id, count

    async def _create_from(self, new: port.NewRun) -> port.Created | port.Existing:
        [answer] = await self._store.create([new])
        if isinstance(answer, port.Refused):
            raise answer.error
        return answer

    async def _count_copied(self, run_id: str) -> int:
        """Return how many events an existing fork shares with the other run."""
        for first in await self._store.read_events(run_id, 0, 1):
            if isinstance(first.data, e.RunQueued) and first.data.forked_from is not None:
                return first.data.forked_from.run_seq
        raise no_such_run(run_id)  # it was deleted since

    async def _continue(
        self, head: port.RunHead, kept: Kept, command: OperatorCommand, caller: Caller | None, node: str
    ) -> str:
        """Start the run that continues a failed one from its failure, once for each command, and return its id."""
        run_id = head.run_id
        first = kept.events[0].data
        assert isinstance(first, e.RunQueued)
        new_id, number = self._named_retry(run_id, command)
        retry = _retry_of(run_id, first, command)
        forked = fork(kept, new_id, await self._store.now(), EngineRunRef(node), retry=retry)
        request = replace(first, run_request_id=f"retry:{number}")
        new = _new_run(
            head,
            forked,
            run_request_id=request.run_request_id,
            request_key=start_key(new_id, request, first.plan_version),
            input_sha256=codec.value_digest(await self._input_of(head, first)),
            tags=descended(head.tags, retry_tag(run_id), lambda: _owners_of_artifacts(forked.events)),
            audit=audit_entry(caller, self._ids.new_id, actor=command.actor, subject=run_id, detail=command.reason),
        )
        return (await self._create_from(new)).run_id

    def _named_retry(self, run_id: str, command: OperatorCommand) -> tuple[str, str]:
        """Return the id of the run that a retry creates, and a number that is the same for the same command.

        A command without an id never repeats another one.
        """
        number = codec.digest(f"{run_id}|{command.signal_id or self._ids.new_id()}".encode())
        return _fitting(f"{run_id}/retry-{number[:12]}", f"retry-{number}"), number


def _refuse_lock(head: port.RunHead, command: OperatorCommand) -> None:
    """Raise `Conflict` for a run that holds a lock: its retry or fork would have no run to hold the lock for."""
    if is_lock(head.plan_id):
        raise conflict(head.run_id, command, "a lock is held for the run that asked for it: retry or fork that run")


def _retry_of(run_id: str, queued: e.RunQueued, command: OperatorCommand) -> e.RetryOf:
    attempt = attempt_of(run_id, queued) + 1
    return e.RetryOf(run_id, command.signal_id or "", command.actor, command.reason, attempt)


def _owners_of_artifacts(events: Sequence[Event]) -> set[str]:
    """Return the runs that created the artifacts of these events."""
    bodies = [event.data for event in events if isinstance(event.data, e.StepCompleted)]
    return runs_of_artifacts(artifact.uri for body in bodies for artifact in body.artifacts)


def _owners_named_in(value: Raw) -> set[str]:
    """Return the runs that created the artifacts to which a value refers."""
    return runs_of_artifacts(found[1].decode() for found in _REFERENCE.finditer(bytes(value)))


def _new_run(
    head: port.RunHead,
    forked: Fork,
    *,
    run_request_id: str,
    request_key: str,
    input_sha256: str,
    tags: tuple[str, ...],
    audit: AuditEntry | None,
) -> port.NewRun:
    """Return the run to create, with its initial events, in the same tenant, project and environment."""
    before = RunState(run_id=forked.state.run_id)
    changes = index_changes(before, forked.state, forked.events)
    return port.NewRun(
        run_id=forked.state.run_id,
        tenant=head.tenant,
        project=head.project,
        environment=head.environment,
        plan_id=head.plan_id,
        plan_version=head.plan_version,
        run_request_id=run_request_id,
        request_key=request_key,
        input_sha256=input_sha256,
        snapshot=runtime_snapshot(forked.state),
        events=forked.events,
        messages=forked.messages,
        signals=forked.signals,
        waits_opened=changes.waits_opened,
        tasks=tuple(task for task in changes.tasks if task.status == "OPEN"),
        records=record_changes(before, forked.events),
        reference_key=head.reference_key,
        tags=tags,
        audit=audit,
    )


def _fitting(name: str, otherwise: str) -> str:
    return name if len(name.encode()) <= NAME_BYTES else otherwise
