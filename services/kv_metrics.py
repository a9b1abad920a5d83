"""Metrics of the KV manager, read from the books at scrape time, so that they are right while nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvmanager.manager import KvManager
from kvmanager.residency import BOUNDS, Durations, Residency
from kvmanager.types import Occupancy, PoolSpec, Totals
from services.presence import PoolSession, Presence


@dataclass(frozen=True, slots=True)
class PoolReading:
    """One pool at one moment."""

    pool_id: str
    epoch: int
    spec: PoolSpec
    occupancy: Occupancy
    available_blocks: int
    references: int
    totals: Totals
    durations: tuple[Durations, ...]
    imbalance: int
    index_names: int
    last_event: int
    session: PoolSession


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    help: str
    read: Callable[[PoolReading], float]


def _usage(reading: PoolReading) -> float:
    occupancy = reading.occupancy
    return occupancy.held_blocks / occupancy.usable_blocks if occupancy.usable_blocks else 0.0


_GAUGES = (
    _Series("usable_blocks", "Blocks that can be handed out: all but the null block.", lambda r: r.spec.usable_blocks),
    _Series(
        "available_blocks",
        "Blocks free, or cached and not pinned.",
        lambda r: r.available_blocks,
    ),
    _Series(
        "block_references",
        "Entries of block tables and of the lease.",
        lambda r: r.references,
    ),
    _Series("shared_blocks", "Held blocks that more than one table names.", lambda r: r.occupancy.shared_blocks),
    _Series("pinned_blocks", "Cached blocks that may not be given up yet.", lambda r: r.occupancy.pinned_blocks),
    _Series("leased_blocks", "Held blocks that are spares of a runner.", lambda r: r.occupancy.leased_blocks),
    _Series("index_names", "Blocks' names that a later prompt can find.", lambda r: r.index_names),
    _Series("usage_ratio", "Held blocks as a share of the usable ones, 0 to 1.", _usage),
    _Series("stored_tokens", "Tokens in held blocks, each block counted once.", lambda r: r.occupancy.stored_tokens),
    _Series("reserved_tokens", "Tokens that held blocks have room for.", lambda r: r.occupancy.reserved_tokens),
    _Series("sequences", "Live sequences.", lambda r: r.occupancy.sequences),
    _Series("session_silent_seconds", "Seconds since its runner was heard.", lambda r: r.session.silent_seconds),
    _Series("books_imbalance", "Blocks that the sum check cannot account for; must be 0.", lambda r: r.imbalance),
)

_COUNTERS = (
    _Series("allocated_blocks", "Blocks handed out, copies included.", lambda r: r.totals.allocated_blocks),
    _Series("reused_blocks", "Cached blocks that were hit and held again.", lambda r: r.totals.reused_blocks),
    _Series("freed_blocks", "Blocks whose last holder let go.", lambda r: r.totals.freed_blocks),
    _Series("evicted_blocks", "Cached blocks given up to make room.", lambda r: r.totals.evicted_blocks),
    _Series("removed_blocks", "Cached blocks that RemovePrefix forgot.", lambda r: r.totals.removed_blocks),
    _Series("index_events", "Changes of the index: the number of the last event.", lambda r: r.last_event),
    _Series("forks", "Children made by Fork.", lambda r: r.totals.forks),
    _Series("copies", "Copy-on-write orders, one block each.", lambda r: r.totals.copies),
    _Series("prefix_query_tokens", "Prompt tokens looked up in the cache.", lambda r: r.totals.queried_tokens),
    _Series("prefix_hit_tokens", "Prompt tokens found in the cache.", lambda r: r.totals.hit_tokens),
    _Series("unknown_frees", "Sequences that Free did not know.", lambda r: r.totals.unknown_frees),
)

_HISTOGRAMS = (
    ("block_lifetime", "Seconds from the computation of a block's content to its eviction."),
    ("block_idle_before_evict", "Seconds from a block's last use to its eviction."),
    ("block_reuse_gap", "Seconds that a cached block lay between two uses."),
    (
        "block_return",
        "Seconds from a block's eviction until the same content was computed again: an estimate from a sample of the "
        "latest evictions.",
    ),
)
"""In the order of PoolReading.durations."""

_FAILURES = (
    ("pool", lambda t: t.allocation_failures - t.quota_failures - t.pin_failures),
    ("quota", lambda t: t.quota_failures),
    ("pins", lambda t: t.pin_failures),
)

_STATES = (
    ("free", lambda o: o.free_blocks),
    ("cached", lambda o: o.cached_blocks),
    ("held", lambda o: o.held_blocks),
)


class BooksCollector(Collector):
    """Yields the octavo_kv_ families; `read` tells the pools of this moment, and may be called from any thread.

    A pool that is opened anew counts from 0 again, which Prometheus takes for the restart that it is. Only the numbers
    of its events go on.
    """

    def __init__(self, read: Callable[[], Sequence[PoolReading]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        readings = self._read()
        yield _blocks(readings)
        yield _sessions(readings)
        yield _pool_info(readings)
        for series in _GAUGES:
            yield _filled(GaugeMetricFamily(f"octavo_kv_{series.name}", series.help, labels=["pool"]), series, readings)
        for series in _COUNTERS:
            counter = CounterMetricFamily(f"octavo_kv_{series.name}", series.help, labels=["pool"])
            yield _filled(counter, series, readings)
        yield _failures(readings)
        for place, (name, text) in enumerate(_HISTOGRAMS):
            yield _histogram(name, text, [(each.pool_id, each.durations[place]) for each in readings])


def pool_readings(manager: KvManager, session_of: Callable[[str], PoolSession]) -> list[PoolReading]:
    """The open pools, each with its session, as they are now; call it where the verbs run."""
    return [
        PoolReading(
            pool_id=pool_id,
            epoch=manager.epoch(pool_id),
            spec=pool.spec,
            occupancy=pool.occupancy(),
            available_blocks=pool.block_pool.available,
            references=pool.block_pool.references,
            totals=replace(pool.totals),
            durations=_durations(pool.residency),
            imbalance=pool.imbalance(),
            index_names=len(pool.block_pool.index),
            last_event=pool.events.last_number,
            session=session_of(pool_id),
        )
        for pool_id, pool in manager.pools()
    ]


def _durations(residency: Residency) -> tuple[Durations, ...]:
    each = (residency.lifetime, residency.idle, residency.reuse_gap, residency.missed)
    return tuple(durations.copy() for durations in each)


def _filled(family: Metric, series: _Series, readings: Sequence[PoolReading]) -> Metric:
    for reading in readings:
        family.add_metric([reading.pool_id], series.read(reading))
    return family


def _blocks(readings: Sequence[PoolReading]) -> Metric:
    text = "Blocks by state; the states sum up to the usable blocks."
    family = GaugeMetricFamily("octavo_kv_blocks", text, labels=["pool", "state"])
    for reading in readings:
        for state, count in _STATES:
            family.add_metric([reading.pool_id, state], count(reading.occupancy))
    return family


def _failures(readings: Sequence[PoolReading]) -> Metric:
    text = "Verbs refused for want of blocks, by what was full: the pool, a tenant's quota, or the room for pins."
    family = CounterMetricFamily("octavo_kv_allocation_failures", text, labels=["pool", "reason"])
    for reading in readings:
        for reason, count in _FAILURES:
            family.add_metric([reading.pool_id, reason], count(reading.totals))
    return family


def _histogram(name: str, text: str, pools: Sequence[tuple[str, Durations]]) -> Metric:
    family = HistogramMetricFamily(f"octavo_kv_{name}_seconds", text, labels=["pool"])
    bounds = [floatToGoString(bound) for bound in (*BOUNDS, float("inf"))]
    for pool_id, durations in pools:
        buckets = list(zip(bounds, accumulate(durations.counts), strict=True))
        family.add_metric([pool_id], buckets, durations.total)
    return family


def _sessions(readings: Sequence[PoolReading]) -> Metric:
    text = "1 for the state that a pool's session with its runner is in."
    family = GaugeMetricFamily("octavo_kv_pool_session", text, labels=["pool", "state"])
    for reading in readings:
        for presence in Presence:
            family.add_metric([reading.pool_id, presence.value], presence is reading.session.presence)
    return family


def _pool_info(readings: Sequence[PoolReading]) -> Metric:
    family = InfoMetricFamily("octavo_kv_pool", "The facts of a pool; block_size in tokens.", labels=["pool"])
    for reading in readings:
        spec = reading.spec
        facts = {
            "num_blocks": str(spec.num_blocks),
            "block_size": str(spec.block_size),
            "bytes_per_block": str(spec.bytes_per_block),
            "model_fingerprint": spec.model_fingerprint,
            "hash_algorithm": spec.hash_algorithm.value,
            "prefix_index": spec.index.value,
            "eviction_policy": spec.eviction.value,
            "epoch": str(reading.epoch),
        }
        family.add_metric([reading.pool_id], facts)
    return family
