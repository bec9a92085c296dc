"""For tests of what is built on Holdfast, and of stores: public, and kept as stable as the rest.

The conformance suite needs pytest, so it is not imported here: ``from holdfast.testing.store_suite import StoreSuite``.
"""

from holdfast.testing.clock import VirtualClock

__all__ = ["VirtualClock"]
