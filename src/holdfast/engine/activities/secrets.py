"""Providers of secrets, and how an attempt of an activity gets the values that it needs.

Environment variables (`env://PREFIX_`) and folders of files (`file:///run/secrets`), as Docker and Kubernetes mount
them, are built in. Other providers are packages with an entry point in the group `holdfast.secrets`, named like the
scheme of their addresses: a function that takes the address and returns a `SecretProvider`.

Nothing is cached: each attempt requests the secrets that it needs once, for the tenant and environment of its run.
"""

import asyncio
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from holdfast.errors import InvalidInput, SecretNotFound, SecretsUnavailable
from holdfast.limits import SECRET_BYTES, SECRET_CHARS_LEAST, SECRETS, SECRETS_S
from holdfast.program.secrets import ResolvedSecrets, Secret, SecretProvider, SecretScope
from holdfast.settings import without_password

ENTRY_POINTS = "holdfast.secrets"


class EnvironmentSecrets:
    """Secrets in environment variables of the node: `stripe/key` is SECRET_STRIPE_KEY with the prefix SECRET_.

    Only variables with the prefix are read. `{tenant}` and `{environment}` in the prefix are replaced by those of the
    run.
    """

    def __init__(self, prefix: str = "SECRET_", environ: Mapping[str, str] | None = None) -> None:
        if not prefix:
            raise InvalidInput("EnvironmentSecrets needs a prefix: else a reference could name any variable")
        self._prefix = prefix
        self._environ = os.environ if environ is None else environ

    async def resolve(self, refs: Sequence[str], scope: SecretScope) -> dict[str, str]:
        """Return the values of the variables."""
        prefix = _filled(self._prefix, scope, _VARIABLE_PART).upper()
        names = {ref: prefix + _variable(ref) for ref in refs}
        for ref, name in names.items():
            if name not in self._environ:
                raise SecretNotFound(
                    f"there is no secret {ref!r}: the variable {name} is not set", retryable=False, secret=ref
                )
        return {ref: self._environ[name] for ref, name in names.items()}


class FileSecrets:
    """Secrets in files of a folder: `stripe/key` is the file `key` in its folder `stripe`.

    One line break at the end of a file is not part of the value. `{tenant}` and `{environment}` in the path of the
    folder are replaced by those of the run. A file outside the folder, reached by a link, is refused. Files are read
    each time.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)

    async def resolve(self, refs: Sequence[str], scope: SecretScope) -> dict[str, str]:
        """Return the contents of the files."""
        folder = Path(_filled(self._folder, scope, _PATH_PART))
        return await asyncio.to_thread(lambda: {ref: _read(folder, ref) for ref in refs})


_PLACE = re.compile(r"\{(tenant|environment)\}")
_VARIABLE_PART = re.compile(r"[a-z0-9]+")
_PATH_PART = re.compile(r"(?!\.{1,2}$)[^/\\\x00]+")


def _filled(template: str, scope: SecretScope, allowed: re.Pattern[str]) -> str:
    """Fill in a template for the tenant and the environment; raise if two of them could give the same text."""

    def part(found: re.Match[str]) -> str:
        value: str = getattr(scope, found[1])
        if not allowed.fullmatch(value):
            raise SecretsUnavailable(f"the {found[1]} {value!r} cannot be a part of {template!r}, where secrets are")
        return value

    return _PLACE.sub(part, template)


def _variable(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", name).upper()


def _read(folder: Path, ref: str) -> str:
    root = Path(os.path.realpath(folder))
    file = Path(os.path.realpath(root.joinpath(*Secret(ref).name.split("/"))))
    if not file.is_relative_to(root) or file == root:
        raise SecretsUnavailable(f"the file of secret {ref!r} is outside of the folder {folder}")
    try:
        if not file.is_file():
            raise SecretNotFound(f"there is no secret {ref!r}: there is no file for it in {folder}", secret=ref)
        with file.open("rb") as opened:
            data = opened.read(SECRET_BYTES + 3)
        return data.decode().removesuffix("\n").removesuffix("\r")
    except OSError as problem:
        raise SecretsUnavailable(f"the file of secret {ref!r} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise SecretsUnavailable(f"the file of secret {ref!r} is not UTF-8 text") from None


def open_provider(address: str | SecretProvider) -> SecretProvider:
    """Return the provider for an address such as `env://SECRET_` or `file:///run/secrets`, or the given provider
    itself.
    """
    if not isinstance(address, str):
        return _provider(address)
    scheme, separator, rest = address.partition("://")
    if scheme == "env" and separator:
        return EnvironmentSecrets(rest or "SECRET_")
    if scheme == "file" and rest.startswith("/"):
        return FileSecrets(unquote(rest))
    found = [each for each in entry_points(group=ENTRY_POINTS) if each.name == scheme] if separator else []
    if not found:
        raise InvalidInput(
            f"secrets is an address such as env://SECRET_ or file:///run/secrets, or one whose scheme is an entry "
            f"point of the group {ENTRY_POINTS}, not {without_password(address)!r}",
            field="secrets",
        )
    return _provider(found[0].load()(address))


def _provider(given: Any) -> SecretProvider:
    if not callable(getattr(given, "resolve", None)):
        raise InvalidInput(
            f"a provider of secrets has `async def resolve(refs, scope)`, unlike {type(given).__qualname__}",
            field="secrets",
        )
    provider: SecretProvider = given
    return provider


async def resolve_secrets(
    provider: SecretProvider | None, references: Iterable[Secret], scope: SecretScope
) -> ResolvedSecrets:
    """Return the values of secrets with one call of the provider; raise the error that fails the attempt."""
    names = sorted({reference.name for reference in references})
    if len(names) > SECRETS:
        raise InvalidInput(f"an activity is given {len(names)} secrets; the most is {SECRETS}")
    if not names:
        return ResolvedSecrets({})
    if provider is None:
        raise SecretsUnavailable("there is no provider of secrets: give App(secrets=…), or set HOLDFAST_SECRETS")
    if not scope.tenant or not scope.environment:  # never resolved for a tenant other than the run's
        raise SecretsUnavailable("the job does not name its run's tenant and environment: an older version has put it")
    found = await _asked(provider, names, scope)
    return ResolvedSecrets({name: _checked(name, found) for name in names})


async def _asked(provider: SecretProvider, names: list[str], scope: SecretScope) -> Mapping[str, Any]:
    try:
        async with asyncio.timeout(SECRETS_S):
            found: Any = await provider.resolve(names, scope)
    except (SecretNotFound, SecretsUnavailable):
        raise
    except (Exception, SystemExit) as problem:  # its text may contain what no history may contain
        raise _failed(provider, f"failed with {type(problem).__qualname__}", names) from None
    if not isinstance(found, Mapping):
        raise _failed(provider, f"answered with a {type(found).__qualname__}", names)
    return found


def _failed(provider: SecretProvider, how: str, names: list[str]) -> SecretsUnavailable:
    kind = type(provider).__qualname__
    return SecretsUnavailable(f"the provider of secrets, {kind}, {how}; asked for {', '.join(names)}")


def _checked(name: str, found: Mapping[str, Any]) -> str:
    value = found.get(name)
    if value is None:
        raise SecretNotFound(f"there is no secret {name!r}: its provider does not have it", secret=name)
    if not isinstance(value, str):
        raise SecretsUnavailable(f"the value of secret {name!r} is not text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise SecretsUnavailable(f"the value of secret {name!r} is not valid Unicode") from None
    if len(value.strip()) < SECRET_CHARS_LEAST or size > SECRET_BYTES:
        raise SecretsUnavailable(
            f"the value of secret {name!r} has to have {SECRET_CHARS_LEAST} characters or more, so that it can be "
            f"redacted, and at most {SECRET_BYTES} bytes"
        )
    return value
