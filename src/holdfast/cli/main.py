"""Assembles the commands."""

import atexit
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Literal

from cyclopts import App

from holdfast.cli.archive import archive_export
from holdfast.cli.artifacts import artifact_get, artifact_list
from holdfast.cli.audit import export
from holdfast.cli.bench import bench
from holdfast.cli.bulk import run_bulk
from holdfast.cli.call import call
from holdfast.cli.commands import HELP, spec_of
from holdfast.cli.dev import dev
from holdfast.cli.doctor import doctor
from holdfast.cli.exit_codes import run_command
from holdfast.cli.generate import ExtraFlag, command_of
from holdfast.cli.histories import check_histories, flow_show
from holdfast.cli.init import init
from holdfast.cli.letter_bulk import bus_bulk, dead_letter_bulk
from holdfast.cli.mcp import mcp
from holdfast.cli.node import node
from holdfast.cli.plans import plan_validate
from holdfast.cli.runs import await_started, run_result, run_show, run_stream, run_tail
from holdfast.cli.server import server
from holdfast.cli.stores import backup, copy, info, migrate, restore
from holdfast.cli.task_bulk import task_bulk
from holdfast.service.operations import OPERATIONS

WAIT = ExtraFlag(option="--wait", help="Wait for the run to finish, and write its result.", then=await_started)
OWN: dict[str, Callable[..., int]] = {
    "runs.result": run_result,
    "plans.validate": plan_validate,
}
"""Operations with commands that do more than one call."""

STARTS = frozenset({"runs.start", "plans.start"})
"""Operations whose commands can wait for the run that they start."""


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Write the script that completes commands and options in a shell.

    Parameters
    ----------
    shell: str
        Such as bash: `source <(holdfast completion bash)`.
    """
    print(all_commands().generate_completion(shell=shell))


ALONE = {
    command.__name__.replace("_", "-"): command
    for command in (init, dev, server, node, call, check_histories, doctor, bench, mcp, completion)
}
"""Commands of one word."""

WRITTEN: tuple[tuple[str, str, Callable[..., int | None]], ...] = (
    ("artifact", "get", artifact_get),
    ("artifact", "list", artifact_list),
    ("archive", "export", archive_export),
    ("audit", "export", export),
    ("flow", "show", flow_show),
    ("run", "bulk", run_bulk),
    ("task", "bulk", task_bulk),
    ("dead-letter", "bulk", dead_letter_bulk),
    ("bus", "bulk", bus_bulk),
    ("run", "show", run_show),
    ("run", "tail", run_tail),
    ("run", "stream", run_stream),
    ("store", "info", info),
    ("store", "migrate", migrate),
    ("store", "backup", backup),
    ("store", "restore", restore),
    ("store", "copy", copy),
)
"""Commands in groups that have no single operation behind them."""


def all_commands() -> App:
    """Return the whole command line."""
    return _commands_of(None)


@cache
def _commands_of(first: str | None) -> App:
    """Return the commands that begin with this word, or all. Creating all of them takes longer than many commands."""
    made = App(
        name="holdfast",
        help="Durable workflows for Python.",
        version=lambda: version("holdfast"),
        result_action="return_value",
        print_error=False,
        exit_on_error=False,
    )
    for name, command in ALONE.items():
        if first in (None, name):
            made.command(command)
    for name, operation in OPERATIONS.items():
        spec = spec_of(operation)
        group, _, verb = spec.words.partition(" ")
        if first in (None, group):
            own = OWN.get(name) or command_of(operation, spec, WAIT if name in STARTS else None)
            _group(made, group).command(own, name=verb)
    for group, verb, written in WRITTEN:
        if first in (None, group):
            _group(made, group).command(written, name=verb)
    return made


def _group(commands: App, group: str) -> App:
    if group not in commands:
        commands.command(App(name=group, help=HELP.get(group, f"Operations on {group}.")))
    return commands[group]


def _commands_for(given: Sequence[str]) -> App:
    """Return the commands that include the one named by these words; if they name none, all."""
    first = given[0] if given else ""
    groups = {spec_of(operation).words.partition(" ")[0] for operation in OPERATIONS.values()}
    is_known = first in ALONE or first in groups or any(first == group for group, _, _ in WRITTEN)
    return _commands_of(first) if is_known else all_commands()


def with_stdin_last(given: list[str]) -> list[str]:
    """Return arguments such that `-`, the standard input, is parsed as an argument, not as an unnamed option."""
    places = [place for place, word in enumerate(given) if word == "-"]
    if len(places) != 1 or "--" in given:
        return given
    [place] = places
    if place > 0 and given[place - 1].startswith("-") and _takes_value(given, given[place - 1]):
        return given
    return [*given[:place], *given[place + 1 :], "--", "-"]


def _takes_value(given: list[str], option: str) -> bool:
    """Return whether the word after an option belongs to it: not after a flag, nor if the option has its value."""
    if "=" in option:
        return False
    _, apps, _ = _commands_for(given).parse_commands(given)
    known = apps[-1].assemble_argument_collection(parse_docstring=False) if apps[-1].default_command else []
    return not any(option in each.names and each.token_count()[0] == 0 for each in known)


def _open_what_is_closed() -> None:
    """Replace closed standard streams, which Python omits: reads return nothing, and writes are discarded."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the lowest free descriptor is that of the stream
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(nowhere, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - it stays open


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the command line, and return the exit code."""
    given = with_stdin_last(list(sys.argv[1:] if arguments is None else arguments))
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # unprintable characters must not cause a failure
    return run_command(lambda: _commands_for(given)(given), as_json="--json" in given)


def run_process() -> None:
    """Carry out the command line of this process, and end it with the exit code."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first one registered is the last one called
    codes.append(main())
    sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    """End the process before the interpreter is taken down, if it has threads that this would abort.

    The threads of obstore enter the interpreter to deliver answers, also those that are no longer waited for. One that
    does so while the interpreter is taken down aborts the process, after everything was done.
    """
    if codes and "obstore" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        logging.shutdown()
        os._exit(codes[0])
