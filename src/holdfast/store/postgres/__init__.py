"""PostgreSQL: one schema, any number of nodes on any number of machines."""

from holdfast.store.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
