"""What the engine and its callers exchange: options, states, failures, and the executor that runs the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from model_runner.batch import BatchEntry
from model_runner.books import CopyOrder, PoolFacts
from model_runner.request import Chunk
from model_runner.scheduler_limits import SchedulerLimits


class DuplicateRequest(Exception):
    """A live request has the id already."""


class QueueFull(Exception):
    """Too much waits already; in retry_seconds the line will have moved by about one request."""

    def __init__(self, sentence: str, retry_seconds: float) -> None:
        super().__init__(sentence)
        self.retry_seconds = retry_seconds


class EngineStopped(Exception):
    """The engine takes no more requests."""


class EngineState(Enum):
    """Whether the engine can make progress."""

    WAITING_FOR_BOOKS = "waiting for the KV manager"
    SERVING = "serving"
    REFUSED = "refused by the KV manager"
    TAKEN = "its pool was taken over by another runner"
    STOPPED = "stopped"


class FailureKind(Enum):
    """Whose turn it is after a failure."""

    ENGINE = "the engine has a fault"
    ELSEWHERE = "another server may well serve the request"
    REQUEST = "the KV manager refuses what the request asks for"
    PINS_EXHAUSTED = "as much of the pool is pinned as may be; without its pin the request may be served"
    STOPPING = "the server stops before the answer is complete; another one may serve the request"
    FORM = "the form that the request asks for cannot go on from the text that was drawn"
    NAME_TAKEN = "the request must take another id: the KV manager has its sequences already"


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended without an answer; the sentence is for its client."""

    request_id: str
    sentence: str
    kind: FailureKind


class Executor(Protocol):
    """Runs the model on physical blocks."""

    def execute(self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder]) -> Tensor:
        """Copies, then computes the entries; float32 logits [rows that they want, vocabulary], in their order."""
        ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """max_sequence_tokens: the longest sequence that model and pool can hold.

    max_queued_requests, of max_queued_tokens tokens of prompts, may wait. async_steps: a step is planned, where that
    can be done, while the one before it runs.
    """

    facts: PoolFacts
    limits: SchedulerLimits
    max_sequence_tokens: int
    eos_token_ids: frozenset[int]
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 22
    async_steps: bool = False


Delivery = Callable[[Sequence[Chunk | Failure]], None]
"""Takes all chunks of a step, in the engine's thread."""

StateListener = Callable[[EngineState, str], None]
"""Takes each change of state with a sentence, in the engine's thread."""
