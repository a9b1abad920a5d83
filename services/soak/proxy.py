"""Between a runner and its KV manager: passes all calls on, and lets faults happen to the messages of sessions.

Sessions come by gRPC, or by a socket of their own beside the proxy's address, as beside a KV manager's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import grpc

from services.addresses import session_address
from services.channels import open_aio_channel
from services.grpc_server import bind
from services.soak.message_faults import MessageFaults, is_answer, is_step
from services.soak.socket_proxy import SocketProxy

Queue = asyncio.Queue[bytes | None]
"""Messages of one direction; None ends it."""


class FaultyProxy:
    """A server on `listen` that calls `upstream`; lives on one event loop.

    by_socket: whether there is a socket for sessions beside both, which are Unix sockets then.
    """

    def __init__(self, listen: str, upstream: str, faults: MessageFaults, *, by_socket: bool) -> None:
        self.faults = faults
        self._listen = listen
        self._channel = open_aio_channel(upstream)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_Everything(self._pass_session, self._pass_call),))
        self._socket_proxy = _beside(listen, upstream, faults) if by_socket else None

    async def start(self) -> None:
        """Listens."""
        if self._socket_proxy is not None:
            # Before the address, as that of a KV manager.
            await self._socket_proxy.start()
        bind(self._server, self._listen)
        await self._server.start()

    async def stop(self) -> None:
        """Ends what is open."""
        if self._socket_proxy is not None:
            await self._socket_proxy.stop()
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
            _start(self._read(requests, up, is_step, end_by_cut), up),
            _start(self._read(call, down, is_answer, end_by_cut), down),
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
        """Moves messages into a queue, until the session is cut."""
        if await self.faults.carry(messages, queue.put_nowait, is_subject):
            end_by_cut()


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


def _beside(listen: str, upstream: str, faults: MessageFaults) -> SocketProxy:
    here, there = session_address(listen), session_address(upstream)
    assert here is not None, f"no socket for sessions can be beside {listen}"
    assert there is not None, f"no socket for sessions can be beside {upstream}"
    return SocketProxy(here, there, faults)
