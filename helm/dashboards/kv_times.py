"""Panels of the KV cache: how long blocks live, how soon the KV manager answers, and whether the books are right."""

from __future__ import annotations

from helm.dashboards.kv_shares import BROKEN, HERE, PRESSURE, UNARY
from helm.dashboards.panels import GREEN, RED, Bars, Heatmap, Lines, Panel, Query
from helm.dashboards.promql import mean, per_second, quantile


def _buckets(metric: str) -> list[Query]:
    return [Query(f"sum by (le) (increase({metric}_bucket{{KV}}[RATE]))", "{{le}}")]


def residency() -> list[Panel]:
    lifetime, idle = "octavo_kv_block_lifetime_seconds", "octavo_kv_block_idle_before_evict_seconds"
    gap, back = "octavo_kv_block_reuse_gap_seconds", "octavo_kv_block_return_seconds"
    return [
        Heatmap(
            "Block lifetime", "From the computation of a block's content to its eviction.", "s", _buckets(lifetime)
        ),
        Heatmap("Idle before eviction", "From a block's last use to its eviction.", "s", _buckets(idle)),
        Heatmap("Reuse gap", "How long cached blocks lay between two uses.", "s", _buckets(gap)),
        Lines(
            "Medians of a block's times",
            "Is the pool large enough? When blocks are given up after a shorter time than that between two uses, they"
            " go before they are asked for again: a larger pool would hit more.",
            "s",
            [
                Query(f"({quantile(0.5, lifetime, 'KV')}) or on () vector(0)", "lifetime"),
                Query(f"({quantile(0.5, idle, 'KV')}) or on () vector(0)", "idle before eviction", colour=RED),
                Query(f"({quantile(0.5, gap, 'KV')}) or on () vector(0)", "reuse gap", colour=GREEN),
            ],
        ),
        Lines(
            "95th percentiles of a block's times",
            "As the medians; a long tail of reuse gaps is what an eviction policy can't serve.",
            "s",
            [
                Query(f"({quantile(0.95, lifetime, 'KV')}) or on () vector(0)", "lifetime"),
                Query(f"({quantile(0.95, idle, 'KV')}) or on () vector(0)", "idle before eviction", colour=RED),
                Query(f"({quantile(0.95, gap, 'KV')}) or on () vector(0)", "reuse gap", colour=GREEN),
            ],
        ),
        Heatmap(
            "Time until evicted content came back",
            "From a block's eviction until the same content was computed again: an estimate from a sample. Short times "
            "are thrash.",
            "s",
            _buckets(back),
        ),
    ]


def session() -> list[Panel]:
    trip, wait, step = "octavo_kv_round_trip_seconds", "octavo_kv_wait_seconds", "octavo_kv_session_step_seconds"
    waited = (
        "sum by (pod) (rate(octavo_kv_waited_steps_total{ANY}[RATE])) / "
        '(sum by (pod) (rate(octavo_runner_step_phase_seconds_count{ANY,phase="kv"}[RATE])) > 0)'
    )
    return [
        Lines(
            "Session latency",
            "From a runner's message to the KV manager's answer, and the part of it that the books were busy.",
            "s",
            [
                Query(quantile(0.5, trip), "round trip p50"),
                Query(quantile(0.99, trip), "round trip p99"),
                Query(quantile(0.5, step), "books p50"),
                Query(quantile(0.99, step), "books p99"),
            ],
        ),
        Lines(
            "Waits for blocks",
            "The share of engine steps that waited for the KV manager, because the lease had no block for them, and how"
            " long these waited (right axis). Steps that find their blocks ahead of time wait for nothing.",
            "percentunit",
            [
                Query(f"({waited}) or on () vector(0)", "steps that waited {{pod}}"),
                Query(f"({quantile(0.99, wait)}) or on () vector(0)", "wait p99", unit="s"),
                Query(f"({mean(wait)}) or on () vector(0)", "wait, mean", unit="s"),
            ],
        ),
        Lines(
            "Lease",
            "Spare blocks that runners have at hand, and how many sequences take per second (right axis). An empty "
            "lease makes steps wait.",
            "short",
            [
                Query("sum by (pod) (octavo_kv_lease_blocks{ANY})", "at hand {{pod}}"),
                Query(per_second("octavo_kv_lease_taken_blocks_total", "ANY", "pod"), "taken {{pod}}", unit="ops"),
            ],
        ),
        Lines(
            "Session state",
            "Runners whose session is up, away or being restored.",
            "short",
            [Query("sum by (state) (octavo_kv_session{ANY})", "{{state}}")],
            width=6,
        ),
        Lines(
            "Seconds of silence",
            "Since a pool's runner was heard, and since a runner lost its session. A runner that lives says a word"
            " every second.",
            "s",
            [
                Query("max by (pod, pool) (octavo_kv_session_silent_seconds{KV})", f"runner silent {HERE}"),
                Query("max by (pod) (octavo_kv_session_away_seconds{ANY})", "session away {{pod}}", colour=RED),
            ],
            width=6,
        ),
        Lines(
            "Steps of sessions",
            "Steps that were carried out, and those that were sent twice, came too early, or too late.",
            "ops",
            [
                Query(per_second("octavo_kv_session_steps_total"), "carried out"),
                Query(per_second("octavo_kv_session_resent_total"), "resent"),
                Query(per_second("octavo_kv_session_gaps_total"), "gaps"),
                Query(per_second("octavo_kv_session_dropped_total"), "dropped"),
            ],
            width=6,
        ),
        Lines(
            "Sessions ended and books restored",
            "Sessions that ended, by cause, and books made anew from what a runner holds, over the last ten minutes.",
            "short",
            [
                Query("sum by (cause) (increase(octavo_kv_sessions_ended_total{ANY}[10m]))", "ended: {{cause}}"),
                Query("sum (increase(octavo_kv_session_restores_total{ANY}[10m]))", "restored", colour=RED),
            ],
            width=6,
            soft_max=2,
        ),
        Lines(
            "RPC latency of the KV manager",
            "The 99th percentile of each verb for people and tools. Steps of an engine go through the session instead.",
            "s",
            [
                Query(
                    f"({quantile(0.99, 'octavo_rpc_duration_seconds', 'ANY,' + UNARY, 'method')}) or on () vector(0)",
                    "{{method}}",
                )
            ],
            width=12,
        ),
        Lines(
            "RPCs of the KV manager by outcome",
            "Calls that ended per second, by status code.",
            "ops",
            [
                Query(
                    'sum by (code) (rate(octavo_rpc_duration_seconds_count{ANY,service="octavo.kv.v1.KvManagerService"}'
                    "[RATE])) or on () vector(0)",
                    "{{code}}",
                )
            ],
            width=12,
        ),
    ]


def books() -> list[Panel]:
    return [
        Lines(
            "Books' imbalance",
            "The invariant: free + cached + held blocks are all of the pool, and all counts are the entries of the"
            " block tables. The sum check of every scrape must read 0.",
            "none",
            [Query("sum by (pod, pool) (octavo_kv_books_imbalance{KV})", HERE)],
            thresholds=BROKEN,
            soft_max=2,
        ),
        Lines(
            "Starts of the KV manager",
            "Starts of the KV manager's process over the last hour, without the first.",
            "short",
            [
                Query(
                    "sum by (pod) (changes(process_start_time_seconds{ANY}[1h]) and on (job, instance) "
                    'octavo_build_info{ANY,component="kv-manager"})',
                    "{{pod}}",
                )
            ],
            soft_max=2,
        ),
        Bars(
            "Occupancy by pool",
            "Held blocks as a share of the usable ones.",
            "percentunit",
            [Query("max by (pod, pool) (octavo_kv_usage_ratio{KV})", HERE)],
            maximum=1,
            thresholds=PRESSURE,
        ),
    ]
