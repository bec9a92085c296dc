"""From settings to a store that is ready for work: opened, guarded, migrated."""

from pathlib import Path
from urllib.parse import unquote

from holdfast.errors import InvalidInput
from holdfast.settings import Settings
from holdfast.store.guards import check_ownership
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Store
from holdfast.store.sqlite import SqliteStore


async def open_store(settings: Settings) -> Store:
    """Open the store that the settings name. A store that cannot guard commits as demanded is refused here."""
    store = await _open(settings)
    try:
        check_ownership(store, settings.checkpoint_ownership)
        await store.migrate()
    except BaseException:
        await store.close()
        raise
    return store


async def _open(settings: Settings) -> Store:
    scheme, separator, rest = settings.store.partition("://")
    if separator and scheme == "memory" and rest == "":
        return MemoryStore(limits=settings.limits)
    if separator and scheme == "sqlite" and rest.startswith("/") and len(rest) > 1 and "?" not in rest:
        path = Path(unquote(rest[1:]))
        return await SqliteStore.open(path, limits=settings.limits, busy_ms=settings.busy_ms)
    if scheme in ("postgres", "postgresql", "s3"):
        raise InvalidInput(f"the store {settings.store!r}: {scheme} is not there yet", field="store")
    raise InvalidInput(
        f"the store {settings.store!r} is not known: use sqlite:///relative.db, sqlite:////absolute.db or memory://",
        field="store",
    )
