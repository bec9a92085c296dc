"""Puts the commands together."""

import sys
from collections.abc import Sequence
from importlib.metadata import version

from cyclopts import App

from holdfast.cli.ending import end_of
from holdfast.cli.histories import check_histories
from holdfast.cli.node import node

commands = App(
    name="holdfast",
    help="Durable workflows for Python.",
    version=lambda: version("holdfast"),
    result_action="return_value",
    print_error=False,
    exit_on_error=False,
)
commands.command(check_histories)
commands.command(node)


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the command line, and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return end_of(lambda: commands(given))
