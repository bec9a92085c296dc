"""Downloads of artifacts: bytes that the activities of a run have stored."""

from collections.abc import AsyncIterator
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.core.events import ArtifactRef
from holdfast.engine.history import head_of
from holdfast.errors import ArtifactMissing, NotFound, PayloadUnreadable, RateLimited
from holdfast.service.context import RequestContext
from holdfast.service.registry import Request, RunId, operation
from holdfast.store.artifacts import KIND

MEDIA_TYPE = "application/octet-stream"

Kind = Annotated[str, Meta(pattern=f"^{KIND.pattern}$", description="The kind of the artifact.")]
ArtifactId = Annotated[str, Meta(pattern=f"^{KIND.pattern}$", description="The last part of the artifact's uri.")]


class DownloadArtifact(Request, frozen=True, kw_only=True):
    """Which artifact of which run to download."""

    run_id: RunId
    kind: Kind
    artifact_id: ArtifactId


class Download(Struct, frozen=True):
    """An artifact, and its bytes as they are read."""

    artifact: ArtifactRef
    chunks: AsyncIterator[bytes]

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield what to send, until the end."""
        return self.chunks


@operation(
    "artifacts.download",
    "GET /v1/runs/{run_id}/artifacts/{kind}/{artifact_id}",
    scope="runs:read",
    errors=(NotFound, ArtifactMissing, PayloadUnreadable, RateLimited),
    media=MEDIA_TYPE,
)
async def download(context: RequestContext, request: DownloadArtifact) -> bytes:
    """Download an artifact that a step of the run has stored. The snapshot of the run lists them.

    Its bytes are checked: if they are not what was stored, the response is not completed.
    """
    await head_of(context.store, request.run_id)
    projection = await context.service.projections.of(context.store, request.run_id)
    for artifact in projection.snapshot.artifacts:
        if artifact.uri.endswith(f"/{request.kind}/{request.artifact_id}"):
            return Download(artifact, context.runtime.open_artifact(artifact))  # type: ignore[return-value]
    raise NotFound(f"run {request.run_id} has no such artifact", run_id=request.run_id)
