"""What it costs an engine to stream to clients in another process, and whether a long text stalls running streams.

python -m bench.streaming [--model sleep|real]: first the step's interval with as many clients as --streams, over the
same engine's interval when nobody listens, in turns. Then the longest gap between two tokens of a stream while a long
text is tokenised, over the longest gap in a span of the same length just before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from octavo.runner.v1 import model_runner_pb2_grpc
from prometheus_client import CollectorRegistry

from bench.sidecar import kv_manager
from bench.sleeping import SleepingExecutor
from model_runner.batch import BatchEntry
from model_runner.books import CopyOrder
from model_runner.engine import Engine
from model_runner.engine_types import Delivery, EngineState, Executor, Failure
from model_runner.request import Chunk, GenerateRequest, SamplingParams, StopConditions
from services.answering import Answering, ServedModel
from services.config import ModelRunnerSettings
from services.endpoint import open_endpoint
from services.model_setup import Setup, set_up_model
from services.runner_metrics import RunnerMetrics
from services.runner_process import KIND
from services.runner_service import ModelRunnerServicer
from services.session.dial import SessionDial
from services.session_books import SessionBooks
from services.streams import Streams

FIRST_STEPS = 5
"""Steps left out at both ends of a run, while streams open and close."""

TEXT_SECONDS = 1.0
"""The span that is looked at after a long text was sent, at most."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run: streams, tokens of each prompt and answer, rounds, and tokens of the long text."""

    streams: int = 64
    prompt_tokens: int = 16
    tokens: int = 100
    rounds: int = 3
    text_tokens: int = 100_000


@dataclass(slots=True)
class Stopwatch:
    """An executor that notes when each step begins in which all streams decode."""

    executor: Executor
    streams: int
    started: list[float] = field(default_factory=list)

    def execute(self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder]) -> torch.Tensor:
        if len(entries) >= self.streams and sum(len(entry.token_ids) for entry in entries) == self.streams:
            self.started.append(time.monotonic())
        return self.executor.execute(entries, copies)

    def take(self) -> list[float]:
        """Milliseconds from each such step to the next; forgets them."""
        taken, self.started = self.started[FIRST_STEPS:-FIRST_STEPS], []
        return [1e3 * (later - earlier) for earlier, later in pairwise(taken)]


class Peer:
    """A process of bench.streaming_client."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.streaming_client", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def ask(self, **order: Any) -> dict[str, Any]:
        """Blocks until the order is carried out."""
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = self._answer()
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class Bench:
    """One model, served in this process; the KV manager and the clients have processes of their own."""

    def __init__(self, setup: Setup, executor: Executor, kv_address: str, sizes: Sizes) -> None:
        self._setup = setup
        self._watch = Stopwatch(executor, sizes.streams)
        self._kv_address = kv_address
        self._sizes = sizes

    def unheard(self) -> tuple[list[float], float]:
        """Milliseconds of each step when nobody listens, and CPU milliseconds of this process for a step."""
        ended = Countdown(self._sizes.streams)
        with self._engine(ended.take, "quiet", CollectorRegistry()) as engine:
            began = time.process_time()
            for number in range(self._sizes.streams):
                stop = StopConditions(max_tokens=self._sizes.tokens, ignore_eos=True)
                prompt = (number + 1,) * self._sizes.prompt_tokens
                engine.submit(GenerateRequest(str(number), prompt, SamplingParams(), stop))
            ended.wait()
            spent = time.process_time() - began
        return self._watch.take(), 1e3 * spent / self._sizes.tokens

    async def streamed(self, clients: Peer) -> tuple[list[float], float, float]:
        """As unheard() with every token streamed; then CPU milliseconds of the clients for a step."""
        began = time.process_time()
        answer = await asyncio.to_thread(clients.ask, **self._order(self._sizes.tokens))
        spent = time.process_time() - began
        return self._watch.take(), 1e3 * spent / self._sizes.tokens, 1e3 * answer["cpu_seconds"] / self._sizes.tokens

    async def gaps(self, clients: Peer, other: Peer, verb: str, text: str) -> tuple[float, float, float, str]:
        """Milliseconds: the longest gap before and while, and how long the text took; and the answer."""
        streaming = asyncio.create_task(asyncio.to_thread(clients.ask, **self._order(4 * self._sizes.tokens)))
        await asyncio.sleep(TEXT_SECONDS)
        answer = await asyncio.to_thread(other.ask, do="send", verb=verb, text=text)
        arrivals = (await streaming)["arrivals"]
        sent, answered = answer["sent"], answer["answered"]
        # A text that goes on to be generated from is tokenised first: later steps compute its chunks.
        span = min(answered - sent, TEXT_SECONDS)
        before = longest_gap(arrivals, sent - span, sent)
        return before, longest_gap(arrivals, sent, sent + span), 1e3 * (answered - sent), answer["answer"]

    @asynccontextmanager
    async def service(self, directory: Path) -> AsyncIterator[str]:
        """The runner's service as runner_process has it; yields its address."""
        settings = ModelRunnerSettings(
            runner_address=f"unix:{directory}/runner.sock", runner_metrics_address="127.0.0.1:0"
        )
        registry = CollectorRegistry()
        answering = Answering(Streams(asyncio.get_running_loop()))
        add = partial(model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server, ModelRunnerServicer(answering))
        endpoint = await open_endpoint(KIND, settings, registry, add)
        try:
            with self._engine(answering.streams.deliver, "streamed", registry) as engine:
                limits = replace(self._setup.limits, max_sequence_tokens=self._setup.options.max_sequence_tokens)
                setup = self._setup
                forms = setup.form_compiler()
                answering.served = ServedModel(engine, setup.tokenizer, limits, setup.describe("streamed"), forms)
                while engine.state is not EngineState.SERVING:
                    await asyncio.sleep(0.01)
                yield endpoint.address
        finally:
            await endpoint.stop(0)

    @contextmanager
    def _engine(self, deliver: Delivery, pool: str, registry: CollectorRegistry) -> Iterator[Engine]:
        books = SessionBooks(SessionDial(self._kv_address), pool_id=pool)
        metrics = RunnerMetrics(registry, lambda: 0, lambda: 0)
        setup = self._setup
        engine = Engine(self._watch, books, setup.tokenizer, setup.options, deliver, observer=metrics)
        engine.start()
        try:
            yield engine
        finally:
            engine.stop()

    def _order(self, tokens: int) -> dict[str, Any]:
        sizes = self._sizes
        return {"do": "stream", "streams": sizes.streams, "tokens": tokens, "prompt_tokens": sizes.prompt_tokens}


class Countdown:
    """A delivery to nobody, which knows when all requests have ended."""

    def __init__(self, requests: int) -> None:
        self._left = requests

    def take(self, items: Sequence[Chunk | Failure]) -> None:
        self._left -= sum(isinstance(item, Failure) or item.usage is not None for item in items)

    def wait(self) -> None:
        while self._left > 0:
            time.sleep(0.01)


def longest_gap(arrivals: Sequence[Sequence[float]], first: float, last: float) -> float:
    """Milliseconds of the longest gap between two arrivals of a stream that has a part between `first` and `last`."""
    gaps = (
        1e3 * (later - earlier)
        for each in arrivals
        for earlier, later in pairwise(each)
        if later > first and earlier < last
    )
    return max(gaps, default=0.0)


def long_text(setup: Setup, tokens: int) -> str:
    """A text of about so many tokens, of words and numbers that don't repeat."""
    words = [
        f"Line {number}: the value of field {number * 7919 % 10007} is not known." for number in range(tokens // 10)
    ]
    text = "\n".join(words)
    count = len(setup.tokenizer.encode(text))
    return text[: len(text) * tokens // count]


def served_setup(model: str, text_tokens: int) -> Setup:
    """The real model; for `sleep` with limits that let a request of `text_tokens` in."""
    setup = set_up_model(ModelRunnerSettings(log_format="json", num_blocks=4_000))
    if model == "real":
        return setup
    # Its blocks are in the books alone.
    facts = replace(setup.options.facts, num_blocks=4_000 + text_tokens // 8)
    longest = setup.options.max_sequence_tokens + text_tokens
    return replace(setup, options=replace(setup.options, facts=facts, max_sequence_tokens=longest))


async def run(given: argparse.Namespace, sizes: Sizes) -> None:
    setup = served_setup(given.model, sizes.text_tokens)
    executor: Executor = setup.executor
    if given.model == "sleep":
        executor = SleepingExecutor(given.step_ms / 1e3, setup.limits.vocab_size, token_id=1)
    with tempfile.TemporaryDirectory() as directory, kv_manager() as kv_address:
        bench = Bench(setup, executor, kv_address, sizes)
        async with bench.service(Path(directory)) as address:
            clients, other = Peer(address), Peer(address)
            if "cost" in given.what:
                await cost(bench, clients, sizes)
            if "gaps" in given.what:
                await gaps(bench, clients, other, setup, sizes)
            clients.close()
            other.close()


async def cost(bench: Bench, clients: Peer, sizes: Sizes) -> None:
    ratios = []
    for number in range(sizes.rounds + 1):
        quiet, quiet_cpu = await asyncio.to_thread(bench.unheard)
        streamed, cpu, client_cpu = await bench.streamed(clients)
        if not number:
            continue  # Warms up.
        ratios.append(statistics.mean(streamed) / statistics.mean(quiet))
        print(
            f"step unheard {statistics.mean(quiet):.2f} ms, streamed {statistics.mean(streamed):.2f} ms "
            f"(medians {statistics.median(quiet):.2f}, {statistics.median(streamed):.2f}), ratio {ratios[-1]:.3f}; "
            f"CPU a step {quiet_cpu:.2f}, {cpu:.2f} ms, clients {client_cpu:.2f} ms",
            flush=True,
        )
    print(f"cost of streaming to {sizes.streams} clients: {100 * (statistics.median(ratios) - 1):.1f} % of the step")


async def gaps(bench: Bench, clients: Peer, other: Peer, setup: Setup, sizes: Sizes) -> None:
    text = long_text(setup, sizes.text_tokens)
    for verb in ("Tokenize", "Generate"):
        for _ in range(sizes.rounds):
            before, during, took, answer = await bench.gaps(clients, other, verb, text)
            if not before or not during:
                raise SystemExit("The streams had ended before the text was answered: give more --tokens.")
            print(
                f"{verb} of {sizes.text_tokens} tokens ({answer}, {took:.0f} ms): longest gap {during:.1f} ms, "
                f"before {before:.1f} ms, ratio {during / before:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("sleep", "real"), default="sleep")
    parser.add_argument("--what", nargs="+", choices=("cost", "gaps"), default=["cost", "gaps"])
    parser.add_argument("--step-ms", type=float, default=20.0, help="how long the sleeping model takes")
    for name, value in ((each, getattr(Sizes(), each)) for each in Sizes.__slots__):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    given = parser.parse_args()
    sizes = Sizes(**{name: getattr(given, name) for name in Sizes.__slots__})
    asyncio.run(run(given, sizes))


if __name__ == "__main__":
    main()
