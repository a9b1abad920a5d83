"""The adaptive policy, which keeps whole runs of blocks, decides as one that keeps each block for itself."""

import random
from itertools import pairwise

import pytest

from bench.cache_sim import Cache, hits
from kvmanager import Pool, pool
from kvmanager.adaptive import AdaptiveEviction
from kvmanager.errors import BrokenBooks, KvError
from kvmanager.runs import Run, Runs
from kvmanager.types import Append, CacheScope, PoolSpec, Retention
from tests.kvmanager.blockwise_eviction import BlockwiseEviction
from tests.kvmanager.test_adaptive import chats_without_memory

COMPILED = not str(pool.__file__).endswith(".py")
BLOCK_SIZE = 2


class History:
    """One random history of a pool: prompts that share beginnings, forks, rewinds, retention and quotas.

    It is drawn as it goes, so two pools that answer differently go on differently.
    """

    def __init__(self, books: Pool, seed: int) -> None:
        self.books = books
        self.rng = random.Random(seed)
        self.salts = self.rng.choice([("",), ("", "a", "b")])
        self.roots = [[self.rng.randrange(9) for _ in range(40)] for _ in range(8)]
        self.lengths: dict[str, int] = {}
        self.answers: list[object] = []
        self.steps = {self.allocate: 8, self.append: 3, self.fork: 1, self.truncate: 1, self.free: 8, self.limit: 1}

    def run(self, steps: int) -> list[object]:
        kinds, weights = list(self.steps), list(self.steps.values())
        for index in range(steps):
            try:
                self.answers.append(self.rng.choices(kinds, weights)[0](f"sequence-{index}"))
            except KvError as refusal:
                self.answers.append((str(refusal), self.free("")))
            if index % 200 == 0:
                assert self.books.check().ok
        self.answers.append(self.books.events.since(max(1, self.books.events.last_number - 100)))
        return self.answers

    def allocate(self, sequence_id: str) -> object:
        rng = self.rng
        root = rng.choice(self.roots)
        token_ids = root[: rng.randint(1, len(root))] + [rng.randrange(99) for _ in range(rng.randrange(30))]
        if rng.random() < 0.2:
            self.roots[rng.randrange(len(self.roots))] = token_ids
        retention = Retention(rng.randrange(2), rng.choice([0.0, 3.0])) if rng.random() < 0.05 else Retention()
        scope = CacheScope(salt=rng.choice(self.salts))
        allocation = self.books.allocate(sequence_id, token_ids, scope=scope, retention=retention)
        self.lengths[sequence_id] = len(token_ids)
        return allocation, self.books.append([Append(sequence_id, (), len(token_ids))])

    def append(self, _: str) -> object:
        if not self.lengths:
            return None
        sequence_id = self.rng.choice(list(self.lengths))
        token_ids = [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 6))]
        grants = self.books.append([Append(sequence_id, token_ids, self.lengths[sequence_id])])
        self.lengths[sequence_id] += len(token_ids)
        return grants

    def fork(self, sequence_id: str) -> object:
        if not self.lengths:
            return None
        parent = self.rng.choice(list(self.lengths))
        self.lengths[sequence_id] = self.lengths[parent]
        return self.books.fork(parent, [sequence_id])

    def truncate(self, _: str) -> object:
        if not self.lengths:
            return None
        sequence_id = self.rng.choice(list(self.lengths))
        self.lengths[sequence_id] = self.rng.randint(1, self.lengths[sequence_id])
        return self.books.truncate(sequence_id, self.lengths[sequence_id])

    def free(self, _: str) -> object:
        if not self.lengths:
            return None
        sequence_id = self.rng.choice(list(self.lengths))
        del self.lengths[sequence_id]
        return self.books.free([Append(sequence_id)])

    def limit(self, _: str) -> object:
        if self.rng.random() < 0.9 or len(self.salts) == 1:
            return None
        return self.books.set_quota(self.rng.choice(self.salts[1:]), self.rng.choice([0, 60]))


def books(num_blocks: int, policy: AdaptiveEviction | BlockwiseEviction) -> Pool:
    ticks = iter(range(1_000_000))
    made = Pool(PoolSpec(num_blocks, BLOCK_SIZE), clock=lambda: next(ticks) / 10)
    made.block_pool.policy = policy
    return made


@pytest.mark.skipif(COMPILED, reason="a policy of compiled books can't be replaced by one that is not compiled")
@pytest.mark.parametrize("seed", range(12))
def test_every_answer_is_that_of_a_policy_of_single_blocks(seed: int) -> None:
    num_blocks = random.Random(seed).choice([80, 150, 400])
    runs = History(books(num_blocks, AdaptiveEviction(num_blocks)), seed)
    blockwise = History(books(num_blocks, BlockwiseEviction(num_blocks)), seed)
    assert runs.run(1_200) == blockwise.run(1_200)
    assert runs.books.totals.evicted_blocks > 1_000


@pytest.mark.parametrize("capacity", [40, 250, 700])
def test_so_it_is_where_much_is_learned(capacity: int) -> None:
    """Conversations that grow, a hot prompt and prompts that are used once: 60,000 blocks."""
    rng = random.Random(capacity)
    conversations = [[number * 1_000_000] for number in range(1, 31)]
    trace: list[list[int]] = []
    for request in range(3_000):
        turns = rng.choice(conversations)
        turns += [turns[-1] + 1 + place for place in range(rng.randrange(4))]
        fresh = list(range(10**9 + request * 100, 10**9 + request * 100 + rng.randrange(1, 40)))
        trace.append(rng.choice([turns[:], fresh, [*range(1, 20), 10**9 + request * 100 + 50]]))
        if len(turns) > 60:
            turns[:] = [turns[-1] + 1_000]
    sample = {capacity: hits(AdaptiveEviction(capacity + 2), capacity, trace)}
    assert sample == {capacity: hits(BlockwiseEviction(capacity + 2), capacity, trace)}
    assert sample[capacity] > 1_000


def _after(cache: Cache, ids: list[int]) -> tuple[int, bool]:
    """What the cache holds after a request, as one number, and whether its policy decides."""
    cache.request(ids)
    return hash(frozenset(cache.where)), cache.policy._trial.trusted


def test_so_it_is_where_lru_takes_over_again_and_again() -> None:
    histories = []
    for policy in (AdaptiveEviction(1_002), BlockwiseEviction(1_002)):
        cache = Cache(policy, 1_000)
        histories.append([_after(cache, ids) for ids in chats_without_memory(1)])
    assert histories[0] == histories[1]
    assert sum(now != before for (_, before), (_, now) in pairwise(histories[0])) >= 4


def test_a_use_of_blocks_that_were_given_up_is_a_fault_of_the_books_and_ends() -> None:
    runs = Runs(8)
    run = Run([3, 4], 0)
    runs.add(run)
    assert runs.cover([3, 4]) == [run]
    runs.shorten(run, 2)
    with pytest.raises(BrokenBooks, match="block 3 is used and has been given up"):
        runs.cover([3, 4])
