"""Changes of the prefix index and the engine's load as batches of smg.grpc.common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from smg_grpc_proto.generated import common_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2

from services.index_relay import Change, Stored
from services.load_meter import Load

SNAPSHOT_BLOCKS = 4096
"""Blocks in one part of a snapshot: some 300 KiB."""
HEARTBEAT_SECONDS = 1.0
IDLE_HEARTBEAT_SECONDS = 5.0
"""After two heartbeats that said the same."""
_IDLE_AFTER = 2
_USAGE_STEP = 0.005
_RATE_STEP = 50.0
_RATE_SHARE = 0.05


def block_hash(name: bytes) -> int:
    """A block's name as a signed integer of 64 bits; a gateway only links and removes blocks by it."""
    return int.from_bytes(name[:8], "big", signed=True)


def change_batch(change: Change, block_size: int) -> pb.KvEventBatch:
    """One change. A batch may be empty: its number counts all the same."""
    batch = pb.KvEventBatch(sequence_number=change.number, timestamp=time.time())
    if change.removed:
        removed = pb.KvBlocksRemoved(block_hashes=[block_hash(each.name) for each in change.removed])
        batch.events.append(pb.KvCacheEvent(removed=removed))
    batch.events.extend(stored_events(change.stored, block_size))
    for place, event in enumerate(batch.events, start=1):
        event.event_id = place
    return batch


def snapshot_batches(stored: Sequence[Stored], last_number: int, block_size: int) -> Iterator[pb.KvEventBatch]:
    """All blocks that can be found, in parts numbered up to `last_number`; the first part clears what was before."""
    parts = [stored[start : start + SNAPSHOT_BLOCKS] for start in range(0, len(stored), SNAPSHOT_BLOCKS)] or [()]
    for index, part in enumerate(parts):
        batch = pb.KvEventBatch(
            sequence_number=last_number - len(parts) + 1 + index,
            timestamp=time.time(),
            snapshot=pb.KvSnapshotChunk(index=index, count=len(parts), blocks=len(stored)),
        )
        if not index:
            batch.events.append(pb.KvCacheEvent(cleared=pb.KvCacheCleared()))
        batch.events.extend(stored_events(part, block_size))
        yield batch


def stored_events(stored: Iterable[Stored], block_size: int) -> Iterator[pb.KvCacheEvent]:
    """One event for each run of blocks that follow each other."""
    for run in _runs(stored):
        event = pb.KvBlocksStored(
            blocks=[
                pb.KvBlock(
                    block_hash=block_hash(each.name), token_ids=each.block.tokens.tolist(), block_size=block_size
                )
                for each in run
            ],
            tier=pb.KV_CACHE_TIER_DEVICE,
        )
        if run[0].block.parent:
            event.parent_block_hash = block_hash(run[0].block.parent)
        yield pb.KvCacheEvent(stored=event)


def _runs(stored: Iterable[Stored]) -> Iterator[list[Stored]]:
    number, before = 0, b""

    def run_of(each: Stored) -> int:
        nonlocal number, before
        if each.block.parent != before or not before:
            number += 1
        before = each.name
        return number

    for _, run in groupby(stored, key=run_of):
        yield list(run)


def engine_load(load: Load, max_running: int) -> pb.EngineLoad:
    """A load as it rides on batches. Blocks that are cached and nobody holds count as free: they give way."""
    record = pb.EngineLoad(
        running_requests=load.running,
        waiting_requests=load.waiting,
        waiting_uncached_tokens=load.waiting_tokens,
        token_usage=load.held_share,
        active_token_usage=load.held_share,
        gen_throughput=load.tokens_per_second,
        max_running_requests=max_running,
        cache_hit_rate=load.hit_rate,
        num_used_tokens=load.held_tokens,
        max_total_num_tokens=load.capacity_tokens,
        engine_reports_steps=True,
    )
    if load.silent_seconds is not None:
        record.engine_silence_ms = round(load.silent_seconds * 1000)
    return record


def scheduler_load(load: Load, max_running: int) -> vllm_engine_pb2.SchedulerLoad:
    """A load as GetLoads tells it."""
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=load.held_tokens,
        max_total_num_tokens=load.capacity_tokens,
        token_usage=load.held_share,
        gen_throughput=load.tokens_per_second,
        cache_hit_rate=load.hit_rate,
        utilization=load.running / max_running,
        max_running_requests=max_running,
        num_waiting_uncached_tokens=load.waiting_tokens,
    )


class LoadStamps:
    """The load records of one stream: on each batch, and by themselves when the load has changed or time has passed."""

    def __init__(self, read: Callable[[], pb.EngineLoad], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._samples = 0
        self._last: pb.EngineLoad | None = None
        self._sent_at = clock()
        self._same = 0

    def stamp(self, batch: pb.KvEventBatch) -> pb.KvEventBatch:
        """Puts the load on a batch that goes out now."""
        self._put(batch, self._read(), load_only=False)
        self._same = 0
        return batch

    def due(self, last_number: int) -> pb.KvEventBatch | None:
        """A batch that has only the load, if one is due; it repeats the last number."""
        load = self._read()
        changed = self._last is None or load_differs(self._last, load)
        patience = IDLE_HEARTBEAT_SECONDS if self._same >= _IDLE_AFTER else HEARTBEAT_SECONDS
        if not changed and self._clock() - self._sent_at < patience:
            return None
        batch = pb.KvEventBatch(sequence_number=last_number, timestamp=time.time())
        self._put(batch, load, load_only=True)
        self._same = 0 if changed else self._same + 1
        return batch

    def _put(self, batch: pb.KvEventBatch, load: pb.EngineLoad, *, load_only: bool) -> None:
        self._samples += 1
        self._last, self._sent_at = load, self._clock()
        batch.load.CopyFrom(load)
        batch.load.sample = self._samples
        batch.load.load_only = load_only


def load_differs(before: pb.EngineLoad, now: pb.EngineLoad) -> bool:
    """Whether a load has changed so much that a router should know."""
    counts = ("running_requests", "waiting_requests", "waiting_uncached_tokens")
    if any(getattr(before, name) != getattr(now, name) for name in counts):
        return True
    if abs(before.token_usage - now.token_usage) > _USAGE_STEP:
        return True
    faster = abs(before.gen_throughput - now.gen_throughput)
    return faster > min(_RATE_STEP, _RATE_SHARE * max(before.gen_throughput, now.gen_throughput))
