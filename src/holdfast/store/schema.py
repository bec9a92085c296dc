"""The schema of a persistent store: its script, the later migrations, and the formats that this build opens.

`schema.sql` creates an empty store. Its first line names its format, and the second the oldest format whose build can
still work with it. Later changes are the files `migrations/NNNN_*.sql`: the number is the format that they produce, and
the first line names the oldest reader. A change that only adds (tables, indexes, columns with defaults) keeps the
oldest reader, so old and new nodes share the store during a rolling upgrade.

One process applies everything that is missing in one transaction, and records it in `holdfast_schema`. A store that
needs a newer build is refused with `StoreTooNew`, and one with a format older than `schema.sql` with `StoreTooOld`.
"""

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from msgspec import Struct

from holdfast.errors import StoreTooNew, StoreTooOld

FORMAT = "-- format:"
OLDEST_READER = "-- oldest reader:"


class Migration(Struct, frozen=True):
    """A script that produces a format: the schema itself, or a step from the previous format."""

    version: int
    oldest_reader: int
    script: str


class Schema(Struct, frozen=True):
    """The formats that this build knows: that of `schema.sql`, and one for each migration after it."""

    migrations: tuple[Migration, ...]

    @property
    def first(self) -> int:
        """Return the format of `schema.sql`: the oldest that this build opens."""
        return self.migrations[0].version

    @property
    def latest(self) -> int:
        """Return the format that this build writes."""
        return self.migrations[-1].version

    def missing(self, present: int) -> list[Migration]:
        """Return the migrations that a store of this format lacks, in order; format 0 is an empty store."""
        return [migration for migration in self.migrations if migration.version > present]

    def check(self, version: int, oldest_reader: int, shown: str, **details: str) -> None:
        """Raise if this build cannot work with a store of this format."""
        if oldest_reader > self.latest:
            raise StoreTooNew(
                f"{shown}: the schema is at version {version} and needs code that knows version {oldest_reader}; "
                f"this Holdfast knows {self.latest}. Upgrade Holdfast.",
                found=version,
                known=self.latest,
                **details,
            )
        if 0 < version < self.first:
            raise StoreTooOld(
                f"{shown}: the schema is at version {version}, and this Holdfast reads version {self.first} and newer. "
                "Finish its runs with the Holdfast that made it, or bring it to that version with a build in between; "
                "or name an empty store.",
                found=version,
                known=self.first,
                **details,
            )


@cache
def schema_of(package: str) -> Schema:
    """Return the schema in a package."""
    return read_schema(files(package))


def read_schema(folder: Traversable) -> Schema:
    """Return the schema in a folder: `schema.sql`, and `migrations/` if it exists."""
    script = (folder / "schema.sql").read_text()
    first = Migration(_number(script, FORMAT), _number(script, OLDEST_READER), script)
    later = folder / "migrations"
    scripts = sorted((file.name, file.read_text()) for file in (later.iterdir() if later.is_dir() else ()))
    steps = [
        Migration(int(name[:4]), _number(text, OLDEST_READER), text) for name, text in scripts if name.endswith(".sql")
    ]
    return Schema((first, *steps))


def _number(script: str, label: str) -> int:
    [value] = [line.removeprefix(label) for line in script.splitlines()[:2] if line.startswith(label)]
    return int(value)
