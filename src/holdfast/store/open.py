"""Opens the store that the settings name: connects, verifies and migrates it."""

from pathlib import Path
from urllib.parse import unquote

from holdfast.errors import InvalidInput, StoreNotMigrated, StoreUnavailable
from holdfast.settings import Settings, without_password
from holdfast.store.artifacts import Artifacts
from holdfast.store.memory import MemoryStore
from holdfast.store.payloads import PayloadCodec, SealingStore
from holdfast.store.port import Store
from holdfast.store.sqlite import SqliteStore
from holdfast.store.validation import check_ownership
from holdfast.store.wakeups import Wakeups


async def open_store(settings: Settings) -> Store:
    """Open the store that the settings name. A store that cannot guard commits as required is refused here."""
    store = await _open(settings)
    try:
        check_ownership(store, settings.checkpoint_ownership)
        await store.migrate()
        return _with_codecs(store, settings)
    except BaseException:
        await store.close()
        raise


async def open_existing(settings: Settings) -> Store:
    """Open an existing store for reading: it is neither created nor migrated."""
    _refuse_missing(settings.store)
    store = await _open(settings)
    try:
        await store.now()  # raises for a missing or old schema
        return _with_codecs(store, settings)
    except BaseException:
        await store.close()
        raise


async def open_sealed(settings: Settings, *, is_existing: bool) -> Store:
    """Open a store without codecs: sealed payloads stay sealed. It is migrated, unless it must exist already."""
    if is_existing:
        _refuse_missing(settings.store)
    store = await _open(settings)
    try:
        check_ownership(store, settings.checkpoint_ownership)
        if is_existing:
            await store.now()  # raises for a missing or old schema
        else:
            await store.migrate()
        return store
    except BaseException:
        await store.close()
        raise


def _with_codecs(store: Store, settings: Settings) -> Store:
    codecs: list[PayloadCodec] = []
    if settings.encryption.is_on:
        from holdfast.store.encryption import Encryption  # the package is an extra

        codecs.append(Encryption.from_settings(settings.encryption))
    artifacts = Artifacts.from_settings(settings.artifacts)
    if artifacts is not None:
        codecs += artifacts.codecs
    return SealingStore(store, codecs) if codecs else store


def open_wakeups(address: str) -> Wakeups | None:
    """Return the wake-ups at an address; None, meaning the store's own, if it is empty."""
    if not address:
        return None
    try:
        from holdfast.store.nats_wakeups import NatsWakeups
    except ImportError as problem:
        raise InvalidInput("wakeups need a package: pip install 'holdfast[nats]'", field="wakeups") from problem
    return NatsWakeups(address)


def is_new(address: str) -> bool:
    """Return whether this is the address of a file that does not exist yet, or is empty."""
    path = sqlite_path(address)
    return path is not None and (not path.exists() or path.stat().st_size == 0)


def _refuse_missing(address: str) -> None:
    if address == "memory://":
        raise InvalidInput(f"the store {address!r} begins empty: name one that is kept", field="store")
    path = sqlite_path(address)
    if path is not None and not path.exists():
        raise StoreUnavailable(f"{path}: there is no such store", path=str(path))
    if path is not None and path.stat().st_size == 0:  # SQLite would write its header
        raise StoreNotMigrated(f"{path}: the file is empty, it is no store yet", path=str(path))


def sqlite_path(address: str) -> Path | None:
    """Return the file at an address, or None if the address is not that of a file."""
    scheme, separator, rest = address.partition("://")
    is_file = separator and scheme == "sqlite" and rest.startswith("/") and len(rest) > 1 and "?" not in rest
    return Path(unquote(rest[1:])) if is_file else None


async def _open(settings: Settings) -> Store:
    scheme, separator, rest = settings.store.partition("://")
    if separator and scheme == "memory" and rest == "":
        if settings.wakeups:
            raise InvalidInput("a store in memory has one process, which needs no wakeups from others", field="wakeups")
        return MemoryStore(limits=settings.limits)
    path = sqlite_path(settings.store)
    if path is not None:
        wakeups = open_wakeups(settings.wakeups)
        return await SqliteStore.open(path, limits=settings.limits, busy_ms=settings.busy_ms, wakeups=wakeups)
    if separator and scheme in ("postgres", "postgresql"):
        return await _open_postgres(settings)
    if separator and scheme == "s3":
        return await _open_s3(settings)
    shown = repr(without_password(settings.store))
    raise InvalidInput(
        f"the store {shown} is not known: use sqlite:///relative.db, sqlite:////absolute.db, "
        "postgresql://host/database, s3://bucket/prefix or memory://",
        field="store",
    )


async def _open_postgres(settings: Settings) -> Store:
    try:
        from holdfast.store.postgres import PostgresStore  # the driver is an extra
    except ModuleNotFoundError as problem:
        if problem.name != "asyncpg":
            raise
        text = "a store on PostgreSQL needs a driver: pip install 'holdfast[postgres]'"
        raise StoreUnavailable(text, missing="asyncpg") from problem
    wakeups = open_wakeups(settings.wakeups)
    return await PostgresStore.open(settings.store, limits=settings.limits, busy_ms=settings.busy_ms, wakeups=wakeups)


async def _open_s3(settings: Settings) -> Store:
    from holdfast.store.s3 import S3Store  # the package is an extra; the module says so where it is missing

    wakeups = open_wakeups(settings.wakeups)
    return await S3Store.open(settings.store, limits=settings.limits, busy_ms=settings.busy_ms, wakeups=wakeups)
