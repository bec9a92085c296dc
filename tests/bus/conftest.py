"""Stores for the tests of the bus."""

from tests.engine.conftest import store as store
