"""Debounced starts: several starts with one key become one run, with the input of the last.

The first start creates the run, which begins `quiet_ms` later. Until then, a later start replaces its input and
postpones its start to `quiet_ms` after itself, but never beyond `at_most_ms` after the first. All callers get this run.
Once it has begun, or `at_most_ms` have passed, or it was approved or queued for admission, the next start creates the
next run of the key.

**One decision, in the store.** The run's id is derived from the key, so a start may find its id taken (QUE-5), and the
next run is a restart. A later input is delivered to the run like an outcome by token (`store/port.py`): the store
accepts it only while the run has not begun, and a turn that has not read it does not commit. So an acknowledged input
is used by the run or replaced by a later one, and no run begins with an input other than the last.

**The turn** records each input (`InputReplaced`), so the history shows who sent which. The message that starts the
run stays in the inbox: if it is handled too early, it is left until the run is to start.
"""

from datetime import timedelta
from hashlib import sha256
from typing import Any

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.event_writer import NOTHING, Decision, EventWriter
from holdfast.core.instants import Instant
from holdfast.core.keys import check_name
from holdfast.core.messages import INPUT_STEP, OUTCOME_SIGNAL, ActivityOutcome, Message, ReportedOutcome, SignalRequest
from holdfast.core.state import APPROVED, PENDING, RunState
from holdfast.errors import InvalidInput
from holdfast.limits import DURATION_MS

KEY_BYTES = 100
"""The most bytes of a key, which is part of the run's id."""


class Debounce(Struct, frozen=True):
    """Make one run of several starts with this key, with the input of the last one.

    The run begins when no start has come for the time `quiet`, and at the latest `at_most` after the first. Durations
    are timedeltas or seconds.
    """

    key: str
    """Starts with the same key, of one workflow, become one run."""
    quiet: timedelta | float
    """How long no start may come before the run begins."""
    at_most: timedelta | float
    """How long after the first start the run begins in any case."""

    @property
    def terms(self) -> e.DebounceTerms:
        """The durations as recorded."""
        return e.DebounceTerms(_milliseconds("quiet", self.quiet), _milliseconds("at_most", self.at_most))


def _milliseconds(field: str, duration: Any) -> int:
    """Return a duration in milliseconds; raise `InvalidInput` if it is not a duration."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= DURATION_MS / 1_000:
        problem = f"the {field} time of a debounced start is a duration above 0, not {duration!r}"
        raise InvalidInput(problem, field="debounce")
    return max(1, round(seconds * 1_000))


def check_debounce(debounce: Any) -> InvalidInput | None:
    """Return why a start cannot be debounced like this, or None."""
    if not isinstance(debounce, Debounce):
        return InvalidInput(f"debounce is an hf.Debounce, not {debounce!r}", field="debounce")
    key: Any = debounce.key
    problem = check_name("debounce", key)
    if problem is not None:
        return problem
    if "/" in key or len(key.encode()) > KEY_BYTES:
        return InvalidInput(
            f"the key of a debounced start has no slash, and at most {KEY_BYTES} bytes", field="debounce"
        )
    terms = debounce.terms
    if terms.quiet_ms > terms.at_most_ms:
        return InvalidInput("at_most of a debounced start is no shorter than its quiet time", field="debounce")
    return None


def debounced_id(key: str, queued: e.RunQueued) -> str:
    """Return the id of the first run of a key for its owner and version: an input fits only the version it is for."""
    plan = "" if queued.plan is None else queued.plan.sha256
    place = (queued.tenant, queued.project, queued.environment, queued.plan_id, queued.plan_version, plan, key)
    return f"{key}-{sha256(codec.encode(place)).hexdigest()[:16]}"


def offer(run_id: str, input: Raw, signal_id: str) -> SignalRequest:
    """Return the request that replaces the input of a run that has not begun."""
    outcome = ActivityOutcome(logical_attempt_id=0, engine_attempt_id=0, result=input)
    return SignalRequest(
        run_id=run_id, name=OUTCOME_SIGNAL, payload=codec.encode(outcome), signal_id=signal_id, step_id=INPUT_STEP
    )


def replace_input(state: RunState, reported: ReportedOutcome, writer: EventWriter) -> Decision:
    """Record a later input of a run that has not begun, and the new instant at which it begins."""
    terms, origin = state.debounce, state.origin
    if terms is None or origin is None or state.status not in (PENDING, APPROVED):
        return NOTHING
    last = min(reported.accepted_at + terms.quiet_ms * 1_000, origin.queued_at + terms.at_most_ms * 1_000)
    # Not in this turn: its start message was handled for the previous input.
    start_at = max(last, state.start_at or 0, writer.now + 1)
    writer.write(e.InputReplaced(input=reported.outcome.result, start_at=start_at), cause=reported.id)
    return writer.decision()


def put_off(state: RunState, message: Message, now: Instant) -> Message | None:
    """Return the start message of a debounced run, postponed, or None if the run is to start now."""
    if state.start_at is None or state.start_at <= now:
        return None
    return replace(message, due_at=state.start_at)
