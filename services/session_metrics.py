"""Metrics of the sessions: how many there are, what was said in them, how long steps took, and why they ended."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.session_streams import CAUSES, SessionStreams

STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1)
"""Upper bounds in seconds: from a few sequences that have computed a token to a long prompt that is hashed."""

_COUNTERS = (
    ("sessions_opened", "Sessions that have begun.", "opened"),
    ("session_messages", "Messages of runners, of any kind.", "messages"),
    ("session_steps", "Steps that were carried out.", "steps"),
    ("session_resent", "Steps that came again and were answered again.", "resent"),
    ("session_dropped", "Steps that came again after later ones, and were dropped.", "dropped"),
    ("session_gaps", "Steps that came too early, and were answered with the gap.", "gaps"),
    ("session_restores", "Books made anew from what a runner holds.", "restores"),
)


def step_histogram(registry: CollectorRegistry) -> Histogram:
    """How long the books were busy with each step."""
    return Histogram(
        "octavo_kv_session_step_seconds",
        "Seconds that a step of a session took in the books, without the wire.",
        registry=registry,
        buckets=STEP_BUCKETS,
    )


class SessionCollector(Collector):
    """Yields the octavo_kv_session families; it only reads numbers, so that any thread may call it."""

    def __init__(self, streams: SessionStreams) -> None:
        self._streams = streams

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        streams = self._streams
        yield GaugeMetricFamily("octavo_kv_sessions", "Sessions that are open.", len(streams))
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(f"octavo_kv_{name}", text, getattr(streams.counts, field))
        ended = CounterMetricFamily("octavo_kv_sessions_ended", "Sessions that have ended, by cause.", labels=["cause"])
        for cause in CAUSES:
            ended.add_metric([cause], streams.ended[cause])
        yield ended
