"""The store in a bucket: S3-compatible object storage, and nothing else."""

from holdfast.store.s3.store import S3Store

__all__ = ["S3Store"]
