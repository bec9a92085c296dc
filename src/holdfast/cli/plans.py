"""`holdfast plan validate`: every problem of a plan, with its line, here or as a server or a store sees it."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from holdfast.cli.app_loader import load_app
from holdfast.cli.connection import Target, connect
from holdfast.cli.exit_codes import FAILED, OK
from holdfast.cli.output import clean, note, show_json
from holdfast.errors import InvalidInput
from holdfast.limits import PLAN_BYTES
from holdfast.program.plan.definition import check_plan


def plan_validate(
    file: str,
    /,
    *,
    mermaid: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    target: Target | None = None,
) -> int:
    """Check a plan, and list every problem with its place. Ends with 1 if there is one.

    Without a server, a store and an app, only the document itself is checked; with --app alone, also whether its
    activities and their arguments are those of the app.

    Parameters
    ----------
    file: str
        The plan, JSON or YAML; - for stdin.
    mermaid: bool
        Draw the plan as a flowchart of Mermaid, if it is valid.
    """
    target = target or Target()
    text = read_document(file)
    is_named = target.server is not None or target.store is not None
    is_known = not os.environ.keys().isdisjoint({"HOLDFAST_SERVER", "HOLDFAST_STORE"})
    if is_named or (is_known and target.app is None):
        answer = asyncio.run(_ask(text, target))
    else:
        here = None if target.app is None else load_app(target.app).registry
        definition, problems = check_plan(text.encode(), here)
        answer = {"is_valid": not problems, "problems": msgspec.to_builtins(problems)}
        if definition is not None:
            known = {"plan_id": definition.name, "plan_version": definition.version, "sha256": definition.sha256}
            answer |= known
    if target.json:
        show_json(answer)
    elif mermaid and answer["is_valid"]:
        definition, _ = check_plan(text.encode())
        assert definition is not None
        print(definition.graph().mermaid())
    else:
        _show(file, answer)
    return OK if answer["is_valid"] else FAILED


def read_document(file: str) -> str:
    """Return the text of a file or stdin, with its exact bytes for the hash. An argument with line breaks is the text
    itself.
    """
    if "\n" in file:
        return file
    try:
        body = sys.stdin.buffer.read(PLAN_BYTES + 1) if file == "-" else Path(file).read_bytes()
        if len(body) > PLAN_BYTES:
            raise InvalidInput(f"{file} has more than {PLAN_BYTES} bytes, the most of a plan", field="document")
        return body.decode()
    except OSError as problem:
        raise InvalidInput(f"{file} cannot be read: {problem.strerror}", field="document") from problem
    except UnicodeDecodeError as problem:
        raise InvalidInput(f"{file} is not UTF-8 text", field="document") from problem


async def _ask(text: str, target: Target) -> dict[str, Any]:
    async with connect(target) as connection:
        answer: dict[str, Any] = await connection("plans.validate", {"document": text})
        return answer


def _show(file: str, answer: dict[str, Any]) -> None:
    for problem in answer["problems"]:
        line = "" if problem["line"] is None else f"{problem['line']}:"
        print(clean(f"{file}:{line} {problem['place'] or '/'}: {problem['message']}"))
    count = len(answer["problems"])
    if answer["is_valid"]:
        print(clean(f"{answer['plan_id']} {answer['plan_version']} is valid; sha256 {answer['sha256']}"))
    else:
        note(f"{count} problem{'' if count == 1 else 's'}")
