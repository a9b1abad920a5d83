"""Between a runner and its KV manager: passes everything on, and loses, doubles, delays, reorders and cuts messages.

Only steps and their answers are subject to faults. What opens a session goes over whole and in order or not at all, as
it does on any stream.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.channels import open_aio_channel
from services.grpc_server import bind
from services.soak.faults import FaultKind

DELAY_SECONDS = 1.0
"""A late message, and all behind it, come so much later at most."""
REORDER_SECONDS = 0.2
"""How long a message waits for others to overtake it."""

Queue = asyncio.Queue[bytes | None]
"""Messages of one direction; None ends it."""


@dataclass(frozen=True, slots=True)
class MessageFault:
    """What happens to that share of the messages."""

    kind: FaultKind
    share: float


class FaultyProxy:
    """A server on `listen` that calls `upstream`. Set `fault` to begin, and None to end it. Lives on one event loop."""

    def __init__(self, listen: str, upstream: str, rng: Random) -> None:
        self.fault: MessageFault | None = None
        self.hits: Counter[FaultKind] = Counter()
        """Messages that something happened to, by what."""
        self._listen = listen
        self._rng = rng
        self._channel = open_aio_channel(upstream)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_Everything(self._pass_session, self._pass_call),))

    async def start(self) -> None:
        """Listens."""
        bind(self._server, self._listen)
        await self._server.start()

    async def stop(self) -> None:
        """Ends what is open."""
        await self._server.stop(0)
        await self._channel.close()

    async def _pass_call(self, method: str, request: bytes, context: Any) -> bytes:
        try:
            return bytes(await self._channel.unary_unary(method)(request, timeout=context.time_remaining()))
        except grpc.aio.AioRpcError as error:
            await _abort(context, error)
            raise

    async def _pass_session(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        up, down = Queue(), Queue()
        cut = asyncio.Event()

        def end_by_cut() -> None:
            cut.set()
            down.put_nowait(None)

        call = self._channel.stream_stream(method)(_items(up))
        readers = [
            _start(self._read(requests, up, _is_step, end_by_cut), up),
            _start(self._read(call, down, _is_answer, end_by_cut), down),
        ]
        try:
            async for message in _items(down):
                yield message
            if cut.is_set():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            await readers[1]
        except grpc.aio.AioRpcError as error:
            await _abort(context, error)
        finally:
            for reader in readers:
                reader.cancel()
            call.cancel()

    async def _read(
        self,
        messages: AsyncIterator[bytes],
        queue: Queue,
        is_subject: Callable[[bytes], bool],
        end_by_cut: Callable[[], None],
    ) -> None:
        """Moves messages into a queue, as far as they are not lost, until the session is cut."""
        async for message in messages:
            match self._happens() if is_subject(message) else None:
                case None:
                    queue.put_nowait(message)
                case FaultKind.DOUBLE:
                    queue.put_nowait(message)
                    queue.put_nowait(message)
                case FaultKind.DELAY:
                    await asyncio.sleep(self._rng.uniform(0.0, DELAY_SECONDS))
                    queue.put_nowait(message)
                case FaultKind.REORDER:
                    asyncio.get_running_loop().call_later(REORDER_SECONDS, queue.put_nowait, message)
                case FaultKind.CUT:
                    end_by_cut()
                    return

    def _happens(self) -> FaultKind | None:
        """What happens to the next message. A lost one goes into no queue."""
        fault = self.fault
        if fault is None or self._rng.random() >= fault.share:
            return None
        self.hits[fault.kind] += 1
        return fault.kind


class _Everything(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Takes every method: Session as a stream of bytes, all others as one message for one."""

    def __init__(self, stream: Callable[..., AsyncIterator[bytes]], call: Callable[..., Awaitable[bytes]]) -> None:
        self._stream = stream
        self._call = call

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method

        async def call(request: bytes, context: Any) -> bytes:
            return await self._call(method, request, context)

        async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for message in self._stream(method, requests, context):
                yield message

        if method.endswith("/Session"):
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(call)


def _start(work: Coroutine[Any, Any, None], queue: Queue) -> asyncio.Task[None]:
    """A task that ends the queue when it is done, whatever came of it."""
    task = asyncio.create_task(work)

    def end(task: asyncio.Task[None]) -> None:
        queue.put_nowait(None)
        # Who waits for the task learns its error; nobody waits for one whose stream was left.
        _ = task.cancelled() or task.exception()

    task.add_done_callback(end)
    return task


async def _items(queue: Queue) -> AsyncIterator[bytes]:
    while (message := await queue.get()) is not None:
        yield message


async def _abort(context: Any, error: grpc.aio.AioRpcError) -> None:
    """Ends a call as it ended upstream, error details included."""
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


def _is_step(message: bytes) -> bool:
    return bool(pb.SessionRequest.FromString(message).HasField("step"))


def _is_answer(message: bytes) -> bool:
    return bool(pb.SessionResponse.FromString(message).HasField("answer"))
