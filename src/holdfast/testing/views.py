"""Views of a store for `holdfast.core.invariants`, to check in a test what must always hold."""

from holdfast.store.inspect import system_view as system_view
from holdfast.store.inspect import view_of as view_of
