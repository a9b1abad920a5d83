"""Priorities, pins, quotas and the removal of a prefix: who stays, who goes, and what is refused."""

import pytest

from kvmanager import Pool
from kvmanager.errors import InvalidArgument, NeverFits, PinsExhausted, PoolShort, QuotaShort
from kvmanager.types import Append, CacheScope, ContentSpan, IndexKind, PoolSpec, Removal, Retention, TenantUsage
from tests.kvmanager.pools import COMMON, FakeClock, cache, end, pool_of, prefill, right

S, T = CacheScope(salt="s"), CacheScope(salt="t")
TEN = Retention(pin_seconds=10.0)


def timed_pool(num_blocks=11, index=IndexKind.HASH):
    clock = FakeClock()
    return Pool(PoolSpec(num_blocks, 16, index=index), clock), clock


def hits(pool, *prompts, **options):
    return [pool.lookup([*prompt, 999], **options).cached_tokens for prompt in prompts]


class TestPriority:
    def test_a_block_of_higher_priority_outlives_all_of_lower_ones(self):
        pool = pool_of(num_blocks=4)
        cache(pool, [1] * 16, retention=Retention(priority=2))
        cache(pool, [2] * 16)
        cache(pool, [3] * 16, retention=Retention(priority=1))
        order = []
        for number in range(3):
            pool.allocate(str(number), [100 + number])
            order.append(hits(pool, [1] * 16, [2] * 16, [3] * 16))
        assert order == [[16, 0, 16], [16, 0, 0], [0, 0, 0]]
        assert right(pool)

    def test_an_older_one_of_the_same_priority_goes_first(self):
        pool = pool_of(num_blocks=3)
        cache(pool, [1] * 16, retention=Retention(priority=5))
        cache(pool, [2] * 16, retention=Retention(priority=5))
        pool.allocate("a", [7])
        assert hits(pool, [1] * 16, [2] * 16) == [0, 16]

    def test_a_prompt_that_is_cached_again_with_less_keeps_its_priority(self):
        pool = pool_of(num_blocks=3)
        cache(pool, [1] * 16, retention=Retention(priority=5))
        cache(pool, [2] * 16)
        cache(pool, [1] * 16)
        pool.allocate("a", [7])
        assert hits(pool, [1] * 16, [2] * 16) == [16, 0]

    def test_generated_tokens_are_kept_with_the_prompt(self):
        pool = pool_of(num_blocks=5)
        prefill(pool, "a", [1] * 16, retention=Retention(priority=1))
        pool.append([Append("a", [2] * 16, 16)])
        pool.free([Append("a", (), 32)])
        cache(pool, [3] * 32)
        pool.allocate("b", [7] * 32)
        assert hits(pool, [1] * 16 + [2] * 16, [3] * 32) == [32, 0]

    @pytest.mark.parametrize("priority", [-1, 101])
    def test_a_priority_out_of_range_is_refused(self, priority):
        with pytest.raises(InvalidArgument, match=f"a priority is 0 to 100, not {priority}"):
            pool_of().allocate("a", [1], retention=Retention(priority))


class TestPins:
    def test_a_pinned_prompt_stays_until_its_time(self):
        pool, clock = timed_pool(num_blocks=5)
        cache(pool, [1] * 32, retention=TEN)
        assert pool.occupancy().pinned_blocks == 2
        clock.now = 9.9
        with pytest.raises(PoolShort, match="3 blocks are needed, 2 are free or cached"):
            pool.allocate("a", [2] * 48)
        assert hits(pool, [1] * 32) == [32]
        clock.now = 10.0
        assert len(pool.allocate("a", [2] * 48).block_ids) == 3
        assert pool.occupancy().pinned_blocks == 0
        assert hits(pool, [1] * 32) == [16]
        assert right(pool)

    def test_only_full_blocks_of_the_prompt_are_pinned(self):
        pool, _ = timed_pool()
        prefill(pool, "a", [1] * 20, retention=TEN)
        pool.append([Append("a", [2] * 20, 20)])
        pool.free([Append("a", (), 40)])
        assert pool.occupancy().cached_blocks == 2
        assert pool.occupancy().pinned_blocks == 1

    def test_the_time_begins_when_the_sequence_ends(self):
        pool, clock = timed_pool()
        prefill(pool, "a", [1] * 16, retention=TEN)
        clock.now = 100.0
        end(pool, "a")
        clock.now = 109.0
        pool.allocate("b", [1])
        assert pool.occupancy().pinned_blocks == 1

    def test_the_longer_of_two_pins_counts(self):
        pool, clock = timed_pool()
        cache(pool, [1] * 16, retention=Retention(pin_seconds=20.0))
        cache(pool, [1] * 16, retention=TEN)
        clock.now = 15.0
        pool.allocate("b", [1])
        assert pool.occupancy().pinned_blocks == 1
        clock.now = 20.0
        pool.allocate("c", [1])
        assert pool.occupancy().pinned_blocks == 0

    def test_at_most_half_the_pool_is_pinned_or_promised(self):
        pool, clock = timed_pool(num_blocks=11)
        cache(pool, [1] * 48, retention=TEN)
        prefill(pool, "a", [2] * 32, retention=TEN)
        with pytest.raises(PinsExhausted, match="1 blocks are to be pinned, 5 are already, and at most 5 may be"):
            pool.allocate("b", [3] * 16, retention=TEN)
        assert pool.allocate("b", [3] * 15, retention=TEN).cached_tokens == 0
        end(pool, "a")
        clock.now = 10.0
        assert len(pool.allocate("c", [3] * 80, retention=TEN).block_ids) == 5
        assert right(pool)

    def test_a_rewound_prompt_pins_what_is_left_of_it(self):
        pool, _ = timed_pool()
        prefill(pool, "a", COMMON, retention=TEN)
        pool.truncate("a", 20)
        assert pool.promised_pins == 1
        end(pool, "a")
        assert pool.occupancy().pinned_blocks == 1
        assert right(pool)

    def test_children_pin_nothing_and_the_preempted_neither(self):
        pool, _ = timed_pool()
        prefill(pool, "p", [1] * 16, retention=TEN)
        pool.fork("p", ["c"])
        end(pool, "c")
        assert pool.promised_pins == 1
        pool.free([Append("p")], preempted=True)
        assert pool.promised_pins == 0
        assert pool.occupancy().pinned_blocks == 0
        assert pool.occupancy().cached_blocks == 1

    def test_a_hit_on_a_pinned_block_does_not_count_as_a_block_that_is_needed(self):
        pool, _ = timed_pool(num_blocks=3)
        cache(pool, [1] * 16, retention=TEN)
        assert pool.allocate("a", [1] * 17).cached_tokens == 16
        assert right(pool)

    def test_pins_that_are_renewed_for_a_week_leave_nothing_behind(self):
        pool, clock = timed_pool()
        for _ in range(1_000):
            clock.now += 1.0
            cache(pool, [1] * 32, retention=Retention(pin_seconds=600_000.0))
        assert len(pool.block_pool.pins._ends) <= 2 * 2 + 64
        clock.now = 599_999.0 + 1_000.0
        pool.allocate("a", [2])
        assert pool.occupancy().pinned_blocks == 2
        clock.now += 1.0
        pool.allocate("b", [2])
        assert pool.occupancy().pinned_blocks == 0
        assert right(pool)

    @pytest.mark.parametrize("seconds", [-1.0, 604_801.0])
    def test_a_pin_out_of_range_is_refused(self, seconds):
        with pytest.raises(InvalidArgument, match="a pin lasts 0 to 604800 seconds"):
            pool_of().allocate("a", [1], retention=Retention(pin_seconds=seconds))


class TestQuotas:
    def test_a_tenant_over_its_quota_gives_up_its_own_blocks(self):
        pool = pool_of(num_blocks=11)
        pool.set_quota("s", 3)
        cache(pool, [1] * 32)
        cache(pool, [2] * 48, scope=S)
        assert pool.tenant_usage("s") == TenantUsage(3, 0, 3)
        cache(pool, [3] * 32, scope=S)
        assert pool.tenant_usage("s") == TenantUsage(3, 0, 3)
        assert hits(pool, [1] * 32) == [32]
        assert hits(pool, [2] * 48, [3] * 32, scope=S) == [16, 32]
        assert pool.occupancy().free_blocks == 5
        assert right(pool)

    def test_the_others_may_take_what_a_tenant_has_cached(self):
        pool = pool_of(num_blocks=4)
        pool.set_quota("s", 3)
        cache(pool, [2] * 48, scope=S)
        assert len(pool.allocate("a", [1] * 48).block_ids) == 3
        assert pool.tenant_usage("s") == TenantUsage(3, 0, 0)
        assert right(pool)

    def test_more_than_the_quota_never_fits_and_more_than_is_left_waits(self):
        pool = pool_of()
        pool.set_quota("s", 3)
        with pytest.raises(NeverFits, match="needs 4 blocks of 16, and the quota of its salt is 3 usable: at most 48"):
            pool.allocate("a", [1] * 49, scope=S)
        prefill(pool, "a", [1] * 32, scope=S)
        with pytest.raises(QuotaShort, match=r"2 blocks are needed, .* quota of 3 leaves 1 beside the 2 held"):
            pool.allocate("b", [2] * 32, scope=S)
        assert pool.allocate("b", [2] * 16, scope=S).cached_tokens == 0
        with pytest.raises(QuotaShort, match="1 blocks are needed, and the salt's quota of 3 leaves 0"):
            pool.append([Append("a", [1], 32)])
        end(pool, "b")
        assert len(pool.append([Append("a", [1], 32)])) == 1
        assert right(pool)

    def test_hits_of_ones_own_cached_blocks_count_once(self):
        pool = pool_of()
        pool.set_quota("s", 3)
        cache(pool, [2] * 48, scope=S)
        allocation = pool.allocate("a", [2] * 48, scope=S)
        assert allocation.cached_tokens == 32
        assert pool.tenant_usage("s") == TenantUsage(3, 3, 0)

    def test_copies_count(self):
        pool = pool_of()
        pool.set_quota("s", 2)
        prefill(pool, "a", [1] * 20, scope=S)
        pool.fork("a", ["b"])
        with pytest.raises(QuotaShort, match="1 blocks are needed"):
            pool.append([Append("b", [2], 20)])
        assert pool.occupancy().free_blocks == 8

    def test_the_default_counts_for_every_salt_without_a_quota_of_its_own(self):
        pool = pool_of()
        pool.set_quota("s", 5)
        prefill(pool, "early", [1] * 48, scope=T)
        pool.set_default_quota(2)
        assert [pool.tenant_usage(salt).quota_blocks for salt in ("s", "t", "unheard of", "")] == [5, 2, 2, 0]
        with pytest.raises(QuotaShort, match="leaves -1"):
            pool.allocate("late", [2], scope=T)
        with pytest.raises(NeverFits, match="the quota of its salt is 2 usable"):
            pool.append([Append("early", [1] * 2, 48)])
        pool.set_quota("t", 0)
        assert len(pool.append([Append("early", [1] * 2, 48)])) == 1
        assert right(pool)

    def test_pinned_blocks_are_part_of_a_quota(self):
        pool, clock = timed_pool()
        pool.set_quota("s", 2)
        cache(pool, [1] * 16, scope=S, retention=TEN)
        with pytest.raises(QuotaShort, match="beside the 0 held and 1 pinned ones"):
            pool.allocate("a", [2] * 32, scope=S)
        clock.now = 10.0
        assert len(pool.allocate("a", [2] * 32, scope=S).block_ids) == 2
        assert right(pool)

    @pytest.mark.parametrize("blocks", [-1, 11])
    def test_a_quota_out_of_range_is_refused(self, blocks):
        pool = pool_of()
        for verb in (lambda: pool.set_quota("s", blocks), lambda: pool.set_default_quota(blocks)):
            with pytest.raises(InvalidArgument, match=f"0 \\(no limit\\) to 10 blocks, all of the pool, not {blocks}"):
                verb()
        assert pool.tenant_usage("s").quota_blocks == 0

    def test_salts_that_come_and_go_leave_nothing_behind(self):
        pool = pool_of()
        for number in range(1_000):
            cache(pool, [1] * 32, scope=CacheScope(salt=f"salt-{number}"))
        assert len(pool.block_pool.tenants.everyone()) <= 1 + 2 * 5 + 64
        assert right(pool)


@pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
class TestRemovePrefix:
    def test_what_begins_the_prompt_and_all_that_continues_it_goes(self, index):
        pool = pool_of(index=index)
        cache(pool, [1] * 16 + [2] * 16 + [3] * 16)
        cache(pool, [1] * 16 + [2] * 16 + [4] * 16)
        assert pool.remove_prefix([1] * 16 + [2] * 16) == Removal(4, 0)
        assert pool.occupancy().cached_blocks == 0
        assert pool.totals.removed_blocks == 4
        assert right(pool)

    def test_what_begins_other_prompts_too_stays(self, index):
        pool = pool_of(index=index)
        cache(pool, [1] * 16 + [2] * 32)
        cache(pool, [1] * 16 + [4] * 16)
        assert pool.remove_prefix([1] * 16 + [2] * 16) == Removal(2, 0)
        assert hits(pool, [1] * 16 + [2] * 32, [1] * 16 + [4] * 16) == [16, 32]

    def test_what_is_held_stays_with_what_it_continues(self, index):
        pool = pool_of(index=index)
        cache(pool, [1] * 16 + [2] * 16 + [3] * 16)
        prefill(pool, "a", [1] * 16 + [2] * 16 + [4] * 4)
        assert pool.remove_prefix([1] * 16) == Removal(1, 2)
        assert hits(pool, [1] * 16 + [2] * 16 + [3] * 16) == [32]
        assert right(pool)

    def test_what_is_pinned_goes_too(self, index):
        pool, _ = timed_pool(index=index)
        cache(pool, [1] * 32, retention=TEN)
        assert pool.remove_prefix([1] * 20) == Removal(2, 0)
        assert pool.occupancy().pinned_blocks == 0
        assert pool.occupancy().free_blocks == 10
        assert right(pool)

    def test_what_is_not_cached_whole_is_left_alone(self, index):
        pool = pool_of(index=index)
        cache(pool, [1] * 32)
        assert pool.remove_prefix([1] * 48) == Removal(0, 0)
        assert pool.remove_prefix([1] * 15) == Removal(0, 0)
        assert pool.remove_prefix([1] * 32, S) == Removal(0, 0)
        assert pool.remove_prefix([1] * 32, spans=[ContentSpan("cat", 0, 4)]) == Removal(0, 0)
        assert hits(pool, [1] * 32) == [32]
