"""A model runner that serves the toy model over gRPC, with its books in the same process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import grpc
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc
from prometheus_client import CollectorRegistry

from kvmanager import KvManager
from model_runner.books import PoolFacts
from model_runner.engine import Engine
from model_runner.engine_types import EngineOptions, EngineState
from model_runner.scheduler_limits import SchedulerLimits
from model_runner.tokenizer import Tokenizer
from model_runner.validation import Limits
from services.answering import Answering, ServedModel
from services.authentication import open_guards
from services.books_inprocess import InProcessBooks
from services.channels import ClientTls
from services.client import Client
from services.config import ModelRunnerSettings, load_settings
from services.draining import Drainer
from services.endpoint import Endpoint, open_endpoint
from services.form_compiler import FormCompiler
from services.runner_metrics import RunnerMetrics
from services.runner_process import KIND, open_admin
from services.runner_service import ModelRunnerServicer
from services.streams import Streams
from tests.model_runner.step_modes import step_mode
from tests.model_runner.toy_model import VOCAB_SIZE, ToyExecutor, ToyTokenizer
from tests.services.kv_support import WAIT_SECONDS, LoopThread, scrape

BLOCK_SIZE = 4


class SpellingTokenizer(ToyTokenizer):
    """The toy's, which can also read: each letter is a token."""

    longest_token_bytes = 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.LETTERS.index(letter) for letter in text]


class ToyServer:
    """Use as a context manager; at its end everything must have been given back."""

    def __init__(
        self,
        directory: Path,
        *,
        num_blocks: int = 257,
        max_queued: int = 1024,
        max_model_tokens: int = 10_000,
        scheduling: dict[str, int] | None = None,
        token: str | None = None,
        client_tls: ClientTls | None = None,
        **settings: Any,
    ) -> None:
        """settings: of the model runner, as far as they concern what is served. token: of clients without another.

        client_tls: theirs.
        """
        self.token = token
        self._client_tls = client_tls
        self.settings = load_settings(
            ModelRunnerSettings,
            {"runner_address": f"unix:{directory}/runner.sock", "runner_metrics_address": "127.0.0.1:0", **settings},
        )
        self.manager = KvManager("boot")
        self.executor = ToyExecutor(BLOCK_SIZE)
        self._options = EngineOptions(
            facts=PoolFacts(num_blocks, BLOCK_SIZE, 0, "toy"),
            limits=SchedulerLimits(BLOCK_SIZE, **(scheduling or {})),
            max_sequence_tokens=min(max_model_tokens, (num_blocks - 1) * BLOCK_SIZE),
            eos_token_ids=frozenset(),
            max_queued_requests=max_queued,
            async_steps=step_mode().is_async,
        )
        self._serves = threading.Event()
        self._thread = LoopThread()
        self._endpoint, self.answering, self.engine = self._thread.run(self._open())

    async def _open(self) -> tuple[Endpoint, Answering, Engine]:
        registry = CollectorRegistry()
        streams = Streams(asyncio.get_running_loop(), self.settings.max_unread_tokens)
        answering = Answering(streams, self.settings.slow_reader_seconds)
        add, guards = partial(self.add_services, answering), open_guards(self.settings)
        endpoint = await open_endpoint(KIND, self.settings, registry, add, guards)
        await open_admin(endpoint, Drainer(answering.traffic, endpoint.health), self.settings)
        metrics = RunnerMetrics(registry, running=lambda: engine.counts()[0], waiting=lambda: engine.counts()[1])
        tokenizer = SpellingTokenizer()
        engine = Engine(
            self.executor,
            InProcessBooks(self.manager),
            tokenizer,
            self._options,
            streams.deliver,
            self._note_state,
            metrics,
            step_mode().steps(self.executor),
        )
        limits = Limits(VOCAB_SIZE, self._options.max_sequence_tokens)
        forms = FormCompiler(cast(Tokenizer, tokenizer), VOCAB_SIZE, ())
        facts = pb.GetModelResponse(model="toy")
        answering.served = ServedModel(engine, cast(Tokenizer, tokenizer), limits, facts, forms)
        return endpoint, answering, engine

    def add_services(self, answering: Answering, server: grpc.aio.Server) -> None:
        """What is served beside health and reflection."""
        model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(ModelRunnerServicer(answering), server)

    def __enter__(self) -> Self:
        self.engine.start()
        assert self._serves.wait(WAIT_SECONDS)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if kind is None and self.engine.state is not EngineState.STOPPED:
                self.assert_nothing_held()
        finally:
            self.engine.stop()
            self._thread.run(self._endpoint.stop(1))
            self._thread.close()

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def pool(self):
        return self.manager.pool("default")

    def client(self, **options: Any) -> Client:
        return Client(self.address, timeout=WAIT_SECONDS, tls=self._client_tls, **({"token": self.token} | options))

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Carries something out on the server's event loop."""
        return self._thread.run(work)

    def unread(self) -> dict[str, int]:
        """Entries that wait to be read, by request, as the event loop sees them."""

        async def read() -> dict[str, int]:
            return {name: stream.unread for name, stream in self.answering.streams._open.items()}

        return self._thread.run(read())

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return scrape(self._endpoint.metrics_address)

    def assert_nothing_held(self) -> None:
        with self.client() as client:
            wait_until(lambda: not client.requests())
        wait_until(lambda: not self.unread())
        assert self.pool.check().violations == ()
        occupancy = self.pool.occupancy()
        assert (occupancy.held_blocks, occupancy.sequences) == (0, 0)

    def _note_state(self, state: EngineState, sentence: str) -> None:
        if state is EngineState.SERVING:
            self._serves.set()


def wait_until(condition: Any) -> None:
    """Polls until `condition()` is true."""
    patience = threading.Event()
    for _ in range(WAIT_SECONDS * 100):
        if condition():
            return
        patience.wait(0.01)
    raise AssertionError(f"{condition} does not come true")


def tokens_of(chunks: Sequence[Any], choice: int = 0) -> list[int]:
    return [token_id for chunk in chunks if chunk.choice_index == choice for token_id in chunk.token_ids]
