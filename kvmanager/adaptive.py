"""Gives up the block that earns the fewest hits per unit of room: its class's best hits-per-time from its age on.

Every cached block has a class, what its chain tells about it: how often it was used, how much its last prompt added
behind the reused part, how long it had waited for its last use, and whether it ended the prompt. For each class the
policy learns how likely a use is at each age, as actuaries learn from lives of which some are still going on
(Kaplan and Meier, 1958): a block counts while it is cached, and a ghost counts for it after it was given up. From that
follows the worth of a block of a given class and age: the most uses per block and time that keeping it on can bring,
over all times to keep it for. That is the Gittins index (Gittins, 1979), and hit density (LHD, Beckmann et al., NSDI
2018) in a cache. Within a class the older goes first, as under LRU, unless a block far younger than the age at which
its class is used is plainly worth less; what a scan leaves behind has a class of its own and goes first.

Time is counted in stored blocks: only these need room. Ages are in half octaves of a sixteenth of the pool, so nothing
here depends on the size of the pool or on the speed of the machine. Blocks of one class released in the same eighth of
a turnover of the pool form a group; groups are ranked again as time goes on, and each verb is O(log groups).

One name in four is watched: its block is counted and leaves a ghost. That is enough because chains come back as a
whole: a prompt that uses a known block has used all blocks before it.
"""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush

from kvmanager.policy import EvictionPolicy

WATCHED = 4
"""One name in so many is watched; a power of two."""
GHOSTS_PER_BLOCK = 1
FIRST = 2
"""Turnovers of the pool before the first learning: until then the order is LRU, and no block has been watched long."""
GROUPS_PER_TURNOVER = 8
MEMORY_TURNOVERS = 32
"""How much of the past counts, in turnovers of the pool, and at least MEMORY_BLOCKS."""
MEMORY_BLOCKS = 1 << 16
LEARN_BLOCKS = 4096
"""What was seen is turned into worth once per turnover, and no sooner than after so many stored blocks."""
YOUNG = 0.5
"""A block is worth at least as much as an older one of its class, up to this share of the most it is ever worth."""
TRUST = 32.0
"""Watched blocks that a class must have seen at an age before its own numbers count as much as those of its kind."""
TRUST_KIND = 16.0
"""The same for a kind, in expected uses."""

# Classes: (uses, fresh, wait, tail) as one number, below 256.
_USES = 5  # 1, 2, 3 to 4, 5 to 8, more
_FRESH = 5  # new blocks of its last prompt: 1, under 4, under 8, under 32, more
_WAITS = 3  # age at its last use: under 2 turnovers, under 8, more
_CLASSES = _USES * _FRESH * _WAITS * 2
_PRIOR = (1.0, 2.0, 3.0, 5.0, 8.0)  # until something is known, a block used k times is k times as likely to be used
_AGES = 24
_MAX_USES = 15

# A block's word: stamp << 20 | class << 12 | uses << 8 | age bucket of its last wait << 3 | flags.
_WATCHED, _CACHED, _OFFERED = 1, 2, 4
_STAMP = 20
# A ghost's word: tag << 47 | stamp << 17 | class << 9 | uses << 5 | age bucket at which it was given up.
_TAG_BITS, _STAMP_BITS = 17, 30


class AdaptiveEviction(EvictionPolicy):
    """The policy of this module, for blocks 1 to `num_blocks` - 1."""

    __slots__ = (
        "_ends",
        "_epoch",
        "_ghost_unit",
        "_ghosts",
        "_group_width",
        "_groups",
        "_heads",
        "_learned_at",
        "_lives",
        "_next_blocks",
        "_next_learning",
        "_now",
        "_period",
        "_previous_blocks",
        "_room",
        "_seen",
        "_starts",
        "_tails",
        "_unit",
        "_uses",
        "_words",
        "_worth",
    )

    def __init__(self, num_blocks: int) -> None:
        self._room = max(1, num_blocks - 2)
        self._words = array("Q", [0]) * num_blocks
        self._next_blocks = array("i", [0]) * num_blocks
        self._previous_blocks = array("i", [0]) * num_blocks
        self._ghosts = array("Q", [0]) * (GHOSTS_PER_BLOCK * self._room)
        self._ghost_unit = max(1, self._room // 64)
        self._unit = max(1, self._room // 16)
        self._starts = [self._unit * _bucket_start(bucket) for bucket in range(_AGES + 1)]
        self._uses = array("d", [0.0]) * (_CLASSES * _AGES)
        """Uses of watched blocks, by class and age."""
        self._lives = array("d", [0.0]) * (_CLASSES * _AGES)
        """Watched blocks last seen at an age less those first seen at it; summed from an age on: those at risk."""
        self._worth = [0.0] * (_CLASSES * _AGES)
        self._group_width = max(1, self._room // GROUPS_PER_TURNOVER)
        # A group is epoch * _CLASSES + class, a doubly linked list of blocks on offer; zero ends it.
        self._heads: dict[int, int] = {}
        self._tails: dict[int, int] = {}
        self._groups: list[tuple[float, int]] = []
        """A heap of (worth, group); empty groups are skipped when they surface."""
        self._epoch = 0
        self._now = 0
        self._period = max(LEARN_BLOCKS, self._room)
        self._next_learning = FIRST * self._room
        self._learned_at = 0
        self._seen = 0.0

    def store(self, block: int, name: bytes, depth: int) -> None:
        self._now += 1
        if name[0] % WATCHED:
            self._words[block] = 1 << 8
        else:
            self._words[block] = self._recall(name)

    def hit(self, blocks: list[int]) -> None:
        words, now = self._words, self._now
        for block in blocks:
            word = words[block]
            uses = word >> 8 & 15
            if uses < _MAX_USES:
                word += 1 << 8
            if word & _CACHED:
                age = self._bucket(now - (word >> _STAMP))
                word = word & ~(_CACHED | 31 << 3) | age << 3
                if word & _WATCHED:
                    self._count_use(word >> 12 & 255, age)
            words[block] = word

    def release(self, blocks: list[int]) -> None:
        words = self._words
        fresh = 0
        for block in blocks:
            if words[block] >> 8 & 15 > 1:
                break
            fresh += 1
        fresh = 0 if fresh < 2 else 1 if fresh < 4 else 2 if fresh < 8 else 3 if fresh < 32 else 4
        stamp = self._now << _STAMP | _CACHED
        uses, wait, tail = 1, 0, 1
        known = -1
        for block in blocks:
            word = words[block]
            # Whoever used a block used all before it, even if only some of these are watched and remembered.
            if word >> 8 & 15 > uses:
                uses = word >> 8 & 15
                wait = word >> 3 & 31
                known = -1
            if known < 0:
                known = _class_of(uses, fresh, wait, 0) << 12 | uses << 8 | wait << 3 | stamp
            words[block] = (known | tail << 12) | word & _WATCHED
            tail = 0
        if self._now >= self._next_learning:
            self._learn()

    def add(self, block: int) -> None:
        word = self._words[block]
        stamp = word >> _STAMP
        group = self._group(word)
        self._words[block] = word | _OFFERED
        head = self._heads.get(group, 0)
        if not head:
            self._heads[group] = self._tails[group] = block
            self._next_blocks[block] = self._previous_blocks[block] = 0
            heappush(self._groups, (self._worth_of(group), group))
        elif stamp == self._now:
            tail = self._tails[group]
            self._next_blocks[tail] = self._tails[group] = block
            self._previous_blocks[block] = tail
            self._next_blocks[block] = 0
        else:
            # Its last continuation has just been given up: it is as old as that.
            self._previous_blocks[head] = self._heads[group] = block
            self._next_blocks[block] = head
            self._previous_blocks[block] = 0

    def remove(self, block: int) -> None:
        word = self._words[block]
        if word & _OFFERED:
            self._unlink(block, word)
            self._words[block] = word & ~_OFFERED

    def victim(self) -> int:
        if self._now // self._group_width != self._epoch:
            self._rank_groups()
        groups, heads = self._groups, self._heads
        while groups and groups[0][1] not in heads:
            heappop(groups)
        if not groups:
            return 0
        block = heads[groups[0][1]]
        self.remove(block)
        return block

    def comes_first(self, block: int) -> bool:
        # Its group, when the last victim was of that one: nothing is worth less until the groups are ranked again.
        return bool(self._groups) and self._groups[0][1] == self._group(self._words[block])

    def released_at(self, block: int) -> int:
        return self._words[block] >> _STAMP

    def offered(self) -> list[int]:
        return [block for block, word in enumerate(self._words) if word & _OFFERED]

    def evicted(self, block: int, name: bytes) -> None:
        word = self._words[block]
        self._words[block] = 0
        if not word & _WATCHED:
            return
        number = word >> 12 & 255
        age = self._bucket(self._now - (word >> _STAMP))
        self._lives[number * _AGES + age] += 1.0
        key = int.from_bytes(name[1:8], "little")
        slot = (key >> _TAG_BITS) % len(self._ghosts)
        ghost = self._ghosts[slot]
        if ghost:
            self._end_ghost(ghost)
        born = (word >> _STAMP) // self._ghost_unit & (1 << _STAMP_BITS) - 1
        tag = key & (1 << _TAG_BITS) - 1
        self._ghosts[slot] = tag << 47 | born << 17 | number << 9 | (word >> 8 & 15) << 5 | age

    def forget(self, block: int) -> None:
        self._words[block] = 0

    # Groups.

    def _group(self, word: int) -> int:
        return (word >> _STAMP) // self._group_width * _CLASSES + (word >> 12 & 255)

    def _worth_of(self, group: int) -> float:
        age = self._now - group // _CLASSES * self._group_width
        return self._worth[group % _CLASSES * _AGES + self._bucket(age)]

    def _unlink(self, block: int, word: int) -> None:
        before, after = self._previous_blocks[block], self._next_blocks[block]
        if before and after:
            self._next_blocks[before] = after
            self._previous_blocks[after] = before
            return
        group = self._group(word)
        if before:
            self._next_blocks[before] = 0
            self._tails[group] = before
        elif after:
            self._previous_blocks[after] = 0
            self._heads[group] = after
        else:
            del self._heads[group], self._tails[group]

    def _rank_groups(self) -> None:
        self._epoch = self._now // self._group_width
        self._groups = [(self._worth_of(group), group) for group in self._heads]
        heapify(self._groups)

    # Lives of watched blocks.

    def _bucket(self, age: int) -> int:
        age //= self._unit
        if age < 2:
            return age
        bits = age.bit_length()
        return min(_AGES - 1, 2 * bits - 2 + (age >> bits - 2 & 1))

    def _count_use(self, number: int, age: int) -> None:
        self._uses[number * _AGES + age] += 1.0
        self._lives[number * _AGES + age] += 1.0

    def _recall(self, name: bytes) -> int:
        """The word of a watched block that was stored: its ghost, if it has one, tells its uses and its last wait."""
        key = int.from_bytes(name[1:8], "little")
        slot = (key >> _TAG_BITS) % len(self._ghosts)
        ghost = self._ghosts[slot]
        if not ghost or ghost >> 47 != key & (1 << _TAG_BITS) - 1:
            return 1 << 8 | _WATCHED
        self._ghosts[slot] = 0
        number = ghost >> 9 & 255
        age = self._ghost_age(ghost)
        self._count_use(number, age)
        self._lives[number * _AGES + (ghost & 31)] -= 1.0
        return min((ghost >> 5 & 15) + 1, _MAX_USES) << 8 | age << 3 | _WATCHED

    def _end_ghost(self, ghost: int) -> None:
        row = (ghost >> 9 & 255) * _AGES
        self._lives[row + (ghost & 31)] -= 1.0
        self._lives[row + self._ghost_age(ghost)] += 1.0

    def _ghost_age(self, ghost: int) -> int:
        units = self._now // self._ghost_unit - (ghost >> 17) & (1 << _STAMP_BITS) - 1
        return max(ghost & 31, self._bucket(units * self._ghost_unit))

    # Learning.

    def _learn(self) -> None:
        self._next_learning = self._now + self._period
        learn_worth(self._uses, self._lives, self._starts, self._worth)
        self._rank_groups()
        elapsed = self._now - self._learned_at
        self._learned_at = self._now
        self._seen += elapsed
        memory = max(MEMORY_TURNOVERS * self._room, MEMORY_BLOCKS)
        if self._seen > memory:
            kept = max(0.0, 1.0 - elapsed / memory)
            self._seen *= kept
            for cell in range(_CLASSES * _AGES):
                self._uses[cell] *= kept
                self._lives[cell] *= kept


def _bucket_start(bucket: int) -> int:
    return bucket if bucket < 2 else 2 + (bucket & 1) << (bucket + 2) // 2 - 2


def _class_of(uses: int, fresh: int, wait: int, tail: int) -> int:
    kind = uses - 1 if uses < 3 else 2 if uses < 5 else 3 if uses < 9 else 4
    # Buckets 10 and 14 begin at 2 and 8 turnovers.
    late = 0 if uses < 2 or wait < 10 else 1 if wait < 14 else 2
    return ((kind * _FRESH + fresh) * _WAITS + late) * 2 + tail


def learn_worth(uses: array[float], lives: array[float], starts: list[int], worth: list[float]) -> None:
    """Fills in `worth`, by class and age: the most uses per block and time that keeping a block on can bring."""
    at_risk = _at_risk(uses, lives)
    shape = [
        sum(uses[cell] for cell in range(age, _CLASSES * _AGES, _AGES))
        / (sum(at_risk[cell] for cell in range(age, _CLASSES * _AGES, _AGES)) + 4.0)
        for age in range(_AGES)
    ]
    factors = _class_factors(uses, at_risk, shape)
    for number in range(_CLASSES):
        row = number * _AGES
        hazard = [0.0] * _AGES
        for age in range(_AGES):
            guess = min(1.0, factors[number] * shape[age])
            hazard[age] = min(1.0, (uses[row + age] + TRUST * guess) / (at_risk[row + age] + TRUST))
        _best_rates(hazard, starts, worth, row)


def _at_risk(uses: array[float], lives: array[float]) -> list[float]:
    """Watched blocks that could be used at each age; those last seen at an age count half there."""
    at_risk = [0.0] * (_CLASSES * _AGES)
    for number in range(_CLASSES):
        older = 0.0
        for cell in range(number * _AGES + _AGES - 1, number * _AGES - 1, -1):
            older += lives[cell]
            at_risk[cell] = max(older - 0.5 * max(0.0, lives[cell] - uses[cell]), uses[cell], 0.0)
    return at_risk


def _class_factors(uses: array[float], at_risk: list[float], shape: list[float]) -> list[float]:
    """How many times as often as the shape says each class is used: the product of what its parts say, and its own."""
    found = [0.0] * _CLASSES
    expected = [0.0] * _CLASSES
    for number in range(_CLASSES):
        row = number * _AGES
        found[number] = sum(uses[row : row + _AGES])
        expected[number] = sum([at_risk[row + age] * shape[age] for age in range(_AGES)])
    factors = [_PRIOR[number // (_FRESH * _WAITS * 2)] for number in range(_CLASSES)]
    for stride, count in ((_FRESH * _WAITS * 2, _USES), (_WAITS * 2, _FRESH), (2, _WAITS), (1, 2)):
        seen = [TRUST_KIND] * count
        guessed = [TRUST_KIND] * count
        for number in range(_CLASSES):
            part = number // stride % count
            seen[part] += found[number]
            guessed[part] += expected[number] * factors[number]
        for number in range(_CLASSES):
            factors[number] *= seen[number // stride % count] / guessed[number // stride % count]
    return [
        (found[number] + TRUST_KIND * factors[number]) / (expected[number] + TRUST_KIND) for number in range(_CLASSES)
    ]


def _best_rates(hazard: list[float], starts: list[int], worth: list[float], row: int) -> None:
    """From each age on, the steepest slope of uses over room: the upper hull of that curve, built from its end."""
    alive, room, used = 1.0, [0.0], [0.0]
    for age in range(_AGES):
        dead = alive * hazard[age]
        room.append(room[-1] + (alive - 0.5 * dead) * (starts[age + 1] - starts[age]))
        used.append(used[-1] + dead)
        alive -= dead
    hull = [_AGES]
    best = peak = 0.0
    for age in range(_AGES - 1, -1, -1):
        slope = _slope(room, used, age, hull[-1])
        while len(hull) > 1:
            longer = _slope(room, used, age, hull[-2])
            if longer < slope:
                break
            slope = longer
            hull.pop()
        hull.append(age)
        peak = max(peak, slope)
        best = max(slope, min(best, YOUNG * peak))
        worth[row + age] = best


def _slope(room: list[float], used: list[float], start: int, end: int) -> float:
    width = room[end] - room[start]
    return (used[end] - used[start]) / width if width > 0.0 else 0.0
