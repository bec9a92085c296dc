"""Every limit of the system, each with its reason.

A configurable limit is a field of `Limits`, with the default that the contract names. The constants below the class
are part of a format and cannot be configured.
"""

from functools import cache
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from holdfast.errors import InvalidInput


def check_types(options: Struct) -> None:
    """Refuse options with a field of the wrong type, as they would be refused when decoded from the wire."""
    for field, kind in _types(type(options)).items():
        value = getattr(options, field)
        try:
            msgspec.convert(value, kind)
            msgspec.json.encode(value)
        except (msgspec.MsgspecError, TypeError, ValueError):
            said = kind.__name__ if isinstance(kind, type) else kind
            raise InvalidInput(f"{field} is of type {said}, not {value!r}", field=field) from None


@cache
def _types(kind: type[Struct]) -> dict[str, Any]:
    return get_type_hints(kind)


class DeadLetterPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a message that cannot be handled is retried, and what happens when it becomes a dead letter."""

    first_ms: int = 1_000
    """How long it is deferred the first time. The delay doubles each time."""

    most_ms: int = 60_000
    """The longest time that it is deferred."""

    pauses_run: bool = False
    """Whether a run is paused if one of its messages becomes a dead letter, so that it does not continue without it."""

    def __post_init__(self) -> None:
        for field, least in (("first_ms", 1), ("most_ms", self.first_ms)):
            value = getattr(self, field)
            if type(value) is not int or not least <= value < 2**40:
                raise InvalidInput(f"{field} is a whole number from {least}, not {value!r}", field=field)
        if type(self.pauses_run) is not bool:
            raise InvalidInput(f"pauses_run is True or False, not {self.pauses_run!r}", field="pauses_run")


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configurable limits of one installation."""

    signal_payload_bytes: int = 64 * 1024
    """The largest payload of a signal. A signal is a message; pass larger content by reference."""

    value_bytes: int = 2 * 1024 * 1024
    """The largest value in a history, as JSON: an input, a result, an answer, progress. Pass larger content by
    reference, because every node that continues a run reads all values. If you change the limit, runs may diverge if
    their code has reached the old one or would reach the new one."""

    signals_per_run_per_minute: int = 60
    """The largest number of signals to one run in a minute, so that a sender in a loop cannot fill the store."""

    acceptance_retention_ms: int = 7 * 24 * 3_600_000
    """How long a repeated signal id gets the first answer. A week is longer than every client retries."""

    batch_items: int = 10_000
    """The most items in one call of a store verb. One call is one transaction, and others wait for it."""

    page_items: int = 1_000
    """The most rows that one call of a `find_` verb returns; also of `read_events`, unless it requests more."""

    rotation_steps: int = 50
    """The number of steps after which `continue_as_new_if_long` rotates the history: what a restart replays (CAN-1)."""

    rotation_bytes: int = 1024 * 1024
    """The estimated size of the history after which `continue_as_new_if_long` rotates it (CAN-1)."""

    stream_bytes: int = 64 * 1024 * 1024
    """The most bytes of one stream of a run, as JSON. Chunks beyond it are dropped and counted."""

    stream_chunk_bytes: int = 64 * 1024
    """The most bytes of one chunk of a stream, as JSON. A stream has many small chunks."""

    poison_retries: int = 10
    """How often a message that cannot be handled is deferred before it becomes a dead letter: about five minutes in
    all."""

    lost_turns: int = 5
    """How many nodes may be lost during a run's turn before the run is left to an operator: it may be what kills
    them."""

    dead_letters: DeadLetterPolicy = DeadLetterPolicy()
    """How messages that cannot be handled are deferred, and whether they pause their run."""

    def __post_init__(self) -> None:
        if not isinstance(self.dead_letters, DeadLetterPolicy):
            raise InvalidInput(f"dead_letters is a DeadLetterPolicy, not {self.dead_letters!r}", field="dead_letters")
        for field in self.__struct_fields__:
            if field != "dead_letters" and type(getattr(self, field)) is not int:
                raise InvalidInput(f"a limit is a whole number: {field} is {getattr(self, field)!r}", field=field)
            if field != "dead_letters" and getattr(self, field) < 1:
                raise InvalidInput(f"a limit is at least 1: {field} is {getattr(self, field)}", field=field)
        if self.lost_turns <= SUSPECT_LOSSES:
            problem = f"lost_turns is at least {SUSPECT_LOSSES + 1}, not {self.lost_turns}: a run is tried alone before"
            raise InvalidInput(problem, field="lost_turns")


SUSPECT_LOSSES = 2
"""After this many consecutive losses a run is tried alone, and each try is counted before it begins. Stores know it."""

SIGNAL_ID_BYTES = 128
"""The longest signal id, in UTF-8 bytes (SIG-5). It is part of keys in every store."""

NAME_BYTES = 255
"""The longest name of a plan, step, signal, tenant or run. It is part of keys in every store."""

NODE_NAME_BYTES = 200
"""The longest name of a node. A suffix that distinguishes its processes is added to it, within `NAME_BYTES`."""

ACTIVITY_NAME_BYTES = 200
"""The longest name of an activity or a queue. Steps, attempts and messages are named after it, within `NAME_BYTES`."""

IDEMPOTENCY_KEY_BYTES = 256
"""The longest idempotency key of an activity call, in UTF-8 bytes. It is part of keys in every store."""

LOSSES_IN_A_ROW = 3
"""After this many consecutive lost attempts a keyed step waits for an operator: its code seems to kill nodes."""

VERIFY_TIMEOUT_MS = 30_000
"""How long a verifier may take, unless its activity overrides it."""

ATTEMPTS_SHOWN = 20
"""How many attempts of a keyed step are shown to an operator: the last ones."""

ERROR_SHOWN_CHARS = 500
"""How many characters of an attempt's error are shown to an operator."""

CLOSED_EFFECTS = 100
"""For how many closed keyed steps, the last ones, a run knows the result, to detect a different one."""

LIST_S = 10.0
"""How long a store may take for a list or a search. A request that takes longer is refused."""

SEARCH_WORDS = 10
SEARCH_CHARS = 200
"""The most words and the longest text of a search: each word is searched in every row."""

WHERE_CHARS = 2_000
"""The longest text of conditions."""

SEARCH_CONDITIONS = 10
"""The most conditions on attributes in a search."""

COUNTED_ROWS = 10_000
"""The most runs that a count examines, of completed ones and of others; a quarter of that with attributes."""

LEASE_MS = 3_600_000
"""The longest lease of a node. One that ends much further in the future was granted by a clock that was ahead."""

COMMENT_CHARS = 4_000
"""The longest comment on a task. It is part of the run's history; keep longer texts elsewhere."""

ERROR_TEXT_CHARS = 8_000
"""The longest error message or traceback kept in a history. Enough for a stack, too little for a dump."""

ROTATIONS_IN_ONE_BREATH = 100
"""How often a workflow may rotate without anything happening in between. More is an endless loop."""

PUBLISHED_BYTES = 4 * 1024
"""The most bytes that one call of `hf.publish` stores, as JSON."""

STREAMS_PER_WRITER = 100
"""The most streams to which an attempt of an activity, or a workflow between two rotations, may write."""

EVENT_BYTES = 350
"""The approximate size of an event in a store, without its values. Used only to estimate the size of a history."""

ERROR_CAUSES = 10
"""The most causes that are kept of an error. A longer chain is a loop that is not worth reading."""

PROJECTOR_LAG_MS = 5_000
"""A projection that is further behind than this is worth an alert (PRJ-3)."""

DURATION_MS = 1_000 * 366 * 24 * 3_600_000
"""The longest sleep or timeout: a thousand years. An instant much further off fits the integers of no store."""

NESTED_RUNS = 20
"""How deeply runs may start runs. A workflow that starts itself must end somewhere."""

JSON_DEPTH = 100
"""How deeply a value may be nested. Readers recurse, from stacks of any depth, and must never be the first to fail."""

CONTEXT_BYTES = 4 * 1024
"""The largest context of a run, as JSON. It is passed to every activity and every child."""

CONTEXT_KEYS = 32
"""The most keys in the context of a run."""

TAGS = 50
"""The most tags with which a run is started."""

ATTRIBUTES = 50
"""The most search attributes that an app may declare, and the most parts of a run's reference."""

ATTRIBUTE_BYTES = 256
"""The longest text of a search attribute: it is stored in an index."""

ATTRIBUTE_ITEMS = 20
"""The most texts in a search attribute that is a list: each is a row of the index."""

PRIORITY = 100
"""The highest priority of a queued run; its negative is the lowest."""

PRIORITY_AGE_MS = 60_000
"""How much waiting time one step of priority is worth. So the lowest overtakes the highest after some three hours."""

OVERLOAD_RETRY_MS = 1_000
"""When to retry a refused start, if it is not known how long the runs inside will take."""

MAILBOX_SIGNALS = 500
"""How many unread signals are loaded with a run, whatever their names. Beyond, only those its open waits can take."""

RESULT_SCHEMA_BYTES = 16 * 1024
"""The largest JSON Schema of a result that is recorded with an activity that is completed later."""

DEFINITION_BYTES = 1024 * 1024
"""The largest declaration of a workflow, as JSON Schemas."""

SECRETS = 100
"""The most secrets of one activity. They are resolved with one call, before each attempt."""

SECRET_CHARS_LEAST = 4
"""The shortest value of a secret. A shorter one is refused: redacting it would change every other text."""

SECRET_BYTES = 64 * 1024
"""The longest value of a secret. It is searched for in everything that an activity returns or raises."""

SECRETS_S = 30.0
"""How long a provider of secrets may take. Then the attempt fails and is retried like any other."""

PLAN_BYTES = 4 * 1024 * 1024
"""The largest text of a plan: enough for 10,000 steps. Every node that runs the plan keeps it in memory."""

PLAN_STEPS = 10_000
"""The most steps of a plan, and the most items of one `for_each`."""

PLAN_DEPTH = 32
"""How deeply the values in a plan may be nested."""

PLAN_VALUES = 1_000_000
"""The most values in the text of a plan."""

PLAN_PROBLEMS = 100
"""The most problems of a plan that are reported. The first ones are usually fixed first."""

EXPRESSION_CHARS = 2_000
"""The longest expression of a reference."""

EXPRESSION_STEPS = 1_000
"""The most steps that one expression may name."""

EXPRESSION_VISITS = 1_000_000
"""The most values that one expression may visit and build: about a second."""
