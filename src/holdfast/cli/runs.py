"""Commands for runs beyond the operations: show a whole run, wait for it, follow it."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any

from cyclopts import Parameter, validators

from holdfast.cli.connection import Connection, Target, connect
from holdfast.cli.exit_codes import FAILED, OK, TIMED_OUT
from holdfast.cli.output import clean, json_line, moment, note, show_fields, show_items, show_json, show_line
from holdfast.cli.run_words import error_of, sentences_of
from holdfast.core.events import BODIES, UnknownBody

SHOWN_CHARS = 1_024
"""How much of an input or a result is shown."""

WAIT_S = 30.0
"""How long one request waits for a result. Then the request is repeated."""

STEPS = ("step_id", "status", "kind", "engine_attempt_id", "started_at", "completed_at", "error")
STYLES = {"plain": "", "good": "green", "warn": "yellow", "bad": "red"}
"""The style of an event, by its tone."""


def run_show(run_id: str, /, *, target: Target | None = None) -> int:
    """Show a run: its state, its steps, and what it waits for.

    Parameters
    ----------
    run_id: str
        The run's id.
    """
    return asyncio.run(_show(run_id, target or Target()))


async def _show(run_id: str, target: Target) -> int:
    async with connect(target) as connection:
        run = await connection("runs.get", {"run_id": run_id})
        snapshot = await connection("runs.snapshot", {"run_id": run_id})
        waits = (await connection("signals.waits", {"run_id": run_id}))["items"]
        first = (await connection("runs.events", {"run_id": run_id, "limit": 1}))["items"]
        given = await _input_of(connection, run_id, first)
        outcome = await connection("runs.result", {"run_id": run_id})
    if target.json:
        show_json({"run": run, "snapshot": snapshot, "waits": waits, "input": given, "outcome": outcome})
        return OK
    show_fields({name: value for name, value in run.items() if name not in ("retrying", "pause", "last_error")})
    for line in sentences_of(run):
        show_line(line, "yellow")
    for title, text in _values(outcome, given):
        print()
        print(f"{title}:")
        show_line(text)
    if snapshot["steps"]:
        print()
        show_items([{**step, "error": error_of(step["error"])} for step in snapshot["steps"]], STEPS)
    if waits:
        print()
        show_items(waits, ("step_id", "name", "since", "until"))
    if snapshot["is_stale"]:
        note("events are missing; look again later")
    return OK


async def _input_of(connection: Connection, run_id: str, events: list[dict[str, Any]]) -> Any:
    """Return the initial input of a run: that of its start, or of the last debounced start."""
    if not events or not isinstance(events[0]["data"], dict):
        return None
    given, is_debounced = events[0]["data"].get("input"), events[0]["data"].get("debounce") is not None
    while is_debounced and events:
        page = await connection("runs.events", {"run_id": run_id, "after": events[-1]["run_seq"], "limit": 500})
        events = page["items"]
        given = next((each["data"]["input"] for each in events[::-1] if each["event_type"] == "InputReplaced"), given)
        is_debounced = all(each["event_type"] != "RunStarted" for each in events)
    return given


def _values(outcome: dict[str, Any], given: Any) -> Iterator[tuple[str, str]]:
    """Yield the arguments and the result of a run, truncated if they are long."""
    if given is not None:
        yield "input", _cut(json_line(given))
    if outcome["is_finished"] and outcome["status"] == "COMPLETED":
        yield "result", _cut(json_line(outcome["result"]))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters; all with --json)"


def run_result(
    run_id: str,
    /,
    *,
    wait_s: Annotated[float | None, Parameter(validator=validators.Number(gte=0), show_default=False)] = None,
    target: Target | None = None,
) -> int:
    """Wait for a run to finish, and write what it returned. Ends with 1 if it failed or was cancelled.

    Parameters
    ----------
    run_id: str
        The run's id.
    wait_s: float
        The longest to wait, in seconds; 0 does not wait. If it has not finished by then this ends with 7.
    """
    return asyncio.run(_result(run_id, wait_s, target or Target()))


async def _result(run_id: str, wait_s: float | None, target: Target) -> int:
    async with connect(target) as connection:
        return await _await_result(connection, run_id, wait_s, target)


async def await_started(connection: Connection, started: Any, target: Target) -> int:
    """Wait for the result of a run that was just started, and write it."""
    if not target.json:
        note(f"run {started['run_id']} is started")
    return await _await_result(connection, started["run_id"], None, target)


async def _await_result(connection: Connection, run_id: str, wait_s: float | None, target: Target) -> int:
    loop = asyncio.get_running_loop()
    until = None if wait_s is None else loop.time() + wait_s
    while True:
        left = WAIT_S if until is None else max(0.0, until - loop.time())
        outcome = await connection("runs.result", {"run_id": run_id, "wait_s": min(left, WAIT_S)})
        if outcome["is_finished"] or (until is not None and loop.time() >= until):
            return _show_outcome(outcome, target)


def _show_outcome(outcome: dict[str, Any], target: Target) -> int:
    if target.json:
        show_json(outcome)
    elif outcome["status"] == "COMPLETED":
        show_json(outcome["result"])
    elif outcome["is_finished"]:
        error = outcome["error"]
        note(f"run {outcome['run_id']} has {_ended(outcome['status'])}: {error['code']}: {error['message']}")
    else:
        note(f"run {outcome['run_id']} has not finished, it is {outcome['status']}")
    if not outcome["is_finished"]:
        return TIMED_OUT
    return OK if outcome["status"] == "COMPLETED" else FAILED


def _ended(status: str) -> str:
    return "been cancelled" if status == "CANCELLED" else status.lower()


def run_tail(
    run_id: str,
    /,
    *,
    after: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    target: Target | None = None,
) -> int:
    """Follow a run's history as it grows, until it finishes. Ends with 1 if it failed or was cancelled.

    With --json each event is one line.

    Parameters
    ----------
    run_id: str
        The run's id.
    after: int
        The number of the event behind which to begin.
    """
    return asyncio.run(_tail(run_id, after, target or Target()))


async def _tail(run_id: str, after: int, target: Target) -> int:
    async with connect(target) as connection:
        async with aclosing(connection.events(run_id, after)) as events:
            async for event in events:
                _show_event(event, target)
        run = await connection("runs.get", {"run_id": run_id})
    return OK if run["status"] == "COMPLETED" else FAILED


def _show_event(event: dict[str, Any], target: Target) -> None:
    if target.json:
        show_json(event)
        return
    step = event["step_id"] or ""
    line = f"{event['run_seq']:5}  {moment(event['persisted_at'])[11:19]}  {event['event_type']:18} {step}".rstrip()
    show_line(line, STYLES[BODIES.get(event["event_type"], UnknownBody).TONE])


def run_stream(
    run_id: str,
    name: str,
    /,
    *,
    after: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    follow: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    target: Target | None = None,
) -> int:
    """Write what a run has written to a stream: texts one after the other, other chunks as lines of JSON.

    With --json each chunk is one line, with its number and who wrote it.

    Parameters
    ----------
    run_id: str
        The run's id.
    name: str
        The stream's name.
    after: int
        The number of the chunk behind which to begin.
    follow: bool
        Go on with what is written later, until the stream is closed or the run has finished.
    """
    return asyncio.run(_stream(run_id, name, after, follow, target or Target()))


async def _stream(run_id: str, name: str, after: int, follow: bool, target: Target) -> int:
    shown = _ShownStream(target)
    async with connect(target) as connection:
        chunks = connection.chunks(run_id, name, after) if follow else _stored(connection, run_id, name, after)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    shown.add(chunk)
        finally:
            shown.end_line()
    return OK


async def _stored(connection: Connection, run_id: str, name: str, after: int) -> AsyncGenerator[Any, None]:
    while True:
        page = await connection.patiently("streams.read", {"run_id": run_id, "name": name, "after": after})
        for chunk in page["items"]:
            yield chunk
        if page["is_last"] or not page["items"]:
            return
        after = page["last_seq"]


class _ShownStream:
    """Writes the chunks of a stream. A text may end within a line."""

    def __init__(self, target: Target) -> None:
        self._is_json = target.json
        self._is_within_line = False

    def add(self, chunk: dict[str, Any]) -> None:
        if self._is_json:
            show_json(chunk)
            return
        if "restarted_from" in chunk:
            self.end_line()
            note(f"{chunk['step_id']} has begun anew: its chunks from {chunk['restarted_from']} on do not count")
        value = chunk["value"]
        if not isinstance(value, str):
            self.end_line()
            show_json(value)
        elif value:
            print("\n".join(map(clean, value.split("\n"))), end="", flush=True)
            self._is_within_line = not value.endswith("\n")

    def end_line(self) -> None:
        if self._is_within_line:
            print(flush=True)
            self._is_within_line = False
