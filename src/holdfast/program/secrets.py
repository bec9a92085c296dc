"""Secrets: references that workflows pass on and histories keep, and values that exist only inside an attempt.

A `Secret` is a name. It is stored as `{"$secret": name}` wherever a value can be: in arguments, options, results,
signals, updates, tasks and states. It never holds its value. Only a context variable holds the values that an attempt
of an activity has resolved; outside of an attempt `reveal` raises.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, Protocol

from msgspec import Struct

from holdfast.core.keys import check_name
from holdfast.core.redaction import Redactor
from holdfast.errors import InvalidInput, NotDurable
from holdfast.program.loop import current_loop
from holdfast.program.schema import json_schema


class _InvalidReference(InvalidInput, ValueError):
    """Because it is a `ValueError`, decoding a reference with a wrong name reports it like any other misfit."""


_InvalidReference.code = InvalidInput.code


class Secret(Struct, frozen=True, rename={"name": "$secret"}, forbid_unknown_fields=True):
    """A reference to a secret, such as `Secret("stripe/key")`. Activities that receive it can read its value.

    A name has parts, separated by `/`. No part may be empty, `.` or `..`.
    """

    name: str
    """The name, such as `stripe/key`."""

    def __post_init__(self) -> None:
        problem = check_name("a secret's name", self.name)
        if problem is not None:
            raise _InvalidReference(problem.message, field="$secret")
        if any(part in ("", ".", "..") for part in self.name.split("/")):
            text = f"a secret's name has parts between /, none of them empty, . or .., unlike {self.name!r}"
            raise _InvalidReference(text, field="$secret")

    def __repr__(self) -> str:
        return f"Secret({self.name!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return how models of pydantic read and write a reference."""
        schema = import_module("pydantic_core.core_schema")  # a program with such a model has imported it
        to_plain = schema.plain_serializer_function_ser_schema(lambda secret: {"$secret": secret.name})
        return schema.no_info_plain_validator_function(_validated, serialization=to_plain)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        """Return the JSON Schema of a reference, for models of pydantic."""
        found: dict[str, Any] = json_schema(cls)["$defs"]["Secret"]
        return found

    def reveal(self) -> str:
        """Return the value, inside an activity that has the secret among its arguments or in its option `secrets`.

        The value is redacted from what the activity returns, raises, reports and logs. The activity is responsible for
        everything else.
        """
        if current_loop() is not None:  # includes the loop of queries and handlers
            raise NotDurable(f"the value of {self!r} is not for workflows: reveal it in an activity")
        resolved = _RESOLVED.get()
        if resolved is None:
            raise NotDurable(
                f"the value of {self!r} is only available inside an activity that has it among its arguments, in "
                "parameters annotated with hf.Secret, or in its option secrets; in tests, inside testing.secrets(...)"
            )
        return resolved.value_of(self)


def _validated(value: Any) -> Secret:
    if isinstance(value, Secret):
        return value
    if isinstance(value, dict) and value.keys() == {"$secret"}:
        return Secret(value["$secret"])
    raise ValueError('a reference to a secret is an object such as {"$secret": "stripe/key"}')


class SecretScope(Struct, frozen=True):
    """The tenant and the environment of the run for which secrets are resolved."""

    tenant: str
    """The tenant of the run."""
    environment: str
    """The environment of the run."""


class SecretProvider(Protocol):
    """A source of secret values: a vault, files, environment variables."""

    async def resolve(self, refs: Sequence[str], scope: SecretScope) -> Mapping[str, str]:
        """Return the values of the secrets with these names, for this tenant and environment.

        It is called once for each attempt, before the activity's function. If a name is missing in the result, the
        attempt fails with `SecretNotFound`; the provider may also raise that itself, with `retryable`. Any other
        exception fails the attempt with `SecretsUnavailable`.
        """
        ...


class ResolvedSecrets:
    """The values of one attempt, and how to redact them."""

    __slots__ = ("_is_over", "_values", "redactor")

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._is_over = False
        self.redactor = Redactor(values)

    def value_of(self, secret: Secret) -> str:
        """Return the value of a secret; raise if the attempt is over, or has not resolved it."""
        if self._is_over:
            raise NotDurable(f"the value of {secret!r} is not available any more: the attempt is over")
        if secret.name not in self._values:
            raise NotDurable(
                f"{secret!r} was not resolved: name it in the activity's option secrets, or let it be an argument "
                "whose parameter is annotated with hf.Secret"
            )
        return self._values[secret.name]

    def close(self) -> None:
        """Stop revealing values. The output of a thread or a task that is still running continues to be redacted."""
        self._is_over = True
        self._values.clear()


_RESOLVED: ContextVar[ResolvedSecrets | None] = ContextVar("holdfast_secrets", default=None)


def enter_secrets(resolved: ResolvedSecrets) -> "Token[ResolvedSecrets | None]":
    """Allow everything that the caller calls from now on to reveal these values."""
    return _RESOLVED.set(resolved)


def leave_secrets(token: "Token[ResolvedSecrets | None]") -> None:
    """Revert `enter_secrets`."""
    _RESOLVED.reset(token)


@contextmanager
def revealed(values: Mapping[str, str]) -> Iterator[None]:
    """Give secrets these values inside the context."""
    resolved = ResolvedSecrets(values)
    token = enter_secrets(resolved)
    try:
        yield
    finally:
        leave_secrets(token)
        resolved.close()


@contextmanager
def without_secrets() -> Iterator[None]:
    """Reveal nothing inside the context: for workflow code that may be called from an activity."""
    token = _RESOLVED.set(None)
    try:
        yield
    finally:
        _RESOLVED.reset(token)


def current_redactor() -> Redactor | None:
    """Return the function that redacts the secrets of the current attempt, or None if it has none."""
    resolved = _RESOLVED.get()
    return None if resolved is None else resolved.redactor


def references_in(value: Any) -> Iterator[Secret]:
    """Return the references in decoded arguments, at any depth."""
    if isinstance(value, Secret):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from references_in(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from references_in(inner)
    elif isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield from references_in(getattr(value, name))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from references_in(getattr(value, field.name, None))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from references_in(vars(value))
