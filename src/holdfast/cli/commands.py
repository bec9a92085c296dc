"""What the operations of the catalogue are called on the command line, and how they look there.

An operation that is not listed has a command all the same: its noun and its verb, with what it must be given as
arguments and everything else as options.
"""

from msgspec import Struct

from holdfast.service.registry import Operation


class Row(Struct, frozen=True, kw_only=True):
    """One command: its words, the fields that are arguments in their order, the one that takes all further words.

    `columns` are what a list shows of each item, `shown` is the field of the answer that is shown by itself. `secret`
    is shown by itself too, as a shell takes it, and it is said that this is the only time. `stdin` is the field that is
    read from the standard input where it is given as `-`, because others can see the words of a command.
    """

    words: str
    arguments: tuple[str, ...] = ()
    rest: str | None = None
    columns: tuple[str, ...] = ()
    shown: str | None = None
    secret: str | None = None
    stdin: str | None = None


NOUNS = {
    "runs": "run",
    "signals": "signal",
    "tasks": "task",
    "activities": "activity",
    "letters": "dead-letter",
    "workflows": "workflow",
    "tokens": "token",
    "tenants": "tenant",
    "system": "system",
}
"""What is said for the nouns of the catalogue; one that is not listed is said as it is."""

HELP = {
    "run": "Start runs, look at them, and tell them what to do.",
    "signal": "Find who waits for signals, and what has become of those that were sent.",
    "activity": "Report outcomes of activities by their completion tokens.",
    "task": "What humans are asked by runs.",
    "dead-letter": "Messages that nobody could handle.",
    "workflow": "What can be started.",
    "queue": "Queues of activities.",
    "system": "The installation: its health, its nodes, and what operators should know.",
    "token": "Who may call the server.",
    "tenant": "Those who share this installation.",
    "audit": "What callers have changed, who they were, and when.",
}

RUN = ("run_id",)
TASK = ("task_id",)
STEP = ("run_id", "step_id")
LETTER = ("letter_id",)
EVENTS = ("run_seq", "persisted_at", "event_type", "step_id", "data")
WAITS = ("run_id", "workflow", "step_id", "name", "since", "until")

ROWS: dict[str, Row] = {
    "runs.start": Row(words="run start", arguments=("workflow",), rest="input"),
    "runs.list": Row(words="run list", columns=("run_id", "workflow", "status", "created_at", "waiting_kind")),
    "runs.get": Row(words="run get", arguments=RUN),
    "runs.snapshot": Row(words="run snapshot", arguments=RUN),
    "runs.events": Row(words="run events", arguments=RUN, columns=EVENTS),
    "runs.query": Row(words="run query", arguments=("run_id", "name"), rest="input", shown="result"),
    "runs.update": Row(words="run update", arguments=("run_id", "name"), rest="input", shown="result"),
    "runs.cancel": Row(words="run cancel", arguments=RUN),
    "runs.pause": Row(words="run pause", arguments=RUN),
    "runs.resume": Row(words="run resume", arguments=RUN),
    "runs.approve": Row(words="run approve", arguments=RUN),
    "runs.terminate": Row(words="run terminate", arguments=RUN),
    "runs.retry": Row(words="run retry", arguments=RUN),
    "runs.retry_step": Row(words="run retry-step", arguments=STEP),
    "runs.skip_step": Row(words="run skip", arguments=STEP, rest="result"),
    "signals.send": Row(words="run signal", arguments=("run_id", "name"), rest="payload"),
    "signals.waits": Row(words="run waits", arguments=RUN, columns=WAITS),
    "signals.send_many": Row(words="signal send-many", rest="signals"),
    "signals.start_with": Row(words="signal start-with", arguments=("workflow", "signal_name"), rest="input"),
    "signals.waiting": Row(words="signal waiting", columns=WAITS),
    "signals.mailbox": Row(
        words="signal mailbox", arguments=RUN, columns=("name", "signal_id", "accepted_at", "payload")
    ),
    "signals.unconsumed": Row(words="signal unconsumed", columns=("run_id", "workflow", "name", "accepted_at")),
    "signals.receipt": Row(words="signal receipt", arguments=("run_id", "name", "signal_id")),
    "tasks.list": Row(
        words="task list", columns=("task_id", "workflow", "name", "status", "assignee", "roles", "due_at")
    ),
    "tasks.get": Row(words="task show", arguments=TASK),
    "tasks.history": Row(words="task history", arguments=TASK, columns=EVENTS),
    "tasks.claim": Row(words="task claim", arguments=TASK),
    "tasks.release": Row(words="task release", arguments=TASK),
    "tasks.assign": Row(words="task assign", arguments=("task_id", "to")),
    "tasks.reassign": Row(words="task reassign", arguments=("task_id", "to")),
    "activities.complete": Row(words="activity complete", arguments=("completion_token",), rest="result"),
    "activities.fail": Row(words="activity fail", arguments=("completion_token",)),
    "tasks.complete": Row(words="task complete", arguments=TASK, rest="answer"),
    "tasks.comment": Row(words="task comment", arguments=("task_id", "text")),
    "letters.list": Row(words="dead-letter list", columns=("letter_id", "run_id", "reason", "died_at", "settled")),
    "letters.get": Row(words="dead-letter show", arguments=LETTER),
    "letters.requeue": Row(words="dead-letter requeue", arguments=LETTER),
    "letters.drop": Row(words="dead-letter drop", arguments=LETTER),
    "workflows.list": Row(words="workflow list", columns=("name", "version", "doc")),
    "workflows.get": Row(words="workflow show", arguments=("name",)),
    "tokens.create": Row(words="token create", arguments=("name",), secret="token"),
    "tokens.list": Row(words="token list", columns=("prefix", "name", "role", "tenant", "expires_at", "is_valid")),
    "tokens.revoke": Row(words="token revoke", arguments=("token_id",)),
    "tokens.revoke_leaked": Row(words="token revoke-leaked", arguments=("token",), stdin="token"),
    "runs.delete": Row(words="run delete", arguments=RUN),
    "tenants.delete": Row(words="tenant delete", arguments=("tenant",)),
    "audit.list": Row(words="audit list", columns=("at", "actor", "by", "operation", "run_id", "subject", "outcome")),
    "system.queues": Row(words="queue list", columns=("name", "jobs")),
    "system.nodes": Row(words="system nodes", columns=("name", "lease_until", "is_here")),
    "system.alerts": Row(words="system alerts", columns=("number", "code", "priority", "run_id", "detail")),
}
"""By the operation's name."""


def row_of(operation: Operation) -> Row:
    """Return the command of an operation."""
    found = ROWS.get(operation.name)
    if found is not None:
        return found
    noun, _, verb = operation.name.partition(".")
    return Row(words=f"{NOUNS.get(noun, noun)} {verb.replace('_', '-')}")
