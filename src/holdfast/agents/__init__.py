"""Agents of other libraries as durable workflows: an adapter for each library, and what the adapters share."""
