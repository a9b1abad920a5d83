"""The RPCs of vllm.grpc.engine.VllmEngine, by which gateways drive an engine: the same requests by another contract."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from model_runner.invalid import InvalidRequest
from model_runner.sequence import LiveRequest
from model_runner.validation import check_text_size
from services.answering import Answering, Received, ServedModel, Writer
from services.callers import current_caller
from services.index_relay import IndexRelay, own_blocks
from services.load_meter import Load
from services.runner_errors import NotReady, Unsupported
from services.tokenizer_bundle import pieces, zipped
from services.vllm_answer import VllmAnswer
from services.vllm_events import LoadStamps, change_batch, engine_load, scheduler_load, snapshot_batches
from services.vllm_request import check_supported, engine_request_id, read_vllm_request

VLLM_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name

LOAD_TICK_SECONDS = 0.1
"""How often a stream of events looks whether the load has changed."""


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """What the service tells of a loaded model. tokenizer_files: makes them, which takes a moment for a large one."""

    model: pb.GetModelInfoResponse
    server: pb.GetServerInfoResponse
    block_size: int
    max_running: int
    relay: IndexRelay
    read_load: Callable[[], Load]
    tokenizer_files: Callable[[], dict[str, str]]


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Lives on the event loop beside ModelRunnerServicer, and answers by the same Answering.

    `facts` is None until the model is loaded. Errors are raised; the server's interceptor makes status codes of them.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self.facts: VllmFacts | None = None
        self._archive: asyncio.Task[bytes] | None = None
        self._started = time.monotonic()
        self._last_receive = 0.0

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        served = self._answering.ready()
        self._last_receive = time.time()
        check_supported(request)
        if not request.request_id:
            request.request_id = uuid.uuid4().hex

        def writer(live: LiveRequest) -> Writer:
            answer = VllmAnswer(live.request, streams=request.stream)
            return lambda chunk: answer.write(chunk, chunk.usage or live.usage(time.monotonic()))

        await self._answering.answer(
            served,
            request,
            engine_request_id(request.request_id),
            partial(self._receive, served, request),
            writer,
            context,
            # A gateway sends a request again, to another server, as long as nothing has come.
            headers_first=False,
        )

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Those that are unknown, or have ended, are passed over."""
        self._answering.abort([engine_request_id(request_id) for request_id in request.request_ids])
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        # A gateway registers whoever answers, healthy or not; so who is not ready fails.
        self._answering.ready()
        return pb.HealthCheckResponse(healthy=True, message="Healthy")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        return self._loaded().model

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        answer = pb.GetServerInfoResponse()
        answer.CopyFrom(self._loaded().server)
        answer.active_requests = sum(self._answering.loaded().engine.counts())
        answer.uptime_seconds = time.monotonic() - self._started
        answer.last_receive_timestamp = self._last_receive
        return answer

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        facts = self._loaded()
        if request.dp_rank:
            raise InvalidRequest("dp_rank", f"dp_rank is {request.dp_rank}, and this server has one; leave it out.")
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=facts.server.server_type,
            dp_rank_count=1,
            loads=[scheduler_load(facts.read_load(), facts.max_running)],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        facts = self._loaded()
        if self._archive is None:
            self._archive = asyncio.create_task(asyncio.to_thread(lambda: zipped(facts.tokenizer_files())))
        # Who asked first may leave; the others still wait for it.
        archive = await asyncio.shield(self._archive)
        for data, digest in pieces(archive):
            yield common_pb2.GetTokenizerChunk(data=data, sha256=digest)

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """What the caller's own requests can find in the cache: blocks of its salt, or without tokens those of none."""
        facts, salt = self._loaded(), current_caller().cache_salt
        relay = facts.relay
        await context.send_initial_metadata(())
        await relay.ready()
        stamps = LoadStamps(lambda: engine_load(facts.read_load(), facts.max_running))
        with relay.bell() as bell:
            wanted = request.start_sequence_number
            if not wanted:
                wanted = relay.last_number + 1
                for batch in snapshot_batches(relay.snapshot(salt), wanted - 1, facts.block_size):
                    yield stamps.stamp(batch)
            while True:
                bell.clear()
                for change in relay.since(wanted):
                    wanted = change.number + 1
                    yield stamps.stamp(change_batch(own_blocks(change, salt), facts.block_size))
                heartbeat = stamps.due(wanted - 1)
                if heartbeat is not None:
                    yield heartbeat
                await _wait(bell, LOAD_TICK_SECONDS)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        raise Unsupported("The cache is the KV manager's: ResetCache of octavo.kv.v1.KvManagerService forgets it.")

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
        raise Unsupported("This server generates text, and has no embeddings.")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        raise Unsupported("This server has no profiler; its metrics tell the phases of a step.")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        raise Unsupported("This server has no profiler; its metrics tell the phases of a step.")

    def _loaded(self) -> VllmFacts:
        if self.facts is None:
            raise NotReady(f"The runner waits for {self._answering.waits_for}; retry shortly.")
        return self.facts

    async def _receive(self, served: ServedModel, request: pb.GenerateRequest) -> Received:
        token_ids = await self._prompt_token_ids(served, request)
        parsed = read_vllm_request(request, token_ids, served.limits)
        return parsed, await served.forms.constraint(parsed.structured_output)

    async def _prompt_token_ids(self, served: ServedModel, request: pb.GenerateRequest) -> Sequence[int]:
        match request.WhichOneof("input"):
            case "tokenized":
                return request.tokenized.input_ids
            case "text":
                check_text_size("text", request.text, served.tokenizer.longest_token_bytes, served.limits)
                work = partial(served.tokenizer.encode, request.text)
                return await self._answering.texts.tokenised(len(request.text), work)
            case _:
                raise InvalidRequest("tokenized", "The request has no prompt; give tokenized or text.")


async def _wait(bell: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await bell.wait()
    except TimeoutError:
        return
