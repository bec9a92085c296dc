"""`/metrics`: the activity of a process and the contents of its store, in the text format of Prometheus.

Counters belong to this process and are kept anyway. Gauges cover the whole store, and are queried at a scrape, at most
once in a few seconds. `prometheus_client` writes the format. Each scrape has a registry of its own: nothing is added to
the global one, which belongs to the host process.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from holdfast.core.bus import SinkStatus
from holdfast.engine.abilities import abilities_of
from holdfast.engine.bus.relays import find_sinks
from holdfast.engine.observe.metrics import Histogram, observer_of
from holdfast.engine.observe.samples import SampleAt, find_samples
from holdfast.service.context import RequestContext, Service
from holdfast.service.http.exchange import Exchange
from holdfast.service.operations.system import raise_node_alerts
from holdfast.store.port import SinkQuery, Stats

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
SCOPE = "system:read"
KEEP_S = 2.0
"""For how long the counts of the store are reused."""
SAMPLED_US = 600_000_000
"""The maximum age of a sample whose counts are shown: computing them at each scrape would cost too much."""
SAMPLES = 1_000
"""How many samples are read: by default one is taken each minute."""

Samples = tuple[tuple[str, ...], Iterable[tuple[tuple[str, ...], float]]]
"""The label names, and each value with its labels."""


class Metrics:
    """An ASGI application that responds with all metrics."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stats: tuple[float, Stats] | None = None
        self._workflow_nodes = 0
        self._sinks: list[SinkStatus] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        exchange = Exchange(self._service, scope, receive, send)
        exchange.operation = "metrics"
        context = self._service.context(await exchange.principal(), exchange.correlation_id)
        with context.logging_refusals("metrics"):
            context.principal.require(SCOPE)
        await exchange.send(200, await self.text(context), CONTENT_TYPE)

    async def text(self, context: RequestContext) -> bytes:
        """Return all metrics as text."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(await self.families(context)))
        return generate_latest(registry)

    async def families(self, context: RequestContext) -> list[Metric]:
        """Return all metrics: each with its name, its description, its labels and its values."""
        store = context.runtime.store
        now = asyncio.get_running_loop().time()
        if self._stats is None or now - self._stats[0] > KEEP_S:
            self._stats = now, await store.stats()
            able = abilities_of(await store.find_nodes())
            self._workflow_nodes = sum(bool(each.abilities.workflows) for each in able)
            self._sinks = await find_sinks(store, SinkQuery(counted=True))
        await raise_node_alerts(context)
        at = await store.now()
        return [
            *self._of_store(self._stats[1], at),
            *_of_sample(await find_samples(store, at - SAMPLED_US, SAMPLES)),
            *self._of_bus(self._sinks, at),
            *self._of_process(context),
        ]

    def _of_store(self, stats: Stats, now: int) -> Iterator[Metric]:
        lag_s = 0.0 if stats.oldest_ready_at is None else max(0, now - stats.oldest_ready_at) / 1e6
        yield _gauge(
            "runs", "Runs in the store; the completed ones are estimated if there are many.", _by("status", stats.runs)
        )
        yield _gauge("runs_ready", "Runs whose turn is due.", _one(stats.ready))
        yield _gauge("runs_leased", "Runs that belong to a node.", _one(stats.leased))
        yield _gauge("runs_queued", "Runs that wait for admission.", _one(stats.queued))
        yield _gauge("ready_lag_seconds", "How long the oldest ready run has been ready.", _one(lag_s))
        yield _gauge("messages_waiting", "Messages in inboxes, due or not.", _one(stats.messages))
        yield _gauge("signals_waiting", "Signals that no wait has taken.", _one(stats.signals))
        yield _gauge("queue_jobs", "Activities in queues.", _by("queue", stats.queues))
        yield _gauge("tasks_open", "Tasks that are not answered.", _one(stats.open_tasks))
        yield _gauge("dead_letters_open", "Dead letters that are not settled.", _one(stats.dead_letters))
        yield _gauge("nodes", "Processes with a current lease, also servers that run no workflows.", _one(stats.nodes))
        runners = _one(self._workflow_nodes)
        yield _gauge("workflow_nodes", "Nodes with a current lease that run workflows.", runners)

    def _of_bus(self, sinks: Sequence[SinkStatus], now: int) -> Iterator[Metric]:
        def by_sink(values: Iterable[float]) -> Samples:
            names = [(status.sink.name,) for status in sinks]
            return ("sink",), list(zip(names, values, strict=True))

        ages_s = [0.0 if each.oldest_at is None else max(0, now - each.oldest_at) / 1e6 for each in sinks]
        backlogs = by_sink(each.backlog for each in sinks)
        yield _gauge("bus_backlog", "Entries that wait for a sink, up to 10,000.", backlogs)
        yield _gauge("bus_backlog_age_seconds", "How old the oldest entry is that waits for a sink.", by_sink(ages_s))
        failures = by_sink(each.failures for each in sinks)
        yield _gauge("bus_failures", "Failures of a sink in a row.", failures)
        letters = by_sink(each.dead_letters for each in sinks)
        yield _gauge("bus_dead_letters", "Dead letters of a sink.", letters)
        delivered = by_sink(each.delivered for each in sinks)
        yield _counter("bus_delivered_total", "Events that a sink has got.", delivered)

    def _of_process(self, context: RequestContext) -> Iterator[Metric]:
        counts, service = observer_of(context.runtime.store).counts, self._service
        yield _gauge("activities_running", "Activities running here.", _one(context.runtime.activities_running))
        open_streams = service.change_feeds.subscribers + context.runtime.streams.readers
        yield _gauge("event_streams", "Event streams that are open here.", _one(open_streams))
        yield _counter("runs_created_total", "Runs created here.", _one(counts.runs_created))
        yield _counter("runs_finished_total", "Runs finished here.", _by("status", counts.finished))
        yield _counter("events_total", "Events recorded here, by type.", _by("type", counts.events))
        yield _counter("signals_total", "Signals sent here, by answer.", _by("answer", counts.signals))
        yield _counter("dead_letters_total", "Dead letters made here.", _by("reason", counts.dead_letters))
        yield _counter("turns_lost_total", "Turns that were not committed.", _by("reason", counts.conflicts))
        yield _counter("claims_total", "Claims made here.", _one(counts.claims))
        yield _counter("runs_claimed_total", "Runs claimed here.", _one(counts.runs_claimed))
        yield _counter("lease_renewals_total", "Renewals of the node's lease.", _one(counts.renewals))
        yield _counter("loop_stalls_total", "Stalls of the event loop.", _one(service.watchdog.stalls))
        held_s = service.watchdog.stalled_s
        yield _counter("loop_stalled_seconds_total", "How long the event loop was blocked.", _one(held_s))
        late = observer_of(context.runtime.store).write_latency
        over = _by("verb", late.over_budget)
        yield _counter("writes_over_budget_total", "Writes that took longer than write_latency_budget_ms.", over)
        yield _gauge("write_latency_budget_seconds", "How long a write may take.", _one(late.budget_ms / 1_000))
        deleted = _by("kind", counts.deleted)
        yield _counter("retention_deleted_total", "What retention and deletions have deleted here.", deleted)
        yield _counter("alerts_total", "Alerts raised here.", _by("code", service.alerts.counts))
        yield _histogram("commit_seconds", "How long commits take.", counts.commit_s)
        yield _histogram("commit_turns", "How many turns share a commit.", counts.batch_turns)
        requests = [
            ((operation, str(status)), count) for (operation, status), count in sorted(service.requests.items())
        ]
        yield _counter("http_requests_total", "Requests answered here.", (("operation", "status"), requests))


def _of_sample(samples: Sequence[SampleAt]) -> Iterator[Metric]:
    """Return the metrics of the last sample of the installation: names without values if there is none."""
    last = [each.sample for each in samples[-1:]]
    retrying: Samples = (), [((), each.retrying) for each in last]
    yield _gauge("runs_retrying", "Runs of which an activity is tried again.", retrying)
    overdue: Samples = (), [((), each.overdue) for each in last]
    yield _gauge("tasks_overdue", "Open tasks that are overdue.", overdue)


class _Collected(Collector):
    """Metrics that were collected before: a registry reads synchronously, while the store is asynchronous."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _one(value: float) -> Samples:
    return (), [((), value)]


def _by(label: str, counts: Mapping[str, int]) -> Samples:
    return (label,), [((str(name),), count) for name, count in sorted(counts.items())]


def _gauge(name: str, help: str, samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"holdfast_{name}", help, labels=samples[0]), samples)


def _counter(name: str, help: str, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(f"holdfast_{name}", help, labels=samples[0]), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples[1]:
        family.add_metric(labels, value)
    return family


def _histogram(name: str, help: str, histogram: Histogram) -> Metric:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(f"holdfast_{name}", help, buckets=buckets, sum_value=histogram.sum)
