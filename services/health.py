"""grpc.health.v1 for grpc.aio, with watches that end when the server stops instead of holding it up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

LIVENESS = "liveness"
"""The health name that is SERVING as long as the process lives."""
READINESS = "readiness"
"""The health name that is SERVING while the process takes work; '' and the service names say the same."""


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Check and Watch over a table of statuses by name. Set `ended` before the last set(): watches end after it."""

    def __init__(self, statuses: Mapping[str, int]) -> None:
        self.ended = False
        self._statuses = dict(statuses)
        self._changed = asyncio.Condition()

    async def set(self, names: Iterable[str], status: int | None) -> None:
        """Gives the names a status and tells the watches; None makes them unknown."""
        async with self._changed:
            for name in names:
                if status is None:
                    self._statuses.pop(name, None)
                else:
                    self._statuses[name] = status
            self._changed.notify_all()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The status of a name; NOT_FOUND for one that is unknown."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no service {request.service!r} here.")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status of a name now and at each change; SERVICE_UNKNOWN for one that is unknown."""
        last = None
        while True:
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            elif self.ended:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "The server is stopping.")
            else:
                await self._wait_for_news(request.service, status)

    async def _wait_for_news(self, name: str, told: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended or self._statuses.get(name, _UNKNOWN) != told)


class Health:
    """grpc.health.v1 of a process: '', 'readiness' and the service names tell readiness, 'liveness' that it lives.

    Several servers can answer. Other names tell of what the process knows of others; its own readiness does not depend
    on them.
    """

    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        self._readiness = ("", READINESS, *service_names)
        self._servicer = HealthServicer({LIVENESS: SERVING} | dict.fromkeys(self._readiness, NOT_SERVING))
        self._takes_work = True
        self.ready = False
        """Whether the process takes work."""
        self.add_to(server)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Lets another server answer too, which is yet to be started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_ready(self, ready: bool) -> None:
        """Tells whether the process can do its work; once it is drained or stopping, it never can again."""
        self.ready = ready and self._takes_work
        await self._servicer.set(self._readiness, SERVING if self.ready else NOT_SERVING)

    async def tell(self, name: str, well: bool | None) -> None:
        """Tells of something else, whether all is well with it; None when there is no such thing any more."""
        status = None if well is None else SERVING if well else NOT_SERVING
        await self._servicer.set([name], status)

    async def drain(self) -> None:
        """Tells that the process shall get no more work."""
        self._takes_work = False
        await self.set_ready(False)

    async def stop(self) -> None:
        """The same, and ends the watches after they were told."""
        self._servicer.ended = True
        await self.drain()
