"""The default policy against LRU on small traces that are known to hurt one or the other."""

import random
from heapq import heappop, heappush

import pytest

from bench.cache_sim import Cache, belady_hits, hits
from kvmanager.adaptive import AdaptiveEviction
from kvmanager.lru import LruEviction

FIRST_FRESH_ID = 10_000_000


def chain(root: int, length: int) -> list[int]:
    return [root * 1_000 + depth for depth in range(length)]


def hot_set_under_scan(seed: int, hot: int, requests: int, first_root: int = 0) -> list[list[int]]:
    """One request in three is for one of `hot` chains of 12 blocks; the others are never seen again."""
    rng = random.Random(seed)
    fresh = FIRST_FRESH_ID + seed * 10_000_000
    trace = []
    for index in range(requests):
        if index % 3:
            length = rng.randrange(10, 40)
            trace.append(list(range(fresh, fresh + length)))
            fresh += length
        else:
            trace.append(chain(first_root + rng.randrange(hot), 12))
    return trace


def policy_hits(capacity: int, trace: list[list[int]]) -> tuple[int, int]:
    return hits(AdaptiveEviction(capacity + 2), capacity, trace), hits(LruEviction(capacity + 2), capacity, trace)


def test_a_scan_does_not_wash_the_hot_set_out() -> None:
    trace = hot_set_under_scan(seed=1, hot=60, requests=6_000)
    learned, lru = policy_hits(1_000, trace)
    assert learned > 0.8 * belady_hits(1_000, trace) > 2 * lru


def test_the_hot_set_moves() -> None:
    trace = [ids for phase in range(3) for ids in hot_set_under_scan(phase, 60, 4_000, first_root=phase * 100)]
    learned, lru = policy_hits(1_000, trace)
    assert learned > 0.65 * belady_hits(1_000, trace) > 1.5 * lru


def test_a_loop_that_fits_hits_always_and_one_that_does_not_is_no_worse_than_lru() -> None:
    loop = [chain(root, 20) for _ in range(30) for root in range(60)]
    assert policy_hits(1_200, loop) == (29 * 1_200, 29 * 1_200)
    learned, lru = policy_hits(1_000, loop)
    assert learned >= lru == 0


@pytest.mark.parametrize("capacity", [300, 1_000, 3_000])
def test_within_a_hundredth_of_lru_where_recent_use_says_all(capacity: int) -> None:
    rng = random.Random(4)
    roots = [0]
    trace = []
    for _ in range(4_000):
        # The root used k requests ago is used with a chance that falls with k.
        back = min(int(rng.paretovariate(0.7)), len(roots))
        root = roots[-back] if rng.random() < 0.7 else len(trace) + 1
        roots.append(root)
        trace.append(chain(root, 10))
    learned, lru = policy_hits(capacity, trace)
    assert learned >= 0.99 * lru


def chats_without_memory(seed: int) -> list[list[int]]:
    """One conversation in five goes on after each turn, after an exponential wait: nothing else is to learn."""
    rng = random.Random(seed)
    due: list[tuple[float, int, list[int]]] = [(start, start, []) for start in range(3_000)]
    fresh, trace = 1, []
    while due:
        time, chat, known = heappop(due)
        length = 1 + int(rng.expovariate(1 / 16))
        ids = known + list(range(fresh, fresh + length))
        fresh += length
        trace.append(ids)
        if len(ids) < 200 and rng.random() < 0.2:
            heappush(due, (time + rng.expovariate(1 / 60), chat, ids))
    return trace


def test_what_differs_by_chance_alone_is_not_learned() -> None:
    results = [policy_hits(500, chats_without_memory(seed)) for seed in (1, 2, 3)]
    learned, lru = (sum(side) for side in zip(*results, strict=True))
    assert learned >= 0.99 * lru


def test_until_it_decides_the_cache_holds_exactly_what_that_of_lru_holds() -> None:
    capacity = 1_000
    learner = AdaptiveEviction(capacity + 2)
    caches = Cache(learner, capacity), Cache(LruEviction(capacity + 2), capacity)
    full = 0
    # Chats, some of which are asked for once more as they are: a release that stores nothing has its turn as well.
    for number, ids in enumerate(chats_without_memory(4)):
        for _ in range(1 + (number % 5 == 0)):
            for cache in caches:
                cache.request(ids)
            assert caches[0].where.keys() == caches[1].where.keys()
        full += len(caches[0].where) >= 0.9 * capacity
    assert full > 3_000
    assert not learner._trial.trusted
    assert learner._model.worth[0] > 0.0


def test_what_goes_on_offer_late_has_the_place_of_its_release() -> None:
    policy = AdaptiveEviction(9)
    names = [bytes([number]) * 32 for number in range(9)]
    # 1 is the beginning of 2 and of 3; 3 is used last, so 1 is as young as that, and 4 is between them.
    policy.store([1, 2], names[:2], 0)
    policy.release([2, 1])
    policy.add(2)
    for chain_of, fresh in (([1], 3), ([], 4)):
        policy.hit(chain_of)
        policy.store([fresh], [names[fresh]], len(chain_of))
        policy.release([fresh, *chain_of])
        policy.add(fresh)
    order = []
    for _ in range(4):
        (block,) = policy.victims(1)
        order.append(block)
        policy.evicted([block], [names[block]])
        if block == 3:
            policy.add(1)
    assert order == [2, 3, 1, 4]


def test_the_same_trace_gives_the_same_hits() -> None:
    trace = hot_set_under_scan(seed=9, hot=40, requests=1_500)
    assert policy_hits(500, trace) == policy_hits(500, trace)


def test_removed_blocks_leave_the_offer() -> None:
    policy = AdaptiveEviction(5)
    name = bytes(32)
    for block in (1, 2, 3):
        policy.store([block], [name], 0)
        policy.release([block])
        policy.add(block)
    assert sorted(policy.offered()) == [1, 2, 3]
    policy.remove(2)
    policy.forget(2)
    policy.remove(1)
    policy.hit([1])
    assert policy.victims(9) == [3]
    policy.evicted([3], [name])
    assert policy.victims(9) == []
    policy.release([1])
    policy.add(1)
    assert policy.victims(9) == [1]


@pytest.mark.parametrize("capacity", [1, 2, 3, 17])
def test_pools_of_a_few_blocks(capacity: int) -> None:
    rng = random.Random(capacity)
    trace = [chain(rng.randrange(6), rng.randrange(1, capacity + 1)) for _ in range(8_000)]
    learned, _ = policy_hits(capacity, trace)
    assert 0 < learned <= belady_hits(capacity, trace)
