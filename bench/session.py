"""What one round trip of a Session costs: a step of many decoding sequences in one message, over a Unix socket.

Each round tells one computed token and one new token of every sequence, and asks for a block for those that will cross
a block's end within two steps: `python -m bench.session`. The KV manager is a process of its own, and the runner's end
is that of a real runner, by each way in turn. A round trip ends when the answer is there, which the thread that reads
notes.

`--busy`: as in a runner that decodes. The message goes out, then the same thread computes a step of 16 streams of the
demo model on all cores, and the answer comes meanwhile. `--against TREE`: by turns with the KV manager of another
working tree, over its socket for sessions.
"""

from __future__ import annotations

import json
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from octavo.kv.v1 import kv_manager_pb2 as pb

from bench.sidecar import kv_manager, kv_manager_of
from bench.turns import LoadMeter
from services.session.dial import SessionDial
from services.session.link import GrpcLink, Link, LinkBroken
from services.session.socket_link import SocketLink

BLOCK_SIZE = 16
LEASE_BLOCKS = 64
READY_SECONDS = 30.0
SILENCE_SECONDS = 600
STREAMS = 16
"""Of the busy engine, which have so many tokens each."""
CONTEXT = 512
TURN = 10
"""Rounds of one way after another, before it is the other way's turn: what else the machine does meets both."""

Work = Callable[[], object]


class _Runner:
    """A runner without an engine."""

    def __init__(self, link: Link, pool_id: str, sequences: int, prompt_tokens: int, steps: int) -> None:
        self._link = link
        blocks = sequences * (-(-(prompt_tokens + steps) // BLOCK_SIZE) + 2) + 2 * LEASE_BLOCKS + 1
        spec = pb.PoolSpec(num_blocks=blocks, block_size=BLOCK_SIZE, model_fingerprint="bench")
        opening = pb.SessionOpen(pool_id=pool_id, spec=spec, runner_id="bench", lease_blocks=LEASE_BLOCKS)
        link.send(pb.SessionRequest(open=opening))
        self._epoch = self._next().opened.epoch
        self._number = 0
        # Sequences of different lengths, so that they don't cross their blocks' ends in the same step.
        self._known = [prompt_tokens + index % BLOCK_SIZE for index in range(sequences)]
        for handle, tokens in enumerate(self._known):
            prompt = array("I", range(handle, handle + tokens)).tobytes()
            admit = pb.AdmitOrder(sequence_id=f"s{handle}", handle=handle, token_ids=prompt)
            link.send(self._step(pb.SessionOrder(admit=admit)))
            assert self._next().answer.admitted

    def round(self, meanwhile: Work | None) -> float:
        """One decode step of all sequences; milliseconds from the message until its answer is there."""
        count = len(self._known)
        asks = array("I", [2 if known % BLOCK_SIZE in (0, BLOCK_SIZE - 1) else 0 for known in self._known])
        progress = pb.Progress(
            handles=array("I", range(count)).tobytes(),
            token_counts=array("I", [1] * count).tobytes(),
            computed_tokens=array("I", self._known).tobytes(),
            asks=asks.tobytes(),
            token_ids=array("I", range(count)).tobytes(),
        )
        request = self._step(pb.SessionOrder(progress=progress))
        start = time.monotonic()
        self._link.send(request)
        if meanwhile is not None:
            meanwhile()
        answer = self._next().answer
        assert answer.number == self._number
        assert not answer.refusals
        self._known = [known + 1 for known in self._known]
        return (self._link.received_at - start) * 1000

    def _step(self, order: pb.SessionOrder) -> pb.SessionRequest:
        self._number += 1
        return pb.SessionRequest(step=pb.SessionStep(epoch=self._epoch, number=self._number, orders=[order]))

    def _next(self) -> pb.SessionResponse:
        response = self._link.receive(READY_SECONDS)
        assert response is not None, "the KV manager does not answer"
        return response


@contextmanager
def _connected(dial: Callable[[], Link]) -> Iterator[Link]:
    """A link to a KV manager that may not listen yet."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            link = dial()
            break
        except LinkBroken:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    try:
        while not link.connected:
            assert time.monotonic() < deadline, "the KV manager does not greet"
            time.sleep(0.01)
        yield link
    finally:
        link.close()


def _decode_step() -> Work:
    """A step of the demo model, which takes all cores."""
    from bench.kernels import step_of
    from model_runner.loading import demo_model_path, load_model

    step = step_of(load_model(demo_model_path()), "cpu", STREAMS, CONTEXT, 1)
    return lambda: step(0)


def measure(
    sequences: int, prompt_tokens: int, rounds: int, warm_up: int, busy: bool, against: Path | None = None
) -> dict[str, dict[str, float]]:
    """Milliseconds of a round trip by each way: some quantiles and the worst, and one round after another."""
    meanwhile = _decode_step() if busy else None
    with kv_manager(session_silence_seconds=SILENCE_SECONDS) as address, ExitStack() as links:
        dials: dict[str, Callable[[], Link]] = {"socket": SessionDial(address), "grpc": lambda: GrpcLink(address)}
        if against is not None:
            dials["against"] = SessionDial(links.enter_context(kv_manager_of(against, SILENCE_SECONDS)))
        spent: dict[str, list[float]] = {way: [] for way in dials}
        took = dict.fromkeys(dials, 0.0)
        runners: dict[str, _Runner] = {}
        for way, dial in dials.items():
            link = links.enter_context(_connected(dial))
            assert isinstance(link, GrpcLink if way == "grpc" else SocketLink)
            runners[way] = _Runner(link, way, sequences, prompt_tokens, rounds + TURN + warm_up)
            for _ in range(warm_up):
                runners[way].round(None)
        for turn in range(-(-rounds // TURN)):
            for way in dials if turn % 2 else reversed(dials):
                start = time.perf_counter()
                spent[way] += [runners[way].round(meanwhile) for _ in range(TURN)]
                took[way] += time.perf_counter() - start
    return {way: _figures(times) | {"cycle_ms": 1000 * took[way] / len(times)} for way, times in spent.items()}


def _figures(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {"p10_ms": cuts[9], "p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(times)}


def main(
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in one message.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, and up to 15 more.")] = 512,
    rounds: Annotated[int, typer.Option(min=2, help="Round trips that count, by each way.")] = 2000,
    warm_up: Annotated[int, typer.Option(min=0, help="Round trips before them.")] = 100,
    busy: Annotated[bool, typer.Option("--busy", help="Beside an engine that decodes 16 streams.")] = False,
    against: Annotated[
        Path | None, typer.Option(help="A working tree, whose KV manager takes turns with this one's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measures a Session's round trip."""
    meter = LoadMeter()
    result = measure(sequences, prompt_tokens, rounds, warm_up, busy, against)
    load = meter.read()
    if as_json:
        typer.echo(json.dumps({"sequences": sequences, "busy": busy, **result, **load.figures()}))
        return
    typer.echo(str(load))
    names = {"p10_ms": "p10", "p50_ms": "p50", "p99_ms": "p99", "max_ms": "worst", "cycle_ms": "one after another"}
    for way, figures in result.items():
        said = ", ".join(f"{name} {figures[key]:.3f} ms" for key, name in names.items())
        typer.echo(f"{sequences} sequences in a message, {way}: {said}")


if __name__ == "__main__":
    typer.run(main)
