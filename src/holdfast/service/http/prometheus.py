"""`/metrics`: what a process does and what its store holds, in the text format of Prometheus.

Counters are this process's own and are counted anyway; gauges are of the whole store, and are looked up when somebody
asks, at most once in a few seconds.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from starlette.types import Receive, Scope, Send

from holdfast.engine.observe.metrics import Histogram, observer_of
from holdfast.service.context import RequestContext, Service
from holdfast.service.http.exchange import Exchange
from holdfast.store.port import Stats

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
SCOPE = "system:read"
KEEP_S = 2.0
"""How long what the store holds is not counted again."""

Labels = Mapping[str, str]
Samples = Iterable[tuple[Labels, float]]


class Metrics:
    """An ASGI application that answers with all metrics."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stats: tuple[float, Stats] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(self._service, scope, receive, send)
        exchange.operation = "metrics"
        context = self._service.context(await exchange.principal(), exchange.correlation_id)
        with context.logging_refusals("metrics"):
            context.principal.require(SCOPE)
        await exchange.send(200, await self.text(context), CONTENT_TYPE)

    async def text(self, context: RequestContext) -> bytes:
        """Return all metrics as text."""
        store = context.runtime.store
        now = asyncio.get_running_loop().time()
        if self._stats is None or now - self._stats[0] > KEEP_S:
            self._stats = now, await store.stats()
        lines = [*self._of_store(self._stats[1], await store.now()), *self._of_process(context)]
        return ("\n".join(lines) + "\n").encode()

    def _of_store(self, stats: Stats, now: int) -> Iterator[str]:
        lag_s = 0.0 if stats.oldest_ready_at is None else max(0, now - stats.oldest_ready_at) / 1e6
        yield from _gauge("runs", "Runs in the store.", _by("status", stats.runs))
        yield from _gauge("runs_ready", "Runs whose turn is due.", _one(stats.ready))
        yield from _gauge("runs_leased", "Runs that belong to a node.", _one(stats.leased))
        yield from _gauge("runs_queued", "Runs that wait for a place.", _one(stats.queued))
        yield from _gauge("ready_lag_seconds", "How long the run that is due for longest has been so.", _one(lag_s))
        yield from _gauge("messages_waiting", "Messages in inboxes, due or not.", _one(stats.messages))
        yield from _gauge("signals_waiting", "Signals that no wait has taken.", _one(stats.signals))
        yield from _gauge("queue_jobs", "Activities in queues.", _by("queue", stats.queues))
        yield from _gauge("tasks_open", "Tasks that nobody has answered.", _one(stats.open_tasks))
        yield from _gauge("dead_letters_open", "Dead letters that nobody has settled.", _one(stats.dead_letters))
        yield from _gauge("nodes", "Nodes whose lease is current.", _one(stats.nodes))

    def _of_process(self, context: RequestContext) -> Iterator[str]:
        counts, service = observer_of(context.runtime.store).counts, self._service
        yield from _gauge("activities_running", "Activities under way here.", _one(context.runtime.activities_running))
        yield from _gauge("event_streams", "Event streams that are open here.", _one(service.change_feeds.watching))
        yield from _counter("runs_created_total", "Runs created here.", _one(counts.runs_created))
        yield from _counter("runs_finished_total", "Runs finished here.", _by("status", counts.finished))
        yield from _counter("events_total", "Events recorded here, by type.", _by("type", counts.events))
        yield from _counter("signals_total", "Signals sent here, by answer.", _by("answer", counts.signals))
        yield from _counter("dead_letters_total", "Messages given up here.", _by("reason", counts.dead_letters))
        yield from _counter("turns_lost_total", "Turns that were not committed.", _by("reason", counts.conflicts))
        yield from _counter("claims_total", "Claims made here.", _one(counts.claims))
        yield from _counter("runs_claimed_total", "Runs claimed here.", _one(counts.runs_claimed))
        yield from _counter("lease_renewals_total", "Renewals of the node's lease.", _one(counts.renewals))
        yield from _counter("loop_stalls_total", "How often the event loop was held up.", _one(service.watchdog.stalls))
        held_s = service.watchdog.stalled_s
        yield from _counter("loop_stalled_seconds_total", "How long the event loop was held up.", _one(held_s))
        yield from _counter("alerts_total", "Alerts raised here.", _by("code", service.alerts.counts))
        yield from _histogram("commit_seconds", "How long commits take.", counts.commit_s)
        yield from _histogram("commit_turns", "How many turns share a commit.", counts.batch_turns)
        requests: Samples = (
            ({"operation": operation, "status": str(status)}, count)
            for (operation, status), count in sorted(service.requests.items())
        )
        yield from _counter("http_requests_total", "Requests answered here.", requests)


def _one(value: float) -> Samples:
    return [({}, value)]


def _by(label: str, counts: Mapping[str, int]) -> Samples:
    return [({label: str(name)}, count) for name, count in sorted(counts.items())]


def _gauge(name: str, help: str, samples: Samples) -> Iterator[str]:
    return _family(name, "gauge", help, samples)


def _counter(name: str, help: str, samples: Samples) -> Iterator[str]:
    return _family(name, "counter", help, samples)


def _family(name: str, kind: str, help: str, samples: Samples) -> Iterator[str]:
    yield f"# HELP holdfast_{name} {help}"
    yield f"# TYPE holdfast_{name} {kind}"
    for labels, value in samples:
        yield _sample(name, labels, value)


def _histogram(name: str, help: str, histogram: Histogram) -> Iterator[str]:
    yield f"# HELP holdfast_{name} {help}"
    yield f"# TYPE holdfast_{name} histogram"
    totals = list(accumulate(histogram.counts))
    for bound, total in zip((*(f"{bound:g}" for bound in histogram.bounds), "+Inf"), totals, strict=True):
        yield _sample(f"{name}_bucket", {"le": bound}, total)
    yield _sample(f"{name}_sum", {}, histogram.sum)
    yield _sample(f"{name}_count", {}, totals[-1])


def _sample(name: str, labels: Labels, value: float) -> str:
    listed = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"holdfast_{name}{{{listed}}} {value:.10g}" if listed else f"holdfast_{name} {value:.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
