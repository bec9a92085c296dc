"""Recorded histories as tests: does the current code still fit runs that were started with earlier code?"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from holdfast.app import App
from holdfast.core import codec
from holdfast.core.codec import parse_instant
from holdfast.core.events import Event
from holdfast.engine.check_histories import check_history
from holdfast.errors import InvalidInput


def assert_replays(app: App, history: Sequence[Event] | str | Path) -> None:
    """Raise `AssertionError` if this app's code would pause the run with this history.

    A history is the result of `run.events()`, or a file written by `holdfast run tail RUN_ID --json`.
    """
    events = read_history(history) if isinstance(history, str | Path) else history
    if not events:
        raise InvalidInput("there is no event in this history", field="history")
    problem = check_history(app.registry, events)
    if problem is None:
        return
    place = f" at event {problem.run_seq}" if problem.run_seq else ""
    differs = (
        f"\n  history: {problem.expected}\n  code:    {problem.found}" if problem.expected or problem.found else ""
    )
    source = f"\n  source:  {problem.source}" if problem.source else ""
    raise AssertionError(
        f"run {problem.run_id} ({problem.plan_id}) would be paused{place}: {problem.message}{differs}{source}"
    )


class _Line(Struct):
    """An event as the API writes it; its body stays as it was written."""

    run_id: str
    run_seq: int
    event_id: str
    event_type: str
    data: Raw
    idempotency_key: str
    emitted_at: str
    persisted_at: str
    adapter_version: str
    engine_run_ref: Raw
    schema_version: int
    step_id: str | None = None
    engine_attempt_id: int | None = None
    logical_attempt_id: int | None = None
    caused_by_signal_id: str | None = None
    parent_event_id: str | None = None

    def event(self) -> Event:
        """Return the event, as a store would read it."""
        fields = {name: getattr(self, name) for name in Event.__struct_fields__}
        fields["data"] = codec.decode_body(self.event_type, self.schema_version, bytes(self.data))
        fields["engine_run_ref"] = codec.decode_ref(bytes(self.engine_run_ref))
        fields["emitted_at"], fields["persisted_at"] = parse_instant(self.emitted_at), parse_instant(self.persisted_at)
        return Event(**fields)


class _Page(Struct):
    items: list[_Line]


def read_history(path: str | Path) -> list[Event]:
    """Return the events of a file: one JSON object per line, or pages of the API (`runs.events`)."""
    found: list[Event] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            if '"items"' in line[:20]:
                found += [each.event() for each in msgspec.json.decode(line, type=_Page).items]
            elif line.strip():
                found.append(msgspec.json.decode(line, type=_Line).event())
        except (ValueError, msgspec.MsgspecError) as problem:
            raise InvalidInput(f"{path}, line {number}: this is not an event: {problem}", field="history") from problem
    return found
