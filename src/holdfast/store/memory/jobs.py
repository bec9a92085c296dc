"""What the reference model stores of a step's activity: its job in a queue, and the details of its progress."""

from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from holdfast.core.events import NULL
from holdfast.core.instants import Instant
from holdfast.core.messages import Message
from holdfast.store import decisions, port


class Work(Struct, frozen=True, kw_only=True):
    """One step's activity. Without a job the run's owner executes it, and there are only details.

    The job's `engine_attempt_id` is that of its next acquisition.
    """

    job: port.Job | None = None
    visible_at: Instant | None = 0
    """When it may be acquired; None: no longer, because its outcome waits for the run."""
    taken_by: str | None = None
    details: Raw | None = None

    def is_taken_by(self, node: str, engine_attempt_id: int) -> bool:
        """Return whether this node acquired it last, as this attempt."""
        return self.job is not None and (self.taken_by, self.job.engine_attempt_id) == (node, engine_attempt_id + 1)

    def kept_until(self, visible_at: Instant, details: Raw | UnsetType) -> "Work":
        """Return the activity after a heartbeat."""
        return replace(self, visible_at=visible_at, details=self.details if details is UNSET else details)

    def is_visible(self, at: Instant) -> bool:
        """Return whether the job may be acquired at this instant."""
        return self.visible_at is not None and self.visible_at <= at

    def is_of_another_run(self, message: Message) -> bool:
        """Return whether an outcome is of a deleted run that had the same id."""
        return self.job is not None and decisions.is_of_another_run(message, self.job.scheduled_at)

    def ended(self, message: Message) -> "Work | None":
        """Return the activity after delivery of an attempt's outcome; None if a later attempt decides."""
        if self.job is None or message.attempt is None or self.job.engine_attempt_id <= message.attempt:
            return self
        if self.job.engine_attempt_id > message.attempt + 1:
            return None if message.is_latest_only else self
        was_acquired = self.taken_by is not None or 0 < self.job.queued_attempt_id <= message.attempt
        return replace(self, visible_at=None, taken_by=None) if was_acquired else self

    def returned(self, engine_attempt_id: int, visible_at: Instant) -> "Work":
        """Return the activity after its job was returned to the queue."""
        assert self.job is not None
        job = replace(self.job, engine_attempt_id=engine_attempt_id)
        return replace(self, job=job, visible_at=visible_at, taken_by=None)


def put(job: port.Job, there: Work | None, now: Instant) -> Work:
    """Return a queued job, with the details of the one that it replaces."""
    details = there.details if there is not None else None
    if details is None and job.details != NULL:
        details = job.details
    return Work(job=replace(job, details=NULL), visible_at=now if job.due_at is None else job.due_at, details=details)


def acquire(work: Work, job: port.Job, node: str, visible_at: Instant) -> tuple[Work, port.Job]:
    """Return the activity after a node has acquired its job, and what the node gets."""
    given = replace(job, details=NULL if work.details is None else work.details)
    kept = replace(job, engine_attempt_id=job.engine_attempt_id + 1)
    return replace(work, job=kept, visible_at=visible_at, taken_by=node), given
