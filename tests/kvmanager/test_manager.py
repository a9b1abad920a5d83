"""Pools by name: openings, epochs, and what late callers are told."""

import pytest

from kvmanager import KvManager
from kvmanager.errors import InvalidArgument, PoolDiffers, StaleEpoch, UnknownPool
from kvmanager.events import EventKind
from kvmanager.types import Append, IndexKind, PoolSpec

SPEC = PoolSpec(10, 16, 4096, "model")


def test_opening_again_is_idempotent_for_the_same_runner():
    manager = KvManager("boot")
    first = manager.open_pool("p", SPEC, "runner-1")
    first.pool.allocate("a", [1])
    second = manager.open_pool("p", SPEC, "runner-1")
    assert (first.created, second.created) == (True, False)
    assert (first.epoch, second.epoch) == (1, 1)
    assert second.pool is first.pool
    assert second.pool.occupancy().sequences == 1


def test_another_runner_gets_an_empty_pool_under_the_next_epoch():
    manager = KvManager("boot")
    manager.open_pool("p", SPEC, "runner-1").pool.allocate("a", [1])
    opening = manager.open_pool("p", SPEC, "runner-2")
    assert (opening.created, opening.epoch) == (True, 2)
    assert opening.pool.occupancy().sequences == 0
    assert opening.pool.occupancy().free_blocks == 9
    with pytest.raises(StaleEpoch, match="in epoch 2, the caller speaks for epoch 1"):
        manager.pool("p", 1)


def test_other_facts_are_refused_and_named():
    manager = KvManager("boot")
    manager.open_pool("p", SPEC, "runner-1")
    with pytest.raises(PoolDiffers, match=r"num_blocks 10 \(asked for 11\), block_size 16 \(asked for 32\); close"):
        manager.open_pool("p", PoolSpec(11, 32, 4096, "model"), "runner-1")
    assert manager.epoch("p") == 1


def test_epochs_go_on_after_a_pool_is_closed():
    manager = KvManager("boot")
    manager.open_pool("p", SPEC, "runner-1").pool.allocate("a", [1])
    assert manager.close_pool("p") == 1
    with pytest.raises(UnknownPool, match="no pool 'p' is open; open ones: none"):
        manager.pool("p")
    assert manager.open_pool("p", PoolSpec(5, 8), "runner-1").epoch == 2


def test_a_later_process_never_gives_out_an_earlier_epoch():
    before, after = KvManager("boot-1", epoch_base=100), KvManager("boot-2", epoch_base=200)
    late = before.open_pool("p", SPEC, "runner-1").epoch
    after.open_pool("p", SPEC, "runner-2")
    with pytest.raises(StaleEpoch, match="in epoch 201, the caller speaks for epoch 101"):
        after.pool("p", late)


def test_pools_do_not_see_each_other():
    manager = KvManager("boot")
    manager.open_pool("p", SPEC, "r").pool.allocate("a", [1])
    manager.open_pool("q", SPEC, "r")
    assert manager.pool("q").occupancy().held_blocks == 0
    assert [pool_id for pool_id, _ in manager.pools()] == ["p", "q"]


@pytest.mark.parametrize(("pool_id", "runner_id"), [("", "r"), ("p", ""), ("p" * 257, "r"), ("p\0", "r")])
def test_ids_are_checked(pool_id, runner_id):
    with pytest.raises(InvalidArgument):
        KvManager("boot").open_pool(pool_id, SPEC, runner_id)


def test_a_bad_spec_opens_nothing():
    manager = KvManager("boot")
    with pytest.raises(InvalidArgument):
        manager.open_pool("p", PoolSpec(1, 16), "r")
    assert manager.pools() == []
    assert manager.open_pool("p", SPEC, "r").epoch == 1


def cache_a_block(manager):
    pool = manager.pool("p")
    pool.allocate("a", [1] * 16)
    pool.free([Append("a", (), 16)])


def kinds(manager, number=1):
    return [(event.number, event.kind) for event in manager.events("p").since(number)]


def test_events_go_on_when_another_runner_opens_the_pool():
    manager = KvManager("boot")
    manager.open_pool("p", SPEC, "runner-1")
    cache_a_block(manager)
    manager.open_pool("p", SPEC, "runner-1")
    assert kinds(manager) == [(1, EventKind.STORED)]
    manager.open_pool("p", SPEC, "runner-2")
    cache_a_block(manager)
    assert kinds(manager) == [(1, EventKind.STORED), (2, EventKind.CLEARED), (3, EventKind.STORED)]
    assert manager.pool("p").lookup([1] * 17).cached_tokens == 16


def test_events_go_on_when_a_pool_is_closed_and_opened():
    manager = KvManager("boot")
    manager.open_pool("p", SPEC, "runner-1")
    cache_a_block(manager)
    manager.close_pool("p")
    with pytest.raises(UnknownPool, match="no pool 'p' is open"):
        manager.events("p")
    manager.open_pool("p", PoolSpec(10, 16, 4096, "model", index=IndexKind.RADIX), "runner-1")
    assert kinds(manager) == [(1, EventKind.STORED), (2, EventKind.CLEARED)]
    cache_a_block(manager)
    assert kinds(manager, 3) == [(3, EventKind.STORED)]


def test_events_of_two_pools_are_numbered_apart():
    manager = KvManager("boot")
    for pool_id in ("p", "q"):
        manager.open_pool(pool_id, SPEC, "r")
    cache_a_block(manager)
    assert (manager.events("p").last_number, manager.events("q").last_number) == (1, 0)
