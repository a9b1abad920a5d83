"""The model runner's second contract, vllm.grpc.engine.VllmEngine, put together: what it serves, and what feeds it.

Imports smg-grpc-proto, which is an extra (octavo[gateway]).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from octavo.kv.v1 import kv_manager_pb2 as kv_pb
from octavo.kv.v1 import kv_manager_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from model_runner.engine import Engine
from model_runner.errors import ModelLoadError
from model_runner.json_file import read_object
from services.answering import Answering
from services.channels import open_aio_channel
from services.config import ModelRunnerSettings
from services.index_relay import IndexRelay, Watch
from services.index_tokens import IndexTokens
from services.load_meter import Load, LoadMeter
from services.model_setup import Setup
from services.session_books import SessionBooks
from services.tokenizer_bundle import architecture_name, tokenizer_files
from services.vllm_service import VLLM_SERVICE_NAME, VllmFacts, VllmServicer

TOKENIZER_ROOT = "/octavo/tokenizers"
"""A directory that nobody has: a gateway that looks for a tokenizer there asks for it by GetTokenizer instead."""

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class VllmSide:
    """Belongs to the event loop."""

    name = VLLM_SERVICE_NAME
    open_methods = (f"/{VLLM_SERVICE_NAME}/HealthCheck",)
    """What a gateway asks without a token."""

    def __init__(self, answering: Answering) -> None:
        self._servicer = VllmServicer(answering)
        self._channel: grpc.aio.Channel | None = None
        self._relay: IndexRelay | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves it there too. Until begin() it says what the runner waits for."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._servicer, server)

    def begin(
        self, settings: ModelRunnerSettings, setup: Setup, engine: Engine, books: SessionBooks, meter: LoadMeter
    ) -> None:
        """The model is loaded."""
        facts = setup.options.facts
        self._channel = open_aio_channel(settings.kv_address, settings.kv_tls())
        tokens = IndexTokens(facts.block_size, settings.cache_options().hash_algorithm)
        self._relay = IndexRelay(_watch(self._channel, settings.pool_id), books.listen, tokens)
        directory = Path(settings.model) if settings.model and Path(settings.model).is_dir() else None

        def read_load() -> Load:
            return meter.measure(engine.requests(), books.held_blocks, facts.num_blocks - 1, facts.block_size)

        self._servicer.facts = VllmFacts(
            model=model_info(setup, directory),
            server=server_info(setup),
            block_size=facts.block_size,
            max_running=setup.options.limits.max_sequences,
            relay=self._relay,
            read_load=read_load,
            tokenizer_files=lambda: tokenizer_files(setup.tokenizer, setup.loaded.config, directory),
        )

    async def close(self) -> None:
        """Ends what begin() began."""
        if self._relay is not None:
            await self._relay.close()
        if self._channel is not None:
            await self._channel.close()


def model_info(setup: Setup, directory: Path | None) -> pb.GetModelInfoResponse:
    """What a gateway is told of the model. No path: it asks for the tokenizer, and needs not share a disk with us."""
    config, limits = setup.loaded.config, setup.limits
    ends = config.eos_token_ids or setup.tokenizer.eos_token_ids
    return pb.GetModelInfoResponse(
        is_generation=True,
        max_context_length=limits.max_sequence_tokens,
        max_req_input_len=limits.max_sequence_tokens,
        vocab_size=limits.vocab_size,
        served_model_name=setup.loaded.name,
        model_path=setup.loaded.name,
        tokenizer_path=f"{TOKENIZER_ROOT}/{setup.loaded.name}",
        model_type=config.architecture,
        architectures=[architecture_name(config)],
        eos_token_ids=sorted(setup.options.eos_token_ids),
        pad_token_id=ends[0] if ends else 0,
        bos_token_id=config.bos_token_id or 0,
        default_sampling_params_json=sampling_defaults(directory),
    )


def server_info(setup: Setup) -> pb.GetServerInfoResponse:
    """What a gateway is told of the server, but for what changes."""
    facts = setup.describe("")
    return pb.GetServerInfoResponse(
        # The word by which gateways know the contract, not the engine.
        server_type="vllm-grpc",
        data_parallel_size=1,
        kv_cache_dtype=facts.kv_dtype,
        block_size=facts.block_size,
        attention_backend=facts.attention_backend,
        model_dtype=facts.weights_dtype,
        max_num_seqs=setup.options.limits.max_sequences,
        constrained_decoding_start="first_token",
    )


def sampling_defaults(directory: Path | None) -> str:
    """How the model is to be sampled where a request does not say, as JSON; of its generation_config.json, if any."""
    file = directory / "generation_config.json" if directory is not None else None
    if file is None or not file.exists():
        return ""
    try:
        settings = read_object(file)
    except ModelLoadError:
        return ""
    found = {name: settings[name] for name in _DEFAULTS if isinstance(settings.get(name), int | float)}
    return json.dumps(found) if found else ""


def _watch(channel: grpc.aio.Channel, pool_id: str) -> Watch:
    stub = kv_manager_pb2_grpc.KvManagerServiceStub(channel)

    def watch(number: int, boot_id: str) -> AsyncIterator[kv_pb.WatchEventsResponse]:
        request = kv_pb.WatchEventsRequest(pool_id=pool_id, from_number=number, boot_id=boot_id)
        return stub.WatchEvents(request).__aiter__()

    return watch
