"""Metrics of the model runner: an observer of the engine, and gauges that are read at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from model_runner.observer import PhaseSeconds, StepReport
from model_runner.request import FinishReason, Usage
from services.tenant_labels import TenantLabels

# Upper bounds in seconds. The first-token and inter-token ones begin lower than usual in LLM serving, because a small
# model on a fast device makes a token in a millisecond.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
)
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 10, 20, 40, 80),
)
REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, *REQUEST_BUCKETS[1:])
PHASE_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

REASONS = ("stop", "length", "abort", "error")


class RunnerMetrics:
    """A model_runner.observer.EngineObserver that counts; `running` and `waiting` tell requests at scrape time.

    The callables are called from the scraper's thread and must be safe there (reading an int or a len is).
    """

    def __init__(self, registry: CollectorRegistry, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        registry.register(_RequestsCollector(running, waiting))
        self._prompt = _counter(registry, "prompt_tokens", "Prompt tokens of the requests that ended.")
        self._cached = _counter(
            registry, "cached_prompt_tokens", "Prompt tokens of the requests that ended whose K/V was cached."
        )
        self._generated = _counter(registry, "generation_tokens", "Tokens generated.")
        self._prefilled = _counter(
            registry, "prefill_tokens", "Prompt tokens computed, those computed again after a preemption included."
        )
        self._preemptions = _counter(registry, "preemptions", "Requests that gave up their blocks to be computed anew.")
        self._pauses = _counter(registry, "pauses", "Times that a request waited for its client to read.")
        self._drafted = _counter(registry, "draft_tokens", "Tokens guessed and verified, for the requests that ended.")
        self._accepted = _counter(registry, "accepted_draft_tokens", "Of those, tokens that came to be in an answer.")
        self._labels = TenantLabels()
        self._tenant_requests = _counter(registry, "tenant_requests", "Requests that ended, by tenant.", "tenant")
        self._tenant_prompt = _counter(registry, "tenant_prompt_tokens", "Their prompt tokens, by tenant.", "tenant")
        self._tenant_generated = _counter(
            registry, "tenant_generation_tokens", "Tokens generated for them, by tenant.", "tenant"
        )
        finished = _counter(registry, "requests_finished", "Requests that ended, by reason.", "reason")
        self._finished = {reason: finished.labels(reason) for reason in REASONS}
        self._first_token = _histogram(
            registry, "time_to_first_token", "Seconds from a request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._next_token = _histogram(
            registry, "inter_token_latency", "Seconds between two tokens of a choice.", INTER_TOKEN_BUCKETS
        )
        self._whole = _histogram(
            registry, "e2e_latency", "Seconds from a request's arrival to its last token.", REQUEST_BUCKETS
        )
        self._queued = _histogram(
            registry, "queue_time", "Seconds from a request's arrival to its first step.", QUEUE_BUCKETS
        )
        phase = _histogram(
            registry,
            "step_phase",
            "Seconds of an engine step, by phase; the phases of a step add up to its wall time.",
            PHASE_BUCKETS,
            "phase",
        )
        self._phases = {name: phase.labels(name) for name in PhaseSeconds.__slots__}

    def on_step(self, report: StepReport) -> None:
        """Counts the prompt tokens of a step and observes its phases."""
        for name, histogram in self._phases.items():
            histogram.observe(getattr(report.phases, name))
        self._prefilled.inc(report.prefill_tokens)

    def on_progress(self, generated_tokens: int, preemptions: int) -> None:
        """Counts tokens and preemptions."""
        self._generated.inc(generated_tokens)
        self._preemptions.inc(preemptions)

    def on_first_token(self, seconds: float) -> None:
        """Observes the time to a request's first token."""
        self._first_token.observe(seconds)

    def on_next_token(self, seconds: float) -> None:
        """Observes the time between two tokens of a choice."""
        self._next_token.observe(seconds)

    def on_finish(self, reason: FinishReason | None, usage: Usage, tenant: str) -> None:
        """Counts a request that ended, for its tenant too, and observes its times."""
        label = self._labels.label(tenant)
        self._tenant_requests.labels(label).inc()
        self._tenant_prompt.labels(label).inc(usage.prompt_tokens)
        self._tenant_generated.labels(label).inc(usage.output_tokens)
        self._pauses.inc(usage.pauses)
        self._drafted.inc(usage.drafted_tokens)
        self._accepted.inc(usage.accepted_tokens)
        self._finished[reason.value if reason else "error"].inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._queued.observe(usage.queue_seconds)
        self._whole.observe(usage.queue_seconds + usage.prefill_seconds + usage.decode_seconds)


class _RequestsCollector(Collector):
    """octavo_runner_requests by state."""

    def __init__(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._states = {"running": running, "waiting": waiting}

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("octavo_runner_requests", "Live requests, by state.", labels=["state"])
        for state, count in self._states.items():
            family.add_metric([state], count())
        yield family


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"octavo_runner_{name}", text, labels, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...], *labels: str
) -> Histogram:
    return Histogram(f"octavo_runner_{name}_seconds", text, labels, registry=registry, buckets=buckets)
