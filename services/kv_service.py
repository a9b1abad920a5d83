"""octavo.kv.v1.KvManagerService over the books. Errors are raised; the server's interceptor makes statuses of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from kvmanager.errors import InvalidArgument
from kvmanager.manager import KvManager
from services import kv_wire as wire
from services.kv_events import EventStreams
from services.session_calls import serve_call
from services.session_streams import SessionStreams

KV_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KvManagerService"].full_name

DEFAULT_PAGE = 100
MAX_PAGE = 1000

Context = grpc.aio.ServicerContext


class KvManagerServicer(kv_manager_pb2_grpc.KvManagerServiceServicer):
    """The verbs, one at a time: none awaits anything between two changes, so each has the books for itself."""

    def __init__(self, manager: KvManager, sessions: SessionStreams) -> None:
        self._manager = manager
        self._sessions = sessions
        self._streams = EventStreams(manager)

    async def OpenPool(self, request: pb.OpenPoolRequest, context: Context) -> pb.OpenPoolResponse:
        """Declares a pool for one runner process."""
        spec = wire.spec_from_wire(request.spec)
        opening = self._manager.open_pool(wire.pool_id_of(request.pool_id), spec, request.runner_id)
        return pb.OpenPoolResponse(
            boot_id=self._manager.boot_id,
            epoch=opening.epoch,
            created=opening.created,
            occupancy=wire.occupancy_to_wire(opening.pool.occupancy()),
        )

    async def ClosePool(self, request: pb.ClosePoolRequest, context: Context) -> pb.ClosePoolResponse:
        """Forgets a pool."""
        closed = self._manager.close_pool(wire.pool_id_of(request.pool_id), request.epoch)
        return pb.ClosePoolResponse(closed_sequences=closed)

    async def Allocate(self, request: pb.AllocateRequest, context: Context) -> pb.AllocateResponse:
        """Makes the block table of a new sequence."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id), request.epoch)
        allocation = pool.allocate(
            request.sequence_id,
            list(request.token_ids),
            scope=wire.scope_from_wire(request.scope),
            spans=wire.spans_from_wire(request.spans),
            retention=wire.retention_from_wire(request.retention),
            headroom_blocks=request.headroom_blocks,
            lookahead_tokens=request.lookahead_tokens,
            skip_cache_read=request.skip_cache_read,
            skip_cache_write=request.skip_cache_write,
            resumed=request.resumed,
            promised_tokens=request.promised_tokens,
            caller=request.epoch,
        )
        return pb.AllocateResponse(
            block_ids=allocation.block_ids,
            cached_tokens=allocation.cached_tokens,
            occupancy=wire.occupancy_to_wire(pool.occupancy()),
            copies=map(wire.copy_to_wire, allocation.copies),
        )

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        """Commits and grows sequences."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id), request.epoch)
        grants = pool.append(wire.appends_from_wire(request.appends), caller=request.epoch)
        return pb.AppendResponse(
            grants=map(wire.grant_to_wire, grants), occupancy=wire.occupancy_to_wire(pool.occupancy())
        )

    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.ForkResponse:
        """Makes children that share the parent's blocks."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id), request.epoch)
        block_ids = pool.fork(request.parent_id, list(request.child_ids), caller=request.epoch)
        return pb.ForkResponse(block_ids=block_ids, occupancy=wire.occupancy_to_wire(pool.occupancy()))

    async def Free(self, request: pb.FreeRequest, context: Context) -> pb.FreeResponse:
        """Ends sequences."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id), request.epoch)
        outcome = pool.free(
            wire.appends_from_wire(request.sequences), preempted=request.preempted, caller=request.epoch
        )
        return pb.FreeResponse(
            freed_sequences=outcome.freed,
            unknown_sequences=outcome.unknown,
            occupancy=wire.occupancy_to_wire(pool.occupancy()),
        )

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        """Says what is cached of a prompt."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id))
        spans = wire.spans_from_wire(request.spans)
        hit = pool.lookup(list(request.token_ids), wire.scope_from_wire(request.scope), spans)
        return pb.LookupResponse(
            cached_tokens=hit.cached_tokens, block_ids=hit.block_ids, partial_block_id=hit.partial_block
        )

    async def Truncate(self, request: pb.TruncateRequest, context: Context) -> pb.TruncateResponse:
        """Rewinds a sequence."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id), request.epoch)
        dropped = pool.truncate(request.sequence_id, request.num_tokens, caller=request.epoch)
        return pb.TruncateResponse(dropped_blocks=dropped, occupancy=wire.occupancy_to_wire(pool.occupancy()))

    async def RemovePrefix(self, request: pb.RemovePrefixRequest, context: Context) -> pb.RemovePrefixResponse:
        """Forgets what is cached of one prompt."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id), request.epoch)
        spans = wire.spans_from_wire(request.spans)
        removal = pool.remove_prefix(list(request.token_ids), wire.scope_from_wire(request.scope), spans)
        return pb.RemovePrefixResponse(removed_blocks=removal.removed_blocks, held_blocks=removal.held_blocks)

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:
        """Limits a tenant, or all that have no limit of their own."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id))
        if request.every_salt:
            pool.set_default_quota(request.max_blocks)
        elif request.WhichOneof("whose") == "salt":
            pool.set_quota(request.salt, request.max_blocks)
        else:
            # The empty salt is somebody, so that it must be given to be meant.
            raise InvalidArgument("set_quota names nobody: give a salt, or every_salt", field="whose")
        return pb.SetQuotaResponse()

    async def GetTenant(self, request: pb.GetTenantRequest, context: Context) -> pb.GetTenantResponse:
        """Shows what a tenant occupies."""
        usage = self._manager.pool(wire.pool_id_of(request.pool_id)).tenant_usage(request.salt)
        return pb.GetTenantResponse(
            quota_blocks=usage.quota_blocks, held_blocks=usage.held_blocks, cached_blocks=usage.cached_blocks
        )

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        """Streams what happens to a pool's prefix index."""
        async for answer in self._streams.watch(wire.pool_id_of(request.pool_id), request.from_number, request.boot_id):
            yield answer

    async def GetBlockTable(self, request: pb.GetBlockTableRequest, context: Context) -> pb.GetBlockTableResponse:
        """Shows one block table."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id))
        sequence, blocks = pool.block_table(request.sequence_id)
        return pb.GetBlockTableResponse(
            sequence=wire.sequence_to_wire(sequence), blocks=map(wire.block_to_wire, blocks)
        )

    async def ListSequences(self, request: pb.ListSequencesRequest, context: Context) -> pb.ListSequencesResponse:
        """Lists a page of live sequences; the page token is the last id of the page before."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id))
        size = _page_size(request.page_size)
        # One more than asked for tells whether there is a next page.
        found = pool.sequences(request.page_token, size + 1)
        page = found[:size]
        return pb.ListSequencesResponse(
            sequences=map(wire.sequence_to_wire, page),
            next_page_token=page[-1].sequence_id if len(found) > size else "",
        )

    async def GetPool(self, request: pb.GetPoolRequest, context: Context) -> pb.GetPoolResponse:
        """Shows a pool."""
        pool_id = wire.pool_id_of(request.pool_id)
        pool = self._manager.pool(pool_id)
        return pb.GetPoolResponse(
            pool_id=pool_id,
            spec=wire.spec_to_wire(pool.spec),
            boot_id=self._manager.boot_id,
            epoch=self._manager.epoch(pool_id),
            occupancy=wire.occupancy_to_wire(pool.occupancy()),
            totals=wire.totals_to_wire(pool.totals),
            recent_lookups=wire.recent_to_wire(pool.recent.sums()),
        )

    async def ResetCache(self, request: pb.ResetCacheRequest, context: Context) -> pb.ResetCacheResponse:
        """Forgets every cached block."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id), request.epoch)
        return pb.ResetCacheResponse(forgotten_blocks=pool.reset_cache())

    async def Check(self, request: pb.CheckRequest, context: Context) -> pb.CheckResponse:
        """Recomputes the books and compares."""
        pool = self._manager.pool(wire.pool_id_of(request.pool_id))
        return wire.check_to_wire(pool.check())

    async def Session(
        self, request_iterator: AsyncIterator[object], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """Carries the whole traffic of one runner."""
        answers = serve_call(self._sessions, request_iterator)
        try:
            async for answer in answers:
                yield answer
        finally:
            await answers.aclose()


def _page_size(asked: int) -> int:
    if asked < 0:
        raise InvalidArgument(
            f"page_size is {asked}; it must be 0 (for {DEFAULT_PAGE}) or more", page_size=asked, field="page_size"
        )
    return min(asked or DEFAULT_PAGE, MAX_PAGE)
