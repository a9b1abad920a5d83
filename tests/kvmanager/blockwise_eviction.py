"""The adaptive policy block by block: nothing is shared between those of a chain, and what waits is counted anew.

What the books' policy must decide, written so that each block can be followed; it is compared with it on random
histories. Its model of returns, its table of ghosts and its trial are the books' own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from kvmanager.adaptive import GROUPS_PER_TURNOVER, LEARN_BLOCKS, MEMORY_BLOCKS, MEMORY_TURNOVERS
from kvmanager.ghosts import MOST_TURNS, MOST_USES, Ghosts, blocks_kept, class_kept, remembered, turn_kept, uses_kept
from kvmanager.ghosts import waited as ghost_waited
from kvmanager.return_model import AGES, CLASSES, ReturnModel, age_bucket, class_of
from kvmanager.trial import Trial


@dataclass(slots=True)
class Content:
    """A block that has content. before: the block before it in its chain. gone: blocks behind it that were given up."""

    before: int = 0
    uses: int = 1
    turn: int = 0
    wait: int = 0
    kind: int = 0
    stamp: int = 0
    release: int = 0
    cached: bool = False
    offered: bool = False
    gone: int = 0
    gone_name: bytes = b""

    def shares_its_past_with(self, other: Content) -> bool:
        return (self.release, self.uses, self.kind) == (other.release, other.uses, other.kind)


class BlockwiseEviction:
    """AdaptiveEviction without runs."""

    def __init__(self, num_blocks: int) -> None:
        self._room = max(1, num_blocks - 2)
        self._contents: dict[int, Content] = {}
        self._ghosts = Ghosts(self._room)
        self._unit = max(1, self._room // 16)
        self._model = ReturnModel(self._unit)
        self._trial = Trial()
        self._group_width = max(1, self._room // GROUPS_PER_TURNOVER)
        self._offers: dict[int, list[int]] = {}
        """By epoch * CLASSES + class, the oldest first."""
        self._ranks: list[tuple[float, int]] = []
        self._by_worth = False
        self._epoch = 0
        self._now = 0
        self._releases = 0
        self._period = max(LEARN_BLOCKS, self._room)
        self._next_learning = self._room
        self._learned_at = 0
        self._seen = 0.0

    def store(self, blocks: list[int], names: list[bytes], depth: int) -> None:
        self._now += len(blocks)
        for block, name in zip(blocks, names, strict=True):
            self._contents[block] = content = Content()
            if ghost := self._ghosts.take(name):
                age = ghost_waited(ghost, self._now // self._unit)
                content.wait = self._return(class_kept(ghost), age, blocks_kept(ghost), hit=False)
                content.uses = min(MOST_USES, uses_kept(ghost) + 1)
                content.turn = turn_kept(ghost)

    def hit(self, blocks: list[int]) -> None:
        for block in blocks:
            content = self._contents[block]
            self.remove(block)
            if content.cached:
                content.cached = False
                self._leave_ghost(content)
                content.wait = self._return(content.kind, (self._now - content.stamp) // self._unit, 1, hit=True)
            content.uses = min(MOST_USES, content.uses + 1)

    def release(self, blocks: list[int]) -> None:
        self._releases += 1
        contents = [self._contents[block] for block in blocks]
        used = next((place for place, content in enumerate(contents) if content.uses > 1), len(contents))
        turn, wait = 1, 0
        if used < len(contents) and contents[used].uses == 2:
            turn, wait = min(MOST_TURNS, contents[used].turn + 1), contents[used].wait
        level, uses = turn, 1
        for content, before in zip(contents, [*blocks[1:], 0], strict=True):
            if content.uses > uses:
                uses = content.uses
                if uses > level:
                    level, wait = uses, content.wait
            content.kind = class_of(level, used, wait, 0)
            content.before, content.uses, content.turn, content.wait = before, uses, turn, 0
            content.stamp, content.release, content.cached = self._now, self._releases, True
        if contents:
            contents[0].kind += 1
        self._model.settle()
        if self._now >= self._next_learning:
            self._learn()

    def evicted(self, blocks: list[int], names: list[bytes]) -> None:
        for block, name in zip(blocks, names, strict=True):
            self.remove(block)
            content = self._contents.pop(block)
            content.gone += 1
            content.gone_name = content.gone_name or name
            before = self._contents.get(content.before)
            if before and before.cached and before.shares_its_past_with(content):
                before.gone, before.gone_name = content.gone, content.gone_name
            else:
                self._leave_ghost(content)

    def forget(self, block: int) -> None:
        content = self._contents.pop(block)
        if content.cached:
            self._leave_ghost(content)
            self._lose(content.kind, self._age(content.stamp), 1)

    def released_at(self, block: int) -> int:
        return self._contents[block].release

    # The order.

    def add(self, block: int) -> None:
        content = self._contents[block]
        if content.offered:
            return
        content.offered = True
        group = self._group(content)
        if group not in self._offers:
            self._offers[group] = [block]
            heappush(self._ranks, (self._worth_of(group), group))
        elif content.stamp == self._now:
            self._offers[group].append(block)
        else:
            # Its last continuation has just been given up: it is as old as that.
            self._offers[group].insert(0, block)

    def _offer_anew(self) -> None:
        """Within a group, in the order of their releases."""
        self._offers = {}
        for block in sorted(self.offered(), key=self.released_at):
            self._offers.setdefault(self._group(self._contents[block]), []).append(block)

    def remove(self, block: int) -> None:
        content = self._contents[block]
        if content.offered:
            content.offered = False
            group = self._group(content)
            self._offers[group].remove(block)
            if not self._offers[group]:
                del self._offers[group]

    def victims(self, most: int) -> list[int]:
        if self._now // self._group_width != self._epoch:
            self._rank_groups()
        if not self._offers:
            return []
        if not self._by_worth:
            return [min(self.offered(), key=self.released_at)]
        while self._ranks[0][1] not in self._offers:
            heappop(self._ranks)
        return [self._offers[self._ranks[0][1]][0]]

    def offered(self) -> list[int]:
        return [block for block, content in self._contents.items() if content.offered]

    def _group(self, content: Content) -> int:
        return content.stamp // self._group_width * CLASSES + content.kind

    def _worth_of(self, group: int) -> float:
        age = self._now - group // CLASSES * self._group_width
        return self._model.worth[group % CLASSES * AGES + age_bucket(age // self._unit)]

    def _rank_groups(self) -> None:
        self._epoch = self._now // self._group_width
        self._ranks = [(self._worth_of(group), group) for group in self._offers]
        heapify(self._ranks)

    # Lives.

    def _age(self, stamp: int) -> int:
        return self._now // self._unit - stamp // self._unit

    def _return(self, kind: int, age: int, count: int, hit: bool) -> int:
        cell = kind * AGES + age_bucket(age)
        self._model.count_returned(cell, count)
        self._trial.used(cell, count, hit)
        return age_bucket(age)

    def _lose(self, kind: int, age: int, count: int) -> None:
        self._model.gone[kind * AGES + age_bucket(age)] += count

    def _leave_ghost(self, last: Content) -> None:
        """What is gone behind a block, and with it if it is gone as well, leaves one ghost."""
        if not last.gone:
            return
        if last.kind % 2 == 0:
            kept = remembered(last.kind, last.uses, last.turn)
            now = self._now // self._unit
            ghost = self._ghosts.put(last.gone_name, last.stamp // self._unit, last.gone, kept, now)
            if ghost:
                self._lose(class_kept(ghost), ghost_waited(ghost, now), blocks_kept(ghost))
        else:
            self._lose(last.kind, self._age(last.stamp), last.gone)
        last.gone, last.gone_name = 0, b""

    def _waiting(self) -> Counter[int]:
        """How many blocks wait, by the model's cell: the cached ones, what is gone behind them, and the ghosts'."""
        waiting: Counter[int] = Counter()
        for content in self._contents.values():
            if content.cached:
                waiting[content.kind * AGES + age_bucket(self._age(content.stamp))] += 1 + content.gone
        for ghost in filter(None, self._ghosts._places):
            age = age_bucket(ghost_waited(ghost, self._now // self._unit))
            waiting[class_kept(ghost) * AGES + age] += blocks_kept(ghost)
        return waiting

    def _learn(self) -> None:
        elapsed = self._now - self._learned_at
        self._learned_at = self._now
        self._next_learning = self._now + self._period
        waiting = self._waiting()
        room = sum(content.cached for content in self._contents.values())
        self._trial.judge(self._model.worth, waiting, room)
        self._model.learn(waiting)
        self._trial.judge_early(self._model.worth, waiting, room, self._model.together())
        self._trial.count_anew()
        if self._trial.trusted != self._by_worth:
            self._by_worth = self._trial.trusted
            self._offer_anew()
        self._rank_groups()
        self._seen += elapsed
        memory = max(MEMORY_TURNOVERS * self._room, MEMORY_BLOCKS)
        if self._seen > memory:
            kept = max(0.0, 1.0 - elapsed / memory)
            self._seen *= kept
            self._model.fade(kept)
