"""Every error that Holdfast raises or returns, in one tree that is ordered by who is at fault.

::

    HoldfastError
    ├── CallerError                 the request was wrong, or came too late; nothing was stored
    │   ├── InvalidInput            a field is missing, malformed or out of range
    │   │   └── PlanInvalid         a plan is wrong; `problems` says where and why, all of them
    │   ├── NotFound                no such run, step or task
    │   ├── Conflict                the id was used before with different content, or the state does not allow it
    │   ├── RunTerminal             the run has finished and accepts nothing more
    │   ├── NotPermitted            the actor may not do this
    │   ├── NotAuthenticated        the caller is unknown: no token, or an invalid one
    │   ├── NotWaiting              `require_waiting` was set and no wait is open
    │   ├── PayloadTooLarge         over a size limit
    │   ├── AnswerTooLarge          the response would exceed the size limit of the service
    │   ├── RateLimited             over a rate limit; `retry_after_ms` says when to try again
    │   ├── Overloaded              a workflow has reached its limit on runs; `retry_after_ms` says when to try again
    │   ├── SignalAcceptanceIndeterminate   a payload is stored, but its acceptance record is missing
    │   ├── MalformedRequest        the request cannot be parsed: it is not JSON, or not text
    │   ├── MethodNotAllowed        the address exists, but does not support this HTTP method
    │   ├── NotAcceptable           the response is not available in the requested format
    │   ├── SlowRequest             the body of a request did not arrive in time
    │   └── UnsupportedMediaType    the `Content-Type` of the request is not JSON
    ├── RunError                    one run is at fault; other runs are not affected
    │   ├── HistoryGap              events are missing between two that were read
    │   ├── CorruptHistory          an event that cannot follow the ones before it
    │   ├── HistoryTooNew           an event was written by a newer version of Holdfast, with a different meaning
    │   ├── ActivityFailed          an activity failed permanently; raised inside the workflow
    │   │   └── StartRefused        a start that the workflow requested was refused; raised inside the workflow
    │   ├── ChildFailed             a child run failed or was cancelled; raised inside the parent
    │   ├── SignalHandlerFailed     the handler of a wait raised; raised inside the workflow
    │   ├── UpdateFailed            an update was refused or failed; raised in the sender
    │   ├── QueryFailed             a query raised, or its result is not JSON; raised in the caller
    │   ├── WorkflowFailed          raised by a workflow to fail its run permanently
    │   ├── UnhandledError          a workflow did not handle an exception; the run is paused
    │   ├── NondeterminismError     replaying the code does not reproduce the recorded history
    │   ├── VersionMismatch         no node has the workflow version that the run was started with
    │   ├── RunFailed               the run failed; raised where its result is awaited
    │   │   └── RunTimedOut         the run exceeded its time-out
    │   ├── RunCancelled            the run was cancelled; raised where its result is awaited
    │   ├── ArtifactMissing         an artifact does not exist: it has expired, or was deleted
    │   ├── ArtifactCorrupt         the content of an artifact has changed since it was stored
    │   ├── PayloadUnreadable       a value is encrypted or stored elsewhere, and cannot be read here
    │   ├── NotDurable              a workflow did something that cannot be replayed; the message names what to use
    │   ├── RunawayWorkflow         a workflow did not become idle
    │   ├── SecretNotFound          the provider does not have a secret that an activity needs
    │   ├── PoisonTurn              nodes were lost during the run's turn; it is paused for an operator
    │   └── TurnRefused             the store rejects what a run would record, and would reject it again
    └── EngineError                 the installation is at fault, not the caller
        ├── PayloadsSealed          the payloads of this store are sealed, and this process cannot seal
        ├── LeaseExpired            the node did not renew its lease in time, and may not claim runs
        ├── NodeSuperseded          another process has started under this node's name and has taken over its runs
        ├── LockLost                another node holds the host lock under which this node was working
        ├── CheckpointOwnershipCapabilityError   the store cannot guard commits as the settings require
        ├── InternalError           an internal error; the log has it under the same correlation id
        ├── SecretsUnavailable      the provider of secrets failed, or none is configured
        ├── RequestTimedOut         the service timed out; the operation may still complete
        ├── ServiceStopping         the service is shutting down; `outcome` is whether the operation was done
        └── StoreError
            ├── StoreBusy           another process has locked the store for longer than the limit
            ├── StoreCorrupt        the file is damaged, cut short, or not a Holdfast store
            ├── StoreFull           the disk or the quota is full; nothing was written
            ├── StoreNotMigrated    the schema is missing or older than this version: run `migrate`
            ├── StoreReadOnly       the file or its folder cannot be written
            ├── StoreTooNew         the schema was written by a newer version of Holdfast
            ├── StoreTooOld         the schema has a format that this version of Holdfast no longer reads
            ├── StoreUnavailable    an input/output error, or the store is closed
            └── StoreUnsafe         the store cannot guarantee durability; opening it is refused

`code` is the name of the class. It is stable: programs should check it, and not the message. `details` contains only
what may be shown to the caller, never a payload.
"""

from typing import Any, ClassVar


class HoldfastError(Exception):
    """The root: a stable `code`, a sentence for people, and `details` for programs."""

    code: ClassVar[str] = "HoldfastError"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.code = cls.__name__

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details

    def as_dict(self) -> dict[str, Any]:
        """Return what may be sent over the wire: code, message and details."""
        return {"code": self.code, "message": self.message, **self.details}


class CallerError(HoldfastError):
    """The request was wrong, or came too late. Nothing was stored."""


class InvalidInput(CallerError):
    """A field is missing, malformed or out of range.

    What to do: Correct the field that `field` names. The same request would fail again.
    """


class PlanInvalid(InvalidInput):
    """A plan is wrong. `details["problems"]` has every problem: its place, the reason, and the line if there is one.

    What to do: Fix every problem in `problems`; `holdfast plan validate` lists them without storing anything.
    """


class NotFound(CallerError):
    """There is no such run, step or task.

    What to do: Check the id, the tenant and the store's address. A finished run may have been deleted by
    retention.
    """


class Conflict(CallerError):
    """The id was used before with different content, or the current state does not allow the operation.

    What to do: Read the message. Use a new id for new content, send the same content to retry, or bring the run
    into a status that allows the operation.
    """


class RunTerminal(CallerError):
    """The run has finished and accepts nothing more.

    What to do: Start a new run, or read the result of this one.
    """


class NotPermitted(CallerError):
    """The actor may not do this.

    What to do: Ask an administrator for the role or scope that the message names.
    """


class NotAuthenticated(CallerError):
    """The caller is unknown: there is no token, or it is invalid, expired or revoked.

    What to do: Make a token with `holdfast token create`, or sign in again.
    """


class NotWaiting(CallerError):
    """`require_waiting` was set and no open wait would take this signal.

    What to do: Send the signal without `require_waiting`, so that it is kept, or send it when the run waits.
    """


class PayloadTooLarge(CallerError):
    """A payload exceeds its size limit.

    What to do: Store the content as an artifact and send its reference, or raise the limit that the message
    names.
    """


class AnswerTooLarge(CallerError):
    """The response would exceed the size limit of the service.

    What to do: Request fewer items, a smaller page, or fewer calls in a batch.
    """


class RateLimited(CallerError):
    """Too many requests in too short a time; `details["retry_after_ms"]` says when to try again.

    What to do: Retry after `retry_after_ms`. If it persists, send requests less often or raise the limit.
    """


class Overloaded(CallerError):
    """The workflow has reached its limit on runs; `details["retry_after_ms"]` says when to try again.

    What to do: Retry after `retry_after_ms`, or let the workflow queue runs instead of rejecting them.
    """


class SignalAcceptanceIndeterminate(CallerError):
    """A payload with this signal id is stored, but the record of its acceptance is missing.

    The signal may have been delivered, so sending it again could apply it twice. Retry only after an operator has
    checked, or after the retention window.

    What to do: Check the run's history. Send the signal under a new id only if it was not applied.
    """


class MalformedRequest(CallerError):
    """The request cannot be parsed: it is not JSON, not text, or nested too deeply.

    What to do: Send a JSON text in UTF-8.
    """


class MethodNotAllowed(CallerError):
    """The address exists, but does not support this HTTP method.

    What to do: Use the method that the reference of operations lists for this address.
    """


class NotAcceptable(CallerError):
    """The response is not available in the requested format.

    What to do: Request JSON, or omit the `Accept` header.
    """


class SlowRequest(CallerError):
    """The body of the request did not arrive in time.

    What to do: Send it again over a better connection. Large content belongs in an artifact.
    """


class UnsupportedMediaType(CallerError):
    """The `Content-Type` of the request is not JSON.

    What to do: Send `Content-Type: application/json`.
    """


class RunError(HoldfastError):
    """One run is at fault; other runs are not affected."""


class HistoryGap(RunError):
    """Events are missing between two that were read. The projection stops; it never skips events.

    What to do: Retry. If it persists, run `holdfast doctor`: the store has lost events.
    """


class CorruptHistory(RunError):
    """An event that cannot follow the ones before it.

    What to do: Run `holdfast doctor --thorough`, and restore from a backup if it confirms the damage.
    """


class HistoryTooNew(RunError):
    """An event was written by a newer version of Holdfast, with a different meaning.

    What to do: Upgrade this process.
    """


class _Recorded(RunError):
    """An error that is recorded in a history: `info` is the record, with its cause."""

    def __init__(self, message: str, info: Any = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.info = info


class ActivityFailed(_Recorded):
    """An activity failed permanently. Raised inside the workflow, which may catch it.

    What to do: Catch it in the workflow to compensate; otherwise look at `info` for the cause.
    """


class StartRefused(ActivityFailed):
    """A start that the workflow requested was refused. Raised inside the workflow; `info.code` is the reason.

    It is the code that a caller would get: `Conflict`, `Overloaded`, `NotFound`, `InvalidInput` and others.

    What to do: Check `info.code`, and handle it as a caller would.
    """


class ChildFailed(_Recorded):
    """A child run failed or was cancelled. Raised inside the parent, which may catch it.

    What to do: Catch it in the parent to compensate; look at the child's history for the cause.
    """


class SignalHandlerFailed(_Recorded):
    """The handler of a wait raised. Raised inside the workflow, which may catch it; the signal is consumed.

    What to do: Fix the handler, or catch the error where the signal is awaited.
    """


class UpdateFailed(_Recorded):
    """An update was refused or failed. Raised in the sender.

    What to do: Read the message: it is what the validator or the handler raised. Send a corrected update under
    a new id.
    """


class QueryFailed(RunError):
    """A query raised, or its result is not JSON. Raised in the caller; the run is not changed.

    What to do: Fix the query, so that it returns JSON and changes nothing.
    """


class RunFailed(_Recorded):
    """The run failed. Raised where its result is awaited; `info` holds the chain of causes.

    What to do: Look at `info` and at the history. Retry the run once the cause is gone.
    """


class RunTimedOut(RunFailed):
    """The run exceeded its time-out. Raised where its result is awaited.

    What to do: Find the step in the history that the run was waiting for. Allow more time, or start the run again.
    """


class RunCancelled(_Recorded):
    """The run was cancelled. Raised where its result is awaited.

    What to do: Nothing, if this was intended. The history shows who cancelled it and why.
    """


class WorkflowFailed(RunError):
    """Raised by a workflow to fail its run permanently. A subclass is recorded under its own name.

    What to do: Nothing: it is the author's decision. The history has the cause.
    """


class UnhandledError(RunError):
    """The workflow did not handle an exception, or nothing can wake it. The run is paused until the code is fixed.

    What to do: Fix the code and deploy it, then resume the run. To fail a run on purpose, raise
    `WorkflowFailed`.
    """


class NondeterminismError(RunError):
    """Replaying the code does not reproduce the recorded history. The run is paused, never failed.

    What to do: Deploy code that fits the history (`hf.patched`, or the previous code), then resume. `holdfast
    check-histories` finds these before a deployment.
    """


class VersionMismatch(RunError):
    """No node has the workflow version that the run was started with. The run is paused.

    What to do: Run a node with that version, or let the new code serve old runs (`hf.patched`), then resume.
    """


class ArtifactMissing(RunError):
    """An artifact does not exist: it has expired, or was deleted.

    What to do: Keep artifacts for longer, or create the artifact again and retry the step.
    """


class ArtifactCorrupt(RunError):
    """The content of an artifact has changed since it was stored.

    What to do: Restore the artifact from a backup, or create it again and retry the step.
    """


class PayloadUnreadable(RunError):
    """A value of the run is encrypted or stored elsewhere and cannot be read: a key or the content is missing.

    What to do: Give this process the missing key, or the address of the artifacts.
    """


class NotDurable(RunError):
    """A workflow did something that cannot be replayed. The message names what to use instead.

    What to do: Use what the message names, or move the code into an activity.
    """


class RunawayWorkflow(RunError):
    """A workflow did not become idle within its bound.

    What to do: Look for a loop without an `await` of a step, a timer or a signal, and move long work into an
    activity.
    """


class SecretNotFound(RunError):
    """The provider does not have a secret that an activity needs. The attempt fails before the function is called.

    `retryable` is whether the secret may become available later, as far as the provider knows.

    What to do: Add the secret to the provider under the name in the message.
    """

    def __init__(self, message: str, *, retryable: bool = True, **details: Any) -> None:
        super().__init__(message, **details)
        self.retryable = retryable


class PoisonTurn(RunError):
    """Several nodes in a row were lost during the run's turn. The run is paused for an operator.

    What to do: Check the logs of those nodes (out of memory, a crash in native code), fix the cause,
    then resume the run.
    """


class TurnRefused(RunError):
    """The store rejects what a run would record, and would reject it again.

    What to do: Read the message: most often a value is too large. Change the code, then resume the run.
    """


class EngineError(HoldfastError):
    """The installation is at fault, not the caller."""


class PayloadsSealed(EngineError):
    """The payloads of this store are encrypted or stored elsewhere, and this process is not configured to do that.

    What to do: Give this process the same encryption keys and artifact store as the others.
    """


class LeaseExpired(EngineError):
    """This node did not renew its lease in time, so it may not claim runs.

    What to do: Nothing: the node acquires a new lease. If it recurs, look for blocking code and a slow store.
    """


class NodeSuperseded(EngineError):
    """Another process has started under this node's name and has taken over its runs. This process has to stop.

    What to do: Give each process its own name, or none.
    """


class LockLost(EngineError):
    """Another node holds the host lock under which this node was working. Nothing was changed.

    What to do: Nothing: the other node continues the work. If it recurs, look for a slow store.
    """


class CheckpointOwnershipCapabilityError(EngineError):
    """The store cannot guard commits as the settings, or a feature, require.

    What to do: Use a store that can guard commits, or set `checkpoint_ownership` to `single-owner` and run one
    process.
    """


class InternalError(EngineError):
    """An internal error. The log has it under the same correlation id.

    What to do: Search the log for the correlation id, and report the error.
    """


class SecretsUnavailable(EngineError):
    """The provider of secrets failed, or none is configured. The attempt fails and is retried by its policy.

    If a provider raises this error, its message is recorded. Of any other error only the type is recorded, because
    the message may contain secrets.

    What to do: Check the provider's address and its credentials.
    """


class RequestTimedOut(EngineError):
    """The service timed out before the operation completed. It may still complete.

    What to do: Retry with the same id: the operation is not done twice.
    """


class ServiceStopping(EngineError):
    """The service is shutting down. `outcome` is `not-done` or `unknown`, for the requested operation.

    What to do: Retry, with the same id if `outcome` is `unknown`.
    """


class StoreError(EngineError):
    """The store failed. What it has acknowledged before is not affected."""


class StoreBusy(StoreError):
    """Another process has locked the store for longer than the limit.

    What to do: Retry. If it persists, find the process that holds the file (`holdfast doctor`).
    """


class StoreCorrupt(StoreError):
    """The file is damaged, cut short, or not a Holdfast store.

    What to do: Stop all nodes, keep the file, and restore a backup with `holdfast store restore`.
    """


class StoreFull(StoreError):
    """The disk or the quota is full. Nothing was written.

    What to do: Free space, or set a retention policy. Nodes continue by themselves.
    """


class StoreNotMigrated(StoreError):
    """The schema is missing or older than this version of Holdfast.

    What to do: Run `holdfast store migrate`.
    """


class StoreReadOnly(StoreError):
    """The file or its folder cannot be written.

    What to do: Give the process permission to write the file and its folder.
    """


class StoreTooNew(StoreError):
    """The schema was written by a newer version of Holdfast.

    What to do: Upgrade Holdfast in this process.
    """


class StoreTooOld(StoreError):
    """The schema has a format that this version of Holdfast no longer reads.

    What to do: Finish its runs with the version of Holdfast that wrote it, then create a new store.
    """


class StoreUnavailable(StoreError):
    """An input/output error, or the store is closed.

    What to do: Check the server, its address and the network. Nodes retry by themselves.
    """


class StoreUnsafe(StoreError):
    """The store cannot guarantee durability, so opening it is refused.

    What to do: Change the setting that the message names: with it, acknowledged data could be lost.
    """
