"""Every error that Holdfast raises or answers with: one tree, sorted by whose fault it is.

::

    HoldfastError
    ├── CallerError                 the request was wrong, or came too late; nothing was stored
    │   ├── InvalidInput            a field is missing, malformed or out of range
    │   │   └── PlanInvalid         a plan is wrong; `problems` says where and why, all of them
    │   ├── NotFound                no such run, step or task
    │   ├── Conflict                the same id was used before with another content, or the state does not allow it
    │   ├── RunTerminal             the run has finished; it takes nothing more
    │   ├── NotPermitted            the actor may not do this
    │   ├── NotAuthenticated        the caller is not known: no token, or one that is not valid
    │   ├── NotWaiting              `require_waiting` was asked for and no wait is open
    │   ├── PayloadTooLarge         over a size limit
    │   ├── AnswerTooLarge          the answer would be larger than a service gives; ask for less
    │   ├── RateLimited             over a rate limit; `retry_after_ms` says when to try again
    │   ├── Overloaded              a workflow has as many runs as it allows; `retry_after_ms` says when to try again
    │   ├── SignalAcceptanceIndeterminate   a payload is stored whose acceptance record is missing
    │   ├── MalformedRequest        a request that is not even readable: no JSON, or no text
    │   ├── MethodNotAllowed        the address is right, and the verb is not
    │   ├── NotAcceptable           the answer cannot be had in the format that was asked for
    │   ├── SlowRequest             the body of a request did not arrive in time
    │   └── UnsupportedMediaType    the body of a request is not said to be JSON
    ├── RunError                    one run is at fault; every other run goes on
    │   ├── HistoryGap              events are missing between two that were read
    │   ├── CorruptHistory          an event that cannot follow the ones before it
    │   ├── HistoryTooNew           an event was written by a newer version of Holdfast, and has another meaning there
    │   ├── ActivityFailed          a step's activity failed for good; raised inside the workflow
    │   │   └── StartRefused        a run that the workflow wanted to start was refused; raised inside the workflow
    │   ├── ChildFailed             a child run failed or was cancelled; raised inside the parent
    │   ├── SignalHandlerFailed     the handler of a wait raised; raised inside the workflow
    │   ├── UpdateFailed            an update was refused or failed; raised to who sent it
    │   ├── QueryFailed             a query raised, or its answer is no JSON; raised to who asked
    │   ├── WorkflowFailed          raised by a workflow to fail its run for good
    │   ├── UnhandledError          an exception that the code of a workflow did not handle; the run is paused
    │   ├── NondeterminismError     replaying the code does not lead to the history that was recorded
    │   ├── VersionMismatch         no node has the version of the workflow that the run was started with
    │   ├── RunFailed               the run failed; raised where its result is awaited
    │   ├── RunCancelled            the run was cancelled; raised where its result is awaited
    │   ├── ArtifactMissing         an artifact is not there: it has expired, or was deleted
    │   ├── ArtifactCorrupt         an artifact is not what was stored
    │   ├── PayloadUnreadable       a value of the run is encrypted or kept elsewhere, and cannot be opened here
    │   ├── NotDurable              a workflow did something that cannot be replayed; the message names what to use
    │   ├── RunawayWorkflow         a workflow did not become idle
    │   ├── SecretNotFound          a provider does not have a secret that an activity needs
    │   ├── PoisonTurn              nodes went away while they took the run's turn; it is set aside for an operator
    │   └── TurnRefused             the store refuses what a run would record, and would refuse it again
    └── EngineError                 the installation is at fault, not the caller
        ├── PayloadsSealed          the payloads of this store are sealed, and this process cannot do that
        ├── LeaseExpired            this node may not claim: it did not renew its lease in time
        ├── NodeSuperseded          another process has started under this node's name, and took over what it held
        ├── CheckpointOwnershipCapabilityError   the store cannot guard commits as the settings demand
        ├── InternalError           an error of the service; the log has it, under the same correlation id
        ├── SecretsUnavailable      a provider of secrets failed, or there is none
        ├── RequestTimedOut         the answer took longer than a service waits; what was asked may still be done
        ├── ServiceStopping         the service is being stopped; `outcome` says whether what was asked was done
        └── StoreError
            ├── StoreBusy           another process has held the store for longer than the limit
            ├── StoreCorrupt        the file is damaged, cut short, or not a Holdfast store
            ├── StoreFull           the disk or the quota is used up; the write was not made
            ├── StoreNotMigrated    the schema is missing or older than this version: run `migrate`
            ├── StoreReadOnly       the file or its folder cannot be written
            ├── StoreTooNew         the schema was written by a newer version of Holdfast
            ├── StoreTooOld         the schema is of a format that this version of Holdfast no longer reads
            ├── StoreUnavailable    an input/output error, or the store is closed
            └── StoreUnsafe         the store cannot promise durability; it is refused at open

`code` is stable and is what programs should look at; it is the class's name. `details` holds only
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
    """A field is missing, malformed or out of range."""


class PlanInvalid(InvalidInput):
    """A plan is wrong. `details["problems"]` has every problem: its place, the reason, and the line if there is one."""


class NotFound(CallerError):
    """There is no such run, step or task."""


class Conflict(CallerError):
    """The same id was used before with another content, or the present state does not allow it."""


class RunTerminal(CallerError):
    """The run has finished; it takes nothing more."""


class NotPermitted(CallerError):
    """The actor may not do this."""


class NotAuthenticated(CallerError):
    """The caller is not known: there is no token, or it is not valid, or not any more."""


class NotWaiting(CallerError):
    """`require_waiting` was asked for and no open wait would take this signal."""


class PayloadTooLarge(CallerError):
    """A payload is over its size limit."""


class AnswerTooLarge(CallerError):
    """The answer would be larger than a service gives. Ask for less: fewer items, fewer calls in a batch."""


class RateLimited(CallerError):
    """Too many in too short a time; `details["retry_after_ms"]` says when to try again."""


class Overloaded(CallerError):
    """The workflow has as many runs as it allows; `details["retry_after_ms"]` says when to try again."""


class SignalAcceptanceIndeterminate(CallerError):
    """A payload with this signal id is stored, but the record of its acceptance is missing.

    It may have been delivered; sending it again could apply it twice. Retry only after an operator has looked,
    or after the retention window.
    """


class MalformedRequest(CallerError):
    """The request cannot even be read: it is no JSON, no text, or nested too deep."""


class MethodNotAllowed(CallerError):
    """The address is right, and the verb is not."""


class NotAcceptable(CallerError):
    """The answer cannot be had in the format that was asked for."""


class SlowRequest(CallerError):
    """The body of the request did not arrive in time."""


class UnsupportedMediaType(CallerError):
    """The body of the request is not said to be JSON."""


class RunError(HoldfastError):
    """One run is at fault; every other run goes on."""


class HistoryGap(RunError):
    """Events are missing between two that were read. Projection halts; it never skips."""


class CorruptHistory(RunError):
    """An event that cannot follow the ones before it."""


class HistoryTooNew(RunError):
    """An event was written by a newer version of Holdfast, and has another meaning there."""


class _Recorded(RunError):
    """An error that stands in a history: `info` is how it was recorded, with its cause."""

    def __init__(self, message: str, info: Any = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.info = info


class ActivityFailed(_Recorded):
    """A step's activity failed for good. Raised inside the workflow, which may catch it."""


class StartRefused(ActivityFailed):
    """A run that the workflow wanted to start was refused. Raised inside the workflow; `info.code` says why.

    That is the code of what a caller would get: `Conflict`, `Overloaded`, `NotFound`, `InvalidInput` and others.
    """


class ChildFailed(_Recorded):
    """A child run failed or was cancelled. Raised inside the parent, which may catch it."""


class SignalHandlerFailed(_Recorded):
    """The handler of a wait raised. Raised inside the workflow, which may catch it; the signal is consumed."""


class UpdateFailed(_Recorded):
    """An update was refused or failed. Raised to who sent it."""


class QueryFailed(RunError):
    """A query raised, or answered with what is no JSON. Raised to who asked; nothing is changed by it."""


class RunFailed(_Recorded):
    """The run failed. Raised where its result is awaited; `info` holds the chain of causes."""


class RunCancelled(_Recorded):
    """The run was cancelled. Raised where its result is awaited."""


class WorkflowFailed(RunError):
    """Raised by a workflow to fail its run for good. A subclass is recorded under its own name."""


class UnhandledError(RunError):
    """The code of a workflow raised what it did not handle. The run is paused, and goes on once the code is mended."""


class NondeterminismError(RunError):
    """Replaying the code does not lead to the history that was recorded. The run is paused, never failed."""


class VersionMismatch(RunError):
    """No node has the version of the workflow that the run was started with. The run is paused."""


class ArtifactMissing(RunError):
    """An artifact is not there: it has expired, or was deleted."""


class ArtifactCorrupt(RunError):
    """The bytes of an artifact are not those that were stored."""


class PayloadUnreadable(RunError):
    """A value of the run is encrypted or kept elsewhere, and cannot be opened: a key or the content is missing."""


class NotDurable(RunError):
    """A workflow did something that cannot be replayed. The message names what to use instead."""


class RunawayWorkflow(RunError):
    """A workflow did not become idle within its bound."""


class SecretNotFound(RunError):
    """A provider does not have a secret that an activity needs. The attempt fails before the function is called.

    `retryable` says whether the secret may be there later, as far as the provider knows.
    """

    def __init__(self, message: str, *, retryable: bool = True, **details: Any) -> None:
        super().__init__(message, **details)
        self.retryable = retryable


class PoisonTurn(RunError):
    """Nodes went away, one after the other, while they took the run's turn. It is set aside for an operator."""


class TurnRefused(RunError):
    """The store refuses what a run would record, and would refuse it again."""


class EngineError(HoldfastError):
    """The installation is at fault, not the caller."""


class PayloadsSealed(EngineError):
    """The payloads of this store are encrypted or kept elsewhere, and this process is not configured to do that."""


class LeaseExpired(EngineError):
    """This node did not renew its lease in time, so it may not claim runs."""


class NodeSuperseded(EngineError):
    """Another process has started under this node's name and took over what it held. This one has to end."""


class LockLost(EngineError):
    """This node no longer holds the host lock under which it works: another one has it. Nothing was changed."""


class CheckpointOwnershipCapabilityError(EngineError):
    """The store cannot guard commits in the way that the settings, or a feature, demand."""


class InternalError(EngineError):
    """An error of the service. The log has it, under the same correlation id."""


class SecretsUnavailable(EngineError):
    """A provider of secrets failed, or there is none. The attempt fails, and is tried again by its policy.

    A provider that raises this decides what is recorded. Of any other error only the type is, as its text may hold
    secrets.
    """


class RequestTimedOut(EngineError):
    """The answer took longer than a service waits. What was asked may still be done: ask again with the same id."""


class ServiceStopping(EngineError):
    """The service is being stopped: ask again. `outcome` says of what was asked that it is `not-done` or `unknown`."""


class StoreError(EngineError):
    """The store cannot do its work. What was acknowledged before is not affected."""


class StoreBusy(StoreError):
    """Another process has held the store for longer than the limit. Retry."""


class StoreCorrupt(StoreError):
    """The file is damaged, cut short, or not a Holdfast store."""


class StoreFull(StoreError):
    """The disk or the quota is used up. The write was not made."""


class StoreNotMigrated(StoreError):
    """The schema is missing or older than this version of Holdfast."""


class StoreReadOnly(StoreError):
    """The file or its folder cannot be written."""


class StoreTooNew(StoreError):
    """The schema was written by a newer version of Holdfast."""


class StoreTooOld(StoreError):
    """The schema is of a format that this version of Holdfast no longer reads."""


class StoreUnavailable(StoreError):
    """An input/output error, or the store is closed."""


class StoreUnsafe(StoreError):
    """The store cannot promise durability, so it is refused at open."""
