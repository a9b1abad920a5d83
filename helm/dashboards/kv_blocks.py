"""Panels of the KV cache: what the blocks are used for, what the cache gives, and what it gives up."""

from __future__ import annotations

from helm.dashboards.kv_shares import FRAGMENTATION, HERE, HIT_RATE, POOLS, PRESSURE, SHARING, UNRECLAIMABLE_SHARE
from helm.dashboards.panels import BLUE, GREEN, GREY, ORANGE, RED, YELLOW, Lines, Panel, Query
from helm.dashboards.promql import per_second, ratio


def occupancy() -> list[Panel]:
    held = 'sum (octavo_kv_blocks{KV,state="held"}) - sum (octavo_kv_leased_blocks{KV})'
    cached = 'sum (octavo_kv_blocks{KV,state="cached"}) - sum (octavo_kv_pinned_blocks{KV})'
    return [
        Lines(
            "Blocks by state",
            "What every block is used for; the layers add up to the capacity, which is the dashed line. `in sequences`"
            " and `leased` (spares of a runner) are held, `pinned` and `cached` can be hit, and only `cached` and"
            " `free` can be had at once.",
            "short",
            [
                Query(held, "in sequences", colour=BLUE),
                Query("sum (octavo_kv_leased_blocks{KV})", "leased", colour="super-light-blue"),
                Query("sum (octavo_kv_pinned_blocks{KV})", "pinned", colour=ORANGE),
                Query(cached, "cached", colour=YELLOW),
                Query('sum (octavo_kv_blocks{KV,state="free"})', "free", colour=GREEN),
                Query("sum (octavo_kv_usable_blocks{KV})", "capacity", colour=GREY, dashed=True, unstacked=True),
            ],
            width=12,
            height=10,
            stacked=True,
        ),
        Lines(
            "Unreclaimable share",
            "Held, or cached and pinned: what no newcomer can get. Near 1, requests wait and running ones are"
            " preempted.",
            "percentunit",
            [Query(UNRECLAIMABLE_SHARE, HERE)],
            width=6,
            height=10,
            maximum=1,
            thresholds=PRESSURE,
        ),
        Lines(
            "Headroom forecast",
            "Blocks that can be had now, and in ten minutes if the last ten minutes go on like this. Below 0 the pool "
            "will be full by then.",
            "short",
            [
                Query("sum by (pod, pool) (octavo_kv_available_blocks{KV})", f"now {HERE}"),
                Query(
                    "sum by (pod, pool) (predict_linear(octavo_kv_available_blocks{KV}[10m], 600))",
                    f"in 10 minutes {HERE}",
                    dashed=True,
                ),
            ],
            width=6,
            height=10,
            minimum=None,
        ),
        Lines(
            "Live sequences",
            "Sequences that have a block table: the choices and beams of running requests.",
            "short",
            [Query("sum by (pod, pool) (octavo_kv_sequences{KV})", HERE)],
        ),
        Lines(
            "Pinned blocks",
            "Cached blocks that may not be given up until their time is over; never more than half of a pool.",
            "short",
            [Query("sum by (pod, pool) (octavo_kv_pinned_blocks{KV})", HERE)],
        ),
        Lines(
            "Allocation failures",
            "Verbs refused for want of blocks, by what was full: the pool (the request waits or is preempted), a "
            "tenant's quota, or the room for pins.",
            "ops",
            [
                Query(
                    per_second("octavo_kv_allocation_failures_total", "KV", "pod, pool, reason"),
                    f"{{{{reason}}}} {HERE}",
                )
            ],
        ),
    ]


def prefix_cache() -> list[Panel]:
    return [
        Lines(
            "Hit rate by tokens",
            "Prompt tokens found in the cache, of those looked up. Sequences that come back from a preemption don't"
            " count.",
            "percentunit",
            [Query(HIT_RATE, HERE)],
            maximum=1,
        ),
        Lines(
            "Tokens looked up and found",
            "The two sides of the hit rate. A rate over few tokens says little.",
            "short",
            [
                Query(per_second("octavo_kv_prefix_query_tokens_total", "KV", POOLS), f"looked up {HERE}"),
                Query(per_second("octavo_kv_prefix_hit_tokens_total", "KV", POOLS), f"found {HERE}"),
            ],
        ),
        Lines(
            "Prefix index",
            "Names that a prompt can find, and changes of the index per second (right axis), which consumers of events"
            " see.",
            "short",
            [
                Query("sum by (pod, pool) (octavo_kv_index_names{KV})", f"names {HERE}"),
                Query(per_second("octavo_kv_index_events_total", "KV", POOLS), f"changes {HERE}", unit="ops"),
            ],
        ),
    ]


def turnover() -> list[Panel]:
    return [
        Lines(
            "Evictions and thrash",
            "Blocks given up per second, and an estimate of those among them that came back: were computed again within"
            " a few turnovers of the pool. Many that come back: the pool is too small for what is asked of it.",
            "ops",
            [
                Query(per_second("octavo_kv_evicted_blocks_total", "KV", POOLS), f"evicted {HERE}"),
                Query(per_second("octavo_kv_block_return_seconds_count", "KV", POOLS), f"came back {HERE}", colour=RED),
            ],
        ),
        Lines(
            "Blocks taken and let go",
            "Fresh blocks, cached blocks that were hit and held again, and blocks whose last holder let go.",
            "ops",
            [
                Query(per_second("octavo_kv_allocated_blocks_total", "KV", POOLS), f"taken {HERE}"),
                Query(per_second("octavo_kv_reused_blocks_total", "KV", POOLS), f"hit {HERE}"),
                Query(per_second("octavo_kv_freed_blocks_total", "KV", POOLS), f"let go {HERE}"),
            ],
        ),
        Lines(
            "Removed by hand",
            "Cached blocks that RemovePrefix forgot, and sequences that Free did not know, which are a client's"
            " mistakes.",
            "ops",
            [
                Query(per_second("octavo_kv_removed_blocks_total", "KV", POOLS), f"removed {HERE}"),
                Query(per_second("octavo_kv_unknown_frees_total", "KV", POOLS), f"unknown frees {HERE}", colour=RED),
            ],
        ),
    ]


def sharing() -> list[Panel]:
    return [
        Lines(
            "Forks and copies on write",
            "Children that share all blocks of their parent, and blocks copied because one of several holders wrote.",
            "ops",
            [
                Query(per_second("octavo_kv_forks_total", "KV", POOLS), f"forks {HERE}"),
                Query(per_second("octavo_kv_copies_total", "KV", POOLS), f"copies {HERE}"),
            ],
            width=6,
        ),
        Lines(
            "Copies per fork",
            "About 1 for answers that part from their prompt; beam searches fork often and copy less.",
            "none",
            [
                Query(
                    f"({ratio('octavo_kv_copies_total', 'octavo_kv_forks_total', 'KV', POOLS)}) or on () vector(0)",
                    HERE,
                )
            ],
            width=6,
            decimals=2,
        ),
        Lines(
            "Sharing factor",
            "Block-table entries for each held block. At 2 the pool holds twice what it could without sharing.",
            "none",
            [Query(f"({SHARING}) or on () vector(1)", HERE)],
            width=6,
            decimals=2,
            minimum=1,
        ),
        Lines(
            "Shared blocks",
            "Held blocks that more than one table names, and the blocks that sharing saves.",
            "short",
            [
                Query("sum by (pod, pool) (octavo_kv_shared_blocks{KV})", f"shared {HERE}"),
                Query(
                    "sum by (pod, pool) (octavo_kv_block_references{KV}) "
                    '- sum by (pod, pool) (octavo_kv_blocks{KV,state="held"})',
                    f"saved {HERE}",
                ),
            ],
            width=6,
        ),
        Lines(
            "Tokens stored and room for them",
            "Tokens in held blocks, each block counted once, and the tokens that these blocks have room for.",
            "short",
            [
                Query("sum by (pod, pool) (octavo_kv_stored_tokens{KV})", f"stored {HERE}"),
                Query("sum by (pod, pool) (octavo_kv_reserved_tokens{KV})", f"room {HERE}"),
            ],
            width=12,
        ),
        Lines(
            "Fragmentation",
            "Room in held blocks that holds no token: the last block of each sequence, blocks asked for ahead, and the "
            "lease. Smaller blocks waste less.",
            "percentunit",
            [Query(f"({FRAGMENTATION}) or on () vector(0)", HERE)],
            width=12,
            maximum=1,
        ),
    ]
