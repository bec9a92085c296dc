"""Flows: workflows that are written as a tree of steps around one typed state."""
