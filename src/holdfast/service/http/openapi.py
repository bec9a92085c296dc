"""The operations as OpenAPI 3.1: the request of each, its response, and every error that it may return."""

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from holdfast.errors import (
    HoldfastError,
    MalformedRequest,
    NotAcceptable,
    PayloadTooLarge,
    SlowRequest,
    UnsupportedMediaType,
)
from holdfast.service.http.problems import Problem, status_of, title_of
from holdfast.service.operations.artifacts import MEDIA_TYPE as OCTETS
from holdfast.service.registry import Operation

Json = dict[str, Any]

REF = "#/components/schemas/{name}"
EVENTS = "text/event-stream"


def describe(operations: Mapping[str, Operation], title: str = "Holdfast") -> Json:
    """Return the description."""
    kinds = [kind for operation in operations.values() for kind in (operation.request_type, operation.response_type)]
    refs, components = msgspec.json.schema_components([*kinds, Problem], ref_template=REF)
    paths: Json = {}
    for operation, answer in zip(operations.values(), refs[1::2], strict=True):
        asked = components[operation.request_type.__name__]
        paths.setdefault(operation.path, {})[operation.verb.lower()] = _operation(operation, asked, answer)
    asks = {operation.request_type.__name__ for operation in operations.values()}
    components[Problem.__name__]["properties"]["code"]["description"] = _codes()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": version("holdfast"),
            "description": "Durable workflows: runs, signals, tasks and what operators do. "
            "The same operations are methods of JSON-RPC 2.0 at POST /rpc, by their operationId.",
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": resource} for resource in dict.fromkeys(operation.resource for operation in operations.values())
        ],
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in components.items() if _is_used(name, asks, paths)},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _is_used(name: str, asks: set[str], paths: Json) -> bool:
    """Return whether a schema is referenced. Requests are not: they are split into parameters and a body."""
    return name not in asks or msgspec.json.encode(REF.format(name=name)) in msgspec.json.encode(paths)


def _operation(operation: Operation, asked: Json, answer: Json) -> Json:
    example = EXAMPLES.get(operation.name, {})
    described: Json = {
        "operationId": operation.name,
        "tags": [operation.resource],
        "summary": operation.summary,
        "description": operation.doc,
        "responses": _responses(operation, answer),
    }
    if operation.scope is not None:
        described["x-scope"] = operation.scope
        described["security"] = [{"token": [operation.scope]}]
    in_body = {} if not operation.has_body else _without(asked, operation.path_fields)
    parameters = _parameters(operation, asked, example)
    if parameters:
        described["parameters"] = parameters
    if operation.has_body:
        given = {field: value for field, value in example.items() if field not in operation.path_fields}
        described["requestBody"] = {
            "required": bool(in_body.get("required")),
            "content": {"application/json": {"schema": in_body, "example": given}},
        }
    return described


def _without(asked: Json, fields: Iterable[str]) -> Json:
    """Return the schema of an object without some of its fields."""
    left = {name: schema for name, schema in asked["properties"].items() if name not in fields}
    required = [name for name in asked.get("required", ()) if name in left]
    kept = {key: value for key, value in asked.items() if key not in ("properties", "required")}
    return {**kept, "properties": left, **({"required": required} if required else {})}


def _parameters(operation: Operation, asked: Json, example: Json) -> list[Json]:
    parameters: list[Json] = []
    for name, schema in asked.get("properties", {}).items():
        place = "path" if name in operation.path_fields else "query"
        if place == "query" and operation.has_body:
            continue
        parameter = {"name": name, "in": place, "required": place == "path", "schema": _of_text(schema)}
        if "description" in schema:
            parameter["description"] = schema["description"]
        if name in example:
            parameter["example"] = example[name]
        parameters.append(parameter)
    return parameters


def _of_text(schema: Json) -> Json:
    """Return the schema of a parameter. Instead of null, a parameter is omitted."""
    choices = [choice for choice in schema.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) != 1:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    return {**rest, **choices[0]}


def _responses(operation: Operation, answer: Json) -> Json:
    schema = _piece(answer) if operation.media == EVENTS else answer
    if operation.media == OCTETS:
        schema = {"type": "string", "format": "binary"}
    answers: Json = {str(operation.status): _response(operation.summary, operation.media, schema)}
    by_status: dict[int, list[type[HoldfastError]]] = {}
    for error in _expanded((*operation.all_errors, *_of_rest(operation))):
        by_status.setdefault(status_of(error), []).append(error)
    problem = {"$ref": REF.format(name=Problem.__name__)}
    for status, errors in sorted(by_status.items()):
        codes = ", ".join(sorted(error.code for error in errors))
        answers[str(status)] = _response(codes, "application/problem+json", problem)
    for response in answers.values():
        response["headers"] = {"X-Correlation-ID": {"schema": {"type": "string"}}}
    for busy in {"429", "503"} & answers.keys():
        answers[busy]["headers"]["Retry-After"] = {"schema": {"type": "integer"}}
    return answers


def _piece(data: Json) -> Json:
    """Return the schema of one item of an event stream, with its data as JSON text. Items with an event name differ."""
    of_event = {
        "type": "object",
        "title": "OfEvent",
        "description": "What a piece with an `event` says, such as `end`.",
    }
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": [data, of_event]}}
    fields = {"id": {"type": "string"}, "event": {"type": "string"}, "data": text}
    return {"type": "object", "properties": fields, "required": ["data"]}


def _response(description: str, kind: str, schema: Json) -> Json:
    return {"description": description, "content": {kind: {"schema": schema}}}


def _codes() -> str:
    """Return the meaning of each code, as text."""
    return "\n".join(f"- `{error.code}`: {title_of(error)}." for error in _expanded([HoldfastError]))


def _of_rest(operation: Operation) -> list[type[HoldfastError]]:
    """Return the errors with which REST itself may refuse a request before it reaches the operation."""
    of_body: list[type[HoldfastError]] = [PayloadTooLarge, SlowRequest, UnsupportedMediaType]
    return [MalformedRequest, NotAcceptable, *(of_body if operation.has_body else [])]


def _expanded(errors: Iterable[type[HoldfastError]]) -> list[type[HoldfastError]]:
    """Return errors with all their subclasses, each once."""
    found: dict[type[HoldfastError], None] = {}
    for error in errors:
        found[error] = None
        found |= dict.fromkeys(_expanded(error.__subclasses__()))
    return [error for error in found if not error.__name__.startswith("_")]


# --- one example of a request for each operation: for the description, the reference, and the tests

RUN = "018f7f5e-0000-7000-8000-000000000001"
TASK = f"{RUN}/approve"
TOKEN = "4f0c2a9e51b7d836"
LEAKED = f"holdfast_{TOKEN}_{'0123456789abcdef' * 4}f603f976"
COMPLETION_TOKEN = "WyJydW4tMSIsInNpZ24iLDEsMV0.vW8lH3uYfGmJbqKkqQ3Jz5u0yCk0yY1x"
LETTER = "7d9f2c54-0000-8000-9000-000000000001"

_OF_RUN: dict[str, Any] = {"run_id": RUN}
_OF_TASK: dict[str, Any] = {"task_id": TASK, "actor": "ann", "actor_roles": ["clerk"], "operation_id": "click-7"}
_COMMAND: dict[str, Any] = {**_OF_RUN, "reason": "the customer called", "actor": "ann", "signal_id": "click-3"}
_START: dict[str, Any] = {
    "workflow": "order",
    "input": {"order_id": "o-1", "cents": 4200},
    "request_id": "req-77",
    "reference_key": "o-1",
    "tags": ["web"],
}
_SIGNAL: dict[str, Any] = {**_OF_RUN, "name": "approval", "payload": {"approved": True}, "signal_id": "click-1"}

_PLAN = "plan: etl\nversion: '1'\nsteps:\n  - {id: rest, sleep: 1}\n"

EXAMPLES: dict[str, dict[str, Any]] = {
    "plans.schema": {},
    "plans.validate": {"document": _PLAN},
    "plans.register": {"document": _PLAN},
    "plans.list": {"plan_id": "etl", "limit": 100},
    "plans.get": {"plan_id": "etl", "plan_version": "1"},
    "plans.start": {"plan_id": "etl", "inputs": {"day": "2026-01-28"}, "request_id": "night-28"},
    "plans.diff": {"plan_id": "etl", "from_version": "1", "to_version": "2"},
    "plans.graph": {"plan_id": "etl", "plan_version": "2", "from_version": "1"},
    "runs.start": _START,
    "streams.list": _OF_RUN,
    "streams.read": {**_OF_RUN, "name": "tokens", "after": 100, "limit": 500},
    "runs.get": _OF_RUN,
    "runs.count": {"workflow": "order", "where": "cents>1000 region=eu"},
    "runs.list": {"workflow": "order", "status": "PAUSED", "created_from": "2026-01-28T12:00:00Z", "order": "newest"},
    "runs.events": {**_OF_RUN, "after": 12, "limit": 100},
    "runs.snapshot": _OF_RUN,
    "runs.graph": {**_OF_RUN, "expand": ["load"]},
    "runs.result": {**_OF_RUN, "wait_s": 5.0},
    "runs.handlers": {"run_id": "order-7"},
    "runs.query": {**_OF_RUN, "name": "progress", "input": {}},
    "runs.update": {**_OF_RUN, "name": "change_address", "input": {"city": "Ulm"}, "update_id": "form-5"},
    "runs.cancel": _COMMAND,
    "runs.pause": _COMMAND,
    "runs.resume": {**_COMMAND, "wait": True},
    "runs.approve": {**_COMMAND, "step_id": "load"},
    "runs.terminate": _COMMAND,
    "runs.retry_step": {**_COMMAND, "step_id": "charge"},
    "runs.skip_step": {**_COMMAND, "step_id": "charge", "result": "paid in cash"},
    "runs.retry": _COMMAND,
    "runs.fork": {**_OF_RUN, "at": 12, "reason": "the shop is mended", "request_id": "fork-7"},
    "runs.command_many": {"command": "retry_step", "workflow": "order", "request_id": "mended-28", "reason": "mended"},
    "runs.fork_many": {"workflow": "order", "where": "region=eu", "request_id": "mend-28", "reason": "mended"},
    "runs.diff": {**_OF_RUN, "other_run_id": f"{RUN}/fork-0123456789ab"},
    "signals.send": _SIGNAL,
    "signals.send_many": {"signals": [_SIGNAL]},
    "signals.start_with": {**_START, "signal_name": "approval", "signal_payload": {"approved": True}},
    "signals.receipt": {**_OF_RUN, "name": "approval", "signal_id": "click-1"},
    "signals.waiting": {"name": "approval", "limit": 50},
    "signals.waits": _OF_RUN,
    "signals.mailbox": _OF_RUN,
    "signals.unconsumed": {"name": "approval", "limit": 50},
    "activities.complete": {"completion_token": COMPLETION_TOKEN, "result": "signed"},
    "activities.fail": {"completion_token": COMPLETION_TOKEN, "message": "not acceptable"},
    "activities.heartbeat": {"completion_token": COMPLETION_TOKEN},
    "tasks.list": {"status": "OPEN", "role": "clerk", "limit": 50},
    "tasks.get": {"task_id": TASK},
    "tasks.history": {"task_id": TASK},
    "tasks.assign": {**_OF_TASK, "to": "bob"},
    "tasks.claim": _OF_TASK,
    "tasks.release": _OF_TASK,
    "tasks.reassign": {**_OF_TASK, "to": "cleo", "roles": ["clerk"]},
    "tasks.complete": {**_OF_TASK, "answer": {"approved": True}},
    "tasks.comment": {**_OF_TASK, "text": "I have asked the customer."},
    "letters.list": {"reason": "retries exhausted"},
    "letters.get": {"letter_id": LETTER},
    "letters.requeue": {"letter_id": LETTER, "actor": "ann"},
    "letters.drop": {"letter_id": LETTER, "actor": "ann"},
    "sinks.list": {},
    "sinks.put": {"name": "billing", "address": "https://billing.example.com/events", "secret": "billing/hook"},
    "sinks.pause": {"sink": "billing"},
    "sinks.resume": {"sink": "billing"},
    "sinks.remove": {"sink": "billing"},
    "bus.replay": {"sink": "billing", "since": "2026-01-28T12:00:00Z"},
    "bus.letters": {"sink": "billing"},
    "bus.requeue": {"letter_id": LETTER},
    "bus.drop": {"letter_id": LETTER},
    "workflows.list": {},
    "workflows.get": {"name": "order", "version": "1"},
    "tokens.create": {"name": "ann", "role": "operator", "roles": ["clerk"], "expires_in_s": 7_776_000},
    "tokens.list": {"limit": 50},
    "tokens.revoke_leaked": {"token": LEAKED, "descendants": True},
    "runs.delete": {**_OF_RUN, "dry_run": True},
    "tenants.delete": {"tenant": "acme", "yes": True, "dry_run": True},
    "audit.list": {"operation": "runs.cancel", "order": "newest", "limit": 50},
    "retention.show": {},
    "retention.preview": {},
    "retention.run": {},
    "archive.list": {"workflow": "order", "limit": 50},
    "archive.get": _OF_RUN,
    "archive.events": {**_OF_RUN, "after": 0, "limit": 100},
    "tokens.revoke": {"token_id": TOKEN},
    "schedules.create": {
        "schedule_id": "nightly",
        "workflow": "order",
        "input": {"order_id": "o-1"},
        "cron": "0 9 * * MON-FRI",
        "tz": "Europe/Sofia",
    },
    "schedules.list": {"workflow": "order", "limit": 50},
    "schedules.get": {"schedule_id": "nightly"},
    "schedules.update": {"schedule_id": "nightly", "every_s": 3_600, "input": {"order_id": "o-1"}},
    "schedules.pause": {"schedule_id": "nightly", "note": "the bank is down"},
    "schedules.resume": {"schedule_id": "nightly"},
    "schedules.trigger": {"schedule_id": "nightly", "request_id": "click-1"},
    "schedules.backfill": {"schedule_id": "nightly", "since": "2026-01-01T00:00:00Z", "until": "2026-01-08T00:00:00Z"},
    "schedules.delete": {"schedule_id": "nightly"},
    "system.health": {},
    "system.stats": {},
    "system.doctor": {},
    "system.queues": {},
    "system.nodes": {},
    "system.locks": {},
    "system.samples": {"since": "2026-01-08T12:00:00Z"},
    "system.takeovers": {},
    "system.alerts": {"after": 0},
}
"""By the operation's name."""
