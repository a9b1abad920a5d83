"""Metrics of the runner's session with its KV manager: how long steps waited, and how the session does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.runner_metrics import PHASE_BUCKETS
from services.session.session import SessionState, SessionStatus


class BooksMetrics:
    """A services.session.session.SessionWatch that counts; `status` is called from the scraper's thread."""

    def __init__(self, registry: CollectorRegistry, status: Callable[[], SessionStatus]) -> None:
        registry.register(_StatusCollector(status))
        self._waits = Histogram(
            "octavo_kv_wait_seconds",
            "Seconds that an engine step waited for the KV manager; steps that did not wait are not counted.",
            registry=registry,
            buckets=PHASE_BUCKETS,
        )
        self._waited = Counter(
            "octavo_kv_waited_steps", "Engine steps that waited for the KV manager.", registry=registry
        )
        self._round_trips = Histogram(
            "octavo_kv_round_trip_seconds",
            "Seconds from a message to the KV manager to its answer.",
            registry=registry,
            buckets=PHASE_BUCKETS,
        )

    def on_wait(self, seconds: float) -> None:
        """Observes a step that waited."""
        self._waits.observe(seconds)
        self._waited.inc()

    def on_round_trip(self, seconds: float) -> None:
        """Observes an answer."""
        self._round_trips.observe(seconds)


class _StatusCollector(Collector):
    """octavo_kv_session by state, and what belongs to it."""

    def __init__(self, status: Callable[[], SessionStatus]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        states = GaugeMetricFamily(
            "octavo_kv_session", "1 for the state that the session with the KV manager is in.", labels=["state"]
        )
        for state in SessionState:
            states.add_metric([state.value], state is status.state)
        yield states
        yield GaugeMetricFamily(
            "octavo_kv_session_away_seconds",
            "Seconds since the session was lost; 0 while it is up.",
            value=status.away_seconds,
        )
        yield GaugeMetricFamily("octavo_kv_lease_blocks", "Spare blocks at hand.", value=status.lease_blocks)
        yield CounterMetricFamily(
            "octavo_kv_lease_taken_blocks", "Spare blocks that sequences took.", value=status.taken_blocks
        )
        yield CounterMetricFamily(
            "octavo_kv_session_restores", "Sessions that began with a report of what is held.", value=status.restores
        )
        yield CounterMetricFamily("octavo_kv_session_resends", "Messages that were sent again.", value=status.resends)
