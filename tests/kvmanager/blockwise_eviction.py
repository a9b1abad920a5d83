"""The adaptive policy block by block: a word and two links for each block, nothing shared between those of a chain.

What the books' policy must decide, written so that each block can be followed; it is compared with it on random
histories. Its model of returns, its ghosts and its guard are the books' own.
"""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush

from kvmanager.adaptive import GROUPS_PER_TURNOVER, LEARN_BLOCKS, MEMORY_BLOCKS, MEMORY_TURNOVERS, WATCHED
from kvmanager.ghosts import MOST_TURNS, MOST_USES, Ghosts, class_kept, remembered, turn_kept, uses_kept, waited
from kvmanager.recency_guard import RecencyGuard
from kvmanager.return_model import AGES, CLASSES, ReturnModel, age_bucket, class_of

# A block's word: stamp << 24 | class << 15 | uses << 11 | turn << 8 | age bucket of its last wait << 3 | flags.
_WATCHED, _CACHED, _OFFERED = 1, 2, 4
_WAIT, _TURN, _USES, _CLASS, _STAMP = 3, 8, 11, 15, 24
_ONE_USE, _ALL_USES = 1 << _USES, 15 << _USES


class BlockwiseEviction:
    """AdaptiveEviction without runs."""

    def __init__(self, num_blocks: int) -> None:
        self._room = max(1, num_blocks - 2)
        self._words: list[int] = [0] * num_blocks
        self._next_blocks = array("i", [0]) * num_blocks
        self._previous_blocks = array("i", [0]) * num_blocks
        self._ghosts = Ghosts(self._room)
        self._hand = 0
        self._unit = max(1, self._room // 16)
        self._tick = max(1, self._room // 64)  # of the ghosts and the guard
        self._model = ReturnModel(self._unit)
        self._guard = RecencyGuard()
        self._group_width = max(1, self._room // GROUPS_PER_TURNOVER)
        # A group is epoch * CLASSES + class, a doubly linked list of blocks on offer; zero ends it.
        self._heads: dict[int, int] = {}
        self._tails: dict[int, int] = {}
        self._groups: list[tuple[float, int]] = []
        """A heap of (worth, group); empty groups are skipped when they surface."""
        self._epoch = 0
        self._now = 0
        self._period = max(LEARN_BLOCKS, self._room)
        self._next_learning = self._room
        self._learned_at = 0
        self._seen = 0.0

    def store(self, blocks: list[int], names: list[bytes], depth: int) -> None:
        for index, (block, name) in enumerate(zip(blocks, names, strict=True), depth):
            self._now += 1
            if (name[0] if index < WATCHED - 1 else index + 1) % WATCHED:
                self._words[block] = _ONE_USE
            else:
                self._words[block] = self._recall(name)
                self._guard.room += 1
                self._count_waiting()

    def hit(self, blocks: list[int]) -> None:
        words, now = self._words, self._now
        stamp = age = -1
        for block in blocks:
            word = words[block]
            if word & _OFFERED:
                self._unlink(block, word)
            if word & _ALL_USES < MOST_USES << _USES:
                word += _ONE_USE
            if word & _CACHED:
                if word >> _STAMP != stamp:
                    stamp = word >> _STAMP
                    age = age_bucket((now - stamp) // self._unit)
                if word & _WATCHED:
                    self._model.count_returned((word >> _CLASS & 511) * AGES + age, 1)
                    self._guard.used(stamp // self._tick, True)
                word = word & ~(_CACHED | _OFFERED | 31 << _WAIT) | age << _WAIT
            words[block] = word

    def release(self, blocks: list[int]) -> None:
        words = self._words
        fresh, turn, wait = 0, 1, 0
        for block in blocks:
            word = words[block]
            if word & _ALL_USES > _ONE_USE:
                # A prompt that is the first to continue what the one before it added is the next turn.
                if word & _ALL_USES == 2 * _ONE_USE:
                    turn = min(MOST_TURNS, (word >> _TURN & 7) + 1)
                    wait = word >> _WAIT & 31
                break
            fresh += 1
        level, uses = turn, _ONE_USE
        rest = turn << _TURN | self._now << _STAMP | _CACHED
        known = class_of(level, fresh, wait, 0) << _CLASS | uses | rest
        marked = known | _WATCHED
        watched = 0
        for block in blocks:
            word = words[block]
            # Whoever used a block used all before it, even if only some of these are watched and remembered.
            if word & _ALL_USES > uses:
                uses = word & _ALL_USES
                if uses >> _USES > level:
                    level = uses >> _USES
                    wait = word >> _WAIT & 31
                known = class_of(level, fresh, wait, 0) << _CLASS | uses | rest
                marked = known | _WATCHED
            if word & _WATCHED:
                watched += 1
                words[block] = marked
            else:
                words[block] = known
        if blocks:
            words[blocks[0]] |= 1 << _CLASS
        self._model.settle()
        if watched:
            self._guard.released(self._now // self._tick, watched)
        if self._now >= self._next_learning:
            self._learn()

    def evicted(self, blocks: list[int], names: list[bytes]) -> None:
        for block, name in zip(blocks, names, strict=True):
            self.remove(block)
            self._give_up(block, name)

    def _give_up(self, block: int, name: bytes) -> None:
        word = self._words[block]
        self._words[block] = 0
        if not word & _WATCHED:
            return
        self._guard.room -= 1
        now = self._now // self._tick
        kept = remembered(word >> _CLASS & 511, word >> _USES & 15, word >> _TURN & 7)
        for lost in self._ghosts.put([name], (word >> _STAMP) // self._tick, kept, now):
            self._model.gone[self._ghost_cell(lost)] += 1.0
            self._guard.lost(now - waited(lost, now))

    def forget(self, block: int) -> None:
        word = self._words[block]
        self._words[block] = 0
        if word & _WATCHED:
            self._guard.room -= 1
            if word & _CACHED:
                self._model.gone[self._cell(word)] += 1.0
                self._guard.lost((word >> _STAMP) // self._tick)

    def released_at(self, block: int) -> int:
        return self._words[block] >> _STAMP

    # The order.

    def add(self, block: int) -> None:
        word = self._words[block]
        if word & _OFFERED:
            return
        self._words[block] = word | _OFFERED
        group = self._group(word)
        head = self._heads.get(group, 0)
        if not head:
            self._heads[group] = self._tails[group] = block
            self._next_blocks[block] = self._previous_blocks[block] = 0
            heappush(self._groups, (self._worth_of(group), group))
        elif word >> _STAMP == self._now:
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

    def victims(self, most: int) -> list[int]:
        if self._now // self._group_width != self._epoch:
            self._rank_groups()
        if not self._heads:
            return []
        while self._groups[0][1] not in self._heads:
            heappop(self._groups)
        return [self._heads[self._groups[0][1]]]

    def offered(self) -> list[int]:
        return [block for block, word in enumerate(self._words) if word & _OFFERED]

    # Groups.

    def _group(self, word: int) -> int:
        return (word >> _STAMP) // self._group_width * CLASSES + (word >> _CLASS & 511)

    def _worth_of(self, group: int) -> float:
        if not self._guard.trusted:
            return 0.0
        age = self._now - group // CLASSES * self._group_width
        return self._model.worth[group % CLASSES * AGES + age_bucket(age // self._unit)]

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

    def _cell(self, word: int) -> int:
        return (word >> _CLASS & 511) * AGES + age_bucket((self._now - (word >> _STAMP)) // self._unit)

    def _ghost_cell(self, ghost: int) -> int:
        age = waited(ghost, self._now // self._tick) * self._tick
        return class_kept(ghost) * AGES + age_bucket(age // self._unit)

    def _recall(self, name: bytes) -> int:
        """The word of a watched block that was stored: its ghost, if it has one, tells its uses, turn and last wait."""
        ghost = self._ghosts.take(name)
        if not ghost:
            return _ONE_USE | _WATCHED
        cell = self._ghost_cell(ghost)
        self._model.count_returned(cell, 1)
        now = self._now // self._tick
        self._guard.used(now - waited(ghost, now), False)
        uses = min(uses_kept(ghost) + 1, MOST_USES)
        return uses << _USES | turn_kept(ghost) << _TURN | cell % AGES << _WAIT | _WATCHED

    def _count_waiting(self) -> None:
        """Counts a few of the blocks and ghosts that still wait for a use; all are once per half a turnover."""
        end = self._hand + 2 * WATCHED
        for word in self._words[self._hand : end]:
            if word & _WATCHED and word & _CACHED:
                self._model.counting[self._cell(word)] += 1
        for ghost in self._ghosts.some(self._hand, end):
            self._model.counting[self._ghost_cell(ghost)] += 1
        self._hand = end
        if end >= len(self._words):
            self._hand = 0
            self._model.counted_waiting()

    def _learn(self) -> None:
        elapsed = self._now - self._learned_at
        self._learned_at = self._now
        self._next_learning = self._now + self._period
        self._model.learn()
        self._guard.judge(self._now)
        self._rank_groups()
        self._seen += elapsed
        memory = max(MEMORY_TURNOVERS * self._room, MEMORY_BLOCKS)
        if self._seen > memory:
            kept = max(0.0, 1.0 - elapsed / memory)
            self._seen *= kept
            self._model.fade(kept)
