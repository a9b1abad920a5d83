"""The KV cache: what the blocks are used for, what the cache gives, what it loses, and whether the books are right."""

from __future__ import annotations

from helm.dashboards import kv_blocks, kv_times
from helm.dashboards.dashboard import PODS, POOL, Dashboard
from helm.dashboards.kv_shares import (
    BROKEN,
    FRAGMENTATION,
    HERE,
    HIT_RATE,
    POOLS,
    PRESSURE,
    SHARING,
    THRASH,
    UNRECLAIMABLE_SHARE,
)
from helm.dashboards.panels import GREEN, RED, YELLOW, Panel, Query, Row, Stat
from helm.dashboards.promql import per_second


def _tiles() -> list[Panel]:
    return [
        Stat(
            "Capacity",
            "Blocks that can be handed out.",
            "short",
            [Query("sum by (pod, pool) (octavo_kv_usable_blocks{KV})", HERE)],
        ),
        Stat(
            "Unreclaimable",
            "The share of the blocks that nobody could get now: held, or cached and pinned. Cached blocks that may be "
            "given up are not counted: they are what a cache is for.",
            "percentunit",
            [Query(UNRECLAIMABLE_SHARE, HERE)],
            maximum=1,
            thresholds=PRESSURE,
        ),
        Stat(
            "Hit rate", "Prompt tokens found in the cache, of those looked up.", "percentunit", [Query(HIT_RATE, HERE)]
        ),
        Stat(
            "Evictions",
            "Cached blocks given up to make room.",
            "ops",
            [Query(per_second("octavo_kv_evicted_blocks_total", "KV", POOLS), HERE)],
        ),
        Stat(
            "Thrash",
            "Of the evicted blocks, those whose content was computed again within a few turnovers of the pool.",
            "percentunit",
            [Query(f"({THRASH}) or on () vector(0)", HERE)],
            thresholds=((None, GREEN), (0.1, YELLOW), (0.25, RED)),
        ),
        Stat(
            "Sharing factor",
            "Block-table entries for each held block: 1 is no sharing.",
            "none",
            [Query(f"({SHARING}) or on () vector(1)", HERE)],
            decimals=2,
        ),
        Stat(
            "Fragmentation",
            "Room in held blocks that holds no token.",
            "percentunit",
            [Query(f"({FRAGMENTATION}) or on () vector(0)", HERE)],
            maximum=1,
        ),
        Stat(
            "Books' imbalance",
            "Blocks that the sum check cannot account for. It must be 0; anything else is a bug: run `octavo check`.",
            "none",
            [Query("sum by (pod, pool) (octavo_kv_books_imbalance{KV})", HERE)],
            thresholds=BROKEN,
        ),
    ]


KV_CACHE = Dashboard(
    "kv-cache",
    "Octavo / KV cache",
    "What the blocks of the paged KV cache are used for, what the cache gives and loses, and whether the books are"
    " right.",
    [
        Row("Now", _tiles()),
        Row("Occupancy", kv_blocks.occupancy()),
        Row("Prefix cache", kv_blocks.prefix_cache()),
        Row("Turnover", kv_blocks.turnover()),
        Row("Sharing and fragmentation", kv_blocks.sharing()),
        Row("How long blocks live", kv_times.residency()),
        Row("Session with the runner, and RPC", kv_times.session()),
        Row("Books", kv_times.books()),
    ],
    [*PODS, POOL],
)
