"""Keeps a node's lease: what it holds stays its own for as long as it says in time that it is there."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from holdfast.errors import StoreError

logger = logging.getLogger("holdfast.node")


async def keep_lease(
    renew: Callable[[], Awaitable[None]], node: str, lease_ms: int, has_failed: Callable[[], bool]
) -> None:
    """Renew the lease of a node three times in its length, until the node has failed.

    Raise `NodeSuperseded` if another process has taken over the name of the node.
    """
    loop, third_s = asyncio.get_running_loop(), lease_ms / 3_000
    while True:
        due = loop.time() + third_s
        await asyncio.sleep(third_s)
        if has_failed():
            return  # the lease runs out, and others go on with what is held here
        late_s = loop.time() - due
        if late_s > third_s:
            text = "node %s was blocked for %.1f s, and may have lost its runs: something on its loop does not await"
            logger.warning(text, node, late_s)
        try:
            await renew()
        except StoreError:
            logger.warning("node %s could not renew its lease", node, exc_info=True)
