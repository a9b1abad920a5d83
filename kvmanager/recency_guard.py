"""Compares a policy's hits with those LRU would have had, among sampled names, to fall back on LRU where it is better.

LRU has a block while fewer other blocks than fit were used since. So it is enough to count the sampled blocks that are
remembered by the time of their last use: no second cache is kept. Where the two disagree about a use, one of them wins.
A prompt's blocks are found or missed together, so a prompt is one piece of evidence however long it is: the lead is a
sum over prompts, and its variance the sum of their squares. A policy that is plainly behind, or after more evidence not
ahead, gives way to LRU's order for a while, which is doubled with every trial lost, and is tried again.
"""

from __future__ import annotations

from typing import Final

EVIDENCE: Final = 16.0
"""Prompts on which a policy that is plainly behind has lost; after four times as many it must be ahead.

Prompts count by Kish's effective number, the square of a sum over the sum of squares: the few that decide most count.
"""
BEHIND: Final = -2.0
"""The lead, in standard deviations, under which a policy is plainly behind."""
AHEAD: Final = 1.0
"""The lead, in standard deviations, that it must have after more evidence."""
MOST_PAUSE: Final = 64
"""LRU is used for 1, 2, 4 and so on up to so many times the length of the trial that was lost."""


class RecencyGuard:
    """Times are whole numbers that never go back, fine enough that a small part of the pool is used at each."""

    # fmt: off
    __slots__ = (
        "_began", "_lead", "_oldest", "_pause", "_prompt_lead", "_recent", "_remembered", "_total", "_until",
        "_variance", "room", "trusted",
    )
    # fmt: on

    def __init__(self) -> None:
        self.trusted = True
        self.room = 0
        """Sampled blocks that have room; so many LRU would have."""
        self._recent: dict[int, int] = {}
        """Sampled blocks that LRU would have, by the time of their last use."""
        self._remembered = 0
        self._oldest = 0
        self._prompt_lead = 0
        """Uses that only the policy had, less those that only LRU had, since blocks were last released."""
        self._lead = 0.0
        self._total = 0.0
        self._variance = 0.0
        self._pause = 1
        self._began = 0
        self._until = 0

    def released(self, time: int, count: int) -> None:
        """A prompt is done: so many sampled blocks were last used at `time`, which is now."""
        self._settle()
        recent = self._recent
        recent[time] = recent.get(time, 0) + count
        self._remembered += count
        while self._oldest < time:
            oldest = recent.get(self._oldest, 0)
            # Half of the oldest, on average, would still be there.
            if self._remembered - oldest // 2 <= self.room:
                break
            recent.pop(self._oldest, None)
            self._remembered -= oldest
            self._oldest += 1

    def used(self, time: int, hit: bool, count: int = 1) -> None:
        """So many sampled blocks that were last used at `time` are used again; `hit`: whether the policy had them."""
        lru_had = self.lost(time, count)
        self._prompt_lead += count - lru_had if hit else -lru_had

    def lost(self, time: int, count: int = 1) -> int:
        """So many sampled blocks that were last used at `time` count no more. Returns how many LRU would have."""
        remembered = self._recent.get(time, 0)
        if not remembered:
            return 0
        lost = min(count, remembered)
        self._recent[time] = remembered - lost
        self._remembered -= lost
        return lost

    def judge(self, now: int) -> None:
        """Decides whether the policy is to be trusted, once per turnover or so; `now` counts stored blocks."""
        if not self.trusted:
            if now >= self._until:
                self._begin(now)
            return
        evidence = self._total * self._total / self._variance if self._variance else 0.0
        if evidence < EVIDENCE:
            return
        least = AHEAD if evidence >= 4 * EVIDENCE else BEHIND
        if self._lead < least * self._variance**0.5:
            self.trusted = False
            self._until = now + self._pause * (now - self._began)
            self._pause = min(MOST_PAUSE, 2 * self._pause)
        elif evidence >= 8 * EVIDENCE:
            self._halve(now)

    def _settle(self) -> None:
        self._lead += self._prompt_lead
        self._total += abs(self._prompt_lead)
        self._variance += self._prompt_lead * self._prompt_lead
        self._prompt_lead = 0

    def _begin(self, now: int) -> None:
        self.trusted = True
        self._lead = self._total = self._variance = 0.0
        self._began = now

    def _halve(self, now: int) -> None:
        """What is long ago counts less."""
        self._lead /= 2
        self._total /= 2
        self._variance /= 2
        self._began = (self._began + now) // 2
        self._pause = max(1, self._pause // 2)
