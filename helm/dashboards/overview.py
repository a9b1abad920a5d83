"""The first look: is it up, is it fast, is the cache well, and where to look next."""

from __future__ import annotations

from helm.dashboards.dashboard import PODS, POOL, Dashboard
from helm.dashboards.kv_shares import BROKEN, PRESSURE
from helm.dashboards.panels import BLUE, GREEN, ORANGE, RED, YELLOW, Lines, Panel, Query, Row, Stat, Table
from helm.dashboards.promql import per_second, quantile, ratio

TO_CACHE = (("KV cache", "octavo-kv-cache"),)
TO_LATENCY = (("Latency and throughput", "octavo-latency"),)
TO_TENANTS = (("Tenants", "octavo-tenants"),)
FAULTS = "INTERNAL|UNKNOWN|UNAVAILABLE|DATA_LOSS|DEADLINE_EXCEEDED"
"""Status codes that are the server's fault, or what a user takes for it."""


def _tiles() -> list[Panel]:
    unreclaimable = "1 - sum (octavo_kv_available_blocks{KV}) / sum (octavo_kv_usable_blocks{KV})"
    hit_rate = ratio("octavo_kv_prefix_hit_tokens_total", "octavo_kv_prefix_query_tokens_total", "KV")
    first = quantile(0.95, "octavo_runner_time_to_first_token_seconds")
    return [
        Stat(
            "Runners ready",
            "Model runners whose session with their KV manager is up.",
            "short",
            [Query('sum (octavo_kv_session{ANY,state="up"})', "up")],
            thresholds=((None, RED), (1.0, GREEN)),
        ),
        Stat(
            "Requests running",
            "Requests that the engines compute.",
            "short",
            [Query('sum (octavo_runner_requests{ANY,state="running"})', "running")],
            links=TO_LATENCY,
        ),
        Stat(
            "Requests waiting",
            "Requests in line.",
            "short",
            [Query('sum (octavo_runner_requests{ANY,state="waiting"})', "waiting")],
            links=TO_LATENCY,
        ),
        Stat(
            "Tokens generated",
            "Per second.",
            "short",
            [Query(per_second("octavo_runner_generation_tokens_total"), "tokens/s")],
            links=TO_LATENCY,
        ),
        Stat(
            "First token, p95",
            "From a request's arrival to its first token.",
            "s",
            [Query(first, "p95")],
            links=TO_LATENCY,
        ),
        Stat(
            "Pool unreclaimable",
            "Blocks that are held, or cached and pinned, of all.",
            "percentunit",
            [Query(unreclaimable, "share")],
            maximum=1,
            thresholds=PRESSURE,
            links=TO_CACHE,
        ),
        Stat(
            "Hit rate",
            "Prompt tokens found in the cache, of those looked up.",
            "percentunit",
            [Query(hit_rate, "hit rate")],
            maximum=1,
            links=TO_CACHE,
        ),
        Stat(
            "Books' imbalance",
            "Must be 0.",
            "none",
            [Query("sum (octavo_kv_books_imbalance{KV})", "blocks")],
            thresholds=BROKEN,
            links=TO_CACHE,
        ),
    ]


def _traffic() -> list[Panel]:
    first, following = "octavo_runner_time_to_first_token_seconds", "octavo_runner_inter_token_latency_seconds"
    return [
        Lines(
            "Requests in progress",
            "Requests that run, and that wait in line.",
            "short",
            [Query("sum by (state) (octavo_runner_requests{ANY})", "{{state}}")],
            width=6,
            stacked=True,
            links=TO_LATENCY,
        ),
        Lines(
            "Requests by how they ended",
            "stop and length are answers; abort is a client's; error is a fault.",
            "reqps",
            [Query(per_second("octavo_runner_requests_finished_total", by="reason"), "{{reason}}")],
            width=6,
            links=TO_TENANTS,
        ),
        Lines(
            "Time to first token",
            "From a request's arrival to its first token.",
            "s",
            [
                Query(quantile(0.5, first), "p50"),
                Query(quantile(0.95, first), "p95"),
                Query(quantile(0.99, first), "p99"),
            ],
            width=6,
            links=TO_LATENCY,
        ),
        Lines(
            "Inter-token latency",
            "Between two tokens of an answer.",
            "s",
            [
                Query(quantile(0.5, following), "p50"),
                Query(quantile(0.95, following), "p95"),
                Query(quantile(0.99, following), "p99"),
            ],
            width=6,
            links=TO_LATENCY,
        ),
    ]


def _cache() -> list[Panel]:
    pinned = "sum (octavo_kv_pinned_blocks{KV})"
    return [
        Lines(
            "Blocks by state",
            "Held by sequences and leases, cached but pinned, cached, and free; they add up to the capacity.",
            "short",
            [
                Query('sum (octavo_kv_blocks{KV,state="held"})', "held", colour=BLUE),
                Query(pinned, "pinned", colour=ORANGE),
                Query(f'sum (octavo_kv_blocks{{KV,state="cached"}}) - {pinned}', "cached", colour=YELLOW),
                Query('sum (octavo_kv_blocks{KV,state="free"})', "free", colour=GREEN),
            ],
            width=6,
            stacked=True,
            links=TO_CACHE,
        ),
        Lines(
            "Prompt tokens by source",
            "What the cache gave, and what had to be computed.",
            "short",
            [
                Query(per_second("octavo_runner_cached_prompt_tokens_total"), "cached", colour=GREEN),
                Query(per_second("octavo_runner_prefill_tokens_total"), "computed", colour=BLUE),
            ],
            width=6,
            stacked=True,
            links=TO_CACHE,
        ),
        Lines(
            "Pressure",
            "Blocks given up, requests that had to give up their blocks, and verbs that found none.",
            "ops",
            [
                Query(per_second("octavo_kv_evicted_blocks_total", "KV"), "evicted blocks"),
                Query(per_second("octavo_runner_preemptions_total"), "preemptions", colour=RED),
                Query(per_second("octavo_kv_allocation_failures_total", "KV"), "allocation failures", colour=ORANGE),
            ],
            width=6,
            links=TO_CACHE,
        ),
        Lines(
            "RPC errors",
            "The share of RPCs, of either service, that ended with a server's fault.",
            "percentunit",
            [
                Query(
                    f'(sum by (service) (rate(octavo_rpc_duration_seconds_count{{ANY,code=~"{FAULTS}"}}[RATE])) / '
                    "(sum by (service) (rate(octavo_rpc_duration_seconds_count{ANY}[RATE])) > 0)) or on () vector(0)",
                    "{{service}}",
                )
            ],
            width=6,
            soft_max=0.05,
        ),
    ]


def _pods() -> list[Panel]:
    return [
        Table(
            "Processes",
            "Each process that is scraped, its version and when it began.",
            "dateTimeFromNow",
            [
                Query(
                    "process_start_time_seconds{ANY} * 1000 * on (job, instance) group_left (version, component,"
                    " python) octavo_build_info{ANY}",
                    "",
                )
            ],
            width=12,
            height=7,
            hidden=("job", "container", "endpoint", "namespace"),
            values=("started",),
        ),
        Table(
            "Pools",
            "The facts of each pool.",
            "short",
            [Query("octavo_kv_pool_info{KV}", "")],
            width=12,
            height=7,
            hidden=("__name__", "Value", "job", "container", "endpoint", "namespace", "instance", "epoch"),
        ),
    ]


OVERVIEW = Dashboard(
    "overview",
    "Octavo / Overview",
    "Whether Octavo is up, fast and well, at a glance; each panel leads to more.",
    [Row("Now", _tiles()), Row("Traffic", _traffic()), Row("Cache", _cache()), Row("Pods", _pods())],
    [*PODS, POOL],
)
