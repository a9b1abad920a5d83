"""However the books are kept, the same tokens come out; what differs is how many of them are computed.

And what the books refuse for a request's own sake ends that request, and nobody else's.
"""

from __future__ import annotations

import random

import pytest

from kvmanager import KvManager
from kvmanager.types import Append, CacheScope, EvictionKind, HashAlgorithm, IndexKind
from model_runner.engine_types import Failure, FailureKind
from model_runner.request import Retention, SamplingParams
from services.cache_options import CacheOptions
from tests.model_runner.engine_harness import Harness
from tests.model_runner.toy_model import answer

DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
HASH, RADIX, NONE = (CacheOptions(index=index) for index in IndexKind)
EVERY_WAY = [
    pytest.param(CacheOptions(algorithm, index, eviction), id=f"{algorithm.value} {index.value} {eviction.value}")
    for algorithm, index, eviction in [
        (HashAlgorithm.SHA256, IndexKind.HASH, EvictionKind.ADAPTIVE),
        (HashAlgorithm.SHA256, IndexKind.RADIX, EvictionKind.ADAPTIVE),
        (HashAlgorithm.SHA256, IndexKind.NONE, EvictionKind.ADAPTIVE),
        (HashAlgorithm.XXH3, IndexKind.HASH, EvictionKind.LRU),
        (HashAlgorithm.XXH3, IndexKind.RADIX, EvictionKind.LRU),
    ]
]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(40), k=length)


def histories(seed: int, count: int, longest: int) -> list[list[int]]:
    """Prompts of which most begin as an earlier one did, up to anywhere in a block."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        shared: list[int] = []
        if prompts and rng.random() < 0.8:
            whole = rng.choice(prompts)
            shared = whole[: rng.randint(1, len(whole))]
        tail = rng.choices(range(40), k=rng.randint(1, 12))
        prompts.append([*shared, *tail][-longest:] if len(shared) + len(tail) > longest else [*shared, *tail])
    return prompts


class TestLeavingNothing:
    @pytest.mark.parametrize("cache", [HASH, RADIX, NONE], ids=["hash", "radix", "none"])
    def test_neither_prompt_nor_answer_stays(self, cache: CacheOptions) -> None:
        prompt = prompt_of(17)
        with Harness(cache=cache) as harness:
            harness.submit("quiet", prompt, 9, skip_cache_write=True, num_choices=2, sampling=DRAWN)
            for choice in range(2):
                assert harness.tokens("quiet", choice) == answer(prompt, 9, DRAWN, seed=11 + choice)
            assert harness.pool.occupancy().cached_blocks == 0
            assert harness.pool.events.since(1) == []
            harness.submit("next", [*prompt, *harness.tokens("quiet")], 1)
            assert harness.last("next").usage.cached_tokens == 0

    def test_what_is_cached_is_read(self) -> None:
        prompt = prompt_of(17)
        with Harness() as harness:
            harness.submit("loud", prompt, 1)
            harness.wait("loud")
            harness.submit("quiet", [*prompt, 5, 6], 1, skip_cache_write=True)
            assert harness.last("quiet").usage.cached_tokens == 16
            harness.submit("neither", [*prompt, 5, 6], 1, skip_cache_write=True, skip_cache_read=True)
            assert harness.last("neither").usage.cached_tokens == 0
            assert harness.pool.occupancy().cached_blocks == 4

    @pytest.mark.usefixtures("no_foresight")
    def test_who_is_preempted_computes_all_of_it_again(self) -> None:
        prompts = {f"r{number}": prompt_of(9, number) for number in range(4)}
        with Harness(num_blocks=14) as harness:
            for name, prompt in prompts.items():
                harness.submit(name, prompt, 16, skip_cache_write=True)
            for name, prompt in prompts.items():
                assert harness.tokens(name) == answer(prompt, 16)
            assert sum(step.preemptions for step in harness.recorder.steps) > 0
            assert harness.pool.occupancy().cached_blocks == 0


class TestHowMuchIsComputed:
    @pytest.mark.parametrize(
        ("cache", "cached", "copies"), [(HASH, 16, 0), (RADIX, 24, 1), (NONE, 0, 0)], ids=["hash", "radix", "none"]
    )
    def test_a_prompt_that_parts_inside_a_block(self, cache: CacheOptions, cached: int, copies: int) -> None:
        """40 tokens of which 24 are cached, in blocks of 16: hash finds one block, radix half of the next as well."""
        first = prompt_of(40)
        second = [*first[:24], *((token + 1) % 40 for token in first[24:])]
        with Harness(block_size=16, cache=cache) as harness:
            harness.submit("first", first, 1)
            harness.wait("first")
            before = harness.executor.computed_tokens
            harness.submit("second", second, 5)
            usage = harness.last("second").usage
            assert harness.tokens("second") == answer(second, 5)
            assert (usage.prompt_tokens, usage.cached_tokens) == (40, cached)
            # The fifth token is drawn and not computed.
            assert harness.executor.computed_tokens - before == 40 - cached + 4
            assert harness.pool.totals.copies == copies

    def test_the_last_token_of_a_prompt_is_computed_whatever_is_cached(self) -> None:
        prompt = prompt_of(8)
        with Harness(block_size=4, cache=RADIX) as harness:
            for name, cached in (("cold", 0), ("warm", 7)):
                harness.submit(name, prompt, 3)
                assert harness.tokens(name) == answer(prompt, 3)
                assert harness.last(name).usage.cached_tokens == cached

    def test_choices_of_a_partial_hit_share_it(self) -> None:
        first, second = prompt_of(16), [*prompt_of(16)[:10], 1, 2, 3]
        with Harness(block_size=8, cache=RADIX) as harness:
            harness.submit("first", first, 1)
            harness.wait("first")
            harness.submit("second", second, 9, num_choices=3, sampling=DRAWN)
            for choice in range(3):
                assert harness.tokens("second", choice) == answer(second, 9, DRAWN, seed=11 + choice)
            assert harness.last("second").usage.cached_tokens == 10

    def test_hits_to_the_token_are_never_fewer(self) -> None:
        prompts = histories(seed=3, count=60, longest=60)
        cached = []
        for cache in (NONE, HASH, RADIX):
            with Harness(num_blocks=2_000, block_size=8, cache=cache) as harness:
                for number, prompt in enumerate(prompts):
                    harness.submit(str(number), prompt, 1)
                    harness.wait(str(number))
                cached.append([harness.last(str(number)).usage.cached_tokens for number in range(len(prompts))])
                assert harness.executor.computed_tokens == sum(map(len, prompts)) - sum(cached[-1])
        none, by_blocks, to_the_token = cached
        assert set(none) == {0}
        assert all(blocks <= tokens for blocks, tokens in zip(by_blocks, to_the_token, strict=True))
        assert 0 < sum(by_blocks) < sum(to_the_token)


class TestWithinAStep:
    """Both requests arrive before the engine's first step."""

    PROMPT = prompt_of(30)

    def test_equal_prompts_share(self) -> None:
        harness = Harness(block_size=4)
        harness.submit("a", self.PROMPT, 6)
        harness.submit("b", self.PROMPT, 6)
        with harness:
            for name in "ab":
                assert harness.tokens(name) == answer(self.PROMPT, 6)
            # 7 full blocks are shared.
            assert harness.executor.steps[0] == [30, 2]

    @pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
    def test_a_step_that_fails_leaves_nothing_to_find(self, index: IndexKind) -> None:
        def fail() -> None:
            raise RuntimeError("planted")

        harness = Harness(block_size=4, cache=CacheOptions(index=index))
        harness.executor.before_step[0] = fail
        for name in "ab":
            harness.submit(name, self.PROMPT, 6)
        with harness:
            assert all(isinstance(harness.wait(name)[-1], Failure) for name in "ab")
            harness.submit("c", self.PROMPT, 6)
            assert harness.tokens("c") == answer(self.PROMPT, 6)
            assert harness.last("c").usage.cached_tokens == 0

    def test_a_part_of_a_block_is_shared_from_the_next_step_on(self) -> None:
        """The index to the token copies before a step, when what the step computes is not there yet."""
        harness = Harness(block_size=4, cache=CacheOptions(index=IndexKind.RADIX))
        prompts = {"a": self.PROMPT[:12], "b": [*self.PROMPT[:10], 7, 8]}
        assert self.PROMPT[10] != 7
        for name, prompt in prompts.items():
            harness.submit(name, prompt, 6)
        with harness:
            for name, prompt in prompts.items():
                assert harness.tokens(name) == answer(prompt, 6)
            assert harness.executor.steps[0] == [12, 4]


class TestTheSameTokens:
    @pytest.mark.usefixtures("no_foresight")
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("cache", EVERY_WAY)
    def test_in_a_pool_so_small_that_some_are_preempted(self, cache: CacheOptions, seed: int) -> None:
        prompts = histories(seed, count=24, longest=30)
        with Harness(num_blocks=24, block_size=4, cache=cache) as harness:
            for number, prompt in enumerate(prompts):
                harness.submit(str(number), prompt, 14, sampling=DRAWN, num_choices=1 + number % 3)
            for number, prompt in enumerate(prompts):
                for choice in range(1 + number % 3):
                    assert harness.tokens(str(number), choice) == answer(prompt, 14, DRAWN, seed=11 + choice)
            assert sum(step.preemptions for step in harness.recorder.steps) > 0
            assert (harness.pool.totals.hit_tokens > 0) == (cache.index is not IndexKind.NONE)

    @pytest.mark.parametrize("cache", EVERY_WAY)
    def test_in_chunks_while_earlier_turns_are_cached(self, cache: CacheOptions) -> None:
        with Harness(num_blocks=40, block_size=4, prefill_chunk_tokens=5, cache=cache) as harness:
            talk = prompt_of(7)
            for turn in range(8):
                harness.submit(str(turn), talk, 6)
                expected = answer(talk, 6)
                assert harness.tokens(str(turn)) == expected
                talk = [*talk, *expected, *prompt_of(3, turn)]


class TestRefusals:
    def failure(self, harness: Harness, name: str) -> Failure:
        item = harness.wait(name)[-1]
        assert isinstance(item, Failure)
        return item

    def test_a_salt_where_names_can_be_made_to_collide(self) -> None:
        with Harness(cache=CacheOptions(HashAlgorithm.XXH3)) as harness:
            harness.submit("salted", [1, 2, 3], cache_salt="s")
            harness.submit("plain", [1, 2, 3])
            refused = self.failure(harness, "salted")
            assert refused.kind is FailureKind.REQUEST
            assert "salt" in refused.sentence
            assert "xxh3" in refused.sentence
            assert harness.tokens("plain") == answer([1, 2, 3], 8)

    def test_more_pins_than_may_be(self) -> None:
        keep = Retention(pin_seconds=60)
        # 8 usable blocks of 4 tokens: 4 may be pinned.
        with Harness(num_blocks=9, manager=KvManager("boot", clock=lambda: 0.0)) as harness:
            harness.submit("kept", prompt_of(13), 1, retention=keep)
            assert harness.tokens("kept") == answer(prompt_of(13), 1)
            assert harness.pool.occupancy().pinned_blocks == 3
            harness.submit("too many", prompt_of(8, 1), 1, retention=keep)
            refused = self.failure(harness, "too many")
            assert refused.kind is FailureKind.PINS_EXHAUSTED
            assert "2 blocks are to be pinned, 3 are already, and at most 4 may be" in refused.sentence
            harness.submit("one more", prompt_of(5, 2), 1, retention=keep)
            harness.wait("one more")
            assert harness.pool.occupancy().pinned_blocks == 4
            harness.submit("unpinned", prompt_of(8, 1), 1)
            assert harness.tokens("unpinned") == answer(prompt_of(8, 1), 1)

    def test_pins_run_out(self) -> None:
        now = [0.0]
        with Harness(num_blocks=9, manager=KvManager("boot", clock=lambda: now[0])) as harness:
            harness.submit("kept", prompt_of(13), 1, retention=Retention(pin_seconds=60))
            harness.wait("kept")
            now[0] = 61.0
            harness.submit("large", prompt_of(30, 1), 1)
            assert harness.tokens("large") == answer(prompt_of(30, 1), 1)

    @pytest.mark.usefixtures("no_foresight")
    def test_who_is_preempted_makes_room_although_it_will_pin(self) -> None:
        """12 usable blocks: the first needs all of them, and the second, 6 of them to be pinned, is in its way."""
        with Harness(num_blocks=13, manager=KvManager("boot", clock=lambda: 0.0)) as harness:
            keep = Retention(pin_seconds=1)
            # Submitted by the engine's thread, so that it comes while the first is small.
            harness.executor.before_step[0] = lambda: harness.submit("second", prompt_of(24, 1), 20, retention=keep)
            harness.submit("first", prompt_of(4), 44)
            assert harness.tokens("first") == answer(prompt_of(4), 44)
            assert harness.tokens("second") == answer(prompt_of(24, 1), 20)
            assert harness.last("second").usage.preemptions > 0

    @pytest.mark.usefixtures("no_foresight")
    def test_pinned_prompts_that_are_preempted_come_back_and_pin_when_they_end(self) -> None:
        prompts = {f"r{number}": prompt_of(9, number) for number in range(6)}
        with Harness(num_blocks=25, manager=KvManager("boot", clock=lambda: 0.0)) as harness:
            for name, prompt in prompts.items():
                harness.submit(name, prompt, 20, retention=Retention(pin_seconds=1), num_choices=2, sampling=DRAWN)
            for name, prompt in prompts.items():
                for choice in range(2):
                    assert harness.tokens(name, choice) == answer(prompt, 20, DRAWN, seed=11 + choice)
            assert sum(step.preemptions for step in harness.recorder.steps) > 0
            assert harness.pool.occupancy().pinned_blocks > 0

    def test_who_outgrows_a_quota_ends_alone(self) -> None:
        with Harness(num_blocks=33) as harness:
            harness.submit("other", prompt_of(6), 40)
            harness.wait_for("other", 1)
            harness.pool.set_quota("s", 3)
            harness.submit("greedy", prompt_of(6, 1), 40, cache_salt="s", num_choices=2, sampling=DRAWN)
            refused = self.failure(harness, "greedy")
            assert refused.kind is FailureKind.REQUEST
            assert "the quota of its salt is 3 usable: at most 12 tokens fit" in refused.sentence
            assert harness.tokens("other") == answer(prompt_of(6), 40)
            harness.submit("small", prompt_of(6, 1), 4, cache_salt="s")
            assert harness.tokens("small") == answer(prompt_of(6, 1), 4)


class TestQuotas:
    """A tenant's quota is that tenant's affair."""

    def test_who_has_no_room_in_it_gives_up_its_own_blocks(self) -> None:
        with Harness(num_blocks=65) as harness:
            # Before any engine's step: the pool must be open.
            harness.submit("first", [1], 1)
            harness.wait("first")
            harness.pool.set_quota("s", 6)

            def submit_all() -> None:
                for number in range(3):
                    harness.submit(f"other {number}", prompt_of(6, number), 30)
                    harness.submit(f"tenant {number}", prompt_of(6, 10 + number), 15, cache_salt="s")

            # In the engine's thread, so that all come before the next step.
            harness.executor.before_step[1] = submit_all
            harness.submit("second", [2], 1)
            for number in range(3):
                assert harness.tokens(f"other {number}") == answer(prompt_of(6, number), 30)
                assert harness.tokens(f"tenant {number}") == answer(prompt_of(6, 10 + number), 15)
                assert harness.last(f"other {number}").usage.preemptions == 0
            preempted = [harness.last(f"tenant {number}").usage.preemptions for number in range(3)]
            assert sum(preempted) > 0

    def test_nobody_waits_behind_it(self) -> None:
        with Harness(num_blocks=65) as harness:
            harness.submit("first", [1], 1)
            harness.wait("first")
            harness.pool.set_quota("s", 4)
            harness.pool.allocate("elsewhere", prompt_of(16), scope=CacheScope(salt="s"))
            harness.submit("waits", prompt_of(9, 1), 1, cache_salt="s")
            harness.submit("other", prompt_of(9, 2), 3)
            assert harness.tokens("other") == answer(prompt_of(9, 2), 3)
            assert [view.request_id for view in harness.engine.requests()] == ["waits"]
            harness.pool.free([Append("elsewhere")])
            assert harness.tokens("waits") == answer(prompt_of(9, 1), 1)
