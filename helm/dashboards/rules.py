"""Recording rules and alerts, as the spec of a PrometheusRule: each alert is for somebody who is on call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

RUNBOOKS = "RUNBOOKS"
"""Stands in the file for the address of docs/operations.md; the chart puts the address in."""

SERIES = "namespace, pod, job, instance"
UNARY = 'service="octavo.kv.v1.KvManagerService",method!~"Session|WatchEvents"'
FAULTS = "INTERNAL|UNKNOWN|UNAVAILABLE|DATA_LOSS"
"""Status codes that are the server's fault and not its client's."""

WHERE = "{{ $labels.namespace }}/{{ $labels.pod }} ({{ $labels.instance }})"
"""What is meant by an alert; outside of Kubernetes the first two are empty."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A series that alerts are made of."""

    record: str
    expr: str

    def render(self) -> Json:
        return {"record": self.record, "expr": self.expr}


@dataclass(frozen=True, slots=True)
class Alert:
    """severity: `critical` wakes somebody up; `warning` waits for the morning. wait: Prometheus' `for`.

    description: what is measured, with its value, and what follows from it.
    """

    name: str
    severity: str
    expr: str
    wait: str
    summary: str
    description: str

    def render(self) -> Json:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}#{self.name.lower()}",
            },
        }


RECORDINGS = (
    Recording("octavo:kv_unreclaimable:ratio", "1 - octavo_kv_available_blocks / octavo_kv_usable_blocks"),
    Recording(
        "octavo:kv_hit_rate:ratio_rate1h",
        "rate(octavo_kv_prefix_hit_tokens_total[1h]) / (rate(octavo_kv_prefix_query_tokens_total[1h]) > 0)",
    ),
    Recording(
        "octavo:kv_thrash:ratio_rate15m",
        "rate(octavo_kv_block_return_seconds_count[15m]) / (rate(octavo_kv_evicted_blocks_total[15m]) > 0)",
    ),
    Recording(
        "octavo:kv_round_trip_seconds:p99_5m",
        f"histogram_quantile(0.99, sum by (le, {SERIES}) (rate(octavo_kv_round_trip_seconds_bucket[5m]))) >= 0",
    ),
    Recording(
        "octavo:kv_rpc_seconds:p99_5m",
        f"histogram_quantile(0.99, sum by (le, method, {SERIES}) "
        f"(rate(octavo_rpc_duration_seconds_bucket{{{UNARY}}}[5m]))) >= 0",
    ),
    Recording(
        "octavo:rpc_errors:ratio_rate5m",
        # Without a fault there is no series of one: then it is 0.
        f'(sum by (service, {SERIES}) (rate(octavo_rpc_duration_seconds_count{{code=~"{FAULTS}"}}[5m])) or '
        f"0 * sum by (service, {SERIES}) (rate(octavo_rpc_duration_seconds_count[5m]))) / "
        f"(sum by (service, {SERIES}) (rate(octavo_rpc_duration_seconds_count[5m])) > 0)",
    ),
    Recording(
        "octavo:time_to_first_token_seconds:p95_5m",
        f"histogram_quantile(0.95, sum by (le, {SERIES}) "
        "(rate(octavo_runner_time_to_first_token_seconds_bucket[5m]))) >= 0",
    ),
)

ALERTS = (
    Alert(
        "OctavoTargetDown",
        "critical",
        "up == 0 and on (job, instance) last_over_time(octavo_build_info[1d])",
        "2m",
        f"Octavo cannot be scraped on {WHERE}",
        "A process of Octavo that was scraped within the last day has not answered Prometheus for two minutes. It is "
        "down, hangs, or cannot be reached; no other alert tells of it meanwhile.",
    ),
    Alert(
        "OctavoPoolUnreclaimable",
        "warning",
        "octavo:kv_unreclaimable:ratio > 0.95",
        "10m",
        f"Pool {{{{ $labels.pool }}}} of {WHERE} is full",
        "{{ $value | humanizePercentage }} of the blocks are held, or cached and pinned, for ten minutes. Requests"
        " wait, and running ones are preempted.",
    ),
    Alert(
        "OctavoEvictionThrash",
        "warning",
        "octavo:kv_thrash:ratio_rate15m > 0.25 and rate(octavo_kv_evicted_blocks_total[15m]) > 0.1",
        "15m",
        f"Pool {{{{ $labels.pool }}}} of {WHERE} gives up what is asked for again",
        "{{ $value | humanizePercentage }} of the evicted blocks are computed again soon afterwards. The pool is"
        " smaller than what is in use.",
    ),
    Alert(
        "OctavoAllocationFailures",
        "warning",
        f"sum by (pool, reason, {SERIES}) (rate(octavo_kv_allocation_failures_total[5m])) > 1",
        "15m",
        f"Pool {{{{ $labels.pool }}}} of {WHERE} refuses blocks",
        "{{ $value | humanize }} verbs per second are refused for want of blocks, because this is full: "
        "{{ $labels.reason }} (pool: all of it; quota: a tenant's; pins: the half that may be pinned).",
    ),
    Alert(
        "OctavoPreemptionStorm",
        "warning",
        f"sum by ({SERIES}) (rate(octavo_runner_preemptions_total[5m])) > 0.1 and "
        f"sum by ({SERIES}) (rate(octavo_runner_preemptions_total[5m])) > "
        f"0.5 * sum by ({SERIES}) (rate(octavo_runner_requests_finished_total[5m]))",
        "10m",
        f"Requests displace each other on {WHERE}",
        "{{ $value | humanize }} preemptions per second, more than one for every two requests that end. Their tokens"
        " are computed again, which slows everybody down.",
    ),
    Alert(
        "OctavoHitRateCollapse",
        "warning",
        "octavo:kv_hit_rate:ratio_rate1h < 0.5 * octavo:kv_hit_rate:ratio_rate1h offset 1d and "
        "octavo:kv_hit_rate:ratio_rate1h offset 1d > 0.2 and rate(octavo_kv_prefix_query_tokens_total[1h]) > 10",
        "30m",
        f"Pool {{{{ $labels.pool }}}} of {WHERE} finds less than half of what it found yesterday",
        "{{ $value | humanizePercentage }} of the prompt tokens of the last hour were cached, less than half of the"
        " share at this hour of yesterday. Prompts have changed, the pool was restarted, or requests are routed"
        " differently.",
    ),
    Alert(
        "OctavoRpcLatencyHigh",
        "warning",
        'label_replace(octavo:kv_round_trip_seconds:p99_5m > 0.05, "method", "Session", "", "") or '
        "octavo:kv_rpc_seconds:p99_5m > 0.25",
        "10m",
        f"The KV manager is slow: {WHERE}",
        "One answer in a hundred of {{ $labels.method }} takes longer than {{ $value | humanizeDuration }}. Its process"
        " wants for CPU, or calls for operators (check, snapshots of a large pool) keep it busy.",
    ),
    Alert(
        "OctavoRpcErrors",
        "critical",
        "octavo:rpc_errors:ratio_rate5m > 0.05",
        "5m",
        f"RPCs fail on {WHERE}",
        "{{ $value | humanizePercentage }} of the calls of {{ $labels.service }} end with a fault of the server"
        " (INTERNAL, UNKNOWN, UNAVAILABLE or DATA_LOSS).",
    ),
    Alert(
        "OctavoKvManagerRestarts",
        "warning",
        "changes(process_start_time_seconds[30m]) >= 2 and on (job, instance)"
        ' octavo_build_info{component="kv-manager"}',
        "0m",
        f"The KV manager restarts again and again: {WHERE}",
        "It has started {{ $value | humanize }} times more within half an hour. Streams go on from the runners' leases,"
        " but each start makes the books anew.",
    ),
    Alert(
        "OctavoSessionAway",
        "critical",
        "octavo_kv_session_away_seconds > 15",
        "1m",
        f"The runner has no KV manager: {WHERE}",
        "Its session has been lost for {{ $value | humanizeDuration }}. It takes no new requests, and streams stop when"
        " its spare blocks are used up.",
    ),
    Alert(
        "OctavoBooksImbalance",
        "critical",
        "octavo_kv_books_imbalance > 0",
        "0m",
        f"The books of pool {{{{ $labels.pool }}}} of {WHERE} are wrong",
        "The sum check cannot account for {{ $value | humanize }} blocks. This is a bug: keep what `octavo check` says,"
        " then restart the pod.",
    ),
    Alert(
        "OctavoPoolFillsSoon",
        "warning",
        "predict_linear(octavo_kv_available_blocks[30m], 1800) < 0 and octavo:kv_unreclaimable:ratio > 0.5",
        "10m",
        f"Pool {{{{ $labels.pool }}}} of {WHERE} will be full within half an hour",
        "As in the last half an hour, blocks that can be had will run out: in another half an hour there would be "
        "{{ $value | humanize }}.",
    ),
    Alert(
        "OctavoQueueGrows",
        "warning",
        'octavo_runner_requests{state="waiting"} > 10 and deriv(octavo_runner_requests{state="waiting"}[10m]) > 0',
        "10m",
        f"More requests come than are served on {WHERE}",
        "{{ $value | humanize }} requests wait in line, and the line grows. Add pods, or limit what clients send.",
    ),
    Alert(
        "OctavoTimeToFirstTokenHigh",
        "warning",
        "octavo:time_to_first_token_seconds:p95_5m > 5",
        "10m",
        f"First tokens come late on {WHERE}",
        "One request in twenty waits longer than {{ $value | humanizeDuration }} for its first token.",
    ),
)


def rules() -> Json:
    """The spec of a PrometheusRule."""
    return {
        "groups": [
            {"name": "octavo.recording", "rules": [each.render() for each in RECORDINGS]},
            {"name": "octavo.alerts", "rules": [each.render() for each in ALERTS]},
        ]
    }
