"""What is asked, from what came over a wire. The words of a refusal are made from the types, not from the values."""

from typing import Annotated, Any, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec

from holdfast.core.codec import explain_unfit
from holdfast.errors import InvalidInput, MalformedRequest
from holdfast.service.registry import Operation

FIELD_CHARS = 100
_NUMBERS = (int, float, bool)
_object = msgspec.json.Decoder(dict[str, Any])


class RequestBinder:
    """Reads what one operation is asked."""

    def __init__(self, operation: Operation) -> None:
        self._kind = operation.request_type
        self._decoder = msgspec.json.Decoder(operation.request_type)
        hints = get_type_hints(operation.request_type, include_extras=True)
        self._many = {field for field, hint in hints.items() if get_origin(_bare(hint)) in (tuple, list)}
        self._numbers = {field: kind for field, hint in hints.items() if (kind := _number(hint)) is not None}

    def from_json(self, text: bytes | msgspec.Raw) -> Any:
        """Read all fields from a JSON object."""
        try:
            return self._decoder.decode(text or b"{}")
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
            raise refusal(problem) from problem

    def from_body(self, values: dict[str, str], body: bytes) -> Any:
        """Read the fields that the path names from there, and the others from the body."""
        if not values:
            return self.from_json(body)
        try:
            fields = _object.decode(body or b"{}")
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
            raise refusal(problem) from problem
        for field in values:
            if field in fields:
                raise InvalidInput(f"{field}: the path says it already", field=field)
        return self._convert({**fields, **values})

    def from_query(self, values: dict[str, str], query: bytes) -> Any:
        """Read the fields that the path names from there, and the others from the query string."""
        fields: dict[str, Any] = dict(values)
        for field, text in _parameters(query):
            if field in self._many:
                fields.setdefault(field, []).append(text)
                continue
            if field in fields:
                raise InvalidInput(f"{field[:FIELD_CHARS]}: this is said more than once", field=field[:FIELD_CHARS])
            fields[field] = self._number(field, text)
        return self._convert(fields)

    def _number(self, field: str, text: str) -> Any:
        kind = self._numbers.get(field)
        if kind is None:
            return text
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError:
            return text  # which is no number, as the check of all fields will say

    def _convert(self, fields: dict[str, Any]) -> Any:
        try:
            return msgspec.convert(fields, self._kind)
        except (msgspec.MsgspecError, RecursionError) as problem:
            raise refusal(problem) from problem


def refusal(problem: Exception) -> InvalidInput | MalformedRequest:
    """Return how a caller is told that what they asked cannot be read."""
    if not isinstance(problem, msgspec.ValidationError):
        return MalformedRequest("this is no JSON, or it is cut short")
    where, reason = explain_unfit(problem)
    if not where and str(problem).startswith("Object contains unknown field"):
        reason = str(problem)[:FIELD_CHARS]  # the name of a field, which is no payload
    field = where.removeprefix(".")
    return InvalidInput(f"{field}: {reason}" if field else reason, **({"field": field} if field else {}))


def _parameters(query: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100)
    except ValueError as problem:
        raise MalformedRequest("the query string cannot be read") from problem


def _number(hint: Any) -> type | None:
    """Return which kind of number a field takes, or None: what is text, or a name, is left as it is."""
    kinds = [_bare(part) for part in (get_args(_bare(hint)) or (hint,))]
    return next((kind for kind in kinds if kind in _NUMBERS), None)


def _bare(hint: Any) -> Any:
    return _bare(get_args(hint)[0]) if get_origin(hint) is Annotated else hint
