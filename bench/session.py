"""What one round trip of a Session costs: a step of many decoding sequences in one message, over a Unix socket.

Each round tells one computed token and one new token of every sequence, and asks for a block for those that will cross
a block's end within two steps: `python -m bench.session`. The KV manager is a process of its own.
"""

from __future__ import annotations

import json
import queue
import statistics
from array import array
from time import perf_counter_ns
from typing import Annotated

import grpc
import typer
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from bench.sidecar import kv_manager

BLOCK_SIZE = 16
LEASE_BLOCKS = 64
READY_SECONDS = 30


class _Runner:
    """A runner without an engine: what it says goes into a queue that gRPC's own thread writes from."""

    def __init__(self, channel: grpc.Channel, sequences: int, prompt_tokens: int, steps: int) -> None:
        self._said: queue.SimpleQueue[pb.SessionRequest] = queue.SimpleQueue()
        self._answers = kv_manager_pb2_grpc.KvManagerServiceStub(channel).Session(iter(self._said.get, None))
        blocks = sequences * (-(-(prompt_tokens + steps) // BLOCK_SIZE) + 2) + 2 * LEASE_BLOCKS + 1
        spec = pb.PoolSpec(num_blocks=blocks, block_size=BLOCK_SIZE, model_fingerprint="bench")
        opening = pb.SessionOpen(spec=spec, runner_id="bench", lease_blocks=LEASE_BLOCKS)
        self._epoch = self._ask(pb.SessionRequest(open=opening)).opened.epoch
        self._number = 0
        # Sequences of different lengths, so that they don't cross their blocks' ends in the same step.
        self._known = [prompt_tokens + index % BLOCK_SIZE for index in range(sequences)]
        for handle, tokens in enumerate(self._known):
            prompt = array("I", range(handle, handle + tokens)).tobytes()
            admit = pb.AdmitOrder(sequence_id=f"s{handle}", handle=handle, token_ids=prompt)
            assert self._step(pb.SessionOrder(admit=admit)).admitted

    def round(self) -> int:
        """One decode step of all sequences; nanoseconds from the message to its answer."""
        count = len(self._known)
        computed = array("I", self._known)
        asks = array("I", [2 if known % BLOCK_SIZE in (0, BLOCK_SIZE - 1) else 0 for known in self._known])
        progress = pb.Progress(
            handles=array("I", range(count)).tobytes(),
            token_counts=array("I", [1] * count).tobytes(),
            computed_tokens=computed.tobytes(),
            asks=asks.tobytes(),
            token_ids=array("I", range(count)).tobytes(),
        )
        start = perf_counter_ns()
        answer = self._step(pb.SessionOrder(progress=progress))
        spent = perf_counter_ns() - start
        assert not answer.refusals
        self._known = [known + 1 for known in self._known]
        return spent

    def close(self) -> None:
        """Ends the stream."""
        self._answers.cancel()

    def _step(self, order: pb.SessionOrder) -> pb.SessionAnswer:
        self._number += 1
        return self._ask(
            pb.SessionRequest(step=pb.SessionStep(epoch=self._epoch, number=self._number, orders=[order]))
        ).answer

    def _ask(self, request: pb.SessionRequest) -> pb.SessionResponse:
        self._said.put(request)
        return next(self._answers)


def measure(sequences: int, prompt_tokens: int, rounds: int, warm_up: int) -> dict[str, float]:
    """Milliseconds of a round trip: p50, p99 and the worst."""
    with kv_manager() as address, grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(READY_SECONDS)
        runner = _Runner(channel, sequences, prompt_tokens, rounds + warm_up)
        for _ in range(warm_up):
            runner.round()
        spent = [runner.round() / 1e6 for _ in range(rounds)]
        runner.close()
    cuts = statistics.quantiles(spent, n=100)
    return {"sequences": sequences, "p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(spent)}


def main(
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in one message.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, and up to 15 more.")] = 512,
    rounds: Annotated[int, typer.Option(min=2, help="Round trips that count.")] = 2000,
    warm_up: Annotated[int, typer.Option(min=0, help="Round trips before them.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measures a Session's round trip."""
    result = measure(sequences, prompt_tokens, rounds, warm_up)
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(
        f"{sequences} sequences in a message: p50 {result['p50_ms']:.3f} ms, p99 {result['p99_ms']:.3f} ms, "
        f"worst {result['max_ms']:.3f} ms"
    )


if __name__ == "__main__":
    typer.run(main)
