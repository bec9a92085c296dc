"""The pure core: what may happen to a run, and what follows from it.

No input or output, no clock, no randomness, no logging, no waiting. Everything here is a function of its arguments;
the standard library and msgspec are all it needs.
"""
