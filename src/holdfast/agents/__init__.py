"""Agents of other libraries whose calls are steps of a run: an adapter for each library, and what they share."""
