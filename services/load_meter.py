"""How loaded the engine is, from what it tells while it works: tokens a second, cache hits, how long it is silent."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model_runner.observer import EngineObserver, SilentObserver, StepReport
from model_runner.request import FinishReason, RequestView, Usage

RATE_SECONDS = 2.0
"""The last seconds that tokens per second are counted over."""
HIT_SAMPLES = 64
"""The last requests that the share of cached prompt tokens is taken of."""


@dataclass(frozen=True, slots=True)
class Load:
    """Of one moment. Counts of requests; tokens; held_share: blocks that live sequences hold, of all usable ones.

    waiting_tokens: of the prompts that wait, less what is likely cached. silent_seconds: since the last step while
    requests run, None while none does.
    """

    running: int
    waiting: int
    waiting_tokens: int
    held_share: float
    held_tokens: int
    capacity_tokens: int
    tokens_per_second: float
    hit_rate: float
    silent_seconds: float | None


class LoadMeter(SilentObserver):
    """An EngineObserver that remembers the last moments. The engine's thread tells it, any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._made: deque[tuple[float, int]] = deque()
        self._hits: deque[tuple[int, int]] = deque(maxlen=HIT_SAMPLES)
        self._last_step = clock()

    def on_step(self, report: StepReport) -> None:
        """Notes that the engine works."""
        self._last_step = self._clock()

    def on_progress(self, generated_tokens: int, preemptions: int) -> None:
        """Notes new tokens."""
        if generated_tokens:
            with self._lock:
                self._made.append((self._clock(), generated_tokens))
                self._forget()

    def on_finish(self, reason: FinishReason | None, usage: Usage, tenant: str) -> None:
        """Notes how much of a prompt was cached."""
        with self._lock:
            self._hits.append((usage.prompt_tokens, usage.cached_tokens))

    def tokens_per_second(self) -> float:
        """Tokens generated in the last RATE_SECONDS, per second."""
        with self._lock:
            self._forget()
            return sum(tokens for _, tokens in self._made) / RATE_SECONDS

    def hit_rate(self) -> float:
        """The share of prompt tokens that were cached, of the last HIT_SAMPLES requests that ended."""
        with self._lock:
            prompts, cached = (sum(column) for column in zip(*self._hits, strict=True)) if self._hits else (0, 0)
        return cached / prompts if prompts else 0.0

    def measure(self, views: Sequence[RequestView], held_blocks: int, usable_blocks: int, block_size: int) -> Load:
        """The load now. views: the live requests."""
        ages = [view.age_seconds for view in views if view.running]
        running = len(ages)
        hit_rate = self.hit_rate()
        waiting_tokens = sum(view.prompt_tokens for view in views if not view.running)
        return Load(
            running=running,
            waiting=len(views) - running,
            waiting_tokens=round(waiting_tokens * (1 - hit_rate)),
            held_share=held_blocks / usable_blocks,
            held_tokens=held_blocks * block_size,
            capacity_tokens=usable_blocks * block_size,
            tokens_per_second=self.tokens_per_second(),
            hit_rate=hit_rate,
            # An engine that was idle before had nothing to say.
            silent_seconds=max(0.0, min(self._clock() - self._last_step, max(ages))) if ages else None,
        )

    def _forget(self) -> None:
        oldest = self._clock() - RATE_SECONDS
        while self._made and self._made[0][0] < oldest:
            self._made.popleft()


class Observers:
    """Several observers of one engine, told in their order."""

    def __init__(self, *observers: EngineObserver) -> None:
        self._observers = observers

    def on_step(self, report: StepReport) -> None:
        for each in self._observers:
            each.on_step(report)

    def on_progress(self, generated_tokens: int, preemptions: int) -> None:
        for each in self._observers:
            each.on_progress(generated_tokens, preemptions)

    def on_first_token(self, seconds: float) -> None:
        for each in self._observers:
            each.on_first_token(seconds)

    def on_next_token(self, seconds: float) -> None:
        for each in self._observers:
            each.on_next_token(seconds)

    def on_finish(self, reason: FinishReason | None, usage: Usage, tenant: str) -> None:
        for each in self._observers:
            each.on_finish(reason, usage, tenant)
