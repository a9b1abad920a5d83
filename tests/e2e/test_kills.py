"""Ten times kill -9 during one run of 100 requests, of the KV manager and of the runner: real processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from services.client import Client, OctavoError
from services.client_retry import RetryPolicy
from tests.e2e.stack import (
    PATIENCE_SECONDS,
    SERVING,
    Stack,
    assert_kill,
    golden_items,
    health_of,
    running_stack,
    wait_until,
)

KILLS = 10
REQUESTS = 100
BATCH = REQUESTS // KILLS
ENDED_OF_BATCH = 3
"""Requests of a batch that have ended when the next kill comes; others run then, and others wait."""
USABLE_BLOCKS = 199
RUNNER = ("--num-blocks", str(USABLE_BLOCKS + 1), "--max-sequences", "4")
ITEMS = [item for item in golden_items() if min(item["gaps"]) > 0.01]
"""Golden outputs that no rounding changes: any run must give exactly these tokens."""


@dataclass(frozen=True, slots=True)
class Patience(RetryPolicy):
    """Sends a request again as often as it may be, and notes each time."""

    pauses_made: list[float] = field(default_factory=list)

    def pauses(self) -> Iterator[float]:
        while True:
            self.pauses_made.append(0.2)
            yield 0.2


@dataclass(slots=True)
class Request:
    """The first tokens of a golden output: what is right, what came, and the code of the error if there was one."""

    prompt: list[int]
    right: list[int]
    retries: Patience = field(default_factory=Patience)
    tokens: list[int] = field(default_factory=list)
    code: str = ""

    def run(self, address: str) -> None:
        with Client(address, timeout=PATIENCE_SECONDS, retry=self.retries) as client:
            try:
                for chunk in client.generate(self.prompt, max_tokens=len(self.right), ignore_eos=True):
                    self.tokens += chunk.token_ids
            except OctavoError as error:
                self.code = error.code


def request_of(number: int) -> Request:
    """8 to 32 tokens, so that requests of a batch end one after the other."""
    item = ITEMS[number % len(ITEMS)]
    return Request(item["prompt_token_ids"], item["output_ids"][: 8 + number * 7 % 25])


class Load:
    """100 requests, which begin batch by batch."""

    def __init__(self, stack: Stack, threads: ThreadPoolExecutor) -> None:
        self.requests = [request_of(number) for number in range(REQUESTS)]
        self._stack = stack
        self._threads = threads
        self._ends: list[Future[None]] = []

    def begin_batch(self) -> None:
        first = len(self._ends)
        self._ends += [
            self._threads.submit(request.run, self._stack.runner_address)
            for request in self.requests[first : first + BATCH]
        ]

    def until_some_ended(self) -> None:
        """Until all earlier batches, and some requests of the last one, have ended."""
        enough = len(self._ends) - BATCH + ENDED_OF_BATCH
        wait_until("the ends of requests", lambda: sum(map(Future.done, self._ends)) >= enough, self._stack.runner)

    def until_ended(self) -> None:
        for end in self._ends:
            end.result(PATIENCE_SECONDS)

    @property
    def retried(self) -> int:
        """Requests that the client sent more than once."""
        return sum(bool(request.retries.pauses_made) for request in self.requests)


def assert_no_block_lost(stack: Stack) -> None:
    stack.assert_nothing_held()
    assert stack.pool().occupancy.usable_blocks == USABLE_BLOCKS


def test_ten_kills_of_the_kv_manager_cost_no_request_no_token_and_no_block(tmp_path: Path) -> None:
    with running_stack(tmp_path, *RUNNER) as stack, ThreadPoolExecutor(REQUESTS) as threads:
        load = Load(stack, threads)
        for _ in range(KILLS):
            load.begin_batch()
            load.until_some_ended()
            assert stack.manager is not None
            assert_kill(stack.manager)
            stack.start_manager()
        load.until_ended()

        assert [request.code for request in load.requests] == [""] * REQUESTS
        assert [request.tokens for request in load.requests] == [request.right for request in load.requests]
        samples = stack.runner_samples()
        # Between two kills new requests were admitted, so that each kill met a session that was up.
        assert samples["octavo_kv_session_restores_total"] >= KILLS
        # Nothing was computed twice.
        assert samples["octavo_runner_prefill_tokens_total"] <= sum(len(each.prompt) for each in load.requests)
        assert samples["octavo_runner_preemptions_total"] == 0
        assert_no_block_lost(stack)


def test_ten_kills_of_the_runner_cost_only_what_had_begun_and_no_block(tmp_path: Path) -> None:
    with running_stack(tmp_path, *RUNNER) as stack, ThreadPoolExecutor(REQUESTS) as threads:
        load = Load(stack, threads)
        epoch = stack.pool().epoch
        load.begin_batch()
        for kill in range(1, KILLS + 1):
            load.until_some_ended()
            assert stack.runner is not None
            assert_kill(stack.runner)
            if kill < KILLS:
                # Nobody is there to take these: the client has to come again.
                load.begin_batch()
            wait_until("the whole pool", lambda: stack.pool().occupancy.held_blocks == 0)
            assert stack.pool().occupancy.sequences == 0
            runner = stack.start_runner()
            wait_until("serving", lambda runner=runner: health_of(stack.runner_address) == SERVING, runner)
        load.until_ended()

        failed = [request for request in load.requests if request.code]
        assert {request.code for request in failed} == {"UNAVAILABLE"}
        for request in failed:
            # What has not begun is sent again and never fails.
            assert 0 < len(request.tokens) <= len(request.right)
            assert request.tokens == request.right[: len(request.tokens)]
        completed = [request for request in load.requests if not request.code]
        assert [request.tokens for request in completed] == [request.right for request in completed]
        assert len(completed) >= KILLS * ENDED_OF_BATCH
        assert load.retried >= REQUESTS - BATCH
        assert stack.pool().epoch == epoch + KILLS
        assert_no_block_lost(stack)
