"""An engine over the toy model and real books, with what it delivers collected by request."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmanager import KvManager
from model_runner.books import KvBooks, PoolFacts
from model_runner.engine import Engine
from model_runner.engine_types import EngineOptions, EngineState, Executor, Failure
from model_runner.observer import StepReport
from model_runner.request import Chunk, FinishReason, GenerateRequest, SamplingParams, StopConditions, Usage
from model_runner.scheduler_limits import SchedulerLimits
from model_runner.sequence import LiveRequest
from model_runner.token_text import Tokenizer
from services.books_inprocess import InProcessBooks
from services.cache_options import DEFAULT_CACHE, CacheOptions
from tests.model_runner.step_modes import step_mode
from tests.model_runner.toy_model import ToyExecutor, ToyTokenizer

PATIENCE_SECONDS = 60


@dataclass
class Recorder:
    """An observer that keeps what it is told."""

    steps: list[StepReport] = field(default_factory=list)
    first_tokens: int = 0
    next_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: list[tuple[FinishReason | None, Usage]] = field(default_factory=list)

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_first_token(self, seconds: float) -> None:
        self.first_tokens += 1

    def on_next_token(self, seconds: float) -> None:
        self.next_tokens += 1

    def on_progress(self, generated_tokens: int, preemptions: int) -> None:
        self.generated_tokens += generated_tokens
        self.preemptions += preemptions

    def on_finish(self, reason: FinishReason | None, usage: Usage, tenant: str) -> None:
        self.finished.append((reason, usage))


class Harness:
    """Use as a context manager; at its end everything must have been given back."""

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        block_size: int = 4,
        eos: Sequence[int] = (),
        books: KvBooks | None = None,
        manager: KvManager | None = None,
        cache: CacheOptions = DEFAULT_CACHE,
        max_model_tokens: int = 10_000,
        max_queued: int = 1024,
        max_queued_tokens: int = 1 << 22,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
        **limits: int,
    ) -> None:
        """executor and tokenizer: another model than the toy, whose blocks have the same size."""
        self.manager = manager or KvManager("boot")
        self.executor = executor or ToyExecutor(block_size)
        self.recorder = Recorder()
        self.states: list[EngineState] = []
        self._changed = threading.Condition()
        self._items: dict[str, list[Chunk | Failure]] = defaultdict(list)
        self.engine = Engine(
            self.executor,
            books or InProcessBooks(self.manager, cache=cache),
            tokenizer or ToyTokenizer(),
            EngineOptions(
                facts=PoolFacts(num_blocks, block_size, 0, "toy"),
                limits=SchedulerLimits(block_size, **limits),
                max_sequence_tokens=min(max_model_tokens, (num_blocks - 1) * block_size),
                eos_token_ids=frozenset(eos),
                max_queued_requests=max_queued,
                max_queued_tokens=max_queued_tokens,
                async_steps=step_mode().is_async,
            ),
            self._take,
            self._note_state,
            self.recorder,
            step_mode().steps(self.executor),
        )

    def __enter__(self) -> Harness:
        self.engine.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.assert_nothing_held()
        self.engine.stop()

    @property
    def pool(self):
        return self.manager.pool("default")

    def assert_nothing_held(self) -> None:
        assert self.engine.requests() == []
        assert self.engine.counts() == (0, 0)
        assert self.pool.check().violations == ()
        occupancy = self.pool.occupancy()
        assert (occupancy.held_blocks, occupancy.sequences) == (0, 0)

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int | None = 8, **options) -> LiveRequest:
        sampling = options.pop("sampling", SamplingParams())
        stop = StopConditions(
            max_tokens=max_tokens,
            stop_strings=options.pop("stop_strings", ()),
            stop_token_ids=frozenset(options.pop("stop_token_ids", ())),
            ignore_eos=options.pop("ignore_eos", False),
            min_tokens=options.pop("min_tokens", 0),
        )
        return self.engine.submit(GenerateRequest(request_id, tuple(prompt), sampling, stop, **options))

    def wait_for(self, request_id: str, count: int) -> list[Chunk | Failure]:
        """The items of a request once there are `count` of them."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self._items[request_id]) >= count, PATIENCE_SECONDS)
        assert done, f"{request_id}: {len(self._items[request_id])} items of {count}"
        return self._items[request_id]

    def wait(self, request_id: str) -> list[Chunk | Failure]:
        """All items of a request once it has ended."""

        def ended() -> bool:
            items = self._items[request_id]
            return bool(items) and (isinstance(items[-1], Failure) or items[-1].usage is not None)

        with self._changed:
            assert self._changed.wait_for(ended, PATIENCE_SECONDS), f"{request_id} does not end"
            return self._items[request_id]

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        """The token ids of one choice of a request that has ended."""
        return [
            token_id for item in self.wait(request_id) if item.choice_index == choice for token_id in item.token_ids
        ]

    def text(self, request_id: str, choice: int = 0) -> str:
        return "".join(item.text for item in self.wait(request_id) if item.choice_index == choice)

    def last(self, request_id: str) -> Chunk:
        return self.wait(request_id)[-1]

    def forget(self, request_id: str) -> None:
        """Makes room for another request of the same id."""
        with self._changed:
            del self._items[request_id]

    def wait_for_states(self, *states: EngineState) -> None:
        """Returns once the engine has gone through these states, and no others."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.states == list(states), PATIENCE_SECONDS), self.states

    def _note_state(self, state: EngineState, sentence: str) -> None:
        with self._changed:
            self.states.append(state)
            self._changed.notify_all()

    def _take(self, items: Sequence[Chunk | Failure]) -> None:
        with self._changed:
            for item in items:
                self._items[item.request_id].append(item)
            self._changed.notify_all()
