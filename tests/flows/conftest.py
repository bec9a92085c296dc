"""Flows are tested where code is: on two stores, with programs kept in memory and with every turn replayed."""

from tests.engine.conftest import address, stored_in, variant

__all__ = ["address", "stored_in", "variant"]
