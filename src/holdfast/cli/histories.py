"""`check-histories`, which replays the runs of a store with an app's code, and `flow show`."""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from holdfast.app import App
from holdfast.cli.app_loader import load_app, settings_at
from holdfast.cli.exit_codes import FAILED, OK
from holdfast.cli.output import clean, json_line
from holdfast.engine.check_histories import Checked, Problem, check_runs, count_runs
from holdfast.errors import NotFound
from holdfast.program.flow.definition import FlowDefinition
from holdfast.settings import Settings, without_password
from holdfast.store.open import open_existing
from holdfast.store.payloads import sealed

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def check_histories(
    target: str,
    /,
    *,
    store: str | None = None,
    finished: Flag = False,
    json: Flag = False,
) -> int:
    """Replay stored histories with this code, and list the runs that it would pause.

    Nothing is written, and no activity is carried out; but the file is imported, which runs its top level. Ends with
    1 if there is such a run.

    Parameters
    ----------
    target: str
        The app: shop.py, shop.py:app or pkg.module:app.
    store: str
        The address of the store, such as sqlite:///orders.db; otherwise HOLDFAST_STORE, then sqlite:///holdfast.db.
    finished: bool
        Look at finished runs too.
    json: bool
        Write one JSON object for each such run, and nothing else, to stdout.
    """
    app = load_app(target)
    return asyncio.run(_check(app, settings_at(store), finished, json))


def flow_show(target: str, name: str, /, *, version: str | None = None) -> None:
    """Write a flow as a flowchart of Mermaid, for documents and pull requests.

    Parameters
    ----------
    target: str
        The app: shop.py, shop.py:app or pkg.module:app.
    name: str
        The flow.
    version: str
        Its version; otherwise the one that was registered last.
    """
    definition = load_app(target).registry.workflow(name, version)
    if not isinstance(definition, FlowDefinition):
        raise NotFound(f"{name!r} is written in code: there is nothing to draw", workflow=name)
    print(definition.mermaid(), end="")


async def _check(app: App, settings: Settings, finished: bool, as_json: bool) -> int:
    checked: Counter[tuple[str, str]] = Counter()
    problems: Counter[tuple[str, str]] = Counter()
    store = await sealed(await open_existing(settings), app.codecs, takes_runs=False)
    try:
        is_empty = await count_runs(store, finished=True) == 0
        with _progress(await count_runs(store, finished=finished)) as progress:
            async for run in check_runs(app.registry, store, finished=finished):
                progress.advance(progress.task_ids[0])
                checked[_kind(run)] += 1
                if run.problem is not None:
                    problems[_kind(run)] += 1
                    print(_line(run.problem) if as_json else _paragraph(run.problem))
    finally:
        await store.close()
    if not as_json and checked:
        Console().print(_table(checked, problems))
    place = without_password(settings.store)
    print(
        f"runs checked: {checked.total()}; would be paused: {problems.total()}; store: {clean(place)}", file=sys.stderr
    )
    if is_empty and not checked:
        print(f"holdfast: there is no run at all in {clean(place)}; is it the store that you mean?", file=sys.stderr)
    return FAILED if problems else OK


@contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """Show the progress on a terminal. Other output to the same terminal goes above it."""
    console = Console(stderr=True)
    shared = sys.stdout.isatty()
    with Progress(console=console, transient=True, disable=not console.is_terminal, redirect_stdout=shared) as progress:
        progress.add_task("checking", total=total)
        yield progress


def _kind(run: Checked) -> tuple[str, str]:
    return run.plan_id, run.plan_version


def _line(problem: Problem) -> str:
    return json_line(problem)


def _paragraph(problem: Problem) -> str:
    workflow = f"{problem.plan_id} version {problem.plan_version}: " if problem.plan_id else ""
    lines = [
        f"{problem.run_id}  {workflow}{problem.code}" + (f" at event {problem.run_seq}" if problem.run_seq else "")
    ]
    if problem.expected or problem.found:
        lines += [f"    history:  {problem.expected}", f"    code:     {problem.found}"]
    else:
        lines += [f"    {problem.message}"]
    if problem.source:
        lines += [f"    source:   {problem.source}"]
    return "\n".join(map(clean, lines))


def _table(checked: Counter[tuple[str, str]], problems: Counter[tuple[str, str]]) -> Table:
    table = Table("workflow", "version")
    table.add_column("runs", justify="right")
    table.add_column("would be paused", justify="right")
    for plan_id, plan_version in sorted(checked):
        kind = (plan_id, plan_version)
        names = Text(clean(plan_id or "(unreadable)")), Text(clean(plan_version))
        table.add_row(*names, str(checked[kind]), str(problems[kind]))
    return table
