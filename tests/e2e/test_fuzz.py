"""2,000 random requests, valid and not, at a live server: each ends well or is refused, and the server still serves."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
from octavo.runner.v1 import model_runner_pb2 as pb

from model_runner.request import Chunk
from services.channels import open_aio_channel
from services.errors import describe_rpc_error
from tests.e2e.request_fuzz import random_request, shown
from tests.e2e.stack import SERVING, health_of, running_stack
from tests.e2e.tiny_chat_model import write_tiny_chat_model

REQUESTS = 2000
AT_A_TIME = 24
PATIENCE_SECONDS = 120.0
METHOD = "/octavo.runner.v1.ModelRunnerService/Generate"
SEED = int(os.environ.get("OCTAVO_FUZZ_SEED", "6"))

REFUSALS = {
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
}
"""How a request may end that is not carried out."""
CUT_SHORT = {"DEADLINE_EXCEEDED", "CANCELLED"}
"""How one may end that has a deadline, or whose client leaves."""


async def outcome_of(stub: grpc.aio.UnaryStreamMultiCallable, rng: random.Random, data: bytes) -> str:
    """The status of one request. One in ten has hardly any time, one in twenty leaves after a chunk."""
    kind = rng.random()
    call = stub(data, timeout=rng.choice([0.001, 0.01, 0.05]) if kind < 0.1 else PATIENCE_SECONDS)
    last = None
    try:
        async for message in call:
            last = message
            if kind > 0.95:
                call.cancel()
    except grpc.aio.AioRpcError as error:
        code, reason, _, _ = describe_rpc_error(error)
        allowed = REFUSALS | CUT_SHORT if kind < 0.1 or kind > 0.95 else REFUSALS
        if code not in allowed:
            raise AssertionError(f"{code} {reason} {error.details()}\n{shown(data)}") from error
        return str(code)
    except asyncio.CancelledError:
        assert kind > 0.95
        return "CANCELLED"
    assert last is not None, f"an empty stream\n{shown(data)}"
    assert last.HasField("usage"), f"a stream without an end\n{shown(data)}"
    return "OK"


async def fuzz(address: str) -> Counter[str]:
    rng = random.Random(SEED)
    plans = [(random.Random(rng.random()), random_request(rng)) for _ in range(REQUESTS)]
    turns = asyncio.Semaphore(AT_A_TIME)
    async with open_aio_channel(address) as channel:
        stub = channel.unary_stream(METHOD, response_deserializer=pb.GenerateResponse.FromString)

        async def one(plan: tuple[random.Random, bytes]) -> str:
            async with turns:
                return await outcome_of(stub, *plan)

        return Counter(await asyncio.gather(*map(one, plans)))


def tokens_of(chunks: Iterator[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def test_2000_random_requests(tmp_path: Path) -> None:
    model = write_tiny_chat_model(tmp_path / "model")
    with running_stack(tmp_path, "--model", str(model), "--num-blocks", "128", "--log-level", "warning") as stack:
        assert stack.runner is not None
        with stack.client() as client:
            ask = {"max_tokens": 20, "ignore_eos": True}
            before = tokens_of(client.generate("Once upon a time", **ask))
            outcomes = asyncio.run(fuzz(stack.runner_address))
            print(dict(outcomes))
            assert outcomes.total() == REQUESTS
            # Much of it is carried out, and much of it is not.
            assert outcomes["OK"] > REQUESTS // 8, outcomes
            assert outcomes["INVALID_ARGUMENT"] > REQUESTS // 8, outcomes
            assert health_of(stack.runner_address) == SERVING
            stack.assert_nothing_held()
            assert tokens_of(client.generate("Once upon a time", **ask)) == before
        assert "unforeseen" not in stack.runner.log
        assert "engine step failed" not in stack.runner.log
