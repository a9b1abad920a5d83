"""A request from its arrival to its last chunk, whatever contract it came by: received, submitted, streamed, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import grpc
from google.protobuf.message import Message
from octavo.runner.v1 import model_runner_pb2 as pb

from model_runner.constraint import Constraint
from model_runner.engine import Engine
from model_runner.engine_types import EngineState
from model_runner.request import Chunk, GenerateRequest
from model_runner.sequence import LiveRequest
from model_runner.tokenizer import Tokenizer
from model_runner.validation import Limits
from services.callers import current_caller
from services.form_compiler import FormCompiler
from services.long_texts import TextThreads
from services.reader_limits import SLOW_READER_SECONDS
from services.reception import Reception
from services.runner_errors import NotReady, SlowReader, UnknownModel
from services.streams import Streams
from services.traffic import Traffic


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the service speaks for once the model is loaded."""

    engine: Engine
    tokenizer: Tokenizer
    limits: Limits
    facts: pb.GetModelResponse
    forms: FormCompiler


Received = tuple[GenerateRequest, Constraint | None]
"""A request as the engine takes it, with what holds its answer to a form."""

Writer = Callable[[Chunk], Iterable[Message]]
"""What goes on the wire for a chunk."""


@dataclass(slots=True)
class _Arrival:
    """A request that is being read, and whether it was aborted meanwhile."""

    aborted: bool = False


class Answering:
    """The requests of a runner, for all of its services. Belongs to the event loop.

    `served` is None until the model is loaded. Errors are raised; the server's interceptor makes status codes of them.
    """

    def __init__(self, streams: Streams, slow_reader_seconds: float = SLOW_READER_SECONDS) -> None:
        """slow_reader_seconds: how long a client may take nothing of what is there for it."""
        self.streams = streams
        self.texts = TextThreads()
        self.served: ServedModel | None = None
        self.waits_for = "the model to be loaded"
        """What requests are told while they cannot be served."""
        self.traffic = Traffic()
        self._slow_reader_seconds = slow_reader_seconds
        self._reception = Reception()
        self._arrivals: dict[str, list[_Arrival]] = {}

    def loaded(self, model: str = "") -> ServedModel:
        """What is served. Raises NotReady before it is loaded, UnknownModel for another name."""
        if self.served is None:
            raise NotReady(f"The runner waits for {self.waits_for}; retry shortly.")
        if model and model != self.served.facts.model:
            raise UnknownModel(model, self.served.facts.model)
        return self.served

    def ready(self, model: str = "") -> ServedModel:
        """What is served, if requests can be taken. Raises EngineStopped and NotReady besides."""
        self.traffic.check_open()
        served = self.loaded(model)
        if served.engine.state is not EngineState.SERVING:
            raise NotReady(f"The runner waits for {self.waits_for}; retry shortly.")
        return served

    async def answer(
        self,
        served: ServedModel,
        message: Message,
        request_id: str,
        receive: Callable[[], Awaitable[Received]],
        writer: Callable[[LiveRequest], Writer],
        context: grpc.aio.ServicerContext,
        *,
        headers_first: bool = True,
    ) -> None:
        """Carries one request out, as the caller's.

        request_id: by which it can be aborted, maybe empty. receive: reads `message`. headers_first: the client learns
        that its request is taken; without, that its first chunk is there.
        """
        caller = current_caller()
        with self.traffic.count():
            arriving = self._arriving(caller.engine_id(request_id) if request_id else "")
            with arriving as arrival, self._reception.receive(served.engine, message.ByteSize()):
                parsed, constraint = await receive()
            parsed = caller.claim(parsed)
            self.streams.check_free(parsed.request_id)
            live = served.engine.submit(parsed, constraint)
            write = writer(live)
            stream = self.streams.open(parsed.request_id, partial(served.engine.throttle, live))
            if arrival.aborted:
                served.engine.cancel(live)
            try:
                # By itself: a status can't follow a first message that is stuck together with what comes before it.
                is_open = headers_first
                if is_open:
                    await context.send_initial_metadata(())
                async for chunk in stream:
                    if not is_open:
                        is_open = True
                        await context.send_initial_metadata(())
                    for each in write(caller.client_chunk(chunk)):
                        await self._send(context, each)
            finally:
                self.streams.close(stream)
                if not stream.ended:
                    # The client has gone, or its time is up.
                    served.engine.cancel(live)

    def abort(self, request_ids: Sequence[str]) -> tuple[int, int]:
        """Ends requests of the caller before the next step, those too that are still being read.

        Returns how many were live, and how many unknown.
        """
        asked = list(dict.fromkeys(map(current_caller().engine_id, request_ids)))
        arriving = [request_id for request_id in asked if request_id in self._arrivals]
        for request_id in arriving:
            for arrival in self._arrivals[request_id]:
                arrival.aborted = True
        live, unknown = self.loaded().engine.abort([each for each in asked if each not in self._arrivals])
        return live + len(arriving), unknown

    @contextmanager
    def _arriving(self, request_id: str) -> Iterator[_Arrival]:
        """Around the time in which a request has an id and the engine does not know it."""
        arrival = _Arrival()
        if not request_id:
            yield arrival
            return
        same = self._arrivals.setdefault(request_id, [])
        same.append(arrival)
        try:
            yield arrival
        finally:
            same.remove(arrival)
            if not same:
                del self._arrivals[request_id]

    async def _send(self, context: grpc.aio.ServicerContext, message: Message) -> None:
        """Returns when the message is on its way, which takes the client's reading when much is on its way already."""
        try:
            async with asyncio.timeout(self._slow_reader_seconds):
                await context.write(message)
        except TimeoutError:
            raise SlowReader(
                f"The client has read nothing for {self._slow_reader_seconds:g} seconds while there was something to "
                "read; read sooner, or ask for less at a time."
            ) from None
