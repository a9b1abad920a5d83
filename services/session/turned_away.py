"""Who was refused for want of blocks is not asked for again while that cannot have changed: asking makes wait."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from model_runner.books import AllocationRequest
from services.session.held import Held

TRIES_IN_VAIN = 8
"""Tries of one sequence in a row that are not put; then it is asked for in any case, for others may hold its prefix."""


class TurnedAway:
    """The admission that was refused last. usable_blocks: of the pool; block_size: tokens."""

    def __init__(self, usable_blocks: int, block_size: int) -> None:
        self._usable_blocks = usable_blocks
        self._block_size = block_size
        self._sequence_id = ""
        self._tries = 0

    def note(self, sequence_id: str) -> None:
        """The KV manager has just refused this one for want of blocks."""
        self._sequence_id, self._tries = sequence_id, 0

    def is_hopeless(self, request: AllocationRequest, live: Iterable[Held], held_blocks: int) -> bool:
        """Whether a try is in vain: it was refused before, and what sequences don't hold is still less than it needs.

        live: the sequences, which hold so many blocks. Only blocks that they hold cost nothing when they are found.
        """
        if request.sequence_id != self._sequence_id or self._tries == TRIES_IN_VAIN:
            return False
        found = 0 if request.skip_cache_read else self._found(request, live)
        needed = -(-len(request.token_ids) // self._block_size) - found + request.headroom_blocks
        if needed <= self._usable_blocks - held_blocks:
            return False
        self._tries += 1
        return True

    def _found(self, request: AllocationRequest, live: Iterable[Held]) -> int:
        """Blocks at the beginning of a prompt that live sequences may hold."""
        tokens = array("I", request.token_ids)
        return max((self._alike(tokens, each.tokens) for each in live if each.salt == request.cache_salt), default=0)

    def _alike(self, one: array[int], other: array[int]) -> int:
        """Full blocks that both begin with."""
        size = self._block_size
        ends = range(size, min(len(one), len(other)) + 1, size)
        return next((n for n, end in enumerate(ends) if one[end - size : end] != other[end - size : end]), len(ends))
