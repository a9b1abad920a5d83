"""The machine of the books over gRPC: each call becomes a request, each refusal the error that it stands for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import grpc
from google.protobuf.message import Message
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from kvmanager import errors
from kvmanager.events import EventKind, IndexEvent
from kvmanager.types import (
    Allocation,
    Append,
    BlockCopy,
    CacheScope,
    ContentSpan,
    FreeOutcome,
    Grant,
    Hit,
    Occupancy,
    PoolSpec,
    Removal,
    Retention,
    TenantUsage,
)
from services import kv_wire as wire
from services.errors import describe_rpc_error
from services.kv_process import RunningKvManager
from tests.kvmanager.books_port import OWNER, Views

KINDS = {
    kind.reason: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvError)
}
NUMBERS = itertools.count(1)


class GrpcPort:
    """A pool of its own at a KV manager that serves. The manager itself is asked for the last event's number only.

    A lease is for a session, and the verbs of people have none.
    """

    has_lease = False

    def __init__(
        self, running: RunningKvManager, stub: kv_manager_pb2_grpc.KvManagerServiceStub, spec: PoolSpec
    ) -> None:
        self.now = 0.0
        self._running = running
        self._stub = stub
        self._pool = f"machine-{next(NUMBERS)}"
        running.manager._clock = lambda: self.now
        request = pb.OpenPoolRequest(pool_id=self._pool, spec=wire.spec_to_wire(spec), runner_id="machine")
        self._epoch = stub.OpenPool(request).epoch

    def allocate(
        self,
        sequence_id: str,
        tokens: Sequence[int],
        scope: CacheScope,
        spans: Sequence[ContentSpan],
        retention: Retention,
        headroom_blocks: int,
        lookahead_tokens: int,
        skip_cache_read: bool,
        resumed: bool,
        promised_tokens: int = 0,
        skip_cache_write: bool = False,
    ) -> Allocation:
        answer = self._call(
            self._stub.Allocate,
            pb.AllocateRequest(
                pool_id=self._pool,
                epoch=self._epoch,
                sequence_id=sequence_id,
                token_ids=tokens,
                scope=_scope(scope),
                spans=_spans(spans),
                retention=pb.Retention(priority=retention.priority, pin_seconds=retention.pin_seconds),
                headroom_blocks=headroom_blocks,
                lookahead_tokens=lookahead_tokens,
                skip_cache_read=skip_cache_read,
                resumed=resumed,
                promised_tokens=promised_tokens,
                skip_cache_write=skip_cache_write,
            ),
        )
        return Allocation(tuple(answer.block_ids), answer.cached_tokens, _copies(answer.copies))

    def append(self, appends: Sequence[Append], epoch: int = OWNER) -> list[Grant]:
        request = pb.AppendRequest(pool_id=self._pool, epoch=self._caller(epoch), appends=_appends(appends))
        return [
            Grant(each.sequence_id, each.first_index, tuple(each.block_ids), _copies(each.copies))
            for each in self._call(self._stub.Append, request).grants
        ]

    def fork(self, parent: str, children: Sequence[str], epoch: int = OWNER) -> tuple[int, ...]:
        request = pb.ForkRequest(
            pool_id=self._pool, epoch=self._caller(epoch), parent_id=parent, child_ids=list(children)
        )
        return tuple(self._call(self._stub.Fork, request).block_ids)

    def truncate(self, sequence_id: str, num_tokens: int, epoch: int = OWNER) -> int:
        request = pb.TruncateRequest(
            pool_id=self._pool, epoch=self._caller(epoch), sequence_id=sequence_id, num_tokens=num_tokens
        )
        return self._call(self._stub.Truncate, request).dropped_blocks

    def free(self, frees: Sequence[Append], preempted: bool = False, epoch: int = OWNER) -> FreeOutcome:
        request = pb.FreeRequest(
            pool_id=self._pool, epoch=self._caller(epoch), sequences=_appends(frees), preempted=preempted
        )
        answer = self._call(self._stub.Free, request)
        return FreeOutcome(answer.freed_sequences, answer.unknown_sequences)

    def lookup(self, tokens: Sequence[int], scope: CacheScope, spans: Sequence[ContentSpan]) -> Hit:
        request = pb.LookupRequest(pool_id=self._pool, token_ids=tokens, scope=_scope(scope), spans=_spans(spans))
        answer = self._call(self._stub.Lookup, request)
        return Hit(tuple(answer.block_ids), answer.cached_tokens, answer.partial_block_id)

    def reset_cache(self) -> int:
        request = pb.ResetCacheRequest(pool_id=self._pool, epoch=self._epoch)
        return self._call(self._stub.ResetCache, request).forgotten_blocks

    def remove_prefix(self, tokens: Sequence[int], scope: CacheScope, spans: Sequence[ContentSpan]) -> Removal:
        request = pb.RemovePrefixRequest(pool_id=self._pool, token_ids=tokens, scope=_scope(scope), spans=_spans(spans))
        answer = self._call(self._stub.RemovePrefix, request)
        return Removal(answer.removed_blocks, answer.held_blocks)

    def set_quota(self, salt: str, blocks: int) -> None:
        self._call(self._stub.SetQuota, pb.SetQuotaRequest(pool_id=self._pool, salt=salt, max_blocks=blocks))

    def set_default_quota(self, blocks: int) -> None:
        self._call(self._stub.SetQuota, pb.SetQuotaRequest(pool_id=self._pool, every_salt=True, max_blocks=blocks))

    def views(self, sequence_id: str) -> Views:
        request = pb.GetBlockTableRequest(pool_id=self._pool, sequence_id=sequence_id)
        answer = self._call(self._stub.GetBlockTable, request)
        return answer.sequence.computed_tokens, [(each.block_id, each.block_hash) for each in answer.blocks]

    def occupancy(self) -> Occupancy:
        message = self._get().occupancy
        return Occupancy(**{name: getattr(message, name) for name in Occupancy.__dataclass_fields__})

    def totals(self) -> dict[str, int]:
        message = self._get().totals
        return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}

    def tenant_usage(self, salt: str) -> TenantUsage:
        answer = self._call(self._stub.GetTenant, pb.GetTenantRequest(pool_id=self._pool, salt=salt))
        return TenantUsage(answer.quota_blocks, answer.held_blocks, answer.cached_blocks)

    def events(self, number: int) -> list[IndexEvent]:
        due = self._running.manager.events(self._pool).last_number - number + 1
        if due <= 0:
            return []
        stream = self._stub.WatchEvents(pb.WatchEventsRequest(pool_id=self._pool, from_number=number), timeout=60)
        events = [_event(answer) for answer in itertools.islice(stream, due)]
        stream.cancel()
        return events

    def violations(self) -> tuple[str, ...]:
        return tuple(self._call(self._stub.Check, pb.CheckRequest(pool_id=self._pool)).violations)

    def index_tree(self) -> None:
        """The wire doesn't show it; the events do."""

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        self._call(self._stub.ClosePool, pb.ClosePoolRequest(pool_id=self._pool, epoch=self._epoch))

    def _get(self) -> pb.GetPoolResponse:
        return self._call(self._stub.GetPool, pb.GetPoolRequest(pool_id=self._pool))

    def _caller(self, epoch: int) -> int:
        """A stranger speaks for no epoch, as people do: a wrong one would not get as far as the sequence."""
        return self._epoch if epoch == OWNER else 0

    def _call(self, verb: Callable[..., Message], request: Message):
        try:
            return verb(request, timeout=60)
        except grpc.RpcError as error:
            view = describe_rpc_error(error)
            raise KINDS[view.reason](view.sentence) from error


def _scope(scope: CacheScope) -> pb.CacheScope:
    return pb.CacheScope(adapter_id=scope.adapter_id, adapter_version=scope.adapter_version, salt=scope.salt)


def _spans(spans: Sequence[ContentSpan]) -> list[pb.ContentSpan]:
    return [pb.ContentSpan(content_id=each.content_id, offset=each.offset, length=each.length) for each in spans]


def _appends(appends: Sequence[Append]) -> list[pb.SequenceAppend]:
    if any(token_id < 0 for each in appends for token_id in each.token_ids):
        raise errors.InvalidArgument("a message can't carry it")
    return [
        pb.SequenceAppend(
            sequence_id=each.sequence_id,
            token_ids=each.token_ids,
            computed_tokens=each.computed_tokens,
            lookahead_tokens=each.lookahead_tokens,
        )
        for each in appends
    ]


def _copies(copies: Sequence[pb.BlockCopy]) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(each.source_block_id, each.target_block_id, each.num_tokens) for each in copies)


def _event(answer: pb.WatchEventsResponse) -> IndexEvent:
    kind = EventKind(answer.WhichOneof("event"))
    if kind is EventKind.STORED:
        stored = answer.stored
        return IndexEvent(
            answer.number,
            kind,
            tuple(stored.block_hashes),
            stored.parent_hash,
            stored.adapter_id,
            stored.adapter_version,
        )
    return IndexEvent(answer.number, kind, tuple(answer.removed.block_hashes))
