"""How requests end: with a last chunk, by an abort, by a failure. Blocks are given back before anybody hears of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from model_runner.books import (
    BOOKS_TROUBLE,
    INVALID_ARGUMENT,
    NEVER_FITS,
    PINS_EXHAUSTED,
    SEQUENCE_EXISTS,
    BooksRefused,
)
from model_runner.engine_types import Delivery, Failure, FailureKind
from model_runner.generation import abort_chunks, describe_stuck
from model_runner.intake import Intake
from model_runner.observer import EngineObserver
from model_runner.request import Chunk
from model_runner.scheduler import Scheduler
from model_runner.sequence import LiveRequest
from model_runner.sequence import Sequence as LiveSequence

_KINDS = {
    SEQUENCE_EXISTS: FailureKind.NAME_TAKEN,
    INVALID_ARGUMENT: FailureKind.REQUEST,
    NEVER_FITS: FailureKind.REQUEST,
    PINS_EXHAUSTED: FailureKind.PINS_EXHAUSTED,
}


class Endings:
    """Ends an engine's requests, in its thread and while none of them is in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        intake: Intake,
        observer: EngineObserver,
        deliver: Delivery,
        on_trouble: Callable[[Exception], None],
    ) -> None:
        """on_trouble: hears of books that fail while blocks are given back for an end that must come about."""
        self._scheduler = scheduler
        self._intake = intake
        self._observer = observer
        self._deliver = deliver
        self._on_trouble = on_trouble

    def finish(self, sequences: list[LiveSequence]) -> None:
        """Gives back what sequences hold that have come to their own end. Raises what the books do."""
        if sequences:
            self._scheduler.finish(sequences)

    def close(self, chunks: Sequence[Chunk]) -> None:
        """Forgets the requests whose last chunk is among `chunks`."""
        for chunk in chunks:
            if chunk.usage is not None:
                live = self._intake.forget(chunk.request_id)
                self._observer.on_finish(chunk.finish_reason, chunk.usage, live.request.tenant)

    def abort(self, lives: Sequence[LiveRequest]) -> None:
        """Ends requests without another token, by chunks that say so."""
        if not lives:
            return
        self._release([sequence for live in lives for sequence in live.sequences])
        now = time.monotonic()
        chunks = [chunk for live in lives for chunk in abort_chunks(live, now)]
        self.close(chunks)
        self._deliver(chunks)

    def fail(self, lives: Sequence[LiveRequest], sentence: str, kind: FailureKind) -> None:
        """Ends requests by a failure with a sentence for their clients."""
        for live in lives:
            self._release(live.sequences)
            self._observer.on_finish(None, live.usage(time.monotonic()), live.request.tenant)
            self._intake.forget(live.request.request_id)
        if lives:
            self._deliver([Failure(live.request.request_id, sentence, kind) for live in lives])

    def fail_at_hand(self, error: Exception) -> None:
        """Fails whoever runs, or else the first in line: somebody among them brought the engine down."""
        scheduler = self._scheduler
        at_hand = scheduler.running or list(scheduler.waiting)[:1]
        lives = {id(sequence.live): sequence.live for sequence in at_hand}
        sentence = f"the engine failed while it worked on this request: {type(error).__name__}; see the server's log"
        self.fail(list(lives.values()), sentence, FailureKind.ENGINE)

    def refuse(self, live: LiveRequest, error: BooksRefused) -> None:
        """Fails a request that the KV manager refuses, unless another of its choices was refused before."""
        if self._intake.is_live(live):
            # A reason that is not known is a fault of ours.
            self.fail([live], str(error), _KINDS.get(error.reason, FailureKind.ENGINE))

    def end_stuck(self, sequences: Sequence[LiveSequence]) -> None:
        """Fails the requests with a choice whose form can't go on."""
        for sequence in sequences:
            if self._intake.is_live(sequence.live):
                self.fail([sequence.live], describe_stuck(sequence), FailureKind.FORM)

    def stop(self) -> None:
        """Fails all that is live, for the server stops."""
        for live in self._intake.all():
            self.fail([live], _stop_sentence(live), FailureKind.STOPPING)

    def _release(self, sequences: list[LiveSequence]) -> None:
        """finish() that does not raise."""
        try:
            self.finish(sequences)
        except BOOKS_TROUBLE as error:
            self._on_trouble(error)


def _stop_sentence(live: LiveRequest) -> str:
    if live.output_tokens:
        return f"the server stops, after {live.output_tokens} tokens of the answer"
    return "the server stops, and has not begun with the answer; send the request to another one"
