"""Flows: workflows written as a tree of steps around one typed state."""
