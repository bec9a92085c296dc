"""Agents of other libraries whose model calls and tool calls are steps of a run. Each has a module of its own."""
