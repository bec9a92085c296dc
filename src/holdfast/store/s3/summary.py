"""What a process needs to know about a run that it does not own: enough to find work and to count, without its head.

A process that writes a head announces its summary along with it, so that others need not read the heads of runs that do
not concern them. A summary may be outdated, like everything known about a bucket: a decision takes effect when the head
is replaced.

The summaries of all runs are also kept in one object, the *index*, for starting processes: each entry is valid only for
the head with its etag.
"""

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from holdfast.core.instants import Instant
from holdfast.core.state import APPROVED, PENDING, TERMINAL, RunStatus

if TYPE_CHECKING:
    from holdfast.store.s3.head import StoredRun

FORMAT = 1
"""The format of the index. A process ignores an index with a format that it does not know."""


class WorkSummary(Struct, frozen=True, array_like=True, gc=False):
    """An activity of a run: its job, if it is in a queue, and the node that has acquired it."""

    step_id: str
    queue: str | None
    activity: str | None
    visible_at: Instant | None
    taken_by: str | None

    def is_visible(self, at: Instant) -> bool:
        """Return whether the job may be acquired at this instant."""
        return self.visible_at is not None and self.visible_at <= at


class Summary(Struct, frozen=True, array_like=True, gc=False):
    """A run as one write of its head left it. Later fields have defaults, because older processes do not write them."""

    run_id: str
    etag: str
    order: int
    writes: int
    plan_id: str
    plan_version: str
    status: RunStatus
    ready_at: Instant | None
    lease_owner: str | None
    sending_since: Instant | None
    """Since when the run has something to send to other runs."""
    is_queued: bool
    has_place: bool
    """Whether the run has an admission request."""
    messages: int
    signals: int
    open_tasks: int
    letters: int
    open_letters: int
    work: tuple[WorkSummary, ...]
    needs: int = 0
    """The format level that a node must support to continue the run."""

    @property
    def head(self) -> "Summary":
        """The facts that it shares with a run's head."""
        return self

    @property
    def age(self) -> tuple[int, int]:
        """The write it belongs to: greater for a later write, and for a later run with the same id."""
        return self.order, self.writes

    @property
    def is_active(self) -> bool:
        """Whether the run is ready or will be, or has an owner, jobs, or something to send."""
        is_due = self.ready_at is not None or self.lease_owner is not None
        return is_due or bool(self.work) or self.sending_since is not None

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished."""
        return self.status in TERMINAL

    @property
    def has_begun(self) -> bool:
        """Whether the run has started, or has finished without a start."""
        return self.status not in (PENDING, APPROVED)


def summary_of(run: "StoredRun", etag: str) -> Summary:
    """Return the summary of a run whose head has this etag."""
    head = run.head
    return Summary(
        run_id=head.run_id,
        etag=etag,
        order=run.order,
        writes=run.writes,
        plan_id=head.plan_id,
        plan_version=head.plan_version,
        status=head.status,
        ready_at=head.ready_at,
        lease_owner=head.lease_owner,
        sending_since=min((entry.at for entry in run.outgoing), default=None),
        is_queued=head.queued_at is not None,
        has_place=run.admission is not None,
        messages=len(run.messages),
        signals=sum(signal.consumed_seq is None for signal in run.signals),
        open_tasks=sum(task.status == "OPEN" for task in run.tasks.values()),
        letters=len(run.letters),
        open_letters=sum(letter.settled is None for letter in run.letters.values()),
        work=tuple(
            WorkSummary(
                step_id,
                None if work.job is None else work.job.queue,
                None if work.job is None else work.job.activity,
                work.visible_at,
                work.taken_by,
            )
            for step_id, work in run.work.items()
        ),
        needs=head.needs,
    )


class _Index(Struct, frozen=True):
    format: int
    runs: tuple[Summary, ...]


def encode_index(summaries: Iterable[Summary]) -> bytes:
    """Return the object that holds the summaries of all runs."""
    return zlib.compress(msgspec.json.encode(_Index(FORMAT, tuple(summaries))), 1)


def decode_index(data: bytes) -> tuple[Summary, ...]:
    """Return the summaries in an index; none if it cannot be read: then the heads are read."""
    try:
        index = msgspec.json.decode(zlib.decompress(data), type=_Index)
    except (zlib.error, msgspec.MsgspecError, UnicodeError):
        return ()
    return index.runs if index.format == FORMAT else ()
