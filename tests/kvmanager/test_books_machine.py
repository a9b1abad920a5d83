"""Random histories against the naive model; and proof that the machine finds planted faults of each known kind."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvmanager.blocks import BlockPool
from kvmanager.errors import PoolShort
from kvmanager.pool import Pool
from tests.kvmanager.books_machine import BooksMachine

THOROUGH = settings(max_examples=150, stateful_step_count=40, deadline=None)
SEARCH = settings(
    max_examples=4000,
    stateful_step_count=40,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_random_histories():
    run_state_machine_as_test(BooksMachine, settings=THOROUGH)


def plant_count_off_by_one_on_fork(monkeypatch):
    real = BlockPool.share
    monkeypatch.setattr(BlockPool, "share", lambda self, block, times=1: real(self, block, max(1, times - 1)))


def plant_hash_left_behind_on_reuse(monkeypatch):
    def drop(self, block):
        self.stored[block] = 0
        self.free.append(block)

    monkeypatch.setattr(BlockPool, "_drop", drop)


def plant_hit_evicted_in_the_same_call(monkeypatch):
    def allocate(self, sequence_id, token_ids, **options):
        # Takes the fresh blocks before the hits are pinned, as one system did with two groups.
        chain = self._chain(token_ids, options["scope"])
        hits = self._match(chain)
        if not hits or options["skip_cache_read"] or options["headroom_blocks"]:
            return real(self, sequence_id, token_ids, **options)
        blocks = self.block_pool
        needed = self._blocks_for(len(chain.token_ids)) - len(hits)
        if needed > blocks.available:
            raise PoolShort("short")
        fresh = [blocks.take() for _ in range(needed)]
        for block in fresh:
            blocks.release(block)
        return real(self, sequence_id, token_ids, **options)

    real = Pool.allocate
    monkeypatch.setattr(Pool, "allocate", allocate)


def plant_tail_freed_twice(monkeypatch):
    def end(self, sequence):
        real(self, sequence)
        blocks = self.block_pool
        if blocks.counts[sequence.blocks[-1]] > 0:
            blocks.release(sequence.blocks[-1])

    real = Pool._end
    monkeypatch.setattr(Pool, "_end", end)


def plant_failed_allocation_keeps_a_touch(monkeypatch):
    def allocate(self, sequence_id, token_ids, **options):
        try:
            return real(self, sequence_id, token_ids, **options)
        except PoolShort:
            for block in self._match(self._chain(token_ids, options["scope"])):
                self.block_pool.share(block)
            raise

    real = Pool.allocate
    monkeypatch.setattr(Pool, "allocate", allocate)


def plant_copy_left_out(monkeypatch):
    monkeypatch.setattr(Pool, "_shared_writes", lambda self, sequence, computed, given_up: ())


@pytest.mark.parametrize(
    "plant",
    [
        plant_count_off_by_one_on_fork,
        plant_hash_left_behind_on_reuse,
        plant_hit_evicted_in_the_same_call,
        plant_tail_freed_twice,
        plant_failed_allocation_keeps_a_touch,
        plant_copy_left_out,
    ],
)
def test_the_machine_finds_a_planted_fault(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - a fault shows as whichever check it hits first
        run_state_machine_as_test(BooksMachine, settings=SEARCH)
