"""Holdfast: durable workflows for Python.

Everything that the documentation uses is here, in `holdfast.errors`, `holdfast.client`, `holdfast.service` and
`holdfast.testing`; modules below those are internal. Names that need the web server or OpenTelemetry are imported on
first use, so that `import holdfast` stays fast and needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast import errors
from holdfast.activity import Activity
from holdfast.app import App
from holdfast.core.audit import Caller
from holdfast.core.bus import Sink
from holdfast.core.debounce import Debounce
from holdfast.core.events import ArtifactRef as Artifact
from holdfast.core.events import Event
from holdfast.core.messages import Actor
from holdfast.core.plans import PlanRef
from holdfast.core.snapshot import RunSnapshot, StepSnapshot, detect_gaps, incremental_project, project_run
from holdfast.core.timing import Retry
from holdfast.engine.activities.context import NonRetryable, RetryAfter, activity_context, open_artifact, put_artifact
from holdfast.engine.activities.context import stream as stream
from holdfast.engine.activities.secrets import EnvironmentSecrets, FileSecrets
from holdfast.engine.activities.verification import Completed, CompletedWithoutResult, Indeterminate, NotCompleted
from holdfast.engine.inbox.authorization import ControlRequest
from holdfast.engine.observe.logs import JsonFormatter, SecretFilter
from holdfast.engine.options import NodeOptions
from holdfast.engine.retention import Retention, RetentionRule
from holdfast.engine.run_context import bind_context, context
from holdfast.engine.stream_reading import StreamChunk, StreamReader
from holdfast.errors import WorkflowFailed
from holdfast.limits import DeadLetterPolicy, Limits
from holdfast.lock import Lock
from holdfast.program.activity_limits import ActivityLimit
from holdfast.program.api import (
    RunInfo,
    Saga,
    continue_as_new,
    continue_as_new_if_long,
    cut,
    now,
    on_query,
    on_update,
    patched,
    plan,
    poll,
    publish,
    random,
    run_info,
    scope,
    set_attributes,
    sleep,
    step,
    uuid4,
    wait_until,
)
from holdfast.program.callbacks import Callback, CallbackRef, callback
from holdfast.program.fan_out import MapResult, map, parallel
from holdfast.program.flow.steps import Act, Child, Chorus, Cue, Scene, Signal, Sleep, Task
from holdfast.program.middleware import ActivityCall, CallNext, ClientCall, WorkflowCall
from holdfast.program.secrets import Secret, SecretProvider, SecretScope
from holdfast.program.signals import signals, wait_signal
from holdfast.program.streams import Stream
from holdfast.program.tasks import Escalation, task
from holdfast.program.values import Converter
from holdfast.run import RunHandle
from holdfast.settings import Settings
from holdfast.store.artifacts import Artifacts, ArtifactStore, FolderArtifacts, StoredObject
from holdfast.store.memory import MemoryStore
from holdfast.store.open import open_store
from holdfast.store.payloads import Payload, PayloadCodec, StreamCodec
from holdfast.store.sqlite import SqliteStore
from holdfast.store.types import PurgePolicy
from holdfast.workflow import ChildRun, Flow, Workflow, start

if TYPE_CHECKING:
    from holdfast.engine.observe.tracing import RedactingSpanProcessor, carry_trace, span_context, traced
    from holdfast.service.http.asgi import asgi
    from holdfast.service.http.server import serve
    from holdfast.service.options import ServiceOptions
    from holdfast.store.encryption import Encryption
    from holdfast.store.object_artifacts import ObjectArtifacts
    from holdfast.store.postgres import PostgresStore

_LAZY = {
    "Encryption": "holdfast.store.encryption",
    "ObjectArtifacts": "holdfast.store.object_artifacts",
    "PostgresStore": "holdfast.store.postgres",
    "RedactingSpanProcessor": "holdfast.engine.observe.tracing",
    "ServiceOptions": "holdfast.service.options",
    "asgi": "holdfast.service.http.asgi",
    "carry_trace": "holdfast.engine.observe.tracing",
    "serve": "holdfast.service.http.server",
    "span_context": "holdfast.engine.observe.tracing",
    "traced": "holdfast.engine.observe.tracing",
}

__all__ = [
    "Act",
    "Activity",
    "ActivityCall",
    "ActivityLimit",
    "Actor",
    "App",
    "Artifact",
    "ArtifactStore",
    "Artifacts",
    "CallNext",
    "Callback",
    "CallbackRef",
    "Caller",
    "Child",
    "ChildRun",
    "Chorus",
    "ClientCall",
    "Completed",
    "CompletedWithoutResult",
    "ControlRequest",
    "Converter",
    "Cue",
    "DeadLetterPolicy",
    "Debounce",
    "Encryption",
    "EnvironmentSecrets",
    "Escalation",
    "Event",
    "FileSecrets",
    "Flow",
    "FolderArtifacts",
    "Indeterminate",
    "JsonFormatter",
    "Limits",
    "Lock",
    "MapResult",
    "MemoryStore",
    "NodeOptions",
    "NonRetryable",
    "NotCompleted",
    "ObjectArtifacts",
    "Payload",
    "PayloadCodec",
    "PlanRef",
    "PostgresStore",
    "PurgePolicy",
    "RedactingSpanProcessor",
    "Retention",
    "RetentionRule",
    "Retry",
    "RetryAfter",
    "RunHandle",
    "RunInfo",
    "RunSnapshot",
    "Saga",
    "Scene",
    "Secret",
    "SecretFilter",
    "SecretProvider",
    "SecretScope",
    "ServiceOptions",
    "Settings",
    "Signal",
    "Sink",
    "Sleep",
    "SqliteStore",
    "StepSnapshot",
    "StoredObject",
    "Stream",
    "StreamChunk",
    "StreamCodec",
    "StreamReader",
    "Task",
    "Workflow",
    "WorkflowCall",
    "WorkflowFailed",
    "activity_context",
    "asgi",
    "bind_context",
    "callback",
    "carry_trace",
    "context",
    "continue_as_new",
    "continue_as_new_if_long",
    "cut",
    "detect_gaps",
    "errors",
    "incremental_project",
    "map",
    "now",
    "on_query",
    "on_update",
    "open_artifact",
    "open_store",
    "parallel",
    "patched",
    "plan",
    "poll",
    "project_run",
    "publish",
    "put_artifact",
    "random",
    "run_info",
    "scope",
    "serve",
    "set_attributes",
    "signals",
    "sleep",
    "span_context",
    "start",
    "step",
    "stream",
    "task",
    "traced",
    "uuid4",
    "wait_signal",
    "wait_until",
]


def __getattr__(name: str) -> Any:
    """Import optional names on first use."""
    if name not in _LAZY:
        hint = f": it is holdfast.errors.{name}" if hasattr(errors, name) else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
