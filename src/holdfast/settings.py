"""Settings: immutable, complete, and never silently ignored.

They come from these sources, each of which overrides the previous one: the defaults, a TOML file, environment variables
(`HOLDFAST_STORE`, `HOLDFAST_LIMITS__BATCH_ITEMS`, …), and arguments. An unknown key is an error in every source.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from holdfast.errors import InvalidInput
from holdfast.limits import Limits

Ownership = Literal["single-owner", "cas-required"]
"""How commits are guarded: by the deployment's promise of one owner, or by the store's conditional writes."""

PREFIX = "HOLDFAST_"
OIDC_CLIENT_SECRET = "HOLDFAST_OIDC_CLIENT_SECRET"
FOR_CLIENTS = frozenset({"HOLDFAST_SERVER", "HOLDFAST_TOKEN", OIDC_CLIENT_SECRET})
"""Environment variables for clients, which are not settings of a store or a node."""


class EncryptionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys with which payloads are encrypted. Without keys they are stored unencrypted."""

    keys: str = ""
    """Keys as `id:key`, separated by commas, each 32 bytes in hex or base64. The first one encrypts, all decrypt."""

    keys_file: str = ""
    """A file with such keys, one per line, instead of `keys`."""

    encrypts: bool = True
    """Whether new payloads are encrypted. Set it to false until every node has the keys: they then only decrypt."""

    def __post_init__(self) -> None:
        if self.keys and self.keys_file:
            raise InvalidInput("give keys or keys_file, not both", field="encryption")

    @property
    def is_on(self) -> bool:
        """Whether there are keys."""
        return bool(self.keys or self.keys_file)

    def __repr__(self) -> str:
        return f"EncryptionSettings(is_on={self.is_on}, encrypts={self.encrypts})"


class ArtifactSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where artifacts and large values are kept. Without a `store`, large values are in the store of runs."""

    store: str = ""
    """A folder or a bucket: `file:///var/lib/shop/artifacts`, `s3://bucket/prefix`."""

    offload_bytes: int = 256 * 1024
    """Larger values are kept there instead of in the store of runs. 0 keeps all values in the store."""

    retention_days: dict[str, float] = {}
    """How long artifacts of each kind are kept. Other kinds are kept as long as their run."""


class NodeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the nodes that the command line starts. See [options of a node](#options-of-a-node)."""

    lease_ms: int | None = None
    claim_runs: int | None = None
    activities_at_once: int | None = None
    cached_runs: int | None = None
    safety_poll_s: float | None = None
    drain_s: float | None = None
    blocked_s: float | None = None
    visible_ms: int | None = None
    definition_grace_s: float | None = None
    write_latency_budget_ms: int | None = None
    fail_open: str | None = None
    artifact_sweep_s: float | None = None
    sample_s: float | None = None
    sample_keep_s: float | None = None
    relays: bool | None = None
    relay_events_s: int | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        options = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in options.items() if value is not None}


class RetentionRuleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long finished runs of a workflow, with a status, or of a tenant are kept. A missing field matches all."""

    finished_days: float | None
    """Counted from the end of the run. null keeps runs forever."""
    workflow: str | None = None
    status: str | None = None
    tenant: str | None = None


class RetentionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long finished data is kept, in days. Data without a value is kept forever."""

    finished_days: float | None = None
    """Finished runs with everything that belongs to them, counted from their end."""
    rules: tuple[RetentionRuleSettings, ...] = ()
    """Rules that precede `finished_days`. The first match decides. In an environment variable: JSON."""
    tasks_days: float | None = None
    """Tasks of finished runs that are kept longer."""
    snapshots_days: float | None = None
    """Runtime snapshots of finished runs that are kept longer."""
    dead_letters_days: float | None = None
    """Dead letters, counted from when they were settled."""
    audit_days: float | None = None
    """Entries of the audit log."""
    outbox_days: float | None = None
    """Events that wait for sinks; alerts and dead letters of the bus, whether or not a sink got them."""
    archive_index_days: float | None = None
    """The record of where a deleted run is archived."""
    stale_runs_days: float | None = None
    """Unfinished runs that have not changed for this long raise an alert."""
    stale_tasks_days: float | None = None
    """Tasks that have been open for this long raise an alert."""
    cancel_stale_runs: bool = False
    cancel_stale_tasks: bool = False
    """Whether the runs of such tasks are cancelled."""
    archive: str = ""
    """Where histories are archived before they are deleted: `file:///var/lib/shop/archive`, `s3://bucket/prefix`."""
    every_s: float = 3_600.0
    """How often a node looks for data to delete."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. Create them with `load_settings`, or directly in code."""

    store: str = "sqlite:///holdfast.db"
    """Where histories are kept: `sqlite:///relative.db`, `sqlite:////absolute.db`, `postgresql://…`,
    `s3://bucket/prefix` or `memory://`."""

    checkpoint_ownership: Ownership = "cas-required"
    """`cas-required` refuses a store that cannot guard commits against a second owner."""

    busy_ms: int = 30_000
    """How long to wait for other processes on the same file, or for a server, before an error."""

    wakeups: str = ""
    """How nodes notify each other, for databases that cannot notify: `nats://localhost:4222/orders`. Empty: the store's
    own way. If the NATS server is down, runs are found a little later."""

    node: NodeSettings = NodeSettings()
    """Options of the nodes that the command line starts: `HOLDFAST_NODE__LEASE_MS`."""

    encryption: EncryptionSettings = EncryptionSettings()
    """The keys with which payloads are encrypted."""

    artifacts: ArtifactSettings = ArtifactSettings()
    """Where artifacts and large values are kept."""

    retention: RetentionSettings = RetentionSettings()
    """How long finished data is kept. An app's own policy, `App(retention=…)`, replaces it."""

    secrets: str = ""
    """The source of the values of secrets: `env://PREFIX_`, `file:///run/secrets`, or the address of an installed
    provider. Empty: there are no secrets. An app's own provider, `App(secrets=…)`, replaces it."""

    limits: Limits = Limits()
    """The limits of this installation."""

    def __post_init__(self) -> None:
        if not isinstance(self.store, str):
            raise InvalidInput(f"store is an address such as sqlite:///orders.db, not {self.store!r}", field="store")
        if not isinstance(self.wakeups, str):
            raise InvalidInput(
                f"wakeups is an address such as nats://localhost:4222, not {self.wakeups!r}", field="wakeups"
            )
        if not isinstance(self.secrets, str):
            raise InvalidInput(f"secrets is an address such as env://SECRET_, not {self.secrets!r}", field="secrets")
        if self.checkpoint_ownership not in get_args(Ownership):
            raise unknown_ownership(self.checkpoint_ownership)
        if type(self.busy_ms) is not int or self.busy_ms < 0:
            raise InvalidInput(f"busy_ms is a whole number from 0, not {self.busy_ms!r}", field="busy_ms")


def unknown_ownership(mode: object) -> InvalidInput:
    """Return the error for an unknown ownership mode. It is never treated as the mode without checks."""
    known = " or ".join(map(repr, get_args(Ownership)))
    return InvalidInput(f"checkpoint_ownership is {known}, not {mode!r}", field="checkpoint_ownership")


def without_password(address: str) -> str:
    """Return an address for logs, errors and reports: without a password, and without options other than a schema.

    An address of an unknown form is shown only where it cannot contain a password.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address if re.fullmatch(r"[\w./-]*", address) else "(an address that is not shown)"
    if scheme == "sqlite" and rest.startswith("/"):  # a path, which may contain an @
        return address.partition("?")[0]
    before, at, place = rest.partition("?")[0].rpartition("@")
    if scheme not in ("postgres", "postgresql"):
        return f"{scheme}{separator}{at}{place}"
    schema = re.search(r"[?&](schema=\w+)(?:&|$)", rest)  # another schema is another store
    return f"{scheme}{separator}{before.partition(':')[0]}{at}{place}" + (f"?{schema[1]}" if schema else "")


def load_settings(environ: Mapping[str, str], file: Path | None = None, **arguments: Any) -> Settings:
    """Return the settings from the file, then the environment, then the arguments."""
    given: dict[str, Any] = {}
    if file is not None:
        _merge(given, _read(file))
    for name, value in environ.items():
        if name.startswith(PREFIX) and name not in FOR_CLIENTS:
            _merge(given, _nested(name.removeprefix(PREFIX).lower().split("__"), value))
    _merge(given, arguments)
    _read_rules(given)
    try:
        return msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as problem:
        raise InvalidInput(f"the settings are wrong: {_variable(str(problem), environ)}{problem}") from problem


def _variable(problem: str, environ: Mapping[str, str]) -> str:
    """Return the prefix with the name of the variable that a problem is about; "" if it is about none."""
    place = re.search(r"`\$\.?([\w.]*)", problem)
    unknown = re.search(r"unknown field `(\w+)`", problem)
    parts = [*(place[1].split(".") if place and place[1] else ()), *(unknown.groups() if unknown else ())]
    name = PREFIX + "__".join(parts).upper()
    return f"{name}: " if name in environ else ""


def _read_rules(given: dict[str, Any]) -> None:
    """Parse the retention rules if they are a text, as in an environment variable."""
    retention = given.get("retention")
    if isinstance(retention, dict) and isinstance(retention.get("rules"), str):
        try:
            retention["rules"] = msgspec.json.decode(retention["rules"])
        except msgspec.DecodeError as problem:
            raise InvalidInput(f"retention.rules is a JSON array: {problem}", field="retention.rules") from problem


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise InvalidInput(f"the settings file {file} cannot be read: {problem}") from problem


def _nested(path: list[str], value: str) -> dict[str, Any]:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


def _merge(onto: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(onto.get(key), dict):
            _merge(onto[key], value)
        else:
            onto[key] = dict(value) if isinstance(value, Mapping) else value
