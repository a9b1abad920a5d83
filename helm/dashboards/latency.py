"""Latency and throughput: what users feel, and what a step of the engine is spent on."""

from __future__ import annotations

from helm.dashboards.dashboard import PODS, Choice, Dashboard
from helm.dashboards.panels import GREEN, ORANGE, RED, YELLOW, Heatmap, Lines, Panel, Query, Row, Stat
from helm.dashboards.promql import mean, per_second, quantile, ratio

FIRST, NEXT = "octavo_runner_time_to_first_token_seconds", "octavo_runner_inter_token_latency_seconds"
WHOLE, QUEUE = "octavo_runner_e2e_latency_seconds", "octavo_runner_queue_time_seconds"

TARGETS = (
    Choice("ttft", "First token within", ("0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0"), "Seconds.", "1.0"),
    Choice("itl", "Next token within", ("0.025", "0.05", "0.1", "0.2", "0.5", "1.0"), "Seconds.", "0.1"),
)
"""Bounds of the histograms' buckets, as Prometheus writes them."""


def _within(metric: str, seconds: str) -> str:
    """The share of what was observed that took no longer than the bound of a bucket."""
    return f'sum (rate({metric}_bucket{{ANY,le="{seconds}"}}[RATE])) / (sum (rate({metric}_count{{ANY}}[RATE])) > 0)'


GOOD = ((None, RED), (0.9, YELLOW), (0.99, GREEN))


def _quantiles(metric: str) -> list[Query]:
    shares = ((0.5, "p50"), (0.9, "p90"), (0.95, "p95"), (0.99, "p99"))
    return [*(Query(quantile(share, metric), name) for share, name in shares), Query(mean(metric), "mean")]


def _tiles() -> list[Panel]:
    return [
        Stat(
            "First token, p95",
            "From a request's arrival to its first token.",
            "s",
            [Query(quantile(0.95, FIRST), "p95")],
            width=4,
        ),
        Stat(
            "First token in time",
            "Requests whose first token came within the time chosen above.",
            "percentunit",
            [Query(_within(FIRST, "$ttft"), "in time")],
            width=4,
            maximum=1,
            thresholds=GOOD,
        ),
        Stat("Next token, p95", "Between two tokens of an answer.", "s", [Query(quantile(0.95, NEXT), "p95")], width=4),
        Stat(
            "Next tokens in time",
            "Tokens that came within the time chosen above.",
            "percentunit",
            [Query(_within(NEXT, "$itl"), "in time")],
            width=4,
            maximum=1,
            thresholds=GOOD,
        ),
        Stat(
            "Tokens generated",
            "Of all answers, per second.",
            "short",
            [Query(per_second("octavo_runner_generation_tokens_total"), "tokens/s")],
            width=4,
        ),
        Stat(
            "Requests",
            "That ended, per second.",
            "reqps",
            [Query(per_second("octavo_runner_requests_finished_total"), "requests/s")],
            width=4,
        ),
    ]


def _latency() -> list[Panel]:
    buckets = "sum by (le) (increase({}_bucket{{ANY}}[RATE]))"
    return [
        Lines(
            "Time to first token",
            "From a request's arrival to its first token: the wait in line and the prompt.",
            "s",
            _quantiles(FIRST),
            width=12,
        ),
        Heatmap(
            "Time to first token, all requests",
            "How many requests took how long.",
            "s",
            [Query(buckets.format(FIRST), "{{le}}")],
            width=12,
        ),
        Lines(
            "Inter-token latency",
            "Between two tokens of an answer: a step of the engine, and waits for blocks.",
            "s",
            _quantiles(NEXT),
            width=12,
        ),
        Heatmap(
            "Inter-token latency, all tokens",
            "How many tokens took how long.",
            "s",
            [Query(buckets.format(NEXT), "{{le}}")],
            width=12,
        ),
        Lines("Whole requests", "From a request's arrival to its last token.", "s", _quantiles(WHOLE), width=12),
        Lines(
            "Time in line",
            "From a request's arrival to its first step; it grows when the pool or the budget of a step is full.",
            "s",
            _quantiles(QUEUE),
            width=12,
        ),
    ]


def _throughput() -> list[Panel]:
    return [
        Lines(
            "Tokens",
            "Prompt tokens that were computed (again after a preemption, too), prompt tokens that the cache gave, and"
            " tokens generated.",
            "short",
            [
                Query(per_second("octavo_runner_prefill_tokens_total"), "prompt, computed"),
                Query(per_second("octavo_runner_cached_prompt_tokens_total"), "prompt, cached"),
                Query(per_second("octavo_runner_generation_tokens_total"), "generated"),
            ],
        ),
        Lines(
            "Requests by how they ended",
            "stop and length are answers; abort is a client's; error is a fault.",
            "reqps",
            [Query(per_second("octavo_runner_requests_finished_total", by="reason"), "{{reason}}")],
        ),
        Lines(
            "Requests in progress",
            "Requests that run, and that wait in line.",
            "short",
            [Query("sum by (state) (octavo_runner_requests{ANY})", "{{state}}")],
            stacked=True,
        ),
        Lines(
            "Preemptions and pauses",
            "Requests that gave up their blocks for others, to be computed anew, and that waited for a client that does"
            " not read.",
            "ops",
            [
                Query(per_second("octavo_runner_preemptions_total", by="pod"), "preemptions {{pod}}", colour=RED),
                Query(per_second("octavo_runner_pauses_total", by="pod"), "pauses {{pod}}", colour=ORANGE),
            ],
            soft_max=1,
        ),
        Lines(
            "Tokens per request",
            "The mean prompt and the mean answer.",
            "short",
            [
                Query(
                    "sum (rate(octavo_runner_prompt_tokens_total{ANY}[RATE])) / (sum"
                    " (rate(octavo_runner_requests_finished_total{ANY}[RATE])) > 0)",
                    "prompt",
                ),
                Query(
                    "sum (rate(octavo_runner_generation_tokens_total{ANY}[RATE])) / (sum"
                    " (rate(octavo_runner_requests_finished_total{ANY}[RATE])) > 0)",
                    "answer",
                ),
            ],
        ),
        Lines(
            "Speculative decoding",
            "Guessed tokens per second, and the share that was right (right axis); 0 unless --speculative-tokens is"
            " set.",
            "short",
            [
                Query(per_second("octavo_runner_draft_tokens_total"), "guessed"),
                Query(per_second("octavo_runner_accepted_draft_tokens_total"), "right"),
                Query(
                    f"({ratio('octavo_runner_accepted_draft_tokens_total', 'octavo_runner_draft_tokens_total')})"
                    " or on () vector(0)",
                    "share that was right",
                    unit="percentunit",
                ),
            ],
        ),
    ]


def _steps() -> list[Panel]:
    phase = "octavo_runner_step_phase_seconds"
    return [
        Lines(
            "A step by phase",
            "The mean step of the engine: schedule, kv (waiting for the KV manager), forward (the model), sample,"
            " deliver. The phases add up to its wall time.",
            "s",
            [Query(ratio(f"{phase}_sum", f"{phase}_count", by="phase"), "{{phase}}")],
            width=12,
            stacked=True,
        ),
        Lines(
            "Share of the time by phase",
            "What the engine's thread was busy with; the rest is idle.",
            "percentunit",
            [Query(per_second(f"{phase}_sum", by="phase"), "{{phase}}")],
            width=12,
            stacked=True,
        ),
        Lines(
            "Steps",
            "Steps of the engine per second.",
            "ops",
            [Query(f'sum by (pod) (rate({phase}_count{{ANY,phase="forward"}}[RATE]))', "{{pod}}")],
        ),
        Lines(
            "Tokens per step",
            "Prompt and generated tokens that a step computes: how full the batch is.",
            "short",
            [
                Query(
                    "(sum by (pod) (rate(octavo_runner_prefill_tokens_total{ANY}[RATE])) + sum by (pod)"
                    " (rate(octavo_runner_generation_tokens_total{ANY}[RATE])))"
                    f' / (sum by (pod) (rate({phase}_count{{ANY,phase="forward"}}[RATE])) > 0)',
                    "{{pod}}",
                )
            ],
        ),
        Lines(
            "Forward pass",
            "The model's share of a step.",
            "s",
            [
                Query(quantile(0.5, phase, 'ANY,phase="forward"'), "p50"),
                Query(quantile(0.99, phase, 'ANY,phase="forward"'), "p99"),
            ],
        ),
    ]


def _process() -> list[Panel]:
    return [
        Lines(
            "RPCs of the runner by outcome",
            "Calls that ended per second, by method and status code.",
            "reqps",
            [
                Query(
                    "sum by (method, code) (rate(octavo_rpc_duration_seconds_count"
                    '{ANY,service="octavo.runner.v1.ModelRunnerService"}[RATE]))',
                    "{{method}} {{code}}",
                )
            ],
        ),
        Lines(
            "CPU",
            "Cores that each process is busy on.",
            "none",
            [
                Query(
                    "sum by (pod, instance) (rate(process_cpu_seconds_total{ANY}[RATE])) and on (instance)"
                    " octavo_build_info{ANY}",
                    "{{pod}} {{instance}}",
                )
            ],
            decimals=2,
        ),
        Lines(
            "Memory",
            "Resident memory of each process.",
            "bytes",
            [
                Query(
                    "sum by (pod, instance) (process_resident_memory_bytes{ANY}) and on (instance)"
                    " octavo_build_info{ANY}",
                    "{{pod}} {{instance}}",
                )
            ],
        ),
    ]


LATENCY = Dashboard(
    "latency",
    "Octavo / Latency and throughput",
    "What users wait for, how much is served, and what a step of the engine is spent on.",
    [
        Row("Now", _tiles()),
        Row("Latency", _latency()),
        Row("Throughput", _throughput()),
        Row("Steps of the engine", _steps()),
        Row("RPC and processes", _process()),
    ],
    [*PODS, *TARGETS],
)
