"""Damage to a store in a bucket, done behind its back."""

from __future__ import annotations

from holdfast.store.s3 import S3Store
from holdfast.store.s3.head import StoredRun


async def lose_record(store: S3Store, run_id: str, name: str, signal_id: str) -> None:
    """Delete the acceptance record of a signal, and leave its payload."""

    def decide(run: StoredRun) -> None:
        run.acceptances.pop((name, signal_id), None)

    await store._heads.change(run_id, decide)
    await store._heads.announce()
