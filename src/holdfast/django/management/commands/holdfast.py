"""`manage.py holdfast …`: the command line of Holdfast, with the app and the store of the project's settings.

`manage.py holdfast node` runs workflows until SIGTERM, and `manage.py holdfast server` serves API and page on a
separate port, for projects behind WSGI. All other commands are those of `holdfast`: `manage.py holdfast run list`.
"""

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand

from holdfast.cli.commands import spec_of
from holdfast.cli.main import main
from holdfast.django import configuration
from holdfast.service.operations import OPERATIONS

TAKES_APP = frozenset({"node", "server", "dev", "check-histories"})
"""Commands whose first argument is the app."""

OF_OPERATIONS = frozenset(spec_of(operation).words.partition(" ")[0] for operation in OPERATIONS.values())
"""Commands that query a store, and need the app for everything that requires the code of workflows."""


def arguments_of(given: list[str]) -> list[str]:
    """Return a command line of `holdfast`, with the project's app added if the command takes one."""
    if not given or "--help" in given:
        return given
    app = configuration()["APP"]
    if given[0] in TAKES_APP:
        return [given[0], app, *given[1:]]
    if given[0] in OF_OPERATIONS and not any(word.partition("=")[0] in ("--server", "--app") for word in given):
        return [*given, "--app", app]
    return given


class Command(BaseCommand):  # type: ignore[misc]
    """The command."""

    help = "The command line of Holdfast, with the app and the store of the settings: node, server, run list, …"

    def run_from_argv(self, argv: list[str]) -> None:
        """Execute the words after `manage.py holdfast`, and exit with the exit code of the command."""
        if store := configuration().get("STORE"):
            os.environ["HOLDFAST_STORE"] = store
        sys.exit(main(arguments_of(argv[2:])))

    def handle(self, *args: Any, **options: Any) -> None:
        """Do the same when Django calls the command itself."""
        self.run_from_argv(["manage.py", "holdfast", *args])
