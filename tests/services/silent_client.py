"""A client that asks, and does not read until it is told to.

A gRPC client's transport takes up to 4 MiB off the wire that nobody reads; this one takes the least that HTTP/2 allows.
"""

from __future__ import annotations

import grpc
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc

from services.channels import CHANNEL_OPTIONS
from tests.services.kv_support import WAIT_SECONDS

SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))


class Silent:
    """Use as a context manager; `call` is the stream, to be read or not."""

    def __init__(self, address: str, request: pb.GenerateRequest, timeout: float = WAIT_SECONDS) -> None:
        self._channel = grpc.insecure_channel(address, options=(*CHANNEL_OPTIONS, *SMALL_WINDOW))
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(self._channel)
        self.call = stub.Generate(request, timeout=timeout)

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
