"""The shares of a pool that several panels show, and their thresholds."""

from __future__ import annotations

from helm.dashboards.panels import GREEN, RED, YELLOW
from helm.dashboards.promql import ratio

HERE = "{{pod}} {{pool}}"
POOLS = "pod, pool"
UNARY = 'service="octavo.kv.v1.KvManagerService",method!~"Session|WatchEvents"'
"""Verbs that end when they are answered; the two others last as long as somebody listens."""

UNRECLAIMABLE_SHARE = (
    "1 - sum by (pod, pool) (octavo_kv_available_blocks{KV}) / sum by (pod, pool) (octavo_kv_usable_blocks{KV})"
)
HIT_RATE = ratio("octavo_kv_prefix_hit_tokens_total", "octavo_kv_prefix_query_tokens_total", "KV", POOLS)
THRASH = ratio("octavo_kv_block_return_seconds_count", "octavo_kv_evicted_blocks_total", "KV", POOLS)
SHARING = (
    'sum by (pod, pool) (octavo_kv_block_references{KV}) / (sum by (pod, pool) (octavo_kv_blocks{KV,state="held"}) > 0)'
)
FRAGMENTATION = (
    "1 - sum by (pod, pool) (octavo_kv_stored_tokens{KV}) / (sum by (pod, pool) (octavo_kv_reserved_tokens{KV}) > 0)"
)

PRESSURE = ((None, GREEN), (0.8, YELLOW), (0.95, RED))
BROKEN = ((None, GREEN), (1.0, RED))
