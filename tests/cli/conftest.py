"""What the tests of the command share: a process that has imported it, and from which each command is forked."""

from collections.abc import Iterator

import pytest

from tests.cli.command_process import environment
from tests.cli.forked_commands import ForkedCommands, fork_commands


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkedCommands]:
    """Return what runs commands quickly."""
    with fork_commands(environment()) as made:
        yield made
