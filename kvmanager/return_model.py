"""How likely blocks are to be used again, and when: learned from lives of which many are still going on.

A block of class c is used again with a chance P of c, and if it is, after a time whose distribution is that of all
blocks that waited as long as it did for their last use. This is the mixture model of cures (Boag, 1949): the more time
passes without a use, the surer it is that none will come. Chances are learned from few lives, because their odds are a
product of what each part of the class says, and the class's own numbers correct it as they grow. How soon they do is
learned as well (`shrinkage`): where classes differ by chance alone, all are taken for alike. The blocks of a prompt
come back together, so the evidence is prompts.
"""

from __future__ import annotations

from array import array
from math import log2
from typing import Final

from kvmanager.shrinkage import likeliest_trust

AGES: Final = 24
LEVELS: Final = 6  # uses or turns: 1, 2, 3, 4 to 5, 6 to 8, more
FRESH: Final = 5  # new blocks of the last prompt: 1, under 8, under 32, under 100, more
WAITS: Final = 6  # turnovers before the last use: no turn before, under 1/8, under 1/2, under 2, under 8, more
CLASSES: Final = LEVELS * FRESH * WAITS * 2
"""A class is (level, fresh, wait, tail) as one number; tail is 1 for the last block of a prompt."""
OF_A_LEVEL: Final = FRESH * WAITS * 2
"""Classes of a level; those of the lowest come first."""
_PARTS = ((OF_A_LEVEL, LEVELS), (WAITS * 2, FRESH), (2, WAITS), (1, 2))

TRUST = 4.0
"""Prompts that must have come back before the odds of all blocks count as much as ODDS."""
TRUST_AGE = 1.0
"""The same for the hazard at an age and HAZARD."""
BELIEF = 0.5
"""The part of the likeliest trust that is used: what is read into chance costs less than what is overlooked."""
HAZARD = 0.2
"""Of the blocks that will be used again, how many are within an age bucket; until something is known."""
MOST_HAZARD = 0.5
ODDS = 0.3
MOST_ODDS, LEAST_ODDS = 64.0, 1.0 / 512.0
_ROUNDS = 2
_STEPS_PER_OCTAVE = 4  # of odds, and of worths: of blocks that are worth about the same the oldest goes first


def class_of_level(level: int) -> int:
    """The first class of a level."""
    return (level - 1 if level < 4 else 3 if level < 6 else 4 if level < 9 else 5) * OF_A_LEVEL


def class_of(level: int, fresh: int, wait: int, tail: int) -> int:
    """The class of a block; `wait` is an age bucket."""
    new = 0 if fresh < 2 else 1 if fresh < 8 else 2 if fresh < 32 else 3 if fresh < 100 else 4
    late = 0 if level < 2 else 1 if wait < 2 else 2 if wait < 6 else 3 if wait < 10 else 4 if wait < 14 else 5
    return class_of_level(level) + (new * WAITS + late) * 2 + tail


def _age_bucket(units: int) -> int:
    if units < 2:
        return units
    bits = units.bit_length()
    return min(AGES - 1, 2 * bits - 2 + (units >> bits - 2 & 1))


def _bucket_start(bucket: int) -> int:
    return bucket if bucket < 2 else 2 + (bucket & 1) << (bucket + 2) // 2 - 2


_BUCKETS: Final = [_age_bucket(units) for units in range(_bucket_start(AGES - 1))]


def age_bucket(units: int) -> int:
    """The half octave of an age in units."""
    return _BUCKETS[units] if units < len(_BUCKETS) else AGES - 1


class ReturnModel:
    """Counts of lives by class and age, what was learned from them, and what a block is worth by class and age."""

    # fmt: off
    __slots__ = (
        "_factors", "_hazards", "_odds", "_parts", "_prompt", "_squares", "_starts", "_uses", "gone", "returned",
        "worth",
    )
    # fmt: on

    def __init__(self, unit: int) -> None:
        cells = CLASSES * AGES
        self._starts = [unit * _bucket_start(bucket) for bucket in range(AGES + 1)]
        self.returned = array("d", [0.0]) * cells
        """Lives that ended in a use."""
        self.gone = array("d", [0.0]) * cells
        """Lives that were lost sight of."""
        self.worth = array("d", [0.0]) * cells
        """The most uses per block and time that keeping a block on can bring, over all times to keep it (Gittins)."""
        self._odds = ODDS
        self._parts = [[1.0] * count for _, count in _PARTS]
        self._factors = [1.0] * CLASSES
        self._hazards = [[HAZARD] * AGES for _ in range(WAITS)]
        self._prompt = 0
        """Uses by the prompt that runs."""
        self._uses = 0.0
        """Uses by the prompts before it, and the sum of the squares of each one's."""
        self._squares = 0.0

    def count_returned(self, cell: int, count: int) -> None:
        self._prompt += count
        self.returned[cell] += count

    def settle(self) -> None:
        """A prompt is done."""
        self._uses += self._prompt
        self._squares += self._prompt * self._prompt
        self._prompt = 0

    def fade(self, kept: float) -> None:
        self._uses *= kept
        self._squares *= kept
        self.returned = array("d", [count * kept for count in self.returned.tolist()])
        self.gone = array("d", [count * kept for count in self.gone.tolist()])

    def learn(self, waiting: dict[int, int]) -> None:
        """waiting: lives that are still going on, by cell."""
        used, at_risk = self._lives(waiting)
        for _ in range(_ROUNDS):
            curves = [_curve(hazards) for hazards in self._hazards]
            self._learn_odds(used, at_risk, curves)
            self._learn_hazards(at_risk, curves)
        curves = [_curve(hazards) for hazards in self._hazards]
        table: dict[tuple[int, int], array[float]] = {}
        for number in range(CLASSES):
            wait = number // 2 % WAITS
            step = round(log2(self._odds_of(number)) * _STEPS_PER_OCTAVE)
            if (wait, step) not in table:
                table[wait, step] = self._worth_of(2.0 ** (step / _STEPS_PER_OCTAVE), curves[wait])
            self.worth[number * AGES : number * AGES + AGES] = table[wait, step]

    def _lives(self, waiting: dict[int, int]) -> tuple[dict[int, float], dict[int, list[float]]]:
        """Uses, and lives that could have ended in one at each age, by class; those last seen at an age count half."""
        used: dict[int, float] = {}
        at_risk: dict[int, list[float]] = {}
        all_returned, all_quiet = self.returned.tolist(), self.gone.tolist()
        for cell, count in waiting.items():
            all_quiet[cell] += count
        for number in range(CLASSES):
            row = number * AGES
            returned, quiet = all_returned[row : row + AGES], all_quiet[row : row + AGES]
            if not (any(returned) or any(quiet)):
                continue
            older = 0.0
            risk = [0.0] * AGES
            for age in range(AGES - 1, -1, -1):
                older += returned[age] + quiet[age]
                risk[age] = older - 0.5 * quiet[age]
            used[number] = sum(returned)
            at_risk[number] = risk
        return used, at_risk

    def _guess(self, number: int) -> float:
        """The odds of a class by its parts."""
        odds = self._odds
        for (stride, count), parts in zip(_PARTS, self._parts, strict=True):
            odds *= parts[number // stride % count]
        return odds

    def _odds_of(self, number: int) -> float:
        return min(MOST_ODDS, max(LEAST_ODDS, self._guess(number) * self._factors[number]))

    def _learn_odds(
        self, used: dict[int, float], at_risk: dict[int, list[float]], curves: list[tuple[list[float], list[float]]]
    ) -> None:
        """One round of moving the odds to where as many uses are expected as were seen."""

        def expected(number: int, odds: float) -> float:
            left, now = curves[number // 2 % WAITS]
            chance = odds / (1.0 + odds)
            lost = 1.0 - chance
            terms = zip(at_risk[number], left, now, strict=True)
            return chance * sum([lives * use / (lost + chance * rest) for lives, rest, use in terms])

        together = self.together()
        trust = TRUST * together
        guesses = sum([expected(number, self._guess(number)) for number in used])
        self._odds *= (sum(used.values()) + trust) / (guesses + trust * self._odds / ODDS)
        for (stride, count), parts in zip(_PARTS, self._parts, strict=True):
            seen = [0.0] * count
            guessed = [0.0] * count
            for number, uses in used.items():
                seen[number // stride % count] += uses
                guessed[number // stride % count] += expected(number, self._guess(number))
            trust = _trust(seen, [guess / part for guess, part in zip(guessed, parts, strict=True)], together)
            for part, ratio in enumerate(parts):
                ratio *= (seen[part] + trust) / (guessed[part] + trust * ratio)
                parts[part] = min(MOST_ODDS, max(1.0 / MOST_ODDS, ratio))
        trust = _trust([*used.values()], [expected(number, self._guess(number)) for number in used], together)
        for number, uses in used.items():
            factor = self._factors[number]
            guess = expected(number, self._guess(number) * factor)
            self._factors[number] = factor * (uses + trust) / (guess + trust * factor)

    def _learn_hazards(self, at_risk: dict[int, list[float]], curves: list[tuple[list[float], list[float]]]) -> None:
        """Uses at each age over the blocks at risk that are expected to be used at all."""
        seen = [[0.0] * AGES for _ in range(WAITS)]
        risk = [[0.0] * AGES for _ in range(WAITS)]
        for number, lives in at_risk.items():
            wait = number // 2 % WAITS
            left, _ = curves[wait]
            odds = self._odds_of(number)
            for age in range(AGES):
                seen[wait][age] += self.returned[number * AGES + age]
                risk[wait][age] += lives[age] * odds * left[age] / (1.0 + odds * left[age])
        together = self.together()
        trust = TRUST_AGE * together
        pooled = [
            (sum([row[age] for row in seen]) + trust * HAZARD) / (sum([row[age] for row in risk]) + trust)
            for age in range(AGES)
        ]
        guessed = [[lives * hazard for lives, hazard in zip(row, pooled, strict=True)] for row in risk]
        trust = _trust([use for row in seen for use in row], [guess for row in guessed for guess in row], together)
        for wait in range(WAITS):
            for age, hazard in enumerate(pooled):
                hazard *= (seen[wait][age] + trust) / (guessed[wait][age] + trust)
                self._hazards[wait][age] = min(MOST_HAZARD, hazard)

    def together(self) -> float:
        """How many uses come together, as one piece of evidence (Kish, 1965: a sum of squares over the sum)."""
        return max(1.0, self._squares / self._uses) if self._uses else 1.0

    def _worth_of(self, odds: float, curve: tuple[list[float], list[float]]) -> array[float]:
        """From each age on, the steepest slope of uses over room."""
        chance = odds / (1.0 + odds)
        room, uses = [0.0], [0.0]
        for age, (left, now) in enumerate(zip(*curve, strict=True)):
            kept = 1.0 - chance + chance * (left - 0.5 * now)
            room.append(room[-1] + kept * (self._starts[age + 1] - self._starts[age]))
            uses.append(uses[-1] + chance * now)
        worth = array("d", [0.0]) * AGES
        ends = [AGES]  # where the slopes from an age end that no later end exceeds: the upper hull, the first one last
        for age in range(AGES - 1, -1, -1):
            slopes = [(uses[end] - uses[age]) / (room[end] - room[age]) for end in ends[-2:]]
            while len(ends) > 1 and slopes[0] > slopes[1]:
                ends.pop()
                slopes = [(uses[end] - uses[age]) / (room[end] - room[age]) for end in ends[-2:]]
            worth[age] = _stepped(slopes[-1])
            ends.append(age)
        return worth


def _stepped(value: float) -> float:
    """The nearest step of an octave."""
    return 2.0 ** (round(log2(value) * _STEPS_PER_OCTAVE) / _STEPS_PER_OCTAVE) if value > 0.0 else 0.0


def _trust(seen: list[float], guessed: list[float], together: float) -> float:
    """The uses that a group must have had before its own numbers count as much as the guess."""
    groups = [(use / together, guess / together) for use, guess in zip(seen, guessed, strict=True) if guess > 0.0]
    return BELIEF * likeliest_trust(groups) * together


def _curve(hazards: list[float]) -> tuple[list[float], list[float]]:
    """Of the blocks that will be used again: how many are not before each age, and how many are at it."""
    left, now = [], []
    rest = 1.0
    for hazard in hazards:
        left.append(rest)
        now.append(rest * hazard)
        rest -= rest * hazard
    return left, now
