"""A small prefix cache that drives an eviction policy on chains of ids: to compare policies without the books.

Each id stands for one full block with everything before it. A request holds its blocks and one more, the last
token's, which is never cached; then it lets all of them go. A cache of capacity C has C + 1 blocks, as bench.evict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from kvmanager.policy import EvictionPolicy

NEVER = 1 << 60


def name_of(block_id: int) -> bytes:
    """A name as the books would give: 32 bytes that look random."""
    return hashlib.blake2b(block_id.to_bytes(16, "little"), digest_size=32).digest()


class Cache:
    """Blocks of one pool, their tree, and the policy that orders the leaves."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.free = list(range(capacity + 1, 0, -1))
        self.where: dict[int, int] = {}
        """The block of each cached or held id."""
        self.ids = [0] * (capacity + 2)
        self.parents = [0] * (capacity + 2)
        self.children = [0] * (capacity + 2)
        self.held = bytearray(capacity + 2)

    def request(self, ids: Sequence[int]) -> int:
        """Allocates and frees one prompt and returns how many of its blocks hit: none of one that never fits."""
        if len(ids) > self.capacity:
            return 0
        hits = self._match(ids)
        for block in hits:
            self.policy.remove(block)
            self.held[block] = True
        if hits:
            self.policy.hit(hits)
        fresh = [self._take() for _ in range(len(ids) - len(hits) + 1)]
        self.free.append(fresh.pop())
        chain = hits + fresh
        self._publish(chain, ids, len(hits))
        chain.reverse()
        self.policy.release(chain)
        for block in chain:
            self.held[block] = False
        if chain and not self.children[chain[0]]:
            self.policy.add(chain[0])
        return len(hits)

    def _match(self, ids: Sequence[int]) -> list[int]:
        hits: list[int] = []
        for block_id in ids:
            block = self.where.get(block_id)
            if block is None:
                break
            hits.append(block)
        return hits

    def _take(self) -> int:
        if self.free:
            return self.free.pop()
        block = self.policy.victims(1)[0]
        block_id, parent = self.ids[block], self.parents[block]
        del self.where[block_id]
        self.policy.evicted([block], [name_of(block_id)])
        if parent:
            self.children[parent] -= 1
            if not self.children[parent] and not self.held[parent]:
                self.policy.add(parent)
        return block

    def _publish(self, chain: list[int], ids: Sequence[int], known: int) -> None:
        """Stores the blocks of a chain behind its first `known`."""
        for depth in range(known, len(chain)):
            block = chain[depth]
            self.where[ids[depth]] = block
            self.ids[block], self.children[block] = ids[depth], 0
            self.held[block] = True
            self.parents[block] = chain[depth - 1] if depth else 0
            self.children[self.parents[block]] += 1
        if known < len(chain):
            self.policy.store(chain[known:], [name_of(block_id) for block_id in ids[known:]], known)


def hits(policy: EvictionPolicy, capacity: int, requests: Iterable[Sequence[int]]) -> int:
    """Hits of `requests`, in order, on an empty cache. The policy must have been made for capacity + 2 blocks."""
    cache = Cache(policy, capacity)
    return sum(cache.request(ids) for ids in requests)


def belady_hits(capacity: int, requests: Sequence[Sequence[int]]) -> int:
    """The most hits that any policy can have: whatever is used again last is given up first."""
    following = _next_uses(requests)
    cached: set[int] = set()
    next_use: dict[int, int] = {}
    order: list[tuple[int, int, int]] = []
    total = 0
    for ids, uses in zip(requests, following, strict=True):
        if len(ids) > capacity:
            continue
        for block_id in ids:
            if block_id not in cached:
                break
            total += 1
        cached.update(ids)
        for depth, (block_id, use) in enumerate(zip(ids, uses, strict=True)):
            next_use[block_id] = use
            heappush(order, (-use, -depth, block_id))
        while len(cached) > capacity:
            use, _, block_id = heappop(order)
            if next_use[block_id] == -use:
                cached.discard(block_id)
    return total


def _next_uses(requests: Sequence[Sequence[int]]) -> list[list[int]]:
    later: dict[int, int] = {}
    following: list[list[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        following.append([later.get(block_id, NEVER) for block_id in requests[index]])
        later.update(dict.fromkeys(requests[index], index))
    following.reverse()
    return following
