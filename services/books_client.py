"""The engine's books over gRPC: a blocking client of a KV manager in another process."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

import grpc
from google.protobuf.message import Message
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from model_runner.books import (
    Admission,
    AllocationRequest,
    BlockGrant,
    BooksLost,
    BooksRefused,
    BooksTaken,
    BooksUnreachable,
    CopyOrder,
    PoolFacts,
    SequenceUpdate,
)
from services.cache_options import DEFAULT_CACHE, CacheOptions
from services.channels import ClientTls, open_channel
from services.errors import describe_rpc_error
from services.kv_wire import spec_to_wire

Answer = TypeVar("Answer", bound=Message)

CALL_SECONDS = 5.0
"""How long a verb may take before the KV manager counts as unreachable."""

_CLOSE_SECONDS = 1.0
_UNREACHABLE = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})


class GrpcBooks:
    """A model_runner.books.KvBooks that asks the KV manager at `address` ('unix:/path' or 'host:port').

    Connects at the first call, and again by itself after the KV manager was away. Used by one thread. Each verb raises
    BooksUnreachable (no answer within `call_seconds`, or no connection), BooksLost (the books began anew), BooksTaken
    (another runner has the pool) or BooksRefused (a fault of the caller, or of its client).
    """

    def __init__(
        self,
        address: str,
        *,
        pool_id: str = "default",
        cache: CacheOptions = DEFAULT_CACHE,
        tls: ClientTls | None = None,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        self.address = address
        self._pool_id = pool_id
        self._cache = cache
        self._call_seconds = call_seconds
        self._runner_id = uuid.uuid4().hex
        self._opened: tuple[str, int] | None = None
        self._channel = open_channel(address, tls)
        self._stub = kv_manager_pb2_grpc.KvManagerServiceStub(self._channel)

    def open(self, facts: PoolFacts) -> bool:
        """Declares the pool; True when its books are new to this runner.

        Raises BooksRefused when the pool is open with other facts, or when the facts make no sense.
        """
        spec = spec_to_wire(self._cache.spec(facts))
        request = pb.OpenPoolRequest(pool_id=self._pool_id, spec=spec, runner_id=self._runner_id)
        answer = self._call(self._stub.OpenPool, request)
        before, self._opened = self._opened, (answer.boot_id, answer.epoch)
        return answer.created or before != self._opened

    def allocate(self, request: AllocationRequest) -> Admission | None:
        """Blocks for all tokens of a new sequence; None while the pool is too full."""
        message = pb.AllocateRequest(
            pool_id=self._pool_id,
            epoch=self._epoch(),
            sequence_id=request.sequence_id,
            token_ids=request.token_ids,
            scope=pb.CacheScope(salt=request.cache_salt),
            headroom_blocks=request.headroom_blocks,
            skip_cache_read=request.skip_cache_read,
            resumed=request.resumed,
            promised_tokens=request.promised_tokens,
            retention=pb.Retention(priority=request.retention.priority, pin_seconds=request.retention.pin_seconds),
        )
        answer = self._call_unless_short(self._stub.Allocate, message)
        return None if answer is None else _admission(answer)

    def append(self, updates: Sequence[SequenceUpdate]) -> list[BlockGrant] | None:
        """Commits and grows all of the sequences; None while the pool is too full for all."""
        request = pb.AppendRequest(pool_id=self._pool_id, epoch=self._epoch(), appends=_appends(updates))
        answer = self._call_unless_short(self._stub.Append, request)
        return None if answer is None else [_grant(each) for each in answer.grants]

    def fork(self, parent_id: str, child_ids: Sequence[str]) -> None:
        """Gives each child the parent's block table."""
        request = pb.ForkRequest(
            pool_id=self._pool_id, epoch=self._epoch(), parent_id=parent_id, child_ids=list(child_ids)
        )
        self._call(self._stub.Fork, request)

    def free(self, updates: Sequence[SequenceUpdate], *, preempted: bool = False) -> None:
        """Commits a last time and ends the sequences; unknown ones are ignored."""
        request = pb.FreeRequest(
            pool_id=self._pool_id, epoch=self._epoch(), sequences=_appends(updates), preempted=preempted
        )
        self._call(self._stub.Free, request)

    def close(self) -> None:
        """Gives up the pool and the connection; never raises."""
        opened, self._opened = self._opened, None
        if opened is not None:
            self._close_pool(opened[1])
        self._channel.close()

    def _close_pool(self, epoch: int) -> None:
        request = pb.ClosePoolRequest(pool_id=self._pool_id, epoch=epoch)
        try:
            self._stub.ClosePool(request, timeout=min(_CLOSE_SECONDS, self._call_seconds))
        except (grpc.RpcError, ValueError):
            # It is gone, or another runner has the pool: nothing of ours is left in it.
            return

    def _epoch(self) -> int:
        if self._opened is None:
            raise BooksLost(f"Pool {self._pool_id!r} was never opened at {self.address}.")
        return self._opened[1]

    def _call(self, verb: Callable[..., Answer], request: Message) -> Answer:
        try:
            return verb(request, timeout=self._call_seconds)
        except grpc.RpcError as error:
            self._raise(error)

    def _call_unless_short(self, verb: Callable[..., Answer], request: Message) -> Answer | None:
        try:
            return verb(request, timeout=self._call_seconds)
        except grpc.RpcError as error:
            # gRPC itself says RESOURCE_EXHAUSTED for a message that is too large, which will never get better.
            if describe_rpc_error(error).reason == "POOL_SHORT":
                return None
            self._raise(error)

    def _raise(self, error: grpc.RpcError) -> NoReturn:
        view = describe_rpc_error(error)
        if view.reason == "STALE_EPOCH":
            raise BooksTaken(view.sentence) from error
        if view.reason == "UNKNOWN_POOL":
            raise BooksLost(view.sentence) from error
        if view.code in _UNREACHABLE:
            raise BooksUnreachable(f"No answer from the KV manager at {self.address}: {view.sentence}") from error
        raise BooksRefused(view.sentence, view.reason) from error


def _appends(updates: Sequence[SequenceUpdate]) -> list[pb.SequenceAppend]:
    return [
        pb.SequenceAppend(sequence_id=each.sequence_id, token_ids=each.token_ids, computed_tokens=each.computed_tokens)
        for each in updates
    ]


def _admission(answer: pb.AllocateResponse) -> Admission:
    return Admission(list(answer.block_ids), answer.cached_tokens, _copies(answer.copies))


def _grant(grant: pb.SequenceGrant) -> BlockGrant:
    return BlockGrant(grant.sequence_id, grant.first_index, list(grant.block_ids), _copies(grant.copies))


def _copies(orders: Iterable[pb.BlockCopy]) -> tuple[CopyOrder, ...]:
    return tuple(CopyOrder(each.source_block_id, each.target_block_id, each.num_tokens) for each in orders)
