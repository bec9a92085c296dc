"""The time of an object store, derived from the times that it assigns to written objects.

A server only reports when an object was written, in whole seconds. A small object is written and read back: at some
moment between request and answer, the server's clock was within the reported second. (If another process has written
the object again meanwhile, it was at that moment.) Each such probe gives a lower bound for how far the server's clock
is ahead of this process's counter of elapsed time. The greatest bound of the last probes is used, so the result is
never ahead of the server, and lags less the more probes there were. The machine's wall clock is never read.
"""

from collections import deque
from collections.abc import Callable

from holdfast.clock import elapsed_us
from holdfast.core.instants import Instant
from holdfast.errors import StoreCorrupt
from holdfast.store.s3.bucket import Bucket

TIME = "time"
"""The object that is written and read."""

SECOND = 1_000_000
PROBE_EVERY = 30 * SECOND
PROBES_KEPT = 10


class ServerTime:
    """The time of a bucket's server. It never goes back."""

    def __init__(self, bucket: Bucket, elapsed: Callable[[], int] = elapsed_us) -> None:
        self._bucket = bucket
        self._elapsed = elapsed
        self._ahead: deque[tuple[int, int]] = deque(maxlen=PROBES_KEPT)
        self._probed_at: int | None = None
        self._latest = 0

    async def now(self) -> Instant:
        """Return the server's time."""
        if self._probed_at is None or self._elapsed() - self._probed_at >= PROBE_EVERY:
            await self._probe()
        ahead = max(least for least, _ in self._ahead)
        self._latest = max(self._latest, self._elapsed() + ahead)
        return self._latest

    async def _probe(self) -> None:
        sent_at = self._elapsed()
        self._probed_at = sent_at
        await self._bucket.put(TIME, b"")
        found = await self._bucket.get(TIME)
        answered_at = self._elapsed()
        if found is None:
            raise StoreCorrupt(f"the object {TIME} is gone as soon as it is written", key=TIME)
        least, most = found.modified_at - answered_at, found.modified_at + SECOND - sent_at
        if self._ahead and max(each for each, _ in self._ahead) > most:
            self._ahead.clear()  # the server's clock was set back
        self._ahead.append((least, most))
