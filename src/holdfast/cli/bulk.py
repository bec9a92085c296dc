"""`holdfast run bulk`: sends one command to all runs that a search finds, after a preview."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated, Any, get_args

from cyclopts import CoercionError, Parameter, Token
from rich.console import Console
from rich.progress import Progress

from holdfast.cli.connection import Connection, Target, connect
from holdfast.cli.exit_codes import FAILED, OK
from holdfast.cli.output import clean, note, show_items, show_json
from holdfast.cli.values import parse_moment
from holdfast.clock import SystemIds
from holdfast.core.state import RunStatus
from holdfast.errors import InvalidInput
from holdfast.service.operations.bulk import MOST_RUNS, BulkCommand

COUNTED = 500
"""How many runs a preview examines in one request."""

NAMED = 10
"""How many runs a preview lists by id."""

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def _command_in(kind: Any, tokens: Sequence[Token]) -> str:
    """Return the command that was typed. Hyphens are allowed, as in the commands for one run."""
    name = tokens[0].value.replace("-", "_")
    if name not in get_args(BulkCommand):
        raise CoercionError(token=tokens[0], target_type=kind)
    return name


def run_bulk(
    command: Annotated[BulkCommand, Parameter(converter=_command_in)],
    /,
    *,
    workflow: str | None = None,
    status: RunStatus | None = None,
    tag: str | None = None,
    text: str | None = None,
    where: str = "",
    created_from: str | None = None,
    created_until: str | None = None,
    finished_from: str | None = None,
    finished_until: str | None = None,
    retrying: Flag = False,
    roots: Flag = False,
    run_id: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    reason: str = "",
    preview: Flag = False,
    yes: Flag = False,
    target: Target | None = None,
) -> int:
    """Give one command to all runs that a search finds: first those that it concerns are counted, then it asks.

    Ends with 1 if a run has refused it. What was done is in the history of each run, and in the audit log.

    Parameters
    ----------
    command: str
        Such as retry_step, which tries the failed steps of paused runs again, or try_now.
    workflow: str
        Only runs of this workflow.
    status: str
        Only runs with this status.
    tag: str
        Only runs with this tag.
    text: str
        Words, each a part of the run's id, workflow, reference, a tag, or what it last failed with.
    where: str
        Conditions on search attributes: cents>1000 region=eu
    created_from: str
        Only runs from then on: 2026-01-28T12:00, or 2h for two hours ago.
    created_until: str
        Only runs before then.
    finished_from: str
        Only runs that have ended from then on.
    finished_until: str
        Only runs that have ended before then.
    retrying: bool
        Only runs of which an activity has failed and is tried again.
    roots: bool
        Leave out runs that another run has started.
    run_id: str
        These runs, instead of a search.
    reason: str
        Why; it is recorded.
    preview: bool
        Only say which runs it would concern.
    yes: bool
        Do not ask.
    """
    asked: dict[str, Any] = {"command": command, "workflow": workflow, "status": status and status.value, "tag": tag}
    asked |= {"text": text, "where": where, "retrying": retrying, "roots": roots, "reason": reason}
    times = {"created_from": created_from, "created_until": created_until}
    times |= {"finished_from": finished_from, "finished_until": finished_until}
    asked |= {name: time and parse_moment(time, name) for name, time in times.items()}
    asked["request_id"] = f"bulk-{SystemIds().new_id()}"
    return asyncio.run(_command(asked, run_id, target or Target(), is_preview=preview, is_sure=yes))


async def _command(
    asked: dict[str, Any], run_ids: tuple[str, ...], target: Target, *, is_preview: bool, is_sure: bool
) -> int:
    asked = {name: value for name, value in asked.items() if value not in (None, "", False)}
    parts = [{"run_ids": run_ids[at : at + MOST_RUNS]} for at in range(0, len(run_ids), MOST_RUNS)] or [{}]
    async with connect(target) as connection:
        found = [item for part in parts async for item in _items(connection, {**asked, **part, "preview": True})]
        concerned = [item["run_id"] for item in found if "not_concerned" not in item]
        if is_preview or not concerned:
            _show_preview(asked["command"], found, concerned, target)
            return OK
        if not is_sure:
            _show_preview(asked["command"], found, concerned, target)
            _confirm(asked["command"], len(concerned))
        answers = []
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(f"{asked['command']}", total=len(found))
            for part in parts:
                async for item in _items(connection, {**asked, **part}):
                    answers.append(item)
                    bar.advance(task)
    return _show_answers(asked, answers, target)


async def _items(connection: Connection, asked: dict[str, Any]) -> Any:
    """Return one answer for each run, part by part."""
    cursor: str | None = ""
    limit = COUNTED if asked.get("preview") else MOST_RUNS
    while cursor is not None:
        answer = await connection.patiently("runs.command_many", {**asked, "cursor": cursor, "limit": limit})
        for item in answer["items"]:
            yield item
        cursor = answer["next"]


def _show_preview(command: str, found: list[Any], concerned: list[str], target: Target) -> None:
    if target.json:
        show_json({"command": command, "found": len(found), "concerned": concerned})
        return
    why: dict[str, int] = {}
    for item in found:
        if "not_concerned" in item:
            why[item["not_concerned"]] = why.get(item["not_concerned"], 0) + 1
    print(f"{command} concerns {len(concerned)} of {len(found)} runs")
    for reason, count in sorted(why.items(), key=lambda each: -each[1]):
        print(f"  {count} not: {clean(reason)}")
    for run_id in concerned[:NAMED]:
        print(f"  {clean(run_id)}")
    if len(concerned) > NAMED:
        print(f"  and {len(concerned) - NAMED} more")


def _confirm(command: str, count: int) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput(f"{command} of {count} runs has to be confirmed: add --yes, or look with --preview")
    if input(f"{command} {count} runs? [y/N] ").strip().lower() not in ("y", "yes"):
        raise InvalidInput("nothing was done")


def _show_answers(asked: dict[str, Any], answers: list[Any], target: Target) -> int:
    done = [item for item in answers if "error" not in item and "not_concerned" not in item]
    refused = [item for item in answers if "error" in item]
    if target.json:
        show_json({"request_id": asked["request_id"], "items": answers})
    else:
        left = len(answers) - len(done) - len(refused)
        alone = f", {left} not concerned" if left else ""
        print(f"{asked['command']}: {len(done)} done, {len(refused)} refused{alone}")
        if refused:
            show_items(
                [{"run_id": item["run_id"], "why": item["error"]["detail"]} for item in refused], ("run_id", "why")
            )
        recorded = f"each run has recorded it, as request {asked['request_id']}"
        made = any("made" in item for item in done)
        note(f"{'each new run names the one before it' if made else recorded}; `holdfast doctor` says what is left")
    return FAILED if refused else OK
