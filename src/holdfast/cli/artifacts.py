"""Commands for artifacts: list those of a run, and download one."""

import asyncio
import os
import sys
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from cyclopts import Parameter

from holdfast.cli.connection import Connection, Target, connect
from holdfast.cli.exit_codes import OK
from holdfast.cli.output import note, show_items, show_json
from holdfast.errors import InvalidInput, NotFound

COLUMNS = ("step_id", "kind", "artifact_id", "size_bytes", "expires_at")


def artifact_list(run_id: str, /, *, target: Target | None = None) -> int:
    """List the artifacts that the steps of a run have stored.

    Parameters
    ----------
    run_id: str
        The run's id.
    """
    return asyncio.run(_list(run_id, target or Target()))


async def _list(run_id: str, target: Target) -> int:
    async with connect(target) as connection:
        found = await _artifacts(connection, run_id)
    if target.json:
        show_json({"items": found})
    else:
        show_items(found, COLUMNS)
    return OK


def artifact_get(
    run_id: str,
    name: str | None = None,
    /,
    *,
    step: Annotated[str | None, Parameter(show_default=False)] = None,
    output: Annotated[
        str | None, Parameter(name=("--output", "-o"), allow_leading_hyphen=True, show_default=False)
    ] = None,
    target: Target | None = None,
) -> int:
    """Download an artifact of a run to a file. The file has its name once all bytes have come and were checked.

    Parameters
    ----------
    run_id: str
        The run's id.
    name: str
        The kind or the id of the artifact, if the run has several.
    step: str
        The step that has stored it.
    output: str
        The file to write, or - for the standard output; otherwise the artifact's kind and id, in the current folder.
    """
    return asyncio.run(_get(run_id, name, step, output, target or Target()))


async def _get(run_id: str, name: str | None, step: str | None, output: str | None, target: Target) -> int:
    async with connect(target) as connection:
        artifact = _only(await _artifacts(connection, run_id), run_id, name, step)
        kind, artifact_id = artifact["kind"], artifact["artifact_id"]
        asked = {"run_id": run_id, "kind": kind, "artifact_id": artifact_id}
        if output == "-":
            await _write(connection, asked, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return OK
        path = Path(output or f"{kind}-{artifact_id.partition('.')[0]}")
        incomplete = path.with_name(f"{path.name}.incomplete")
        try:
            with incomplete.open("wb") as file:
                await _write(connection, asked, file)
            os.replace(incomplete, path)
        except OSError as problem:
            raise InvalidInput(f"{path} cannot be written: {problem.strerror}", field="output") from problem
        finally:
            with suppress(OSError):
                incomplete.unlink()
    if target.json:
        show_json({**artifact, "path": str(path)})
    else:
        note(f"{path}: {artifact['size_bytes']} bytes")
    return OK


async def _write(connection: Connection, asked: dict[str, Any], file: BinaryIO) -> None:
    async with aclosing(connection.download("artifacts.download", asked)) as chunks:
        async for chunk in chunks:
            file.write(chunk)


async def _artifacts(connection: Connection, run_id: str) -> list[dict[str, Any]]:
    """Return the artifacts of a run, each with its step and its id."""
    snapshot = await connection("runs.snapshot", {"run_id": run_id})
    return [
        {"step_id": step["step_id"], **artifact, "artifact_id": artifact["uri"].rpartition("/")[2]}
        for step in snapshot["steps"]
        for artifact in step["artifacts"]
    ]


def _only(found: list[dict[str, Any]], run_id: str, name: str | None, step: str | None) -> dict[str, Any]:
    """Return the one artifact that matches."""
    meant = [
        each for each in found if name in (None, each["kind"], each["artifact_id"]) and step in (None, each["step_id"])
    ]
    if not meant:
        raise NotFound(
            f"run {run_id} has no such artifact: `holdfast artifact list {run_id}` lists them", run_id=run_id
        )
    if len(meant) > 1:
        ids = ", ".join(each["artifact_id"] for each in meant)
        raise InvalidInput(f"run {run_id} has {len(meant)} of them, name one by its id: {ids}", field="name")
    return meant[0]
