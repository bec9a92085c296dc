"""What an app has open: the store, the node, the sender. Starts runs by definition, as `App.start` and services do."""

from collections.abc import Mapping

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.clock import Ids
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.messages import SignalRequest
from holdfast.core.names import check_name
from holdfast.engine.inbox.authorization import Permits, check_start, permits_of
from holdfast.engine.inbox.operator_commands import Caller, Operators
from holdfast.engine.inbox.signals import FirstSignal, Sender, first_signal
from holdfast.engine.node import Node
from holdfast.engine.turns.draft import start_run
from holdfast.errors import InvalidInput, NotFound
from holdfast.limits import PRIORITY
from holdfast.program.definitions import WorkflowDefinition
from holdfast.store import port

Workflows = Mapping[tuple[str, str], WorkflowDefinition]


class Started(Struct, frozen=True):
    """A run that is there now, by this request or by an earlier one, and how its first signals were answered."""

    run_id: str
    workflow_version: str
    """The version that it was started with, which is that of the earlier request, if there was one."""
    signals: tuple[port.Delivered, ...] = ()


class Opened(Struct, frozen=True):
    """What an app has open, for as long as its node is."""

    store: port.Store
    node: Node
    sender: Sender
    operators: Operators
    workflows: Workflows
    ids: Ids

    def operators_for(self, caller: Caller | None) -> Operators:
        """Return who may do what, for somebody who asks through a service."""
        operators = self.operators
        return operators if caller is None else replace(operators, caller=caller)

    def permits(self, caller: Caller | None = None) -> Permits | None:
        """Return who is asked about what is sent to runs, or None if nobody is."""
        return permits_of(self.operators_for(caller), self.store)

    def workflow(self, name: str, version: str | None = None) -> WorkflowDefinition:
        """Return a definition by its name; without a version, the one that was registered last."""
        if version is not None and (name, version) in self.workflows:
            return self.workflows[name, version]
        known = {version: definition for (of, version), definition in self.workflows.items() if of == name}
        if not known:
            raise NotFound(f"there is no workflow {name!r} here", workflow=name)
        if version is not None:
            problem = f"there is no version {version!r} of workflow {name!r} here; there are {sorted(known)}"
            raise NotFound(problem, workflow=name, version=version)
        return next(reversed(known.values()))

    async def start(
        self,
        definition: WorkflowDefinition,
        input: Raw,
        *,
        request_id: str | None = None,
        run_id: str | None = None,
        tenant: str = "default",
        project: str = "default",
        environment: str = "default",
        reference_key: str | None = None,
        tags: tuple[str, ...] = (),
        priority: int = 0,
        with_signal: FirstSignal | None = None,
        caller: Caller | None = None,
        names_version: bool = False,
    ) -> Started:
        """Start a run with this input, which fits the definition. When this returns it is durable.

        `names_version`: the caller asked for this very version of the workflow, and it is a part of the request.
        """
        if self.node.failure is not None:
            raise self.node.failure
        request_id = "" if request_id is None else request_id
        _check_start(run_id, request_id, tenant, project, environment, priority)
        _check_size(input, definition.name, self.node.limits.value_bytes)
        operators = self.operators_for(caller)
        queued = e.RunQueued(
            definition.name,
            definition.version,
            tenant,
            project,
            environment,
            run_request_id=request_id,
            input=input,
            by=operators.by,
        )
        if operators.authoriser is not None:
            await check_start(operators, queued, run_id)
        if not self.sender.declarations.is_published:  # what was registered since the node was opened
            await self.sender.declarations.publish()
        now = await self.store.now()
        new = start_run(
            run_id or self.ids.new_id(),
            queued,
            now,
            self.node.name,
            reference_key=reference_key,
            tags=tags,
            names_version=names_version,
        )
        if caller is not None:
            new = replace(new, audit=operators.audit(subject=definition.name))
        if with_signal is not None:
            signal = self._first_signal(new.run_id, with_signal, definition, operators)
            permits = self.permits(caller)
            if permits is not None:
                await permits.check_first(signal, queued, run_id)
            new = replace(new, signals=(signal,))
        new = self.node.run_queue.with_admission(new, priority)
        answer = await self.node.starter.create(new, now, is_unheard_of=run_id is None and not request_id)
        if isinstance(answer, port.Refused):
            raise answer.error
        self.node.run_queue.notice_start(new)
        version = definition.version
        if isinstance(answer, port.Existing) and not names_version:  # by an earlier release, perhaps
            [existing] = await self.store.load([answer.run_id])
            version = version if existing is None else existing.head.plan_version
        return Started(answer.run_id, version, answer.signals)

    def _first_signal(
        self, run_id: str, given: FirstSignal, definition: WorkflowDefinition, operators: Operators
    ) -> SignalRequest:
        """Return the signal that comes with a start. It has an id, so that a lost answer may be asked for again."""
        signal = first_signal(run_id, given, definition)
        signal_id = self.ids.new_id() if signal.signal_id is None else signal.signal_id
        audit = operators.audit(actor=signal.actor, subject=signal.name)
        return replace(signal, signal_id=signal_id, audit=audit)


def _check_size(input: Raw, name: str, most_bytes: int) -> None:
    if len(input) > most_bytes:  # looked at here, because most are small
        codec.bounded(input, most_bytes, f"the input of {name!r}")


def _check_start(
    run_id: str | None, request_id: str, tenant: str, project: str, environment: str, priority: int
) -> None:
    """Refuse the start of a run before anything is made of it that could not be read again."""
    problem = None
    for field, place in (("tenant", tenant), ("project", project), ("environment", environment)):
        if problem is None and place != "default":
            problem = check_name(field, place)
    if problem is None and request_id != "":
        problem = check_name("request_id", request_id)
    if problem is None and run_id is not None:
        problem = check_name("run_id", run_id)
    if problem is not None:
        raise problem
    if run_id is not None and "/" in run_id:
        raise InvalidInput("run_id: a slash is for the ids of children", field="run_id")
    if type(priority) is not int or not -PRIORITY <= priority <= PRIORITY:
        problem = InvalidInput(f"priority is a whole number from -{PRIORITY} to {PRIORITY}", field="priority")
        raise problem
