"""Written by `python -m tools.client_stubs` from the operations; a test compares them. Do not edit."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from typing import Any, Literal

from holdfast.client.calls import Calls
from holdfast.core.events import RunStatus
from holdfast.program.plan.difference import PlanDifference
from holdfast.service.operations.activities import OutcomeAccepted
from holdfast.service.operations.audit import AuditPage
from holdfast.service.operations.bulk import RunsCommanded
from holdfast.service.operations.bus import (
    BusLetterPage,
    RemovedSink,
    ReplayedSink,
    SettledBusLetter,
    SinkPage,
    SinkView,
)
from holdfast.service.operations.controls import Commanded, RunDifference, RunForked, RunsForked
from holdfast.service.operations.dead_letters import LetterPage, OpenedLetter, SettledLetter
from holdfast.service.operations.deletions import DeletedView
from holdfast.service.operations.plans import PlanCheck, PlanGraph, PlanPage, PlanVersion, PlanView, SchemaView
from holdfast.service.operations.retention import ArchivedRunPage, ArchivedRunView, RetentionReportView, RetentionView
from holdfast.service.operations.run_streams import ChunkPage, ChunkView, StreamsPage
from holdfast.service.operations.runs import Answered, EventPage, HandlersView, RunCounts, RunOutcome, RunPage
from holdfast.service.operations.schedules import Backfilled, Deleted, SchedulePage, ScheduleView, Triggered
from holdfast.service.operations.signals import (
    MailPage,
    ReceiptView,
    SentSignals,
    StartedWithSignal,
    UnconsumedPage,
    WaitPage,
)
from holdfast.service.operations.system import (
    AlertList,
    DoctorReport,
    Health,
    LockList,
    NodeList,
    QueueList,
    SampleList,
    StatsView,
    TakeoverList,
)
from holdfast.service.operations.tasks import TaskHistory, TaskPage
from holdfast.service.operations.tokens import MadeToken, RevokedToken, TokenPage
from holdfast.service.operations.workflows import WorkflowList, WorkflowView
from holdfast.service.registry import Operation
from holdfast.service.views import AcceptedSignal, EventView, GraphView, RunStarted, RunView, SnapshotView, TaskItem

RESOURCES: tuple[str, ...]
STREAMED: dict[str, Operation]

Run = Callable[[Coroutine[Any, Any, Any]], Any]

def needed(operation: Operation) -> tuple[str, ...]: ...
def iterate(stream: AsyncGenerator[Any], run: Run) -> Iterator[Any]: ...

class Runs:
    def __init__(self, calls: Calls) -> None: ...
    async def start(
        self,
        workflow: str,
        *,
        input: dict[str, Any] = ...,
        workflow_version: str | None = ...,
        request_id: str = ...,
        run_id: str | None = ...,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        reference_key: str | None = ...,
        tags: Sequence[str] = ...,
        priority: int = ...,
        at: datetime | None = ...,
        after_s: float | None = ...,
        execution_timeout_s: float | None = ...,
        run_timeout_s: float | None = ...,
        cleanup_timeout_s: float | None = ...,
        context: dict[str, Any] = ...,
        reference_parts: dict[str, Any] = ...,
        attributes: dict[str, Any] = ...,
        reuse: Literal["return", "reject", "restart-if-finished", "terminate-and-restart"] | None = ...,
        debounce_key: str | None = ...,
        debounce_quiet_s: float | None = ...,
        debounce_at_most_s: float | None = ...,
    ) -> RunStarted: ...
    async def get(self, run_id: str) -> RunView: ...
    async def list(
        self,
        *,
        workflow: str | None = ...,
        status: RunStatus | None = ...,
        reference_key: str | None = ...,
        tag: str | None = ...,
        parent_run_id: str | None = ...,
        roots: bool = ...,
        retrying: bool = ...,
        created_from: datetime | None = ...,
        created_until: datetime | None = ...,
        finished_from: datetime | None = ...,
        finished_until: datetime | None = ...,
        where: str = ...,
        text: str | None = ...,
        order: Literal["id", "newest"] = ...,
        order_by: str = ...,
        cursor: str = ...,
        limit: int = ...,
    ) -> RunPage: ...
    async def count(
        self,
        *,
        workflow: str | None = ...,
        status: RunStatus | None = ...,
        reference_key: str | None = ...,
        tag: str | None = ...,
        parent_run_id: str | None = ...,
        roots: bool = ...,
        retrying: bool = ...,
        created_from: datetime | None = ...,
        created_until: datetime | None = ...,
        finished_from: datetime | None = ...,
        finished_until: datetime | None = ...,
        where: str = ...,
        text: str | None = ...,
    ) -> RunCounts: ...
    async def events(self, run_id: str, *, after: int = ..., limit: int = ...) -> EventPage: ...
    async def snapshot(self, run_id: str) -> SnapshotView: ...
    async def graph(self, run_id: str, *, expand: Sequence[str] = ..., collapse: Sequence[str] = ...) -> GraphView: ...
    async def result(self, run_id: str, *, wait_s: float = ...) -> RunOutcome: ...
    async def query(self, run_id: str, name: str, *, input: dict[str, Any] = ...) -> Answered: ...
    async def handlers(self, run_id: str) -> HandlersView: ...
    async def update(
        self, run_id: str, name: str, *, input: dict[str, Any] = ..., update_id: str = ...
    ) -> Answered: ...
    async def cancel(
        self, run_id: str, *, reason: str = ..., actor: str = ..., signal_id: str = ..., wait: bool = ...
    ) -> Commanded: ...
    async def pause(
        self, run_id: str, *, reason: str = ..., actor: str = ..., signal_id: str = ..., wait: bool = ...
    ) -> Commanded: ...
    async def resume(
        self,
        run_id: str,
        *,
        reason: str = ...,
        actor: str = ...,
        signal_id: str = ...,
        wait: bool = ...,
        raise_failure: bool = ...,
    ) -> Commanded: ...
    async def approve(
        self,
        run_id: str,
        *,
        reason: str = ...,
        actor: str = ...,
        signal_id: str = ...,
        wait: bool = ...,
        step_id: str | None = ...,
    ) -> Commanded: ...
    async def terminate(
        self, run_id: str, *, reason: str = ..., actor: str = ..., signal_id: str = ..., wait: bool = ...
    ) -> Commanded: ...
    async def retry_step(
        self, run_id: str, step_id: str, *, reason: str = ..., actor: str = ..., signal_id: str = ..., wait: bool = ...
    ) -> Commanded: ...
    async def skip_step(
        self,
        run_id: str,
        step_id: str,
        *,
        reason: str = ...,
        actor: str = ...,
        signal_id: str = ...,
        wait: bool = ...,
        result: Any = ...,
    ) -> Commanded: ...
    async def retry(
        self, run_id: str, *, from_start: bool = ..., reason: str = ..., actor: str = ..., signal_id: str = ...
    ) -> RunStarted: ...
    async def fork(
        self,
        run_id: str,
        *,
        at: int | None = ...,
        input: dict[str, Any] | None = ...,
        request_id: str = ...,
        reason: str = ...,
        actor: str = ...,
    ) -> RunForked: ...
    async def fork_many(
        self,
        request_id: str,
        *,
        workflow: str | None = ...,
        status: RunStatus | None = ...,
        reference_key: str | None = ...,
        tag: str | None = ...,
        parent_run_id: str | None = ...,
        roots: bool = ...,
        retrying: bool = ...,
        created_from: datetime | None = ...,
        created_until: datetime | None = ...,
        finished_from: datetime | None = ...,
        finished_until: datetime | None = ...,
        where: str = ...,
        text: str | None = ...,
        run_ids: Sequence[str] = ...,
        limit: int = ...,
        reason: str = ...,
        actor: str = ...,
    ) -> RunsForked: ...
    async def diff(self, run_id: str, other_run_id: str) -> RunDifference: ...
    async def delete(self, run_id: str, *, dry_run: bool = ...) -> DeletedView: ...
    async def command_many(
        self,
        command: Literal[
            "cancel",
            "pause",
            "resume",
            "raise",
            "terminate",
            "approve",
            "retry_step",
            "skip_step",
            "try_now",
            "retry",
            "retry_failed",
            "retry_from_start",
            "fork",
        ],
        request_id: str,
        *,
        workflow: str | None = ...,
        status: RunStatus | None = ...,
        reference_key: str | None = ...,
        tag: str | None = ...,
        parent_run_id: str | None = ...,
        roots: bool = ...,
        retrying: bool = ...,
        created_from: datetime | None = ...,
        created_until: datetime | None = ...,
        finished_from: datetime | None = ...,
        finished_until: datetime | None = ...,
        where: str = ...,
        text: str | None = ...,
        run_ids: Sequence[str] = ...,
        only_once: bool = ...,
        preview: bool = ...,
        cursor: str = ...,
        limit: int = ...,
        reason: str = ...,
        actor: str = ...,
    ) -> RunsCommanded: ...
    def stream(self, run_id: str, *, after: int = ...) -> AsyncIterator[EventView]: ...

class SyncRuns:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def start(
        self,
        workflow: str,
        *,
        input: dict[str, Any] = ...,
        workflow_version: str | None = ...,
        request_id: str = ...,
        run_id: str | None = ...,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        reference_key: str | None = ...,
        tags: Sequence[str] = ...,
        priority: int = ...,
        at: datetime | None = ...,
        after_s: float | None = ...,
        execution_timeout_s: float | None = ...,
        run_timeout_s: float | None = ...,
        cleanup_timeout_s: float | None = ...,
        context: dict[str, Any] = ...,
        reference_parts: dict[str, Any] = ...,
        attributes: dict[str, Any] = ...,
        reuse: Literal["return", "reject", "restart-if-finished", "terminate-and-restart"] | None = ...,
        debounce_key: str | None = ...,
        debounce_quiet_s: float | None = ...,
        debounce_at_most_s: float | None = ...,
    ) -> RunStarted: ...
    def get(self, run_id: str) -> RunView: ...
    def list(
        self,
        *,
        workflow: str | None = ...,
        status: RunStatus | None = ...,
        reference_key: str | None = ...,
        tag: str | None = ...,
        parent_run_id: str | None = ...,
        roots: bool = ...,
        retrying: bool = ...,
        created_from: datetime | None = ...,
        created_until: datetime | None = ...,
        finished_from: datetime | None = ...,
        finished_until: datetime | None = ...,
        where: str = ...,
        text: str | None = ...,
        order: Literal["id", "newest"] = ...,
        order_by: str = ...,
        cursor: str = ...,
        limit: int = ...,
    ) -> RunPage: ...
    def count(
        self,
        *,
        workflow: str | None = ...,
        status: RunStatus | None = ...,
        reference_key: str | None = ...,
        tag: str | None = ...,
        parent_run_id: str | None = ...,
        roots: bool = ...,
        retrying: bool = ...,
        created_from: datetime | None = ...,
        created_until: datetime | None = ...,
        finished_from: datetime | None = ...,
        finished_until: datetime | None = ...,
        where: str = ...,
        text: str | None = ...,
    ) -> RunCounts: ...
    def events(self, run_id: str, *, after: int = ..., limit: int = ...) -> EventPage: ...
    def snapshot(self, run_id: str) -> SnapshotView: ...
    def graph(self, run_id: str, *, expand: Sequence[str] = ..., collapse: Sequence[str] = ...) -> GraphView: ...
    def result(self, run_id: str, *, wait_s: float = ...) -> RunOutcome: ...
    def query(self, run_id: str, name: str, *, input: dict[str, Any] = ...) -> Answered: ...
    def handlers(self, run_id: str) -> HandlersView: ...
    def update(self, run_id: str, name: str, *, input: dict[str, Any] = ..., update_id: str = ...) -> Answered: ...
    def cancel(
        self, run_id: str, *, reason: str = ..., actor: str = ..., signal_id: str = ..., wait: bool = ...
    ) -> Commanded: ...
    def pause(
        self, run_id: str, *, reason: str = ..., actor: str = ..., signal_id: str = ..., wait: bool = ...
    ) -> Commanded: ...
    def resume(
        self,
        run_id: str,
        *,
        reason: str = ...,
        actor: str = ...,
        signal_id: str = ...,
        wait: bool = ...,
        raise_failure: bool = ...,
    ) -> Commanded: ...
    def approve(
        self,
        run_id: str,
        *,
        reason: str = ...,
        actor: str = ...,
        signal_id: str = ...,
        wait: bool = ...,
        step_id: str | None = ...,
    ) -> Commanded: ...
    def terminate(
        self, run_id: str, *, reason: str = ..., actor: str = ..., signal_id: str = ..., wait: bool = ...
    ) -> Commanded: ...
    def retry_step(
        self, run_id: str, step_id: str, *, reason: str = ..., actor: str = ..., signal_id: str = ..., wait: bool = ...
    ) -> Commanded: ...
    def skip_step(
        self,
        run_id: str,
        step_id: str,
        *,
        reason: str = ...,
        actor: str = ...,
        signal_id: str = ...,
        wait: bool = ...,
        result: Any = ...,
    ) -> Commanded: ...
    def retry(
        self, run_id: str, *, from_start: bool = ..., reason: str = ..., actor: str = ..., signal_id: str = ...
    ) -> RunStarted: ...
    def fork(
        self,
        run_id: str,
        *,
        at: int | None = ...,
        input: dict[str, Any] | None = ...,
        request_id: str = ...,
        reason: str = ...,
        actor: str = ...,
    ) -> RunForked: ...
    def fork_many(
        self,
        request_id: str,
        *,
        workflow: str | None = ...,
        status: RunStatus | None = ...,
        reference_key: str | None = ...,
        tag: str | None = ...,
        parent_run_id: str | None = ...,
        roots: bool = ...,
        retrying: bool = ...,
        created_from: datetime | None = ...,
        created_until: datetime | None = ...,
        finished_from: datetime | None = ...,
        finished_until: datetime | None = ...,
        where: str = ...,
        text: str | None = ...,
        run_ids: Sequence[str] = ...,
        limit: int = ...,
        reason: str = ...,
        actor: str = ...,
    ) -> RunsForked: ...
    def diff(self, run_id: str, other_run_id: str) -> RunDifference: ...
    def delete(self, run_id: str, *, dry_run: bool = ...) -> DeletedView: ...
    def command_many(
        self,
        command: Literal[
            "cancel",
            "pause",
            "resume",
            "raise",
            "terminate",
            "approve",
            "retry_step",
            "skip_step",
            "try_now",
            "retry",
            "retry_failed",
            "retry_from_start",
            "fork",
        ],
        request_id: str,
        *,
        workflow: str | None = ...,
        status: RunStatus | None = ...,
        reference_key: str | None = ...,
        tag: str | None = ...,
        parent_run_id: str | None = ...,
        roots: bool = ...,
        retrying: bool = ...,
        created_from: datetime | None = ...,
        created_until: datetime | None = ...,
        finished_from: datetime | None = ...,
        finished_until: datetime | None = ...,
        where: str = ...,
        text: str | None = ...,
        run_ids: Sequence[str] = ...,
        only_once: bool = ...,
        preview: bool = ...,
        cursor: str = ...,
        limit: int = ...,
        reason: str = ...,
        actor: str = ...,
    ) -> RunsCommanded: ...
    def stream(self, run_id: str, *, after: int = ...) -> Iterator[EventView]: ...

class Signals:
    def __init__(self, calls: Calls) -> None: ...
    async def send(
        self,
        run_id: str,
        name: str,
        *,
        payload: Any = ...,
        signal_id: str = ...,
        step_id: str | None = ...,
        require_waiting: bool = ...,
    ) -> AcceptedSignal: ...
    async def send_many(self, signals: Sequence[dict[str, Any]]) -> SentSignals: ...
    async def start_with(
        self,
        workflow: str,
        signal_name: str,
        *,
        input: dict[str, Any] = ...,
        workflow_version: str | None = ...,
        request_id: str = ...,
        run_id: str | None = ...,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        reference_key: str | None = ...,
        tags: Sequence[str] = ...,
        priority: int = ...,
        at: datetime | None = ...,
        after_s: float | None = ...,
        execution_timeout_s: float | None = ...,
        run_timeout_s: float | None = ...,
        cleanup_timeout_s: float | None = ...,
        context: dict[str, Any] = ...,
        reference_parts: dict[str, Any] = ...,
        attributes: dict[str, Any] = ...,
        reuse: Literal["return", "reject", "restart-if-finished", "terminate-and-restart"] | None = ...,
        debounce_key: str | None = ...,
        debounce_quiet_s: float | None = ...,
        debounce_at_most_s: float | None = ...,
        signal_payload: Any = ...,
        signal_id: str = ...,
    ) -> StartedWithSignal: ...
    async def receipt(
        self, run_id: str, name: str, signal_id: str, *, signal_storage_key: str | None = ...
    ) -> ReceiptView: ...
    async def waiting(self, *, name: str | None = ..., cursor: str = ..., limit: int = ...) -> WaitPage: ...
    async def waits(self, run_id: str, *, name: str | None = ..., cursor: str = ..., limit: int = ...) -> WaitPage: ...
    async def mailbox(
        self, run_id: str, *, name: str | None = ..., cursor: str = ..., limit: int = ...
    ) -> MailPage: ...
    async def unconsumed(
        self, *, name: str | None = ..., finished: bool = ..., cursor: str = ..., limit: int = ...
    ) -> UnconsumedPage: ...

class SyncSignals:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def send(
        self,
        run_id: str,
        name: str,
        *,
        payload: Any = ...,
        signal_id: str = ...,
        step_id: str | None = ...,
        require_waiting: bool = ...,
    ) -> AcceptedSignal: ...
    def send_many(self, signals: Sequence[dict[str, Any]]) -> SentSignals: ...
    def start_with(
        self,
        workflow: str,
        signal_name: str,
        *,
        input: dict[str, Any] = ...,
        workflow_version: str | None = ...,
        request_id: str = ...,
        run_id: str | None = ...,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        reference_key: str | None = ...,
        tags: Sequence[str] = ...,
        priority: int = ...,
        at: datetime | None = ...,
        after_s: float | None = ...,
        execution_timeout_s: float | None = ...,
        run_timeout_s: float | None = ...,
        cleanup_timeout_s: float | None = ...,
        context: dict[str, Any] = ...,
        reference_parts: dict[str, Any] = ...,
        attributes: dict[str, Any] = ...,
        reuse: Literal["return", "reject", "restart-if-finished", "terminate-and-restart"] | None = ...,
        debounce_key: str | None = ...,
        debounce_quiet_s: float | None = ...,
        debounce_at_most_s: float | None = ...,
        signal_payload: Any = ...,
        signal_id: str = ...,
    ) -> StartedWithSignal: ...
    def receipt(
        self, run_id: str, name: str, signal_id: str, *, signal_storage_key: str | None = ...
    ) -> ReceiptView: ...
    def waiting(self, *, name: str | None = ..., cursor: str = ..., limit: int = ...) -> WaitPage: ...
    def waits(self, run_id: str, *, name: str | None = ..., cursor: str = ..., limit: int = ...) -> WaitPage: ...
    def mailbox(self, run_id: str, *, name: str | None = ..., cursor: str = ..., limit: int = ...) -> MailPage: ...
    def unconsumed(
        self, *, name: str | None = ..., finished: bool = ..., cursor: str = ..., limit: int = ...
    ) -> UnconsumedPage: ...

class Activities:
    def __init__(self, calls: Calls) -> None: ...
    async def complete(self, completion_token: str, *, result: Any = ...) -> OutcomeAccepted: ...
    async def fail(self, completion_token: str, *, message: str = ..., retryable: bool = ...) -> OutcomeAccepted: ...
    async def heartbeat(self, completion_token: str) -> OutcomeAccepted: ...

class SyncActivities:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def complete(self, completion_token: str, *, result: Any = ...) -> OutcomeAccepted: ...
    def fail(self, completion_token: str, *, message: str = ..., retryable: bool = ...) -> OutcomeAccepted: ...
    def heartbeat(self, completion_token: str) -> OutcomeAccepted: ...

class Tasks:
    def __init__(self, calls: Calls) -> None: ...
    async def list(
        self,
        *,
        mine: bool = ...,
        actor: str = ...,
        actor_roles: Sequence[str] = ...,
        role: str | None = ...,
        assignee: str | None = ...,
        due_before: datetime | None = ...,
        overdue: bool = ...,
        workflow: str | None = ...,
        status: Literal["OPEN", "COMPLETED", "CANCELLED"] | None = ...,
        text: str | None = ...,
        run_id: str | None = ...,
        cursor: str = ...,
        limit: int = ...,
    ) -> TaskPage: ...
    async def get(self, task_id: str) -> TaskItem: ...
    async def history(self, task_id: str, *, cursor: str = ..., limit: int = ...) -> TaskHistory: ...
    async def assign(
        self, task_id: str, to: str, *, actor: str = ..., actor_roles: Sequence[str] = ..., operation_id: str = ...
    ) -> TaskItem: ...
    async def claim(
        self, task_id: str, *, actor: str = ..., actor_roles: Sequence[str] = ..., operation_id: str = ...
    ) -> TaskItem: ...
    async def release(
        self, task_id: str, *, actor: str = ..., actor_roles: Sequence[str] = ..., operation_id: str = ...
    ) -> TaskItem: ...
    async def reassign(
        self,
        task_id: str,
        *,
        actor: str = ...,
        actor_roles: Sequence[str] = ...,
        operation_id: str = ...,
        to: str | None = ...,
        roles: Sequence[str] | None = ...,
    ) -> TaskItem: ...
    async def complete(
        self,
        task_id: str,
        *,
        actor: str = ...,
        actor_roles: Sequence[str] = ...,
        operation_id: str = ...,
        answer: Any = ...,
    ) -> TaskItem: ...
    async def comment(
        self, task_id: str, text: str, *, actor: str = ..., actor_roles: Sequence[str] = ..., operation_id: str = ...
    ) -> TaskItem: ...

class SyncTasks:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def list(
        self,
        *,
        mine: bool = ...,
        actor: str = ...,
        actor_roles: Sequence[str] = ...,
        role: str | None = ...,
        assignee: str | None = ...,
        due_before: datetime | None = ...,
        overdue: bool = ...,
        workflow: str | None = ...,
        status: Literal["OPEN", "COMPLETED", "CANCELLED"] | None = ...,
        text: str | None = ...,
        run_id: str | None = ...,
        cursor: str = ...,
        limit: int = ...,
    ) -> TaskPage: ...
    def get(self, task_id: str) -> TaskItem: ...
    def history(self, task_id: str, *, cursor: str = ..., limit: int = ...) -> TaskHistory: ...
    def assign(
        self, task_id: str, to: str, *, actor: str = ..., actor_roles: Sequence[str] = ..., operation_id: str = ...
    ) -> TaskItem: ...
    def claim(
        self, task_id: str, *, actor: str = ..., actor_roles: Sequence[str] = ..., operation_id: str = ...
    ) -> TaskItem: ...
    def release(
        self, task_id: str, *, actor: str = ..., actor_roles: Sequence[str] = ..., operation_id: str = ...
    ) -> TaskItem: ...
    def reassign(
        self,
        task_id: str,
        *,
        actor: str = ...,
        actor_roles: Sequence[str] = ...,
        operation_id: str = ...,
        to: str | None = ...,
        roles: Sequence[str] | None = ...,
    ) -> TaskItem: ...
    def complete(
        self,
        task_id: str,
        *,
        actor: str = ...,
        actor_roles: Sequence[str] = ...,
        operation_id: str = ...,
        answer: Any = ...,
    ) -> TaskItem: ...
    def comment(
        self, task_id: str, text: str, *, actor: str = ..., actor_roles: Sequence[str] = ..., operation_id: str = ...
    ) -> TaskItem: ...

class Letters:
    def __init__(self, calls: Calls) -> None: ...
    async def list(
        self,
        *,
        run_id: str | None = ...,
        reason: Literal[
            "undecodable",
            "definition missing",
            "history irreparable",
            "retries exhausted",
            "refused",
            "payload does not fit",
        ]
        | None = ...,
        settled: bool = ...,
        cursor: str = ...,
        limit: int = ...,
    ) -> LetterPage: ...
    async def get(self, letter_id: str) -> OpenedLetter: ...
    async def requeue(self, letter_id: str, *, actor: str = ...) -> SettledLetter: ...
    async def drop(self, letter_id: str, *, actor: str = ...) -> SettledLetter: ...

class SyncLetters:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def list(
        self,
        *,
        run_id: str | None = ...,
        reason: Literal[
            "undecodable",
            "definition missing",
            "history irreparable",
            "retries exhausted",
            "refused",
            "payload does not fit",
        ]
        | None = ...,
        settled: bool = ...,
        cursor: str = ...,
        limit: int = ...,
    ) -> LetterPage: ...
    def get(self, letter_id: str) -> OpenedLetter: ...
    def requeue(self, letter_id: str, *, actor: str = ...) -> SettledLetter: ...
    def drop(self, letter_id: str, *, actor: str = ...) -> SettledLetter: ...

class Workflows:
    def __init__(self, calls: Calls) -> None: ...
    async def list(self) -> WorkflowList: ...
    async def get(self, name: str, *, version: str | None = ...) -> WorkflowView: ...

class SyncWorkflows:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def list(self) -> WorkflowList: ...
    def get(self, name: str, *, version: str | None = ...) -> WorkflowView: ...

class Plans:
    def __init__(self, calls: Calls) -> None: ...
    async def schema(self) -> SchemaView: ...
    async def validate(self, document: str) -> PlanCheck: ...
    async def register(
        self, *, document: str | None = ..., uri: str = ..., sha256: str | None = ..., tenant: str = ...
    ) -> PlanVersion: ...
    async def list(
        self, *, plan_id: str | None = ..., tenant: str = ..., cursor: str = ..., limit: int = ...
    ) -> PlanPage: ...
    async def get(self, plan_id: str, *, plan_version: str | None = ..., tenant: str = ...) -> PlanView: ...
    async def start(
        self,
        plan_id: str,
        *,
        plan_version: str | None = ...,
        sha256: str | None = ...,
        uri: str = ...,
        document: str | None = ...,
        inputs: dict[str, Any] = ...,
        request_id: str = ...,
        run_id: str | None = ...,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        reference_key: str | None = ...,
        tags: Sequence[str] = ...,
        priority: int = ...,
        at: datetime | None = ...,
        after_s: float | None = ...,
        reference_parts: dict[str, Any] = ...,
        attributes: dict[str, Any] = ...,
        execution_timeout_s: float | None = ...,
        run_timeout_s: float | None = ...,
        cleanup_timeout_s: float | None = ...,
        reuse: Literal["return", "reject", "restart-if-finished", "terminate-and-restart"] | None = ...,
        debounce_key: str | None = ...,
        debounce_quiet_s: float | None = ...,
        debounce_at_most_s: float | None = ...,
        context: dict[str, Any] = ...,
    ) -> RunStarted: ...
    async def diff(self, plan_id: str, from_version: str, to_version: str, *, tenant: str = ...) -> PlanDifference: ...
    async def graph(
        self,
        plan_id: str,
        *,
        plan_version: str | None = ...,
        tenant: str = ...,
        from_version: str | None = ...,
        expand: Sequence[str] = ...,
        collapse: Sequence[str] = ...,
    ) -> PlanGraph: ...

class SyncPlans:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def schema(self) -> SchemaView: ...
    def validate(self, document: str) -> PlanCheck: ...
    def register(
        self, *, document: str | None = ..., uri: str = ..., sha256: str | None = ..., tenant: str = ...
    ) -> PlanVersion: ...
    def list(
        self, *, plan_id: str | None = ..., tenant: str = ..., cursor: str = ..., limit: int = ...
    ) -> PlanPage: ...
    def get(self, plan_id: str, *, plan_version: str | None = ..., tenant: str = ...) -> PlanView: ...
    def start(
        self,
        plan_id: str,
        *,
        plan_version: str | None = ...,
        sha256: str | None = ...,
        uri: str = ...,
        document: str | None = ...,
        inputs: dict[str, Any] = ...,
        request_id: str = ...,
        run_id: str | None = ...,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        reference_key: str | None = ...,
        tags: Sequence[str] = ...,
        priority: int = ...,
        at: datetime | None = ...,
        after_s: float | None = ...,
        reference_parts: dict[str, Any] = ...,
        attributes: dict[str, Any] = ...,
        execution_timeout_s: float | None = ...,
        run_timeout_s: float | None = ...,
        cleanup_timeout_s: float | None = ...,
        reuse: Literal["return", "reject", "restart-if-finished", "terminate-and-restart"] | None = ...,
        debounce_key: str | None = ...,
        debounce_quiet_s: float | None = ...,
        debounce_at_most_s: float | None = ...,
        context: dict[str, Any] = ...,
    ) -> RunStarted: ...
    def diff(self, plan_id: str, from_version: str, to_version: str, *, tenant: str = ...) -> PlanDifference: ...
    def graph(
        self,
        plan_id: str,
        *,
        plan_version: str | None = ...,
        tenant: str = ...,
        from_version: str | None = ...,
        expand: Sequence[str] = ...,
        collapse: Sequence[str] = ...,
    ) -> PlanGraph: ...

class System:
    def __init__(self, calls: Calls) -> None: ...
    async def health(self) -> Health: ...
    async def stats(self) -> StatsView: ...
    async def doctor(self) -> DoctorReport: ...
    async def queues(self) -> QueueList: ...
    async def nodes(self) -> NodeList: ...
    async def locks(self) -> LockList: ...
    async def samples(self, *, since: datetime | None = ..., limit: int = ...) -> SampleList: ...
    async def takeovers(self, *, since: datetime | None = ..., limit: int = ...) -> TakeoverList: ...
    async def alerts(self, *, after: int = ..., limit: int = ...) -> AlertList: ...

class SyncSystem:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def health(self) -> Health: ...
    def stats(self) -> StatsView: ...
    def doctor(self) -> DoctorReport: ...
    def queues(self) -> QueueList: ...
    def nodes(self) -> NodeList: ...
    def locks(self) -> LockList: ...
    def samples(self, *, since: datetime | None = ..., limit: int = ...) -> SampleList: ...
    def takeovers(self, *, since: datetime | None = ..., limit: int = ...) -> TakeoverList: ...
    def alerts(self, *, after: int = ..., limit: int = ...) -> AlertList: ...

class Tokens:
    def __init__(self, calls: Calls) -> None: ...
    async def create(
        self,
        name: str,
        *,
        role: Literal["viewer", "operator", "engineer", "admin"] | None = ...,
        scopes: Sequence[
            Literal[
                "runs:read",
                "runs:write",
                "runs:control",
                "runs:override",
                "signals:read",
                "signals:write",
                "tasks:read",
                "tasks:write",
                "letters:read",
                "letters:write",
                "workflows:read",
                "system:read",
                "audit:read",
                "admin",
            ]
        ] = ...,
        roles: Sequence[str] = ...,
        tenant: str | None = ...,
        project: str | None = ...,
        environment: str | None = ...,
        expires_in_s: int | None = ...,
    ) -> MadeToken: ...
    async def list(
        self, *, tenant: str | None = ..., sessions: bool = ..., cursor: str = ..., limit: int = ...
    ) -> TokenPage: ...
    async def revoke(self, token_id: str, *, descendants: bool = ...) -> RevokedToken: ...
    async def revoke_leaked(self, token: str, *, descendants: bool = ...) -> RevokedToken: ...

class SyncTokens:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def create(
        self,
        name: str,
        *,
        role: Literal["viewer", "operator", "engineer", "admin"] | None = ...,
        scopes: Sequence[
            Literal[
                "runs:read",
                "runs:write",
                "runs:control",
                "runs:override",
                "signals:read",
                "signals:write",
                "tasks:read",
                "tasks:write",
                "letters:read",
                "letters:write",
                "workflows:read",
                "system:read",
                "audit:read",
                "admin",
            ]
        ] = ...,
        roles: Sequence[str] = ...,
        tenant: str | None = ...,
        project: str | None = ...,
        environment: str | None = ...,
        expires_in_s: int | None = ...,
    ) -> MadeToken: ...
    def list(
        self, *, tenant: str | None = ..., sessions: bool = ..., cursor: str = ..., limit: int = ...
    ) -> TokenPage: ...
    def revoke(self, token_id: str, *, descendants: bool = ...) -> RevokedToken: ...
    def revoke_leaked(self, token: str, *, descendants: bool = ...) -> RevokedToken: ...

class Audit:
    def __init__(self, calls: Calls) -> None: ...
    async def list(
        self,
        *,
        tenant: str | None = ...,
        run_id: str | None = ...,
        actor: str | None = ...,
        token_id: str | None = ...,
        operation: str | None = ...,
        since: datetime | None = ...,
        until: datetime | None = ...,
        order: Literal["newest", "oldest"] = ...,
        cursor: str = ...,
        limit: int = ...,
    ) -> AuditPage: ...

class SyncAudit:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def list(
        self,
        *,
        tenant: str | None = ...,
        run_id: str | None = ...,
        actor: str | None = ...,
        token_id: str | None = ...,
        operation: str | None = ...,
        since: datetime | None = ...,
        until: datetime | None = ...,
        order: Literal["newest", "oldest"] = ...,
        cursor: str = ...,
        limit: int = ...,
    ) -> AuditPage: ...

class Tenants:
    def __init__(self, calls: Calls) -> None: ...
    async def delete(self, tenant: str, *, yes: bool = ..., dry_run: bool = ...) -> DeletedView: ...

class SyncTenants:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def delete(self, tenant: str, *, yes: bool = ..., dry_run: bool = ...) -> DeletedView: ...

class Retention:
    def __init__(self, calls: Calls) -> None: ...
    async def show(self) -> RetentionView: ...
    async def preview(self) -> RetentionReportView: ...
    async def run(self) -> RetentionReportView: ...

class SyncRetention:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def show(self) -> RetentionView: ...
    def preview(self) -> RetentionReportView: ...
    def run(self) -> RetentionReportView: ...

class Archive:
    def __init__(self, calls: Calls) -> None: ...
    async def list(
        self,
        *,
        run_id: str | None = ...,
        workflow: str | None = ...,
        status: RunStatus | None = ...,
        tenant: str | None = ...,
        cursor: str = ...,
        limit: int = ...,
    ) -> ArchivedRunPage: ...
    async def get(self, run_id: str) -> ArchivedRunView: ...
    async def events(self, run_id: str, *, after: int = ..., limit: int = ...) -> EventPage: ...

class SyncArchive:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def list(
        self,
        *,
        run_id: str | None = ...,
        workflow: str | None = ...,
        status: RunStatus | None = ...,
        tenant: str | None = ...,
        cursor: str = ...,
        limit: int = ...,
    ) -> ArchivedRunPage: ...
    def get(self, run_id: str) -> ArchivedRunView: ...
    def events(self, run_id: str, *, after: int = ..., limit: int = ...) -> EventPage: ...

class Sinks:
    def __init__(self, calls: Calls) -> None: ...
    async def list(self, *, cursor: str = ..., limit: int = ...) -> SinkPage: ...
    async def put(
        self,
        name: str,
        address: str,
        *,
        kind: Literal["webhook", "nats", "redis"] = ...,
        secret: str = ...,
        tenant: str | None = ...,
        workflows: Sequence[str] = ...,
        event_types: Sequence[str] = ...,
        alerts: bool = ...,
        payloads: Literal["concealed", "opened"] = ...,
        allow_private: bool = ...,
        max_attempts: int = ...,
    ) -> SinkView: ...
    async def pause(self, sink: str) -> SinkView: ...
    async def resume(self, sink: str) -> SinkView: ...
    async def remove(self, sink: str) -> RemovedSink: ...

class SyncSinks:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def list(self, *, cursor: str = ..., limit: int = ...) -> SinkPage: ...
    def put(
        self,
        name: str,
        address: str,
        *,
        kind: Literal["webhook", "nats", "redis"] = ...,
        secret: str = ...,
        tenant: str | None = ...,
        workflows: Sequence[str] = ...,
        event_types: Sequence[str] = ...,
        alerts: bool = ...,
        payloads: Literal["concealed", "opened"] = ...,
        allow_private: bool = ...,
        max_attempts: int = ...,
    ) -> SinkView: ...
    def pause(self, sink: str) -> SinkView: ...
    def resume(self, sink: str) -> SinkView: ...
    def remove(self, sink: str) -> RemovedSink: ...

class Bus:
    def __init__(self, calls: Calls) -> None: ...
    async def replay(
        self,
        sink: str,
        *,
        since: datetime | None = ...,
        run_id: str | None = ...,
        from_seq: int = ...,
        event_id: str = ...,
    ) -> ReplayedSink: ...
    async def letters(
        self, *, sink: str | None = ..., run_id: str | None = ..., cursor: str = ..., limit: int = ...
    ) -> BusLetterPage: ...
    async def requeue(self, letter_id: str) -> SettledBusLetter: ...
    async def drop(self, letter_id: str) -> SettledBusLetter: ...

class SyncBus:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def replay(
        self,
        sink: str,
        *,
        since: datetime | None = ...,
        run_id: str | None = ...,
        from_seq: int = ...,
        event_id: str = ...,
    ) -> ReplayedSink: ...
    def letters(
        self, *, sink: str | None = ..., run_id: str | None = ..., cursor: str = ..., limit: int = ...
    ) -> BusLetterPage: ...
    def requeue(self, letter_id: str) -> SettledBusLetter: ...
    def drop(self, letter_id: str) -> SettledBusLetter: ...

class Schedules:
    def __init__(self, calls: Calls) -> None: ...
    async def create(
        self,
        schedule_id: str,
        workflow: str,
        *,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        cron: str = ...,
        every_s: float | None = ...,
        at: datetime | None = ...,
        tz: str = ...,
        start_at: datetime | None = ...,
        end_at: datetime | None = ...,
        overlap: Literal["skip", "queue", "cancel-running", "allow"] = ...,
        jitter_s: float = ...,
        catch_up_s: float = ...,
        input: dict[str, Any] = ...,
        workflow_version: str | None = ...,
        reference_key: str | None = ...,
        tags: Sequence[str] = ...,
        priority: int = ...,
        context: dict[str, Any] = ...,
    ) -> ScheduleView: ...
    async def list(self, *, workflow: str | None = ..., cursor: str = ..., limit: int = ...) -> SchedulePage: ...
    async def get(
        self, schedule_id: str, *, tenant: str = ..., project: str = ..., environment: str = ...
    ) -> ScheduleView: ...
    async def update(
        self,
        schedule_id: str,
        *,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        cron: str = ...,
        every_s: float | None = ...,
        at: datetime | None = ...,
        tz: str = ...,
        start_at: datetime | None = ...,
        end_at: datetime | None = ...,
        overlap: Literal["skip", "queue", "cancel-running", "allow"] = ...,
        jitter_s: float = ...,
        catch_up_s: float = ...,
        input: dict[str, Any] | None = ...,
    ) -> ScheduleView: ...
    async def pause(
        self, schedule_id: str, *, tenant: str = ..., project: str = ..., environment: str = ..., note: str = ...
    ) -> ScheduleView: ...
    async def resume(
        self, schedule_id: str, *, tenant: str = ..., project: str = ..., environment: str = ..., note: str = ...
    ) -> ScheduleView: ...
    async def trigger(
        self, schedule_id: str, *, tenant: str = ..., project: str = ..., environment: str = ..., request_id: str = ...
    ) -> Triggered: ...
    async def backfill(
        self,
        schedule_id: str,
        since: datetime,
        until: datetime,
        *,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        overlap: Literal["skip", "queue", "cancel-running", "allow"] = ...,
    ) -> Backfilled: ...
    async def delete(
        self, schedule_id: str, *, tenant: str = ..., project: str = ..., environment: str = ...
    ) -> Deleted: ...

class SyncSchedules:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def create(
        self,
        schedule_id: str,
        workflow: str,
        *,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        cron: str = ...,
        every_s: float | None = ...,
        at: datetime | None = ...,
        tz: str = ...,
        start_at: datetime | None = ...,
        end_at: datetime | None = ...,
        overlap: Literal["skip", "queue", "cancel-running", "allow"] = ...,
        jitter_s: float = ...,
        catch_up_s: float = ...,
        input: dict[str, Any] = ...,
        workflow_version: str | None = ...,
        reference_key: str | None = ...,
        tags: Sequence[str] = ...,
        priority: int = ...,
        context: dict[str, Any] = ...,
    ) -> ScheduleView: ...
    def list(self, *, workflow: str | None = ..., cursor: str = ..., limit: int = ...) -> SchedulePage: ...
    def get(
        self, schedule_id: str, *, tenant: str = ..., project: str = ..., environment: str = ...
    ) -> ScheduleView: ...
    def update(
        self,
        schedule_id: str,
        *,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        cron: str = ...,
        every_s: float | None = ...,
        at: datetime | None = ...,
        tz: str = ...,
        start_at: datetime | None = ...,
        end_at: datetime | None = ...,
        overlap: Literal["skip", "queue", "cancel-running", "allow"] = ...,
        jitter_s: float = ...,
        catch_up_s: float = ...,
        input: dict[str, Any] | None = ...,
    ) -> ScheduleView: ...
    def pause(
        self, schedule_id: str, *, tenant: str = ..., project: str = ..., environment: str = ..., note: str = ...
    ) -> ScheduleView: ...
    def resume(
        self, schedule_id: str, *, tenant: str = ..., project: str = ..., environment: str = ..., note: str = ...
    ) -> ScheduleView: ...
    def trigger(
        self, schedule_id: str, *, tenant: str = ..., project: str = ..., environment: str = ..., request_id: str = ...
    ) -> Triggered: ...
    def backfill(
        self,
        schedule_id: str,
        since: datetime,
        until: datetime,
        *,
        tenant: str = ...,
        project: str = ...,
        environment: str = ...,
        overlap: Literal["skip", "queue", "cancel-running", "allow"] = ...,
    ) -> Backfilled: ...
    def delete(self, schedule_id: str, *, tenant: str = ..., project: str = ..., environment: str = ...) -> Deleted: ...

class Streams:
    def __init__(self, calls: Calls) -> None: ...
    async def list(self, run_id: str, *, cursor: str = ..., limit: int = ...) -> StreamsPage: ...
    async def read(self, run_id: str, name: str, *, after: int = ..., limit: int = ...) -> ChunkPage: ...
    def follow(self, run_id: str, name: str, *, after: int = ...) -> AsyncIterator[ChunkView]: ...

class SyncStreams:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def list(self, run_id: str, *, cursor: str = ..., limit: int = ...) -> StreamsPage: ...
    def read(self, run_id: str, name: str, *, after: int = ..., limit: int = ...) -> ChunkPage: ...
    def follow(self, run_id: str, name: str, *, after: int = ...) -> Iterator[ChunkView]: ...

class Lists:
    def __init__(self, calls: Calls) -> None: ...
    def stream(
        self,
        *,
        kinds: str = ...,
        workflow: str | None = ...,
        reference_key: str | None = ...,
        tag: str | None = ...,
        parent_run_id: str | None = ...,
        roots: bool = ...,
        retrying: bool = ...,
        run_id: str | None = ...,
        status: RunStatus | None = ...,
        task_status: Literal["OPEN", "COMPLETED", "CANCELLED"] | None = ...,
        role: str | None = ...,
        assignee: str | None = ...,
        mine: bool = ...,
        actor: str = ...,
        reason: Literal[
            "undecodable",
            "definition missing",
            "history irreparable",
            "retries exhausted",
            "refused",
            "payload does not fit",
        ]
        | None = ...,
        settled: bool = ...,
        where: str = ...,
    ) -> AsyncIterator[tuple[str, Any]]: ...

class SyncLists:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def stream(
        self,
        *,
        kinds: str = ...,
        workflow: str | None = ...,
        reference_key: str | None = ...,
        tag: str | None = ...,
        parent_run_id: str | None = ...,
        roots: bool = ...,
        retrying: bool = ...,
        run_id: str | None = ...,
        status: RunStatus | None = ...,
        task_status: Literal["OPEN", "COMPLETED", "CANCELLED"] | None = ...,
        role: str | None = ...,
        assignee: str | None = ...,
        mine: bool = ...,
        actor: str = ...,
        reason: Literal[
            "undecodable",
            "definition missing",
            "history irreparable",
            "retries exhausted",
            "refused",
            "payload does not fit",
        ]
        | None = ...,
        settled: bool = ...,
        where: str = ...,
    ) -> Iterator[tuple[str, Any]]: ...

class Artifacts:
    def __init__(self, calls: Calls) -> None: ...
    def download(self, run_id: str, kind: str, artifact_id: str) -> AsyncIterator[bytes]: ...

class SyncArtifacts:
    def __init__(self, resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None: ...
    def download(self, run_id: str, kind: str, artifact_id: str) -> Iterator[bytes]: ...
