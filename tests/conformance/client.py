"""A caller of one pool over gRPC, with the shorthands that the conformance tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.errors import RpcErrorView, describe_rpc_error

COMMON = [0] * 16 + [1] * 16 + [2] * 16
"""C of the reference: three full blocks of 16."""

Span = tuple[str, int, int]


@dataclass
class Client:
    """Speaks for one pool, by hand: with epoch 0."""

    stub: Any
    pool_id: str

    def open(self, num_blocks: int = 11, block_size: int = 16, **facts: Any) -> pb.OpenPoolResponse:
        """Opens the pool; 11 blocks of 16 tokens are the reference's usual one, 10 of them usable."""
        spec = pb.PoolSpec(num_blocks=num_blocks, block_size=block_size, **facts)
        return self.stub.OpenPool(pb.OpenPoolRequest(pool_id=self.pool_id, spec=spec, runner_id="r"))

    def allocate(
        self, name: str, tokens: Sequence[int], *, scope: Scope | None = None, spans: Iterable[Span] = (), **more: Any
    ) -> pb.AllocateResponse:
        """Asks for the block table of a new sequence."""
        return self.stub.Allocate(
            pb.AllocateRequest(
                pool_id=self.pool_id,
                sequence_id=name,
                token_ids=tokens,
                scope=(scope or Scope()).wire,
                spans=_spans(spans),
                **more,
            )
        )

    def append(self, name: str, tokens: Sequence[int] = (), computed: int = 0) -> pb.AppendResponse:
        """Commits and tells tokens of one sequence."""
        news = pb.SequenceAppend(sequence_id=name, token_ids=tokens, computed_tokens=computed)
        return self.stub.Append(pb.AppendRequest(pool_id=self.pool_id, appends=[news]))

    def prefill(self, name: str, tokens: Sequence[int], **more: Any) -> pb.AllocateResponse:
        """Allocates a prompt and says that all of it is computed, as a runner does."""
        answer = self.allocate(name, tokens, **more)
        self.append(name, computed=len(tokens))
        return answer

    def free(self, *names: str, computed: int = 0) -> pb.FreeResponse:
        """Ends sequences in one call, each with so many computed tokens; 0: as many as before."""
        ends = [pb.SequenceAppend(sequence_id=name, computed_tokens=computed) for name in names]
        return self.stub.Free(pb.FreeRequest(pool_id=self.pool_id, sequences=ends))

    def cache(self, name: str, tokens: Sequence[int], **more: Any) -> pb.AllocateResponse:
        """A sequence that computes its prompt and ends: its full blocks stay cached."""
        answer = self.allocate(name, tokens, **more)
        self.free(name, computed=len(tokens))
        return answer

    def lookup(
        self, tokens: Sequence[int], *, scope: Scope | None = None, spans: Iterable[Span] = ()
    ) -> pb.LookupResponse:
        """Asks what is cached."""
        return self.stub.Lookup(
            pb.LookupRequest(pool_id=self.pool_id, token_ids=tokens, scope=(scope or Scope()).wire, spans=_spans(spans))
        )

    def table(self, name: str) -> list[pb.BlockInfo]:
        """The entries of a block table."""
        return list(self.stub.GetBlockTable(pb.GetBlockTableRequest(pool_id=self.pool_id, sequence_id=name)).blocks)

    def hashes(self, name: str) -> list[str]:
        """The hashes of a sequence's blocks, in hex; "" for a block that has none."""
        return [block.block_hash.hex() for block in self.table(name)]

    def counts(self, name: str) -> list[int]:
        """The reference counts of a sequence's blocks."""
        return [block.reference_count for block in self.table(name)]

    def get(self) -> pb.GetPoolResponse:
        """The pool."""
        return self.stub.GetPool(pb.GetPoolRequest(pool_id=self.pool_id))

    @property
    def available(self) -> int:
        """What vLLM calls free: Octavo tells the blocks that hold nothing from the cached ones nobody holds."""
        occupancy = self.get().occupancy
        return occupancy.free_blocks + occupancy.cached_blocks

    def reset(self) -> int:
        """Forgets the cache and says how many blocks that were."""
        return self.stub.ResetCache(pb.ResetCacheRequest(pool_id=self.pool_id)).forgotten_blocks

    @contextmanager
    def watch(self, number: int = 0) -> Iterator[Any]:
        """A stream of events while the block runs."""
        call = self.stub.WatchEvents(pb.WatchEventsRequest(pool_id=self.pool_id, from_number=number), timeout=60)
        try:
            yield call
        finally:
            call.cancel()

    def snapshot(self) -> tuple[int, dict[bytes, bytes]]:
        """The number of the last event, and the parent of each name that can be found."""
        parents: dict[bytes, bytes] = {}
        with self.watch() as call:
            for answer in call:
                for chain in answer.snapshot.stored:
                    parents.update(links(chain))
                if answer.snapshot.last:
                    return answer.number, parents
        raise AssertionError("the snapshot has no last part")

    @property
    def index_size(self) -> int:
        """Names that can be found."""
        return len(self.snapshot()[1])

    def events(self, after: int) -> list[pb.WatchEventsResponse]:
        """The events behind that of number `after`, up to now."""
        last = self.snapshot()[0]
        with self.watch(after + 1) as call:
            return [next(call) for _ in range(last - after)]

    def check(self) -> pb.CheckResponse:
        """The self-check."""
        return self.stub.Check(pb.CheckRequest(pool_id=self.pool_id))


@dataclass(frozen=True)
class Scope:
    """Whose cache."""

    adapter: str = ""
    version: str = ""
    salt: str = ""

    @property
    def wire(self) -> pb.CacheScope:
        return pb.CacheScope(adapter_id=self.adapter, adapter_version=self.version, salt=self.salt)


def links(chain: pb.BlocksStored) -> Iterator[tuple[bytes, bytes]]:
    """Each name of a stored chain with its parent."""
    parent = chain.parent_hash
    for name in chain.block_hashes:
        yield name, parent
        parent = name


def refusal(call: Callable[[], object]) -> RpcErrorView:
    """How a call that must be refused is."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return describe_rpc_error(caught.value)


def _spans(spans: Iterable[Span]) -> list[pb.ContentSpan]:
    return [pb.ContentSpan(content_id=name, offset=offset, length=length) for name, offset, length in spans]
