"""`holdfast doctor`: reports problems of an installation, and what to do about each."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
from cyclopts import Parameter, validators
from rich.console import Console
from rich.progress import Progress

from holdfast.cli.app_loader import settings_at
from holdfast.cli.connection import Target, connect
from holdfast.cli.exit_codes import FAILED, OK
from holdfast.cli.output import show_json, show_line
from holdfast.cli.stores import Address, AsJson
from holdfast.clock import SystemClock
from holdfast.engine.observe import doctor as examining
from holdfast.engine.observe.doctor import Report, report_of
from holdfast.errors import (
    InvalidInput,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreNotMigrated,
    StoreReadOnly,
    StoreUnsafe,
)
from holdfast.settings import Settings, without_password
from holdfast.store.health import Bounds, Finding, wrong
from holdfast.store.open import is_new, open_existing

COULD_NOT_LOOK = 2
OF_THE_STORE = (StoreCorrupt, StoreFull, StoreNotMigrated, StoreReadOnly, StoreUnsafe)
"""Errors that describe a problem of the store. After others the state is unknown."""

ADVICE: dict[type[StoreError], str] = {
    StoreNotMigrated: "bring it up to date with `holdfast store migrate`",
    StoreCorrupt: "stop the nodes, keep a copy of it, and restore a backup",
    StoreReadOnly: "see who may write the file and its folder, or name the primary server",
    StoreUnsafe: "change what it names; nodes refuse the store too",
}
LEVELS = ("fine", "note", "wrong")
STYLES = {"fine": "green", "note": "yellow", "wrong": "red"}
Thorough = Annotated[bool, Parameter(negative="", show_default=False)]
Sample = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=100_000))]


def doctor(
    *,
    store: Address = None,
    server: str | None = None,
    token: str | None = None,
    thorough: Thorough = False,
    sample: Sample = 200,
    as_json: AsJson = False,
) -> int:
    """Examine a store and its runs, and report what is wrong and what to do.

    Nothing is changed, and nodes may go on working. A server is asked where one is named and no store is: it reads no
    runs in full. Ends with 1 if something is wrong, with 2 if it could not look.

    Parameters
    ----------
    server: str
        The address of a server to ask instead; otherwise HOLDFAST_SERVER, if there is no HOLDFAST_STORE.
    token: str
        Your access token for the server; otherwise HOLDFAST_TOKEN.
    thorough: bool
        Read all of a SQLite file, to see that it is whole.
    sample: int
        How many runs to read in full, spread over all of them.
    """
    if store is not None and server is not None:
        raise InvalidInput("--server uses HTTP, --store does not: give one or the other")
    if store is None and server is None and "HOLDFAST_STORE" not in os.environ:
        server = os.environ.get("HOLDFAST_SERVER")
    if server is not None:
        report = asyncio.run(_ask(server, token))
    else:
        report = asyncio.run(_examine(settings_at(store), Bounds(sample_runs=sample), thorough))
    if as_json:
        show_json(msgspec.to_builtins(report))
    else:
        _show(report)
    if not report.looked:
        return COULD_NOT_LOOK
    return OK if report.is_fine else FAILED


async def _examine(settings: Settings, bounds: Bounds, thorough: bool) -> Report:
    shown = without_password(settings.store)
    try:
        opened = await open_existing(settings)
        try:
            with _progress() as progress:
                return await examining.examine(
                    opened, SystemClock(), shown=shown, bounds=bounds, thorough=thorough, progress=progress
                )
        finally:
            await opened.close()
    except StoreError as problem:
        otherwise = "name another with --store" if is_new(settings.store) else "see that it can be reached"
        advice = next((ADVICE[kind] for kind in type(problem).__mro__ if kind in ADVICE), otherwise)
        return report_of(shown, [wrong("store", problem.message, advice)], looked=isinstance(problem, OF_THE_STORE))


async def _ask(server: str, token: str | None) -> Report:
    async with connect(Target(server=server, token=token)) as connection:
        answer = await connection("system.doctor", {})
    return report_of(server, msgspec.convert(answer["items"], list[Finding]))


@contextmanager
def _progress() -> Iterator[examining.Progress]:
    """Show the progress on a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading runs", total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _show(report: Report) -> None:
    width = max(len(finding.subject) for finding in report.findings)
    for finding in sorted(report.findings, key=lambda each: LEVELS.index(each.level)):  # the worst is read first: last
        show_line(f"{finding.level:5}  {finding.subject.ljust(width)}  {finding.sentence}", STYLES[finding.level])
        for line in _below(finding):
            show_line(f"{'':5}  {'':{width}}  {line}")
    wrong_ones = sum(finding.level == "wrong" for finding in report.findings)
    if not report.looked:
        show_line(f"{report.store}: could not look")
    else:
        found = f"{wrong_ones} things are wrong" if wrong_ones != 1 else "one thing is wrong"
        show_line(f"{report.store}: {'all is well' if report.is_fine else found}")


def _below(finding: Finding) -> Iterator[str]:
    if finding.run_ids:
        yield f"runs: {', '.join(finding.run_ids)}"
    if finding.advice:
        yield f"-> {finding.advice}"
