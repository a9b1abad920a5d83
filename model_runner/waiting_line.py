"""The line of sequences that wait for blocks: who is next, and how often somebody may go before somebody else.

Under FCFS whoever was admitted before and lost its blocks comes first, in the order of admission, and then newcomers in
the order of arrival. Under PRIORITY a request stands where it would under FCFS had it arrived later by AGEING_SECONDS
for each level: so waiting makes up for priority, the order of any two never changes, and nobody waits for ever.

Among newcomers of one priority one that begins like a running sequence goes first: it shares blocks that are held
anyway. Each newcomer is overtaken like that MAX_OVERTAKEN times at most.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from enum import Enum

from model_runner.sequence import Sequence

AGEING_SECONDS = 10.0
"""What one level of priority is worth: a request goes before those of the level above that arrive this much later."""
MAX_OVERTAKEN = 8
"""Times that a newcomer is overtaken for the sake of a shared prefix."""
WINDOW = 32
"""Newcomers at the front of the line among which prefixes are compared."""
_COMPARED_BLOCKS = (1, 4, 16)
"""Prefixes are compared by these numbers of blocks: a few hashes, made once when a request arrives."""

Rank = tuple[float, bool, int]


class SchedulingPolicy(Enum):
    """Who goes first: by arrival, or by the priority of the request, lower first."""

    FCFS = "fcfs"
    PRIORITY = "priority"


def prefix_keys(sequence: Sequence, block_size: int) -> tuple[int, ...]:
    """One number for each compared prefix that the prompt has in full; equal for equal prefixes under one salt.

    None for a request that leaves nothing in the cache: nobody shares its blocks.
    """
    if sequence.live.request.skip_cache_write:
        return ()
    tokens, salt = sequence.token_ids, sequence.live.request.cache_salt
    ends = [blocks * block_size for blocks in _COMPARED_BLOCKS if blocks * block_size <= len(tokens)]
    return tuple(hash((salt, *tokens[:end])) for end in ends)


class WaitingLine:
    """Sequences without blocks, first in line first. block_size: tokens."""

    def __init__(self, policy: SchedulingPolicy, block_size: int) -> None:
        self._policy = policy
        self._block_size = block_size
        self._line: list[Sequence] = []
        self._members: set[int] = set()
        """Ids of the objects in line; what violations() compares."""
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def add(self, newcomer: Sequence) -> None:
        """Lines up a sequence that was never admitted."""
        self._arrivals += 1
        newcomer.number = self._arrivals
        newcomer.prefix_keys = prefix_keys(newcomer, self._block_size)
        self.put_back(newcomer)

    def put_back(self, sequence: Sequence) -> None:
        """Lines up a sequence that has lost its blocks. Raises ValueError when it is in line already."""
        if id(sequence) in self._members:
            raise ValueError(f"sequence {sequence.sequence_id!r} is in line already")
        self._members.add(id(sequence))
        insort(self._line, sequence, key=self._rank)

    def next(self, held_prefixes: Collection[int], passed_salts: Collection[str]) -> Sequence | None:
        """Who is to be tried next: the first, or a newcomer close behind that shares more of `held_prefixes`.

        Those with one of `passed_salts` are passed over.
        """
        best: Sequence | None = None
        most = compared = 0
        for sequence in self._line:
            if sequence.live.request.cache_salt in passed_salts:
                continue
            if best is None:
                best = first = sequence
                most = _shared(sequence, held_prefixes)
            elif not self._may_overtake(sequence, first):
                break
            elif (shared := _shared(sequence, held_prefixes)) > most:
                best, most = sequence, shared
            compared += 1
            if first.admitted_before or sequence.overtaken >= MAX_OVERTAKEN or compared == WINDOW:
                break
        return best

    def take(self, sequence: Sequence) -> None:
        """Takes a sequence that next() named out of the line, and counts that those before it were overtaken."""
        index = self._line.index(sequence)
        for overtaken in self._line[:index]:
            overtaken.overtaken += 1
        del self._line[index]
        self._members.remove(id(sequence))

    def remove(self, gone: Collection[int]) -> None:
        """Takes out those whose object ids are in `gone`."""
        self._line = [sequence for sequence in self._line if id(sequence) not in gone]
        self._members.difference_update(gone)

    def victim(self, running: Seq[Sequence]) -> Sequence:
        """Who of the running sequences, in the order of admission, gives its blocks up first."""
        if self._policy is SchedulingPolicy.FCFS:
            return running[-1]
        return max(running, key=lambda sequence: (self._standing(sequence), sequence.number))

    def displaces(self, sequence: Sequence, running: Sequence) -> bool:
        """Whether a running sequence is to give its blocks up for this one, were it admitted: one of a lower level."""
        if self._policy is SchedulingPolicy.FCFS or _level(running) <= _level(sequence):
            return False
        return self._standing(running) > self._standing(sequence)

    def violations(self) -> list[str]:
        """One sentence for each contradiction in the line; none when it is right. O(line)."""
        wrong = [f"{each.sequence_id!r} is in line and holds blocks" for each in self._line if each.block_table]
        if len(self._members) != len(self._line) or self._members != set(map(id, self._line)):
            wrong.append(f"{len(self._line)} sequences are in line, but {len(self._members)} are counted as members")
        ranks = [self._rank(each) for each in self._line]
        if ranks != sorted(ranks):
            wrong.append("the line is out of order")
        return wrong

    def _rank(self, sequence: Sequence) -> Rank:
        arrived = self._standing(sequence) if self._policy is SchedulingPolicy.PRIORITY else 0.0
        return arrived, not sequence.admitted_before, sequence.number

    def _may_overtake(self, sequence: Sequence, first: Sequence) -> bool:
        equal = self._policy is SchedulingPolicy.FCFS or _level(sequence) == _level(first)
        return equal and not sequence.admitted_before

    @staticmethod
    def _standing(sequence: Sequence) -> float:
        """When a request counts as arrived, in seconds."""
        return sequence.live.arrived_at + AGEING_SECONDS * _level(sequence)


def _level(sequence: Sequence) -> int:
    return sequence.live.request.queue_priority


def _shared(sequence: Sequence, held_prefixes: Collection[int]) -> int:
    return sum([1 for key in sequence.prefix_keys if key in held_prefixes])
