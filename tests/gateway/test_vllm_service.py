"""VllmEngine over gRPC, on the toy model: what a gateway relies on, and how each refusal looks."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from octavo.kv.v1 import kv_manager_pb2 as kv_pb

from kvmanager.types import HashAlgorithm
from services.answering import Answering
from services.errors import describe_rpc_error
from services.index_relay import IndexRelay
from services.index_tokens import IndexTokens
from services.load_meter import Load
from tests.gateway.needed import need
from tests.model_runner.toy_model import answer
from tests.services.kv_support import WAIT_SECONDS
from tests.services.toy_server import BLOCK_SIZE, ToyServer, wait_until

need("smg_grpc_proto")

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc  # noqa: E402
from smg_grpc_proto.generated import vllm_engine_pb2 as pb  # noqa: E402

from services.vllm_service import VllmFacts, VllmServicer  # noqa: E402

PROMPT = [1, 2, 3, 4, 5]
LOAD = Load(2, 3, 40, 0.25, 64, 256, 12.5, 0.5, None)
FILES = {"tokenizer.json": random.Random(1).randbytes(100_000).hex()}
MODEL = pb.GetModelInfoResponse(served_model_name="toy", max_context_length=1000)


async def _empty_index(number: int, boot_id: str) -> AsyncIterator[Any]:
    snapshot = kv_pb.IndexSnapshot(first=True, last=True)
    yield kv_pb.WatchEventsResponse(boot_id="b", number=0, snapshot=snapshot)
    await asyncio.Event().wait()


class VllmToyServer(ToyServer):
    """The toy's server, with both contracts."""

    def add_services(self, answering: Answering, server: grpc.aio.Server) -> None:
        super().add_services(answering, server)
        self.servicer = VllmServicer(answering)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self.servicer, server)
        self.load_model()

    def load_model(self) -> None:
        tokens = IndexTokens(BLOCK_SIZE, HashAlgorithm.SHA256)
        self.servicer.facts = VllmFacts(
            model=MODEL,
            server=pb.GetServerInfoResponse(server_type="vllm-grpc"),
            block_size=BLOCK_SIZE,
            max_running=8,
            relay=IndexRelay(_empty_index, lambda tap: None, tokens),
            read_load=lambda: LOAD,
            tokenizer_files=lambda: FILES,
        )

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self.servicer.facts is not None:
            self._thread.run(self.servicer.facts.relay.close())
        super().__exit__(kind, error, traceback)

    @contextmanager
    def engine_stub(self) -> Iterator[vllm_engine_pb2_grpc.VllmEngineStub]:
        with grpc.insecure_channel(self.address) as channel:
            yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[VllmToyServer]:
    with VllmToyServer(tmp_path) as running:
        yield running


def request(request_id: str = "r", *, stream: bool = True, **sampling: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(**({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | sampling))
    tokenized = pb.TokenizedInput(input_ids=PROMPT)
    return pb.GenerateRequest(request_id=request_id, tokenized=tokenized, sampling_params=params, stream=stream)


def refused(call: Any, *arguments: Any) -> Any:
    """How a call is refused."""
    with pytest.raises(grpc.RpcError) as error:
        list(call(*arguments, timeout=WAIT_SECONDS)) if not hasattr(call, "future") else call(*arguments, timeout=60)
    return describe_rpc_error(error.value)


def test_a_stream_and_an_answer_at_once_have_the_same_tokens(server: VllmToyServer) -> None:
    with server.engine_stub() as stub:
        streamed = list(stub.Generate(request(n=2), timeout=WAIT_SECONDS))
        whole = list(stub.Generate(request("s", stream=False, n=2), timeout=WAIT_SECONDS))
    for index in (0, 1):
        deltas = [each.chunk.token_ids for each in streamed if each.HasField("chunk") and each.chunk.index == index]
        assert [token for delta in deltas for token in delta] == answer(PROMPT, 6)
    assert [each.WhichOneof("response") for each in whole] == ["complete", "complete"]
    assert [list(each.complete.output_ids) for each in whole] == [answer(PROMPT, 6)] * 2
    for answers in (streamed, whole):
        ends = {each.complete.index: each.complete for each in answers if each.HasField("complete")}
        assert [ends[index].finish_reason for index in (0, 1)] == ["length", "length"]
        assert [ends[index].completion_tokens for index in (0, 1)] == [6, 6]


def test_the_text_of_a_prompt_is_tokenised(server: VllmToyServer) -> None:
    text = request(stream=False)
    text.text = "bcdef"
    with server.engine_stub() as stub:
        (whole,) = stub.Generate(text, timeout=WAIT_SECONDS)
    assert (whole.complete.prompt_tokens, list(whole.complete.output_ids)) == (5, answer([1, 2, 3, 4, 5], 6))


def test_without_an_id_a_request_gets_one(server: VllmToyServer) -> None:
    with server.engine_stub() as stub:
        assert len(list(stub.Generate(request("", stream=False), timeout=WAIT_SECONDS))) == 1


def test_an_abort_ends_a_request_and_does_no_harm_again(server: VllmToyServer) -> None:
    with server.engine_stub() as stub:
        stream = stub.Generate(request("long", max_tokens=900), timeout=WAIT_SECONDS)
        next(stream)
        for _ in range(2):
            stub.Abort(pb.AbortRequest(request_ids=["long", "unknown"]), timeout=WAIT_SECONDS)
        last = list(stream)[-1]
    assert last.complete.finish_reason == "abort"


def test_an_abort_finds_a_request_that_is_still_being_read(server: VllmToyServer) -> None:
    held = threading.Event()

    class SlowForms:
        async def constraint(self, form: Any) -> None:
            await asyncio.to_thread(held.wait, WAIT_SECONDS)

    server.answering.served = replace(server.answering.served, forms=SlowForms())
    with server.engine_stub() as stub:
        stream = stub.Generate(request("slow", max_tokens=900), timeout=WAIT_SECONDS)
        wait_until(lambda: "slow" in server.answering._arrivals)
        stub.Abort(pb.AbortRequest(request_ids=["slow"]), timeout=WAIT_SECONDS)
        held.set()
        answers = list(stream)
    assert answers[-1].complete.finish_reason == "abort"
    # At most the step that was under way.
    assert answers[-1].complete.completion_tokens <= 1


def test_who_is_not_ready_fails_the_health_check(server: VllmToyServer) -> None:
    with server.engine_stub() as stub:
        assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=WAIT_SECONDS).healthy
        served, server.answering.served = server.answering.served, None
        assert refused(stub.HealthCheck, pb.HealthCheckRequest())[::2] == ("UNAVAILABLE", "NOT_READY")
        server.answering.served = served
        server.answering.traffic.stopping = True
        assert refused(stub.HealthCheck, pb.HealthCheckRequest())[::2] == ("UNAVAILABLE", "STOPPING")


def test_before_the_model_is_loaded_nothing_is_known_of_it(server: VllmToyServer) -> None:
    server.servicer.facts = None
    with server.engine_stub() as stub:
        for call, message in (
            (stub.GetModelInfo, pb.GetModelInfoRequest()),
            (stub.GetServerInfo, pb.GetServerInfoRequest()),
            (stub.GetLoads, pb.GetLoadsRequest()),
            (stub.GetTokenizer, common_pb2.GetTokenizerRequest()),
            (stub.SubscribeKvEvents, common_pb2.SubscribeKvEventsRequest()),
        ):
            assert refused(call, message)[::2] == ("UNAVAILABLE", "NOT_READY")


def test_facts_and_load(server: VllmToyServer) -> None:
    with server.engine_stub() as stub:
        assert stub.GetModelInfo(pb.GetModelInfoRequest()) == MODEL
        info = stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.server_type, info.active_requests) == ("vllm-grpc", 0)
        loads = stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
        assert loads.dp_rank_count == 1
        (load,) = loads.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 3, 5)
        assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (64, 256, 0.25)
        assert (load.gen_throughput, load.cache_hit_rate, load.num_waiting_uncached_tokens) == (12.5, 0.5, 40)
        assert (load.max_running_requests, load.utilization) == (8, 0.25)
        assert refused(stub.GetLoads, pb.GetLoadsRequest(dp_rank=1)).code == "INVALID_ARGUMENT"


def test_the_tokenizer_comes_in_parts_with_its_digest_on_the_last(server: VllmToyServer) -> None:
    with server.engine_stub() as stub:
        parts = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=WAIT_SECONDS))
        again = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=WAIT_SECONDS))
    archive = b"".join(part.data for part in parts)
    assert len(parts) > 1
    assert all(len(part.data) <= 65_536 for part in parts)
    assert [part.sha256 for part in parts] == [""] * (len(parts) - 1) + [hashlib.sha256(archive).hexdigest()]
    assert zipfile.ZipFile(io.BytesIO(archive)).read("tokenizer.json").decode() == FILES["tokenizer.json"]
    assert again == parts


def test_events_begin_with_a_snapshot_and_the_load_goes_on(server: VllmToyServer) -> None:
    with server.engine_stub() as stub:
        stream = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=WAIT_SECONDS)
        first, second = next(stream), next(stream)
        stream.cancel()
    assert (first.snapshot.count, [event.WhichOneof("data") for event in first.events]) == (1, ["cleared"])
    assert (first.load.running_requests, first.load.waiting_requests, first.load.sample) == (2, 3, 1)
    assert (first.load.token_usage, first.load.active_token_usage, first.load.load_only) == (0.25, 0.25, False)
    # "Carries no events and repeats the last sequence sent on its stream."
    assert (second.sequence_number, list(second.events), second.load.load_only) == (first.sequence_number, [], True)
    assert second.load.sample == 2


def test_a_place_that_is_not_kept_is_out_of_range(server: VllmToyServer) -> None:
    with server.engine_stub() as stub:
        message = common_pb2.SubscribeKvEventsRequest(start_sequence_number=7)
        assert refused(stub.SubscribeKvEvents, message)[::2] == ("OUT_OF_RANGE", "TOO_FAR_BEHIND")


def test_what_is_not_there_says_so(server: VllmToyServer) -> None:
    images = request()
    images.mm_inputs.SetInParent()
    with server.engine_stub() as stub:
        for call, message in (
            (stub.Generate, images),
            (stub.Embed, pb.EmbedRequest()),
            (stub.FlushCache, common_pb2.FlushCacheRequest()),
            (stub.StartProfile, common_pb2.StartProfileRequest()),
            (stub.StopProfile, common_pb2.StopProfileRequest()),
        ):
            failure = refused(call, message)
            assert (failure.code, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED")
            assert failure.sentence.endswith(".")


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (pb.GenerateRequest(request_id="r"), "give tokenized or text"),
        (request(temperature=-1.0), "temperature is -1.0"),
        (pb.GenerateRequest(request_id="r", tokenized=pb.TokenizedInput()), "The prompt is empty"),
    ],
)
def test_a_request_that_cannot_be_is_refused(server: VllmToyServer, message: Any, sentence: str) -> None:
    with server.engine_stub() as stub:
        failure = refused(stub.Generate, message)
    assert (failure.code, failure.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert sentence in failure.sentence


def test_an_id_that_is_live_is_refused(server: VllmToyServer) -> None:
    with server.engine_stub() as stub:
        stream = stub.Generate(request("same", max_tokens=900), timeout=WAIT_SECONDS)
        next(stream)
        assert refused(stub.Generate, request("same")).code == "ALREADY_EXISTS"
        stream.cancel()
