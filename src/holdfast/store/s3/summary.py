"""What a process has to know of a run that is not its own: enough to find work, and to count, without its head.

A process that writes a head announces its summary with it, so that others read no head of a run they have nothing to do
with. A summary may be old, as everything that is known of a bucket: a decision counts when the head was replaced.

The summaries of all runs are kept in one object as well, the *index*, for processes that start: each entry holds for
the head with its etag, and for no other.
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
"""The format of the index. One that a process does not know is not used."""


class WorkSummary(Struct, frozen=True, array_like=True, gc=False):
    """An activity of a run: its job, if it is in a queue, and who has acquired it."""

    step_id: str
    queue: str | None
    activity: str | None
    visible_at: Instant | None
    taken_by: str | None

    def is_visible(self, at: Instant) -> bool:
        """Return whether the job may be acquired at this instant."""
        return self.visible_at is not None and self.visible_at <= at


class Summary(Struct, frozen=True, array_like=True, gc=False):
    """A run, as one write of its head left it. Later fields have defaults: older processes do not know them."""

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
    """Whether the run came through an admission queue."""
    messages: int
    signals: int
    open_tasks: int
    letters: int
    open_letters: int
    work: tuple[WorkSummary, ...]
    needs: int = 0
    """The level of the format that a node must understand to go on with the run."""

    @property
    def head(self) -> "Summary":
        """What it has in common with a run's head."""
        return self

    @property
    def age(self) -> tuple[int, int]:
        """Which write it is of: greater for a later one, and for a later run of the same id."""
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
    """Return the summaries that an index holds; none if it cannot be read: then the heads are."""
    try:
        index = msgspec.json.decode(zlib.decompress(data), type=_Index)
    except (zlib.error, msgspec.MsgspecError, UnicodeError):
        return ()
    return index.runs if index.format == FORMAT else ()
