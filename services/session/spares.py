"""How many spare blocks a runner wants: few, and no more than surprises need where blocks are scarce, answers quick."""

from __future__ import annotations

from services.session.held import Held

MIN_SPARES = 4
"""Wanted however few sequences there are."""
SEQUENCES_PER_SPARE = 2
"""A sequence takes a block every block_size steps: so the spares last for half as many without a KV manager."""
SPARES_PER_SURPRISE = 2
"""Wanted for a sequence that asks for no room ahead and may need a block in each step."""
SCARCE_LEASES = 4
"""Blocks are scarce when less than so many of the largest lease are left."""
SHORT_STEPS = 64
"""They are scarce for so many steps after a refused admission: in fewer it is asked for again."""


class Spares:
    """What the lease should have, settled once a step. Counts are blocks of a pool that has so many usable ones."""

    def __init__(self, limit: int, usable_blocks: int, block_size: int) -> None:
        """limit: blocks of the lease, at most. block_size: tokens."""
        self._limit = limit
        self._usable_blocks = usable_blocks
        self._block_size = block_size
        self.wanted = min(limit, MIN_SPARES)
        self.spoken_for = 0
        """Of these, how many somebody is likely to take soon."""
        self.told = 0
        """How many wanted ones the KV manager was told of."""
        self.is_thrifty = False
        """Whether a spare block would be missed: somebody waits for it, or few are left and answers come in time."""
        self._short_steps = 0
        self._guessing = 0
        self._starting: dict[int, Held] = {}
        """By handle, sequences whose prompt ends with a block, until it is computed."""

    @property
    def press(self) -> bool:
        """Whether more are wanted than the KV manager knows."""
        return self.wanted > self.told

    def note_refusal(self) -> None:
        """An admission was refused for want of blocks."""
        self._short_steps = SHORT_STEPS

    def note_start(self, held: Held) -> None:
        """It is admitted. If its prompt ends with a block, it needs one right after it, and can't ask before."""
        if held.prompt_tokens == len(held.blocks) * self._block_size:
            self._starting[held.handle] = held

    def note_end(self, held: Held) -> None:
        """It has ended."""
        self._starting.pop(held.handle, None)

    def note_guess(self) -> None:
        """A block is wanted for guesses in the step at hand: it comes from half of the lease, at most."""
        self._guessing += 1

    def step(self, sequences: int, forking: int, held_blocks: int, *, prompt: bool) -> None:
        """A step is scheduled, beside so many live sequences, of which `forking` ask for no room ahead.

        prompt: answers come within a step.
        """
        self._short_steps = max(0, self._short_steps - 1)
        left = self._usable_blocks - held_blocks
        self.is_thrifty = self._short_steps > 0 or (prompt and left < SCARCE_LEASES * self._limit)
        for held in [each for each in self._starting.values() if each.computed >= each.prompt_tokens]:
            self.note_end(held)
        self.spoken_for = SPARES_PER_SURPRISE * (forking + self._guessing) + len(self._starting)
        self._guessing = 0
        in_case = 0 if self.is_thrifty else max(MIN_SPARES, -(-(sequences - forking) // SEQUENCES_PER_SPARE))
        self.wanted = min(self._limit, self.spoken_for + in_case)

    def forget(self) -> None:
        """Nobody is there any more."""
        self._starting.clear()
        self.told = 0
