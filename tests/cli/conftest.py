"""What the tests of the command share: a process that has imported it, and from which each command is forked."""

from collections.abc import Iterator

import pytest

from tests.cli.console import environment
from tests.cli.forks import Forks, forking


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Return what runs commands quickly."""
    with forking(environment()) as made:
        yield made
