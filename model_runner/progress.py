"""How far a request is: its times, and its next tokens as its observer hears of them."""

from __future__ import annotations

from collections.abc import Callable

from model_runner.observer import EngineObserver
from model_runner.sequence import LiveRequest, Sequence


class Progress:
    """Keeps the counts and times of requests while their tokens come. Times are seconds on the engine's clock."""

    def __init__(self, observer: EngineObserver) -> None:
        self._observer = observer
        self.generated_tokens = 0
        """All so far, over all requests."""

    def count(self, live: LiveRequest, tokens: int) -> None:
        """The request has so many tokens more, those of beams that were dropped among them."""
        live.output_tokens += tokens
        self.generated_tokens += tokens

    def take(self, sequence: Sequence, token_id: int, now: float) -> None:
        """Appends a new token, which is not yet computed."""
        sequence.token_ids.append(token_id)
        sequence.num_outputs += 1
        self.note_first(sequence, now)
        if sequence.num_outputs > 1:
            self._observer.on_next_token(now - sequence.last_token_at)
        sequence.last_token_at = now

    def note_first(self, sequence: Sequence, now: float) -> None:
        """The sequence's request has a token, which may be its first."""
        live = sequence.live
        if live.first_token_at is None:
            live.first_token_at = now
            self._observer.on_first_token(now - live.arrived_at)
        live.last_token_at = now


class ToldProgress:
    """What an observer has been told of two totals: tokens generated, and preemptions."""

    def __init__(self, totals: Callable[[], tuple[int, int]]) -> None:
        self._totals = totals
        self._told = (0, 0)

    def tell(self, observer: EngineObserver) -> None:
        """Tells what has come about since the last time."""
        (tokens, preemptions), told = self._totals(), self._told
        self._told = (tokens, preemptions)
        observer.on_progress(tokens - told[0], preemptions - told[1])
