"""Workflows and activities as they are registered: names, versions, types, policies and limits."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import timedelta
from functools import cache, cached_property, lru_cache
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, get_args

import msgspec
from msgspec import Raw

from holdfast.core import codec
from holdfast.core.admission import AdmissionRequest, Overload, RunLimit, check_admission_request, check_limit
from holdfast.core.attributes import AttributeType
from holdfast.core.call_limits import LimitedBy
from holdfast.core.debounce import Debounce
from holdfast.core.events import NULL, ErrorInfo, RunTimeouts
from holdfast.core.graph import Graph
from holdfast.core.keys import check_idempotency_key, check_name, check_step_name, check_tag, require_step_name
from holdfast.core.plans import PlanRef
from holdfast.core.timing import NO_RETRY, Retry
from holdfast.errors import ActivityFailed, CallerError, InvalidInput
from holdfast.limits import DURATION_MS, ERROR_TEXT_CHARS, NAME_BYTES, PRIORITY, TAGS, VERIFY_TIMEOUT_MS
from holdfast.program.fingerprint import fingerprint
from holdfast.program.middleware import Middleware, WorkflowCall
from holdfast.program.secrets import Secret, without_secrets
from holdfast.program.values import PLAIN, Signature, Values

if TYPE_CHECKING:
    from holdfast.program.activity_limits import LimitedCalls


class WorkflowDefinition:
    """A registered workflow."""

    is_external = False
    """Whether only other apps have its code."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        version: str,
        signals: Mapping[str, Any] | None = None,
        *,
        allows_other_signals: bool = False,
        values: Values = PLAIN,
        failures: Any = (),
        on_error: "OnError" = "pause",
        requires_approval: bool = False,
        is_entity: bool = False,
    ) -> None:
        if not inspect.iscoroutinefunction(function):
            raise InvalidInput(f"a workflow is an async function, and {function.__qualname__} is not")
        self.requires_approval = _checked_flag("requires_approval", requires_approval)
        """Whether an operator has to approve a run before it starts."""
        self.is_entity = _checked_flag("entity", is_entity)
        """Whether its runs accept any number of signals per minute."""
        self.failures = failure_types(failures)
        """The exceptions that fail a run, in addition to `WorkflowFailed` and what steps and waits raise."""
        self.on_error: OnError = error_policy(on_error)
        """What any other exception does that the code does not handle."""
        self.function = function
        self.name = name
        self.version = version
        self.values = values
        self.signature = Signature(function, f"workflow {name!r}", values=values)
        self.signals = dict(signals or {})
        self.allows_other_signals = allows_other_signals
        self.signal_decoders = {
            signal: values.decoder(kind, f"signal {signal!r} of workflow {name!r}")
            for signal, kind in self.signals.items()
        }
        self.forms: dict[str, msgspec.json.Decoder[Any]] = {}
        self.queries: dict[str, Signature] = {}
        self.updates: dict[str, Signature] = {}
        """The queries and updates that its runs answer, as far as they have run in this process."""
        self.attributes: Mapping[str, AttributeType] = {}
        """The search attributes that the app declares."""
        self.activities: dict[str, ActivityDefinition] = {}
        """The activities of the app, to which `hf.step` adds functions."""
        self.middleware: Sequence[Middleware[WorkflowCall]] = ()
        """The middleware of the app around its workflows."""

    def form(self, name: str, kind: Any) -> "tuple[Raw, msgspec.json.Decoder[Any]]":
        """Return the JSON Schema of a type as the form of a task, and the decoder of answers; raise if it has none."""
        return self.values.form(kind, f"the form of task {name!r}")

    def graph(self) -> Graph | None:
        """Return the graph to draw: none for a workflow in code, because its steps are known only as it runs."""
        return None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the code, which differs for other code with the same name and version."""
        return fingerprint(self.function)


def note_handler(
    known: dict[str, Signature], name: str, handler: Callable[..., Any], what: str, values: Values
) -> None:
    """Record the signature of a handler of queries or updates so that it can be shown; raise if it is not callable."""
    if name not in known:
        known[name] = Signature(handler, f"{what} {name!r}", values=values)


OnFailure = Literal["raise", "pause"]

OnError = Literal["pause", "fail"]
"""What an unhandled exception in a workflow's code does: pause the run until the code is fixed, or fail it."""

ClosePolicy = Literal["await", "abandon", "cancel"]
"""What becomes of a child when its parent ends."""

CancelPolicy = Literal["now", "wait"]
"""What a cancellation does while an activity or a child is awaited: cancel it immediately, or wait for its outcome."""


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a single call of an activity or a child is made, apart from how it is executed. It is not stored."""

    name: str = ""
    """The name of its step, instead of the name of what is called."""
    cancel: CancelPolicy = "now"
    idempotency_key: str | None = None
    """The key of an activity's call, if the definition does not compute one."""


class ChildOptions(CallOptions, frozen=True, kw_only=True):
    """How a child is called, including the options of its start."""

    close_policy: ClosePolicy = "await"
    attributes: Mapping[str, Any] = {}
    run_id: str = ""
    """Its id, if it is not derived from its parent's id and the step's."""
    tags: tuple[str, ...] = ()
    priority: int = 0
    retry: Retry | None = None
    """How often it is started again, as another child, after a failure."""
    execution_timeout: timedelta | float | None = None
    run_timeout: timedelta | float | None = None
    cleanup_timeout: timedelta | float | None = None

    @property
    def timeouts(self) -> RunTimeouts | None:
        """The durations that bound it."""
        return run_timeouts(self.execution_timeout, self.run_timeout, self.cleanup_timeout)


PLAIN_CALL = CallOptions()
PLAIN_CHILD = ChildOptions()


_OF_A_CHILD = {
    "cancel": f"one of {', '.join(get_args(CancelPolicy))}",
    "close_policy": f"one of {', '.join(get_args(ClosePolicy))}",
    "attributes": "a dict of values by name",
    "tags": f"a tuple of at most {TAGS} strings",
    "priority": f"a whole number from -{PRIORITY} to {PRIORITY}",
    "retry": "a Retry, such as Retry(max_attempts=5)",
}
"""The possible options of a child, for error messages."""


def child_options(base: ChildOptions, changes: dict[str, Any]) -> ChildOptions:
    """Return the options of children with these changes; raise if an option does not exist."""
    checks: dict[str, Callable[[Any], CallerError | bool | None]] = {
        "name": lambda value: check_step_name("name", value),
        "cancel": lambda value: value in get_args(CancelPolicy),
        "close_policy": lambda value: value in get_args(ClosePolicy),
        "attributes": lambda value: isinstance(value, Mapping),
        "run_id": lambda value: check_name("run_id", value),
        "tags": _problem_of_tags,
        "priority": lambda value: type(value) is int and -PRIORITY <= value <= PRIORITY,
        "retry": lambda value: value is None or isinstance(value, Retry),
        "execution_timeout": lambda value: value is None or milliseconds(value) is not None,
        "run_timeout": lambda value: value is None or milliseconds(value) is not None,
        "cleanup_timeout": lambda value: value is None or milliseconds(value) is not None,
    }
    for field, value in changes.items():
        if field not in checks:
            raise InvalidInput(
                f"unknown option of a child {field!r}; known are {', '.join(sorted(checks))}", field=field
            )
        verdict = checks[field](value)
        if isinstance(verdict, CallerError):
            raise verdict
        if verdict is False:
            raise InvalidInput(f"{field} of a child is {_OF_A_CHILD[field]}, not {value!r}", field=field)
    changed = msgspec.structs.replace(base, **changes) if changes else base
    _ = changed.timeouts  # raises if they contradict each other
    return changed


def _problem_of_tags(tags: Any) -> InvalidInput | bool:
    if not isinstance(tags, tuple) or len(tags) > TAGS:
        return False
    return next(filter(None, map(check_tag, tags)), True)


def call_options(base: CallOptions, changes: dict[str, Any]) -> CallOptions:
    """Return the call options with the changes that apply to them; these are removed from `changes`."""
    fields: dict[str, Any] = {}
    if "name" in changes:
        fields["name"] = changes.pop("name")
        require_step_name("name", fields["name"])
    if "cancel" in changes:
        fields["cancel"] = cancel_policy(changes.pop("cancel"))
    if "idempotency_key" in changes:
        fields["idempotency_key"] = checked_key(changes.pop("idempotency_key"))
    return msgspec.structs.replace(base, **fields) if fields else base


def cancel_policy(value: Any) -> CancelPolicy:
    """Return the policy for a call that is cancelled; raise if there is no such policy."""
    if value not in get_args(CancelPolicy):
        raise InvalidInput(f"cancel is one of {', '.join(get_args(CancelPolicy))}, not {value!r}", field="cancel")
    return value  # type: ignore[no-any-return]


class ActivityOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an activity is executed. Each can be set on the definition and for one call."""

    retry: Retry = Retry()
    timeout_ms: int | None = None
    schedule_to_close_ms: int | None = None
    heartbeat_timeout_ms: int | None = None
    queue: str = ""
    on_failure: OnFailure = "raise"
    """What follows when the last attempt has failed: the error is raised, or the run is paused for an operator."""
    secrets: tuple[Secret, ...] = ()
    """The secrets that are resolved for each attempt, in addition to those among the arguments."""
    plan_retry: Retry | None = None
    """How often a plan retries the step as a new logical attempt before it pauses the run; see `StepOptions`."""
    limit: LimitedBy | None = None
    """The limit that applies to the call, set when it is scheduled. The call waits for a place in the limit's queue."""

    @property
    def is_without_limits(self) -> bool:
        """Whether an attempt has no time limit."""
        return self.timeout_ms is None and self.schedule_to_close_ms is None and self.heartbeat_timeout_ms is None


STORING_A_PLAN = ActivityOptions(
    retry=Retry(max_attempts=0, initial_ms=200, most_ms=10_000, non_retryable=("NotFound", "NotPermitted", "Conflict"))
)
"""How the body of a plan is stored: retried until the store accepts it. An invalid plan is not retried."""


START_RUN = "holdfast.start"
"""The activity that starts an independent run for a workflow."""

WAITING_FOR_A_CALLBACK = ActivityOptions(retry=Retry(max_attempts=0, initial_ms=200, most_ms=10_000))
"""Its options: it is retried after a lost node, but an outcome that was reported to it is never retried."""

UPDATE_RUN = "holdfast.update"
"""The activity that updates a run for a workflow, and waits for the answer."""


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An update that a workflow sends to a run."""

    run_id: str
    name: str
    update_id: str
    arguments: dict[str, Any] = {}


STARTING_A_RUN = ActivityOptions(
    retry=Retry(
        max_attempts=0,
        initial_ms=200,
        most_ms=10_000,
        non_retryable=(
            *("Conflict", "InvalidInput", "NotFound", "NotPermitted", "Overloaded", "PayloadTooLarge", "PlanInvalid"),
            *("RateLimited", "RunTerminal", "UpdateFailed"),
        ),
    )
)
"""How a workflow starts or updates a run: retried until the store accepts it. A refusal, which is final, is raised."""


class StartRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a workflow requests when it starts an independent run."""

    request_id: str
    workflow: str = ""
    version: str | None = None
    input: Raw = NULL
    plan: PlanRef | None = None
    run_id: str | None = None
    reference_key: str | None = None
    tags: tuple[str, ...] = ()
    priority: int = 0
    attributes: Any = None
    timeouts: RunTimeouts | None = None
    reuse: Literal["return", "reject", "restart-if-finished", "terminate-and-restart"] | None = None
    debounce: Debounce | None = None


class _NamedSignature(Signature):
    """The parameters of a workflow of which only the name is known: any keyword arguments."""

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Raw:
        if args:
            raise InvalidInput(f"{self.name} is called by its name: give its arguments by name too", field="args")
        return self.values.encode(kwargs)

    def unpack(self, raw: Raw) -> dict[str, Any]:
        return codec.decode(raw, dict[str, Any])


class ExternalWorkflow(WorkflowDefinition):
    """A workflow that only other apps have, known by its name or by a function with its parameters and result."""

    is_external = True

    def __init__(self, workflow: Any, name: str | None, version: str, values: Values) -> None:
        is_named = isinstance(workflow, str)
        if not is_named and not callable(workflow):
            text = f"an external workflow is given by its name or as an async function, not as {workflow!r}"
            raise InvalidInput(text, field="workflow")
        known = str(workflow if is_named else getattr(workflow, "__name__", ""))
        super().__init__(_unknown if is_named else workflow, name or known, version, values=values)
        if is_named:
            self.signature = _NamedSignature(_unknown, f"workflow {self.name!r}", values=values)


async def _unknown() -> Any:
    """Stands in for a function that this app does not have."""


def step_definition(known: "dict[str, ActivityDefinition]", function: Any, values: Values) -> "ActivityDefinition":
    """Return the activity for a function that is used as a step, under its full name; raise if it cannot be one."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    found = known.get(name)
    if found is not None and found.function is function:
        return found
    if isinstance(getattr(function, "definition", None), ActivityDefinition | WorkflowDefinition):
        raise InvalidInput(f"{name} is registered: call it without hf.step", field="function")
    if not callable(function) or "<" in name or not getattr(function, "__qualname__", ""):
        problem = f"hf.step takes a function of a module, by whose name a node finds it again, not {function!r}"
        raise InvalidInput(problem, field="function")
    require_step_name("the name of the function", name)
    known[name] = ActivityDefinition(function, name, ActivityOptions(), values=values)
    return known[name]


@lru_cache(maxsize=1_024)
def encode_options(options: ActivityOptions) -> Raw:
    """Return the options in their stored form. There are few different ones, and many calls."""
    return codec.encode(options)


_DEFAULTS = ActivityOptions()
_ENCODED_DEFAULTS = encode_options(_DEFAULTS)


def decode_options(raw: Raw) -> ActivityOptions:
    """Return the options that were stored with a step."""
    return _DEFAULTS if raw == _ENCODED_DEFAULTS else _decode_options(bytes(raw))


@lru_cache(maxsize=1_024)
def _decode_options(raw: bytes) -> ActivityOptions:
    return codec.decode(raw, ActivityOptions)


class Verifier:
    """The verifier of an activity: a function of some of its arguments. See `engine/activities/verification.py`."""

    def __init__(self, function: Callable[..., Any], timeout_ms: int, retry: Retry, signature: Signature) -> None:
        self.function = function
        self.timeout_ms = timeout_ms
        self.retry = retry
        self.is_async = inspect.iscoroutinefunction(function)
        self.names = parameters_of("verify", function, signature)


class ActivityDefinition:
    """A registered activity."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: ActivityOptions,
        idempotency_key: Callable[..., str] | None = None,
        verify: Callable[..., Any] | None = None,
        verify_timeout_ms: int | None = None,
        verify_retry: Any = None,
        values: Values = PLAIN,
        raises: Any = (),
        retry_if: Callable[[Exception], bool] | None = None,
    ) -> None:
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            name = function.__qualname__
            problem = f"an activity returns its result, and {name} yields: return a list, or put an artifact"
            raise InvalidInput(problem)
        predicate: Any = retry_if
        if predicate is not None and (not callable(predicate) or inspect.iscoroutinefunction(predicate)):
            found = "an async one" if callable(predicate) else repr(predicate)
            raise InvalidInput(f"retry_if is a plain function of the exception, not {found}", field="retry_if")
        self.raises = _checked_raises(raises)
        """The exceptions that a workflow can catch around a call by their own classes."""
        self._retry_if = retry_if
        self.function = function
        self.name = name
        self.values = values
        self.options = options
        self.is_async = inspect.iscoroutinefunction(function)
        self.signature = Signature(function, f"activity {name!r}", values=values)
        self.takes_secrets = self.signature.takes(Secret)
        if verify is None and verify_timeout_ms is not None:
            raise InvalidInput("verify_timeout is the time of a verifier, and there is none", field="verify_timeout")
        if verify is None and verify_retry is not None:
            raise InvalidInput("verify_retry is the policy of a verifier, and there is none", field="verify_retry")
        if verify_retry is not None and (not isinstance(verify_retry, Retry) or not verify_retry.max_attempts):
            problem = "verify_retry is a Retry with max_attempts: after so many failures an operator is asked"
            raise InvalidInput(problem, field="verify_retry")
        self.limited: LimitedCalls | None = None
        """The limit of its calls, if it has one."""
        self.takes_slot = True
        """Whether the activity occupies one of a node's slots."""
        self.key_function = idempotency_key
        self._key_names: list[str] = []
        if idempotency_key is not None:
            if inspect.iscoroutinefunction(idempotency_key):
                problem = "the function that computes it runs in the workflow: pass a plain function, not an async one"
                raise InvalidInput(f"idempotency_key: {problem}", field="idempotency_key")
            self._key_names = parameters_of("idempotency_key", idempotency_key, self.signature)
        timeout_ms = VERIFY_TIMEOUT_MS if verify_timeout_ms is None else verify_timeout_ms
        self.verifier = (
            None if verify is None else Verifier(verify, timeout_ms, verify_retry or NO_RETRY, self.signature)
        )

    def is_retried(self, problem: BaseException) -> bool:
        """Return whether the activity's own predicate allows a retry after this error."""
        if self._retry_if is None or not isinstance(problem, Exception):
            return True
        try:
            return bool(self._retry_if(problem))
        except Exception as broken:
            problem.add_note(f"retry_if of activity {self.name!r} raised {broken!r}, so it is not tried again")
            return False

    def as_declared(self, problem: ActivityFailed) -> ActivityFailed:
        """Return a failure that can be caught as the declared exception class that it was an instance of."""
        names = (problem.info.code, *problem.info.bases)
        declared: list[Any] = [each for name in names for each in self.raises if each.__name__ == name]
        return _failure_of(declared[0], problem.message, problem.info) if declared else problem

    def key_of(self, input: Raw) -> str:
        """Return the idempotency key of a call with these arguments, as the function on the definition computes it."""
        assert self.key_function is not None
        arguments = self.signature.unpack(input)
        key: Any
        try:
            key = self.key_function(**{name: arguments[name] for name in self._key_names})
        except Exception as problem:
            words = f"the idempotency key of activity {self.name!r} could not be computed: {problem!r}"
            raise InvalidInput(words[:ERROR_TEXT_CHARS], field="idempotency_key") from problem
        return checked_key(key)


_BUILT_IN: dict[str, ActivityDefinition] = {}


def built_in(function: Callable[..., Any], name: str, *, takes_slot: bool = True) -> ActivityDefinition:
    """Return an activity of the engine. Its parameters are looked up once; each node provides its own function.

    One that waits for another run takes no slot. Otherwise such waits could occupy all slots that the other run needs.
    """
    if name not in _BUILT_IN:
        _BUILT_IN[name] = ActivityDefinition(function, name, ActivityOptions())
        _BUILT_IN[name].function = _of_no_node
    own = copy(_BUILT_IN[name])
    own.function = function
    own.takes_slot = takes_slot
    return own


async def _of_no_node() -> NoReturn:
    """Stands in for the function of an activity that each node provides itself."""
    raise RuntimeError("an activity of the engine was called that belongs to no node")


def checked_key(key: Any) -> str:
    """Return an idempotency key; raise `InvalidInput` if it cannot be one."""
    problem = check_idempotency_key(key)
    if problem is not None:
        raise problem
    assert isinstance(key, str)
    return key


def milliseconds(value: timedelta | float | None) -> int | None:
    """Return a duration, a timedelta or a number of seconds, in milliseconds."""
    if value is None:
        return None
    given: Any = value
    if isinstance(given, bool) or not isinstance(given, timedelta | float | int):
        raise InvalidInput(f"a duration is a timedelta or a number of seconds, not {value!r}")
    try:
        seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    except OverflowError:
        seconds = inf
    if not 0 < seconds <= DURATION_MS / 1_000:
        raise InvalidInput(f"a duration is more than 0, and at most a thousand years, not {value!r}")
    return max(1, round(seconds * 1_000))


NO_TIMEOUTS = (None, None, None)
RUN_TIMEOUTS = ("execution_timeout", "run_timeout", "cleanup_timeout")
"""The start options that bound the duration of a run, in the order in which `run_timeouts` takes them."""


def run_timeouts(
    execution: timedelta | float | None, run: timedelta | float | None, cleanup: timedelta | float | None
) -> RunTimeouts | None:
    """Return the time limits of a run from durations; None if it has none."""
    if execution is None and run is None:
        if cleanup is not None:
            problem = "cleanup_timeout bounds what follows an execution_timeout or a run_timeout: give one of them too"
            raise InvalidInput(problem, field="cleanup_timeout")
        return None
    timeouts = RunTimeouts(milliseconds(execution), milliseconds(run))
    return timeouts if cleanup is None else msgspec.structs.replace(timeouts, cleanup_ms=milliseconds(cleanup))


def child_run_id(run_id: str, step_id: str) -> str:
    """Return the id of the run that a step starts: readable if it fits, and always the same."""
    readable = f"{run_id}/{step_id}"
    return readable if len(readable.encode()) <= NAME_BYTES else f"child-{codec.digest(readable.encode())}"


def scoped_child_run_id(run_id: str, prefix: str, name: str) -> str:
    """Return the id of the run that a step of code starts; `prefix` is the prefix of its id since a rotation.

    A single slash separates a parent from its child, so a slash in a name or after a scope is doubled: the child `b` in
    the scope `a` is another run than the child `b` of the child `a`.
    """
    parts = name.split("/")
    if all(parts):
        return child_run_id(run_id, prefix + "//".join(parts))
    return f"child-{codec.digest(f'{run_id}|{prefix}{name}'.encode())}"


def failure_policy(value: str) -> OnFailure:
    """Return the policy for an activity that has failed permanently; raise if there is no such policy."""
    if value not in get_args(OnFailure):
        raise InvalidInput(f"on_failure is one of {', '.join(get_args(OnFailure))}, not {value!r}", field="on_failure")
    return value  # type: ignore[return-value]


def _checked_flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{field} is True or False, not {value!r}", field=field)
    return value


def error_policy(value: str) -> OnError:
    """Return the policy for exceptions that a workflow does not handle; raise if there is no such policy."""
    if value not in get_args(OnError):
        raise InvalidInput(f"on_error is one of {', '.join(get_args(OnError))}, not {value!r}", field="on_error")
    return value  # type: ignore[return-value]


@cache
def _failure_class(declared: Any) -> Any:
    """Return the class of failures that can be caught as `ActivityFailed` and as this exception.

    Only the text of the exception was recorded, so none of its code that needs its arguments or fields runs.
    """
    body: dict[str, Any] = {
        "message": "",
        "details": None,
        "info": None,
        "code": ActivityFailed.code,
        **{name: getattr(Exception, name) for name in ("__str__", "__repr__", "__hash__", "__setattr__")},
        "__init__": _without_arguments,
    }
    made: Any = type(declared.__name__, (ActivityFailed, declared), body)
    made.code = ActivityFailed.code
    return made


def _without_arguments(self: ActivityFailed, message: str, info: ErrorInfo) -> None:
    self.args, self.message, self.details, self.info = (message,), message, {}, info


def _failure_of(declared: Any, message: str, info: ErrorInfo) -> ActivityFailed:
    """Return a failure that can be caught as `ActivityFailed` and as this exception, whatever its constructor takes."""
    made = _failure_class(declared)
    builtin = next(each for each in made.__mro__ if "__new__" in vars(each) and each.__module__ == "builtins")
    failure: ActivityFailed = builtin.__new__(made, message)
    failure.__init__(message, info)  # type: ignore[misc]
    return failure


def _checked_raises(raises: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that an activity declares; raise if a workflow could not catch one by its class."""
    declared = failure_types(raises, "raises")
    for each in declared:
        try:
            _failure_of(each, "", ErrorInfo("", ""))
        except Exception as problem:
            text = f"raises: {each.__name__} cannot be raised again in a workflow ({problem}); declare a base of it"
            raise InvalidInput(text, field="raises") from problem
    return declared


def failure_types(value: Any, field: str = "failures") -> tuple[type[Exception], ...]:
    """Return the exceptions that fail a run, or that an activity declares; raise if they are not exceptions."""
    given = value if isinstance(value, tuple | list | set | frozenset) else (value,)
    for each in given:
        if not isinstance(each, type) or not issubclass(each, Exception):
            problem = f"{field} is a tuple of exception classes, such as (InsufficientFunds,), not {value!r}"
            raise InvalidInput(problem, field=field)
    return tuple(given)


# --- limits on the runs of a workflow


class LimitOptions(TypedDict, total=False):
    """What `@app.workflow(...)` accepts to bound the runs of a workflow. See docs/limits.md."""

    at_once: int
    """How many runs may be active at the same time."""

    per_key: int
    """How many of them may have the same key; `key` computes it."""

    key: Callable[..., Any]
    """Computes the key from arguments of the workflow, by their names, such as `lambda customer: customer`."""

    rate: tuple[int, timedelta | float]
    """How many runs may start within any period: their number, and the period."""

    overload: Overload
    """What happens to a start beyond the limit: `queue` (the default), `delay`, or `reject`."""


class WorkflowLimit:
    """The limits of one workflow."""

    def __init__(self, options: LimitOptions, signature: Signature) -> None:
        unknown = sorted(set(options) - set(LimitOptions.__annotations__))
        if unknown:
            limits = ", ".join(sorted(LimitOptions.__annotations__))
            raise InvalidInput(
                f"unknown workflow option {unknown[0]!r}; known are allow_other_signals, entity, failures, name, "
                f"on_error, requires_approval, signals, version, and of limits {limits}",
                field=unknown[0],
            )
        if options.get("overload", "queue") not in get_args(Overload):
            raise InvalidInput(
                f"overload is one of {', '.join(get_args(Overload))}, not {options['overload']!r}", field="overload"
            )
        starts, period_ms = _rate(options.get("rate"))
        self.limit = RunLimit(
            at_once=options.get("at_once"),
            per_key=options.get("per_key"),
            starts=starts,
            period_ms=period_ms,
            overload=options.get("overload", "queue"),
        )
        self._key = options.get("key")
        self._signature = signature
        problem = check_limit(self.limit)
        if problem is not None:
            raise problem
        if (self.limit.at_once, self.limit.per_key, starts) == (None, None, None):
            raise InvalidInput("a workflow's limit needs at_once, per_key or rate; key and overload alone set none")
        if (self._key is None) != (self.limit.per_key is None):
            raise InvalidInput("per_key and key belong together: set both or neither")
        self.names = parameters_of("key", self._key, signature) if self._key is not None else []

    def admission_request(self, input: Any, priority: int = 0) -> AdmissionRequest:
        """Return the admission request of a run with this input."""
        request = AdmissionRequest(limit=self.limit, key=self._key_of(input), priority=priority)
        problem = check_admission_request(request)
        if problem is not None:
            raise problem
        return request

    def _key_of(self, input: Any) -> str:
        if self._key is None:
            return ""
        arguments = self._signature.unpack(input)
        try:
            with without_secrets():
                return str(self._key(**{name: arguments[name] for name in self.names}))
        except Exception as problem:
            raise InvalidInput(f"the key could not be computed: {problem!r}", field="key") from problem


def _rate(rate: Any) -> tuple[int | None, int]:
    if rate is None:
        return None, 1_000
    if not isinstance(rate, tuple) or len(rate) != 2:
        raise InvalidInput(
            f"rate is a number of starts and a period, such as (100, timedelta(minutes=1)), not {rate!r}"
        )
    return rate[0], milliseconds(rate[1]) or 0


def parameters_of(field: str, function: Any, signature: Signature) -> list[str]:
    """Return which arguments of an activity or a workflow a function takes, by name; refuse any others."""
    if not callable(function):
        raise InvalidInput(f"{field} is a function of the arguments of {signature.name}, not {function!r}", field=field)
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if name not in signature.names or not by_name:
            known = ", ".join(signature.names) or "nothing"
            raise InvalidInput(f"{field} takes {name!r}, and {signature.name} takes {known}", field=field)
    return list(parameters)
