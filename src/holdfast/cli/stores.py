"""`holdfast store`: commands for a store as a whole."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from holdfast.cli.app_loader import settings_at
from holdfast.cli.connection import user_name
from holdfast.cli.exit_codes import OK
from holdfast.cli.output import note, show_fields, show_json
from holdfast.clock import SystemClock, SystemIds
from holdfast.core.audit import AuditEntry
from holdfast.errors import InvalidInput
from holdfast.settings import Settings, without_password
from holdfast.store.copy import CopyReport, copy_store
from holdfast.store.health import Bounds
from holdfast.store.open import open_existing, open_sealed, open_store, sqlite_path
from holdfast.store.sqlite import backup as files

Address = Annotated[
    str | None,
    Parameter(
        help="The address of the store, such as sqlite:///orders.db; otherwise HOLDFAST_STORE, then "
        "sqlite:///holdfast.db.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, Parameter(name="--json", negative="", show_default=False, help="Answer with JSON.")]


KeepTokens = Annotated[
    bool,
    Parameter(negative="", show_default=False, help="Leave tokens and sessions as they are in the copy."),
]


def info(*, store: Address = None, as_json: AsJson = False) -> int:
    """Say what a store is: where, how large, and of which version. Nothing is changed."""
    settings = settings_at(store)
    if sqlite_path(settings.store) is None and settings.store != "memory://":
        found = asyncio.run(_info(settings))
    else:
        found = msgspec.to_builtins(files.file_info(file_of(settings, "name a store that is kept")))
    _show({"store": without_password(settings.store), **found}, as_json)
    return OK


async def _info(settings: Settings) -> dict[str, Any]:
    """Return the facts about a store that is not a file."""
    store = await open_existing(settings)
    try:
        facts, stats = await store.health(Bounds(sample_runs=0)), await store.stats()
    finally:
        await store.close()
    return {
        "software": facts.software,
        "schema_version": facts.schema_version,
        "latest_version": facts.latest_version,
        "runs": sum(stats.runs.values()),
        "by_status": dict(stats.runs),
        "completed_is_estimated": stats.completed_is_estimated,
        "nodes": stats.nodes,
    }


def migrate(*, store: Address = None, as_json: AsJson = False) -> int:
    """Create a store, or upgrade an old one. Nodes may keep working unless the release notes say otherwise."""
    settings = settings_at(store)
    if settings.store == "memory://":
        raise InvalidInput("the store 'memory://' ends with this command: name one that is kept", field="store")
    version = asyncio.run(_migrate(settings))
    _show({"store": without_password(settings.store), "schema_version": version}, as_json)
    return OK


def backup(to: Path, /, *, store: Address = None, as_json: AsJson = False) -> int:
    """Copy a store while nodes work, and check the copy. Nothing is overwritten.

    Parameters
    ----------
    to: Path
        The file to make.
    """
    settings = settings_at(store)
    source = file_of(settings, "use pg_dump")
    with _progress("copying") as progress:
        copied = files.copy_store(source, to, progress)
    _show(msgspec.to_builtins(copied), as_json)
    return OK


def restore(copy: Path, /, *, store: Address = None, keep_tokens: KeepTokens = False, as_json: AsJson = False) -> int:
    """Restore a store from a copy. The copy is verified, and an existing store is never overwritten.

    All tokens and sessions in it are revoked: a copy does not know which were revoked since it was made.

    Parameters
    ----------
    copy: Path
        The file that `holdfast store backup` made.
    """
    settings = settings_at(store)
    place = file_of(settings, "use pg_restore")
    with _progress("restoring") as progress:
        entry = AuditEntry(
            entry_id=SystemIds().new_id(), operation="store.restore", actor=user_name(), at=SystemClock().now()
        )
        restored = files.restore_store(copy, place, entry, keep_tokens=keep_tokens, progress=progress)
    _show(msgspec.to_builtins(restored), as_json)
    if keep_tokens:
        note("tokens and sessions are as the copy has them: one that was revoked since is valid again")
    else:
        note(f"{restored.tokens_revoked} tokens and sessions were revoked: make new ones with `holdfast token create`")
    return OK


def copy(source: str, target: str, /, *, as_json: AsJson = False) -> int:
    """Copy everything from one store into another, live runs included, and compare both. Stop the nodes of both before.

    Stores may be of different kinds: SQLite, PostgreSQL, S3. A copy that was interrupted goes on when it is repeated.
    Nothing is deleted from the source; do not start nodes on it again.

    Parameters
    ----------
    source: str
        The address of the store to copy.
    target: str
        The address of the store to copy into. It is made if it is not there.
    """
    if source == target:
        raise InvalidInput("the source and the target of a copy are the same store", field="target")
    with _progress("copying") as progress:
        report = asyncio.run(_copy(settings_at(source), settings_at(target), progress))
    _show(
        {"source": without_password(source), "target": without_password(target), **msgspec.to_builtins(report)}, as_json
    )
    return OK


async def _copy(source: Settings, target: Settings, progress: files.Progress) -> CopyReport:
    opened = await open_sealed(source, is_existing=True)
    try:
        into = await open_sealed(target, is_existing=False)
        try:
            return await copy_store(opened, into, progress)
        finally:
            await into.close()
    finally:
        await opened.close()


async def _migrate(settings: Settings) -> int:
    opened = await open_store(settings)
    try:
        return await opened.migrate()
    finally:
        await opened.close()


def file_of(settings: Settings, otherwise: str) -> Path:
    """Return the file of a store. Other stores have their own tools, which are better suited."""
    path = sqlite_path(settings.store)
    if path is not None:
        return path
    address = without_password(settings.store)
    if settings.store.startswith("postgres"):
        raise InvalidInput(f"the store {address} is not a file: {otherwise}", field="store")
    raise InvalidInput(f"the store {address} is not a SQLite file such as sqlite:///orders.db", field="store")


@contextmanager
def _progress(what: str) -> Iterator[files.Progress]:
    """Show the progress on a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(answer)
    else:
        show_fields(answer)
