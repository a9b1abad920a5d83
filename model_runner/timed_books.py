"""A KV manager's port with a stopwatch, so that a step knows how long it waited for the books."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from model_runner.books import Admission, AllocationRequest, Growth, KvBooks, PoolFacts, SequenceUpdate


class TimedBooks:
    """Passes every verb on and adds the seconds that it took to `seconds`."""

    def __init__(self, books: KvBooks) -> None:
        self._books = books
        self.seconds = 0.0

    @contextmanager
    def _clock(self) -> Iterator[None]:
        started = monotonic()
        try:
            yield
        finally:
            self.seconds += monotonic() - started

    def open(self, facts: PoolFacts) -> None:
        with self._clock():
            self._books.open(facts)

    def allocate(self, request: AllocationRequest) -> Admission | None:
        with self._clock():
            return self._books.allocate(request)

    def append(self, updates: Sequence[SequenceUpdate]) -> Growth | None:
        with self._clock():
            return self._books.append(updates)

    def extend(self, updates: Sequence[SequenceUpdate]) -> Growth:
        with self._clock():
            return self._books.extend(updates)

    def truncate(self, sequence_id: str, num_tokens: int) -> None:
        with self._clock():
            self._books.truncate(sequence_id, num_tokens)

    def fork(self, parent_id: str, child_ids: Sequence[str]) -> None:
        with self._clock():
            self._books.fork(parent_id, child_ids)

    def free(self, updates: Sequence[SequenceUpdate], *, preempted: bool = False) -> None:
        with self._clock():
            self._books.free(updates, preempted=preempted)

    def flush(self) -> None:
        with self._clock():
            self._books.flush()

    @property
    def away(self) -> str:
        return self._books.away

    def close(self) -> None:
        with self._clock():
            self._books.close()
