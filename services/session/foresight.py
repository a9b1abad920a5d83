"""When to ask for the room that sequences will need, so that nobody waits for the answer."""

from __future__ import annotations

from services.session.held import Held

AHEAD_STEPS = 2
"""Room is asked for so many steps before a sequence can need it, or sooner."""
LATE_STEPS = 1
"""The same where blocks are scarce and answers quick: what is granted sooner lies idle until then."""
PACE_STEPS = 2
"""What does not press is said in every second step: a message costs either side more than what is in it."""


class Foresight:
    """Counts the engine's steps, and knows which sequences are to ask for room in which of them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._steps = 0
        self.asks_late = False
        """Room is asked for as late as it may be, in whichever step that is."""
        self._due: dict[int, list[Held]] = {}

    @property
    def is_pace(self) -> bool:
        """Whether this step is one to say what does not press."""
        return self._steps % PACE_STEPS == 0

    def plan(self, held: Held) -> None:
        """Notes when to ask for the next block: a sequence grows by one token a step, once its prompt is computed.

        Not in the step that may end the prompt, for a fork may follow it, and nothing may be said of a sequence before
        what it promises is computed. Who grows faster, because guesses of it were right, or forks often, is served from
        the lease.
        """
        if held.forks_often:
            return
        soonest = 1 if held.told - held.computed <= 1 and not held.promised else 2
        room = len(held.blocks) * self._block_size
        ahead, pace = (LATE_STEPS, 1) if self.asks_late else (AHEAD_STEPS, PACE_STEPS)
        due = self._steps + max(soonest, room + 1 - held.told - held.ahead + 1 - ahead)
        sooner = due - due % pace
        held.due = sooner if sooner >= self._steps + soonest else due
        self._due.setdefault(held.due, []).append(held)

    def step(self) -> list[Held]:
        """A step is scheduled. Returns who is to ask in it; some of them may have ended."""
        self._steps += 1
        due = [held for held in self._due.pop(self._steps, ()) if held.due == self._steps]
        for held in due:
            held.due = 0
        return due

    def forget(self) -> None:
        """Nobody is there any more."""
        self._due.clear()
