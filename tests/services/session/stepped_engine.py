"""A real engine on the toy model, stepped by the test on a clock of its own, with books over a bad channel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from model_runner.books import PoolFacts
from model_runner.engine import RETRY_SECONDS, Engine
from model_runner.engine_types import EngineOptions, EngineState, Failure
from model_runner.request import Chunk, GenerateRequest, SamplingParams, StopConditions
from model_runner.scheduler_limits import SchedulerLimits
from services.cache_options import DEFAULT_CACHE, CacheOptions
from services.columns import from_column
from services.session.check import violations
from services.session.limits import SessionLimits
from services.session.mirror import Mirror
from services.session_books import SessionBooks
from tests.model_runner.step_modes import step_mode
from tests.model_runner.toy_model import Model, ToyExecutor, ToyTokenizer, next_logits
from tests.services.session.bad_channel import FakeClock, FakeServer

STEP_SECONDS = 0.005
BEAT_SECONDS = 1.0
LIMITS = SessionLimits(beat=0)


class SteppedEngine(Engine):
    """An engine whose sleeps let the test's clock go on."""

    clock: FakeClock

    def _wait(self) -> None:
        self.clock.now += self._patience()
        self._books.flush()

    def _open_books(self) -> None:
        super()._open_books()
        if not self._has_books:
            self.clock.now += RETRY_SECONDS

    def turn(self) -> bool:
        """One turn of the loop; it takes STEP_SECONDS."""
        self.clock.now += STEP_SECONDS
        return self._turn()


class Bench:
    """One runner: its engine, its books, and what it delivered."""

    def __init__(
        self,
        server: FakeServer,
        *,
        num_blocks: int = 65,
        block_size: int = 4,
        lease_blocks: int = 4,
        cache: CacheOptions = DEFAULT_CACHE,
        limits: SessionLimits = LIMITS,
        model: Model = next_logits,
        **scheduling: int,
    ) -> None:
        self.server = server
        self.books = SessionBooks(
            server.dial, cache=cache, lease_blocks=lease_blocks, limits=limits, clock=server.clock
        )
        self.executor = ToyExecutor(block_size, model)
        self.states: list[EngineState] = []
        self.items: dict[str, list[Chunk | Failure]] = defaultdict(list)
        options = EngineOptions(
            facts=PoolFacts(num_blocks, block_size, 0, "toy"),
            limits=SchedulerLimits(block_size, **scheduling),
            max_sequence_tokens=(num_blocks - 1) * block_size,
            eos_token_ids=frozenset(),
            async_steps=step_mode().is_async,
        )
        self.engine = SteppedEngine(
            self.executor,
            self.books,
            ToyTokenizer(),
            options,
            self._take,
            lambda state, _: self.states.append(state),
            steps=step_mode().steps(self.executor),
        )
        self.engine.clock = server.clock

    @property
    def mirror(self) -> Mirror:
        assert self.books._opened is not None
        return self.books._opened.mirror

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int, **options: object) -> None:
        sampling = options.pop("sampling", SamplingParams())
        stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
        self.engine.submit(GenerateRequest(name, tuple(prompt), sampling, stop, **options))  # type: ignore[arg-type]

    def turn(self, count: int = 1) -> None:
        """Turns of the engine; the mirror must be right after each."""
        for _ in range(count):
            session = self.books._opened
            if session is not None and session.exchange is not None:
                session.exchange.beat(self.server.clock.now, BEAT_SECONDS)
            self.engine.turn()
            assert violations(self.mirror) == []

    def until_served(self) -> None:
        """Until the engine serves."""
        self.turn_until(lambda: self.engine.state is EngineState.SERVING)

    def turn_until(self, condition, most: int = 3000) -> None:
        for _ in range(most):
            if condition():
                return
            self.turn()
        raise AssertionError(f"{condition} does not come true; at {self.server.clock.now}, {self.books.away!r}")

    def ended(self, name: str) -> bool:
        items = self.items[name]
        return bool(items) and (isinstance(items[-1], Failure) or items[-1].usage is not None)

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        assert not isinstance(self.items[name][-1], Failure), self.items[name][-1]
        return [token for item in self.items[name] if item.choice_index == choice for token in item.token_ids]

    def until_all_ended(self) -> None:
        self.turn_until(lambda: not self.engine.requests())

    def assert_books_agree(self) -> None:
        """Once all is told, the books say what the mirror says, and nothing is held but the lease."""
        with self.server.healed():
            self.turn_until(lambda: not self.books.away and not self.books._opened.exchange.waiting)
        pool = self.server.manager.pool("default")
        assert pool.check().violations == ()
        assert pool.live.keys() == self.mirror.live.keys()
        for name, held in self.mirror.live.items():
            assert (name, list(pool.live[name].blocks)) == (name, held.blocks)
        assert sorted(pool.lease.members()) == sorted(self.mirror.lease)
        # What the mirror would report as cached is physically there.
        size = self.executor.block_size
        for block, cached in self.mirror.cached.blocks.items():
            stored = [self.executor.slots[block * size + offset] for offset in range(size)]
            assert from_column(cached.tokens, "tokens").tolist() == stored

    def _take(self, items: Sequence[Chunk | Failure]) -> None:
        for item in items:
            self.items[item.request_id].append(item)
