"""Runs as they are when they begin, for whoever need not ask a store."""

from holdfast.core.instants import Instant
from holdfast.store.port import LoadedRun, NewRun, RunHead


def new_head(new: NewRun, owner: str | None, now: Instant) -> RunHead:
    """Return a run as it is when it is created, before anything makes it ready."""
    return RunHead(
        run_id=new.run_id,
        tenant=new.tenant,
        project=new.project,
        environment=new.environment,
        plan_id=new.plan_id,
        plan_version=new.plan_version,
        run_request_id=new.run_request_id,
        parent_run_id=new.parent_run_id,
        reference_key=new.reference_key,
        tags=new.tags,
        status=new.snapshot.status,
        version=len(new.events),
        snapshot=new.snapshot,
        created_at=now,
        updated_at=now,
        finished_at=None,
        inbox_seq=0,
        ready_at=None,
        lease_owner=owner,
        lease_epoch=1 if owner else 0,
    )


def created_run(new: NewRun, owner: str, now: Instant) -> LoadedRun:
    """Return a run as it is right after it was created for `owner`, without asking the store."""
    return LoadedRun(head=new_head(new, owner, now), messages=new.messages)
