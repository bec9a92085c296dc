"""What the operations may be asked, one example each: for the description, the reference, and the tests."""

from typing import Any

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

EXAMPLES: dict[str, dict[str, Any]] = {
    "runs.start": _START,
    "runs.get": _OF_RUN,
    "runs.list": {"workflow": "order", "status": "PAUSED", "created_from": "2026-01-28T12:00:00Z", "order": "newest"},
    "runs.events": {**_OF_RUN, "after": 12, "limit": 100},
    "runs.snapshot": _OF_RUN,
    "runs.result": {**_OF_RUN, "wait_s": 20.0},
    "runs.query": {**_OF_RUN, "name": "progress", "input": {}},
    "runs.update": {**_OF_RUN, "name": "change_address", "input": {"city": "Ulm"}, "update_id": "form-5"},
    "runs.cancel": _COMMAND,
    "runs.pause": _COMMAND,
    "runs.resume": {**_COMMAND, "wait": True},
    "runs.approve": _COMMAND,
    "runs.terminate": _COMMAND,
    "runs.retry_step": {**_COMMAND, "step_id": "charge"},
    "runs.skip_step": {**_COMMAND, "step_id": "charge", "result": "paid in cash"},
    "runs.retry": _COMMAND,
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
    "workflows.list": {},
    "workflows.get": {"name": "order", "version": "1"},
    "tokens.create": {"name": "ann", "role": "operator", "roles": ["clerk"], "expires_in_s": 7_776_000},
    "tokens.list": {"limit": 50},
    "tokens.revoke_leaked": {"token": LEAKED, "descendants": True},
    "runs.delete": {**_OF_RUN, "dry_run": True},
    "tenants.delete": {"tenant": "acme", "yes": True, "dry_run": True},
    "audit.list": {"operation": "runs.cancel", "order": "newest", "limit": 50},
    "tokens.revoke": {"token_id": TOKEN},
    "system.health": {},
    "system.stats": {},
    "system.queues": {},
    "system.nodes": {},
    "system.alerts": {"after": 0},
}
"""By the operation's name."""
