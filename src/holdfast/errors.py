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
    │   │   └── RunTimedOut         the run took longer than it may
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
        ├── ServiceStopping         the service is being stopped; `outcome` is whether what was asked was done
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
    """A field is missing, malformed or out of range.

    What to do: Correct the field that `field` names. Sending the same again gets the same answer.
    """


class PlanInvalid(InvalidInput):
    """A plan is wrong. `details["problems"]` has every problem: its place, the reason, and the line if there is one.

    What to do: Mend every problem in `problems`; `holdfast plan validate` lists them without storing anything.
    """


class NotFound(CallerError):
    """There is no such run, step or task.

    What to do: Check the id, the tenant and the store's address. A finished run may have been deleted by
    retention.
    """


class Conflict(CallerError):
    """The same id was used before with another content, or the present state does not allow it.

    What to do: Read the message. Take a new id for new content; send the same content for a retry; or get the
    run into a status that allows it.
    """


class RunTerminal(CallerError):
    """The run has finished; it takes nothing more.

    What to do: Start a new run, or read the result of this one.
    """


class NotPermitted(CallerError):
    """The actor may not do this.

    What to do: Ask an administrator for the role or scope that the message names.
    """


class NotAuthenticated(CallerError):
    """The caller is not known: there is no token, or it is not valid, or not any more.

    What to do: Make a token with `holdfast token create`, or sign in again.
    """


class NotWaiting(CallerError):
    """`require_waiting` was asked for and no open wait would take this signal.

    What to do: Send without `require_waiting`, so that the signal is kept; or send it when the run waits.
    """


class PayloadTooLarge(CallerError):
    """A payload is over its size limit.

    What to do: Store the content as an artifact and send its reference, or raise the limit that the message
    names.
    """


class AnswerTooLarge(CallerError):
    """The answer would be larger than a service gives. Ask for less: fewer items, fewer calls in a batch.

    What to do: Ask for fewer items, a smaller page, or fewer calls in a batch.
    """


class RateLimited(CallerError):
    """Too many in too short a time; `details["retry_after_ms"]` says when to try again.

    What to do: Retry after `retry_after_ms`. If it lasts, send less often or raise the limit.
    """


class Overloaded(CallerError):
    """The workflow has as many runs as it allows; `details["retry_after_ms"]` says when to try again.

    What to do: Retry after `retry_after_ms`, or let the workflow queue runs instead of rejecting them.
    """


class SignalAcceptanceIndeterminate(CallerError):
    """A payload with this signal id is stored, but the record of its acceptance is missing.

    It may have been delivered; sending it again could apply it twice. Retry only after an operator has looked,
    or after the retention window.

    What to do: Look at the run's history. Send it under a new id only if it was not applied.
    """


class MalformedRequest(CallerError):
    """The request cannot even be read: it is no JSON, no text, or nested too deep.

    What to do: Send one JSON text in UTF-8.
    """


class MethodNotAllowed(CallerError):
    """The address is right, and the verb is not.

    What to do: Use the verb that the reference of operations names for this address.
    """


class NotAcceptable(CallerError):
    """The answer cannot be had in the format that was asked for.

    What to do: Ask for JSON, or leave the header `Accept` away.
    """


class SlowRequest(CallerError):
    """The body of the request did not arrive in time.

    What to do: Send again over a better connection; large content belongs into an artifact.
    """


class UnsupportedMediaType(CallerError):
    """The body of the request is not said to be JSON.

    What to do: Send `Content-Type: application/json`.
    """


class RunError(HoldfastError):
    """One run is at fault; every other run goes on."""


class HistoryGap(RunError):
    """Events are missing between two that were read. Projection halts; it never skips.

    What to do: Retry. If it stays, run `holdfast doctor`: the store has lost events.
    """


class CorruptHistory(RunError):
    """An event that cannot follow the ones before it.

    What to do: Run `holdfast doctor --thorough`, and restore from a backup if it confirms the damage.
    """


class HistoryTooNew(RunError):
    """An event was written by a newer version of Holdfast, and has another meaning there.

    What to do: Upgrade this process.
    """


class _Recorded(RunError):
    """An error that stands in a history: `info` is how it was recorded, with its cause."""

    def __init__(self, message: str, info: Any = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.info = info


class ActivityFailed(_Recorded):
    """A step's activity failed for good. Raised inside the workflow, which may catch it.

    What to do: Catch it in the workflow to compensate; otherwise look at `info` for the cause.
    """


class StartRefused(ActivityFailed):
    """A run that the workflow wanted to start was refused. Raised inside the workflow; `info.code` says why.

    That is the code of what a caller would get: `Conflict`, `Overloaded`, `NotFound`, `InvalidInput` and others.

    What to do: Look at `info.code`, and handle it as a caller would.
    """


class ChildFailed(_Recorded):
    """A child run failed or was cancelled. Raised inside the parent, which may catch it.

    What to do: Catch it in the parent to compensate; look at the child's history for the cause.
    """


class SignalHandlerFailed(_Recorded):
    """The handler of a wait raised. Raised inside the workflow, which may catch it; the signal is consumed.

    What to do: Mend the handler, or catch the error where the signal is awaited.
    """


class UpdateFailed(_Recorded):
    """An update was refused or failed. Raised to who sent it.

    What to do: Read the message: it is what the validator or the handler raised. Send a corrected update under
    a new id.
    """


class QueryFailed(RunError):
    """A query raised, or answered with what is no JSON. Raised to who asked; nothing is changed by it.

    What to do: Mend the query, so that it returns JSON and changes nothing.
    """


class RunFailed(_Recorded):
    """The run failed. Raised where its result is awaited; `info` holds the chain of causes.

    What to do: Look at `info` and at the history. Retry the run once the cause is gone.
    """


class RunTimedOut(RunFailed):
    """The run took longer than it may. Raised where its result is awaited.

    What to do: Look in the history for the step that it waited for; give it more time, or start it again.
    """


class RunCancelled(_Recorded):
    """The run was cancelled. Raised where its result is awaited.

    What to do: Nothing, if it was meant; the history says who cancelled it and why.
    """


class WorkflowFailed(RunError):
    """Raised by a workflow to fail its run for good. A subclass is recorded under its own name.

    What to do: Nothing: it is the author's decision. The history has the cause.
    """


class UnhandledError(RunError):
    """The code of a workflow raised what it did not handle. The run is paused, and goes on once the code is mended.

    What to do: Mend the code and deploy it, then resume the run. To fail a run on purpose, raise
    `WorkflowFailed`.
    """


class NondeterminismError(RunError):
    """Replaying the code does not lead to the history that was recorded. The run is paused, never failed.

    What to do: Deploy code that fits the history (`hf.patched`, or the former code), then resume. `holdfast
    check-histories` finds these before a deployment.
    """


class VersionMismatch(RunError):
    """No node has the version of the workflow that the run was started with. The run is paused.

    What to do: Run a node with that version, or let the new code serve old runs (`hf.patched`), then resume.
    """


class ArtifactMissing(RunError):
    """An artifact is not there: it has expired, or was deleted.

    What to do: Keep artifacts for longer, or make the artifact again and retry the step.
    """


class ArtifactCorrupt(RunError):
    """The bytes of an artifact are not those that were stored.

    What to do: Restore it from a backup, or make it again and retry the step.
    """


class PayloadUnreadable(RunError):
    """A value of the run is encrypted or kept elsewhere, and cannot be opened: a key or the content is missing.

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
    """A provider does not have a secret that an activity needs. The attempt fails before the function is called.

    `retryable` is whether the secret may be there later, as far as the provider knows.

    What to do: Add the secret to the provider under the name that the message has.
    """

    def __init__(self, message: str, *, retryable: bool = True, **details: Any) -> None:
        super().__init__(message, **details)
        self.retryable = retryable


class PoisonTurn(RunError):
    """Nodes went away, one after the other, while they took the run's turn. It is set aside for an operator.

    What to do: Look at the logs of the nodes that went away (memory, a crash in native code), mend it, then
    resume the run.
    """


class TurnRefused(RunError):
    """The store refuses what a run would record, and would refuse it again.

    What to do: Read the message: most often a value is too large. Change the code, then resume the run.
    """


class EngineError(HoldfastError):
    """The installation is at fault, not the caller."""


class PayloadsSealed(EngineError):
    """The payloads of this store are encrypted or kept elsewhere, and this process is not configured to do that.

    What to do: Give this process the same encryption keys and artifact store as the others.
    """


class LeaseExpired(EngineError):
    """This node did not renew its lease in time, so it may not claim runs.

    What to do: Nothing: the node takes a new lease. If it recurs, look for blocking code and for a slow store.
    """


class NodeSuperseded(EngineError):
    """Another process has started under this node's name and took over what it held. This one has to end.

    What to do: Give each process its own name, or none.
    """


class LockLost(EngineError):
    """This node no longer holds the host lock under which it works: another one has it. Nothing was changed.

    What to do: Nothing: the other node goes on. If it recurs, look for a slow store.
    """


class CheckpointOwnershipCapabilityError(EngineError):
    """The store cannot guard commits in the way that the settings, or a feature, demand.

    What to do: Use a store that can guard commits, or set `checkpoint_ownership` to `single-owner` and run one
    process.
    """


class InternalError(EngineError):
    """An error of the service. The log has it, under the same correlation id.

    What to do: Look in the log for the correlation id, and report it.
    """


class SecretsUnavailable(EngineError):
    """A provider of secrets failed, or there is none. The attempt fails, and is tried again by its policy.

    A provider that raises this decides what is recorded. Of any other error only the type is, as its text may hold
    secrets.

    What to do: Check the provider's address and its credentials.
    """


class RequestTimedOut(EngineError):
    """The answer took longer than a service waits. What was asked may still be done: ask again with the same id.

    What to do: Ask again with the same id: what was done is not done twice.
    """


class ServiceStopping(EngineError):
    """The service is being stopped: ask again. `outcome` says of what was asked that it is `not-done` or `unknown`.

    What to do: Ask again, with the same id where `outcome` is `unknown`.
    """


class StoreError(EngineError):
    """The store cannot do its work. What was acknowledged before is not affected."""


class StoreBusy(StoreError):
    """Another process has held the store for longer than the limit. Retry.

    What to do: Retry. If it lasts, look for a process that holds the file (`holdfast doctor`).
    """


class StoreCorrupt(StoreError):
    """The file is damaged, cut short, or not a Holdfast store.

    What to do: Stop all nodes, keep the file, and restore a backup with `holdfast store restore`.
    """


class StoreFull(StoreError):
    """The disk or the quota is used up. The write was not made.

    What to do: Make room, or set a policy of retention; nodes go on by themselves.
    """


class StoreNotMigrated(StoreError):
    """The schema is missing or older than this version of Holdfast.

    What to do: Run `holdfast store migrate`.
    """


class StoreReadOnly(StoreError):
    """The file or its folder cannot be written.

    What to do: Give the process the right to write the file and its folder.
    """


class StoreTooNew(StoreError):
    """The schema was written by a newer version of Holdfast.

    What to do: Upgrade Holdfast in this process.
    """


class StoreTooOld(StoreError):
    """The schema is of a format that this version of Holdfast no longer reads.

    What to do: Finish its runs with the Holdfast that wrote it, then begin a new store.
    """


class StoreUnavailable(StoreError):
    """An input/output error, or the store is closed.

    What to do: Check the server, its address and the network. Nodes retry by themselves.
    """


class StoreUnsafe(StoreError):
    """The store cannot promise durability, so it is refused at open.

    What to do: Change the setting that the message names; it would lose what was acknowledged.
    """
