"""The scheduler over real books, driven by hand: who computes how much in which step, and what the books are asked.

Numbers called published are those of vLLM's scheduler tests for the same situation. All others are worked out in a
comment beside them. Blocks have 16 tokens unless a test says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner.books import CopyOrder, SequenceUpdate
from model_runner.request import Retention
from model_runner.step_plan import StepPlan
from tests.model_runner.scheduler_driver import DRAWN, Call, Driver, names, work_of


class TestTheBudget:
    def test_concurrent_chunks(self) -> None:
        """Published: a budget of 1024 and chunks of 400 for three prompts of 800."""
        driver = Driver(max_batched_tokens=1024, prefill_chunk_tokens=400)
        for name in "abc":
            driver.add(name, 800)
        assert driver.steps(3) == [
            {"a/0": 400, "b/0": 400, "c/0": 224},
            {"a/0": 400, "b/0": 400, "c/0": 224},
            {"a/0": 1, "b/0": 1, "c/0": 352},
        ]

    def test_a_long_prompt_beside_a_short_one(self) -> None:
        """Published: 2000 tokens in chunks of 400, with a companion of 10: 400 and 10."""
        driver = Driver(max_batched_tokens=1024, prefill_chunk_tokens=400)
        driver.add("long", 2000)
        driver.add("short", 10)
        assert driver.steps(1) == [{"long/0": 400, "short/0": 10}]

    def test_a_chunk_is_a_cap_for_a_lone_prompt_too(self) -> None:
        """There is no adaptive threshold: 2000 tokens take five steps of 400, alone or not."""
        driver = Driver(max_batched_tokens=1024, prefill_chunk_tokens=400)
        driver.add("long", 2000)
        assert driver.steps(6) == [{"long/0": 400}] * 5 + [{"long/0": 1}]

    def test_without_a_cap_the_budget_alone_cuts(self) -> None:
        # 2000 = 1024 + 976; the other prompt gets what is left of the second step, 48, and then its last 2.
        driver = Driver(max_batched_tokens=1024)
        driver.add("long", 2000)
        driver.add("short", 50)
        assert driver.steps(3) == [{"long/0": 1024}, {"long/0": 976, "short/0": 48}, {"long/0": 1, "short/0": 2}]

    def test_decodes_come_first(self) -> None:
        # Of 8 tokens one is the older sequence's, so that a prompt of 20 takes 7 + 7 + 6.
        driver = Driver(max_batched_tokens=8)
        driver.add("old", 5)
        driver.step()
        driver.add("new", 20)
        assert driver.steps(4) == [
            {"old/0": 1, "new/0": 7},
            {"old/0": 1, "new/0": 7},
            {"old/0": 1, "new/0": 6},
            {"old/0": 1, "new/0": 1},
        ]

    def test_prompt_tokens_are_counted(self) -> None:
        """Decode steps don't count as prompt tokens, the last token of a prompt does, alone or in a chunk."""
        driver = Driver(max_batched_tokens=8)
        driver.add("old", 5)
        assert driver.step().prefill_tokens == 5
        driver.add("new", 8)
        # 7 tokens of the new prompt beside a decode step; then its last one; then there are only decode steps.
        assert [driver.step().prefill_tokens for _ in range(3)] == [7, 1, 0]

    def test_nothing_to_do(self) -> None:
        driver = Driver()
        assert driver.step() == StepPlan()
        assert driver.asked() == []


class TestAdmission:
    def test_short_prompts_do_not_overtake(self) -> None:
        """Published: prompts of 800, 800, 10 and 10, a budget of 1024, three seats: two are admitted at first."""
        driver = Driver(max_batched_tokens=1024, max_sequences=3)
        for name, length in (("a", 800), ("b", 800), ("c", 10), ("d", 10)):
            driver.add(name, length)
        # The second prompt gets the 224 tokens that the first leaves, and nothing is left for the third.
        assert driver.steps(1) == [{"a/0": 800, "b/0": 224}]
        assert driver.running == ["a/0", "b/0"]
        # 1 and 576 leave 447: the third comes in and takes the last seat.
        assert driver.steps(1) == [{"a/0": 1, "b/0": 576, "c/0": 10}]
        assert driver.waiting == ["d/0"]

    def test_seats(self) -> None:
        """Published: of 10 requests with three seats 3 run and 7 wait, in the order they came."""
        driver = Driver(max_sequences=3)
        for number in range(10):
            driver.add(str(number), 10)
        driver.step()
        assert driver.running == ["0/0", "1/0", "2/0"]
        assert driver.waiting == [f"{number}/0" for number in range(3, 10)]

    def test_one_seat(self) -> None:
        """First come, first served."""
        driver = Driver(max_sequences=1)
        sequences = [driver.add(name, 10) for name in "bca"]
        for index, sequence in enumerate(sequences):
            driver.step()
            assert driver.running == [sequence.sequence_id]
            assert driver.waiting == names(sequences[index + 1 :])
            driver.scheduler.finish([sequence])

    def test_no_more_sequences_than_tokens_in_a_step(self) -> None:
        """Else some would stand still: with a budget of 2, two choices take all seats, whatever number there is."""
        driver = Driver(max_sequences=64, max_batched_tokens=2)
        driver.add("a", 1, num_choices=2)
        driver.add("b", 1)
        assert driver.steps(3) == [{"a/0": 1}, {"a/0": 1, "a/1": 1}, {"a/0": 1, "a/1": 1}]
        assert driver.waiting == ["b/0"]

    def test_who_does_not_fit_holds_those_behind(self) -> None:
        # 4 usable blocks: a holds 2. b needs 2 and one for a to grow; c would fit with 1 and one for a.
        driver = Driver(usable_blocks=4)
        driver.add("a", 20)
        driver.add("b", 20)
        driver.add("c", 5)
        assert driver.steps(1) == [{"a/0": 20}]
        assert driver.waiting == ["b/0", "c/0"]

    def test_the_books_are_not_asked_again_before_a_block_comes_back(self) -> None:
        # 6 usable blocks: a holds 2, b 1. c needs 2 and one each for a and b, and 3 are left.
        driver = Driver(usable_blocks=6)
        driver.add("a", 20)
        b = driver.add("b", 5)
        driver.add("c", 20)
        driver.steps(5)
        assert driver.asked() == [
            Call("allocate", ("a/0",)),
            Call("allocate", ("b/0",)),
            Call("allocate", ("c/0",), granted=False),
            # The first block of a is full.
            Call("append", ("a/0",)),
        ]
        driver.scheduler.finish([b])
        driver.step()
        assert driver.asked() == [Call("free", ("b/0",)), Call("allocate", ("c/0",))]

    def test_blocks_that_come_back_unheard_are_found_within_32_steps(self) -> None:
        """Whoever was refused asks again every 32 steps while somebody runs: nobody tells of a pin that is over."""
        # 8 usable blocks: 3 are pinned, a has 1. b needs 4 and one for a, and 4 are left.
        driver = Driver(usable_blocks=8)
        pinned = driver.add("pinned", 48, retention=Retention(pin_seconds=60.0))
        driver.step()
        driver.scheduler.finish([pinned])
        driver.add("a", 5)
        driver.step()
        driver.add("b", 60)
        driver.step()
        assert driver.waiting == ["b/0"]
        driver.manager.pool("default").remove_prefix(pinned.live.request.prompt_token_ids)
        driver.steps(31)
        assert driver.waiting == ["b/0"]
        driver.step()
        assert driver.running == ["a/0", "b/0"]
        assert [call.granted for call in driver.asked() if call.names == ("b/0",)] == [False, True]

    @pytest.mark.parametrize(("usable_blocks", "running"), [(5, ["a/0", "b/0"]), (6, ["a/0", "b/0", "c/0"])])
    def test_an_admission_leaves_a_block_for_each_that_runs(self, usable_blocks: int, running: list[str]) -> None:
        # a and b hold 1 each. c needs 2, and 2 must be left for a and b: 1 + 1 + 2 + 2 = 6.
        driver = Driver(usable_blocks=usable_blocks)
        for name, length in (("a", 16), ("b", 16), ("c", 32)):
            driver.add(name, length)
        driver.step()
        assert driver.running == running

    def test_a_lone_sequence_may_take_the_whole_pool(self) -> None:
        driver = Driver(usable_blocks=4)
        driver.add("a", 64)
        assert driver.steps(1) == [{"a/0": 64}]
        assert driver.held_blocks == 4

    def test_what_can_never_fit_is_refused_and_holds_nobody(self) -> None:
        # 65 tokens need 5 blocks of the 4 there are.
        driver = Driver(usable_blocks=4)
        huge = driver.add("huge", 65)
        driver.add("a", 20)
        driver.step()
        ((refused, error),) = driver.scheduler.take_refused()
        assert refused is huge
        assert all(number in str(error) for number in ("65", "5", "4", "64"))
        assert (driver.running, driver.waiting) == (["a/0"], [])

    def test_a_cached_prefix_is_not_computed_again(self) -> None:
        """A prompt of 40 tokens whose first 32 are cached computes 8."""
        driver = Driver()
        first = driver.add("first", 40)
        driver.step()
        driver.scheduler.finish([first])
        second = driver.add("second", 40)
        second.token_ids[:] = first.token_ids[:40]
        assert driver.steps(1) == [{"second/0": 8}]
        assert (first.live.cached_tokens, second.live.cached_tokens) == (0, 32)


class TestSharingWithinAStep:
    def test_two_equal_prompts(self) -> None:
        """Published (47): two equal prompts of 100 tokens in one step compute 100 + 4; those that come later, 4 each.

        6 full blocks are 96 tokens.
        """
        driver = Driver()
        prompt = range(100)
        for name in "ab":
            driver.add(name, 0, prompt=prompt)
        assert driver.steps(1) == [{"a/0": 100, "b/0": 4}]
        driver.add("c", 0, prompt=prompt)
        assert driver.steps(2) == [{"a/0": 1, "b/0": 1, "c/0": 4}, {"a/0": 1, "b/0": 1, "c/0": 1}]
        # 6 shared blocks, and a seventh for each of the three.
        assert driver.held_blocks == 6 + 3

    def test_what_the_step_has_no_room_for_is_not_promised(self) -> None:
        """A budget of 64 and chunks of 40: of the first prompt's 40 tokens 2 blocks are full, and 24 tokens are left.

        So the second computes 24 from the 32 on that it shares, and is at 56 tokens, 3 blocks, when the first is at 40.
        """
        driver = Driver(max_batched_tokens=64, prefill_chunk_tokens=40)
        first, second = (driver.add(name, 0, prompt=range(100)) for name in "ab")
        assert driver.steps(1) == [{"a/0": 40, "b/0": 24}]
        assert (first.live.cached_tokens, second.live.cached_tokens) == (0, 32)
        assert first.block_table[:2] == second.block_table[:2]
        assert driver.steps(2) == [{"a/0": 40, "b/0": 24}, {"a/0": 20, "b/0": 20}]

    def test_a_step_that_fails_leaves_nothing_behind(self) -> None:
        driver = Driver()
        for name in "ab":
            driver.add(name, 0, prompt=range(100))
        driver.scheduler.schedule()
        driver.scheduler.finish(driver.scheduler.running[:])
        occupancy = driver.manager.pool("default").occupancy()
        assert (occupancy.held_blocks, occupancy.cached_blocks) == (0, 0)
        driver.add("c", 0, prompt=range(100))
        assert driver.steps(1) == [{"c/0": 100}]

    def test_who_skips_the_cache_computes_all(self) -> None:
        driver = Driver()
        driver.add("a", 0, prompt=range(100))
        driver.add("b", 0, prompt=range(100), skip_cache_read=True)
        assert driver.steps(1) == [{"a/0": 100, "b/0": 100}]


class TestPreemption:
    """5 usable blocks, prompts of 32 tokens: a and b hold 2 each, and with 33 tokens each wants the last one."""

    @pytest.fixture
    def driver(self) -> Driver:
        """After the first step, in which a and b ran. c, which needs 1, had to leave two for them: it waits."""
        driver = Driver(usable_blocks=5)
        driver.add("a", 32)
        driver.add("b", 32)
        driver.add("c", 5)
        assert driver.steps(1) == [{"a/0": 32, "b/0": 32}]
        assert driver.waiting == ["c/0"]
        driver.asked()
        return driver

    def test_the_latest_admitted_gives_way(self, driver: Driver) -> None:
        """Published for a pool of 6 with the null block: the one that stays takes its third block."""
        plan = driver.step()
        assert (work_of(plan), plan.preemptions) == ({"a/0": 1}, 1)
        assert driver.running == ["a/0"]
        assert driver.held_blocks == 3
        assert [sequence.live.preemptions for sequence in driver.sequences] == [0, 1, 0]

    def test_it_goes_before_those_never_admitted(self, driver: Driver) -> None:
        driver.step()
        assert driver.waiting == ["b/0", "c/0"]

    def test_nobody_is_admitted_in_that_step(self, driver: Driver) -> None:
        """The books refuse both, take b's blocks, and give a its own; there is no other word."""
        driver.step()
        assert driver.asked() == [
            Call("append", ("a/0", "b/0"), granted=False),
            Call("free", ("b/0",)),
            Call("append", ("a/0",)),
        ]

    def test_it_comes_back_first_with_its_tokens_and_finds_its_blocks(self, driver: Driver) -> None:
        a, b, _ = driver.sequences
        tokens = b.token_ids[:]
        assert len(tokens) == 33
        # b needs 3 blocks and one for a: too many beside a's 3. c would fit, but is behind.
        assert driver.steps(4) == [{"a/0": 1}] * 4
        assert driver.waiting == ["b/0", "c/0"]
        # The books were asked again once: blocks, its own, had come back.
        refusals = [call for call in driver.asked() if call.verb == "allocate"]
        assert refusals == [Call("allocate", ("b/0",), granted=False, resumed=True)]
        driver.scheduler.finish([a])
        driver.asked()
        plan = driver.step()
        assert driver.asked() == [Call("allocate", ("b/0",), resumed=True), Call("allocate", ("c/0",))]
        assert driver.running == ["b/0", "c/0"]
        # Both of its blocks were still cached, so that of its 33 tokens one is left to compute.
        assert work_of(plan) == {"b/0": 1, "c/0": 5}
        assert b.token_ids == [*tokens, DRAWN]
        # What the client is told stays what the first admission found.
        assert b.live.cached_tokens == 0

    def test_resuming_without_the_cache(self) -> None:
        """Published: 4 usable blocks; of 30 prompt tokens and 2 outputs 32 are computed again, and the last is kept.

        A budget of 2 makes the prompt last as long as the other sequence takes to fill two blocks.
        """
        driver = Driver(usable_blocks=4, max_batched_tokens=2)
        high = driver.add("high", 1)
        driver.step()
        low = driver.add("low", 30, skip_cache_read=True)
        # In step 2 high has 2 tokens, so it wants a block in step 17 with 17 tokens, and another in step 33 with 33.
        # low computes a token in each step from 2 to 31, in which it draws its first, and draws its second in step 32.
        assert [driver.step().preemptions for _ in range(2, 33)] == [0] * 31
        assert (len(high.token_ids), len(low.token_ids), low.num_outputs) == (33, 32, 2)
        assert driver.held_blocks == 4
        assert driver.step().preemptions == 1
        assert driver.waiting == ["low/0"]
        driver.scheduler.finish([high])
        assert driver.steps(1) == [{"low/0": 2}]
        assert low.pending == 32 - 2
        assert low.token_ids[31] == DRAWN

    def test_others_go_on_in_the_step_that_preempts(self) -> None:
        """A prompt in the middle of its chunks is computed, though the sequence after it loses its blocks.

        9 usable blocks of 4: a holds 1, b 5, c 1, and the 2 that c had to leave are left.
        """
        driver = Driver(usable_blocks=9, block_size=4, prefill_chunk_tokens=2)
        driver.add("a", 4)
        driver.add("b", 20)
        driver.add("c", 4)
        # After step 2 a and c have 5 tokens and in step 3 they take the last blocks; after step 6 they have 9.
        for _ in range(6):
            assert driver.step().preemptions == 0
        assert driver.held_blocks == 9
        plan = driver.step()
        assert plan.preemptions == 1
        assert work_of(plan) == {"a/0": 1, "b/0": 2}
        assert (driver.running, driver.waiting) == (["a/0", "b/0"], ["c/0"])

    def test_one_after_the_other_gives_way_and_they_line_up_as_they_came(self) -> None:
        """7 usable blocks: four prompts of 16 tokens hold 1 each, 3 are left, and with 17 tokens all four need one."""
        driver = Driver(usable_blocks=7)
        for name in "abcd":
            driver.add(name, 16)
        # Step 2: 4 are needed and 3 are left. Without d 3 are needed and 4 are left.
        assert [driver.step().preemptions for _ in range(2)] == [0, 1]
        assert (driver.running, driver.waiting) == (["a/0", "b/0", "c/0"], ["d/0"])
        # After step 17 they have 33 tokens: 3 are needed and 1 is left; without c, 2 are needed and 3 are left.
        assert [driver.step().preemptions for _ in range(3, 19)] == [0] * 15 + [1]
        assert (driver.running, driver.waiting) == (["a/0", "b/0"], ["c/0", "d/0"])

    def test_two_give_way_in_one_step(self) -> None:
        """The blocks of one may not be enough: it shared some.

        5 usable blocks of 4: a and the two choices of c have one each beside a's first and the one the choices share.
        """
        driver = Driver(usable_blocks=5, block_size=4)
        driver.add("a", 4)
        driver.add("c", 4, num_choices=2)
        # 5 tokens each after step 1, so that they grow in step 2; 9 tokens each after step 5.
        for _ in range(5):
            assert driver.step().preemptions == 0
        assert driver.held_blocks == 5
        driver.asked()
        # 3 are needed. c/1 gives back its own block only, and 2 are needed; c/0 gives back its own and the shared one.
        plan = driver.step()
        assert (work_of(plan), plan.preemptions) == ({"a/0": 1}, 2)
        assert driver.asked() == [
            Call("append", ("a/0", "c/0", "c/1"), granted=False),
            Call("free", ("c/1",)),
            Call("append", ("a/0", "c/0"), granted=False),
            Call("free", ("c/0",)),
            Call("append", ("a/0",)),
        ]
        assert driver.waiting == ["c/0", "c/1"]

    def test_the_last_one_runs_on_alone(self) -> None:
        """3 usable blocks for two sequences of up to 3: one of them ends, then the other."""
        driver = Driver(usable_blocks=3)
        a, b = driver.add("a", 10), driver.add("b", 10)
        while len(a.token_ids) < 48:
            driver.step()
        assert driver.waiting == ["b/0"]
        driver.scheduler.finish([a])
        while len(b.token_ids) < 48:
            driver.step()
        assert (a.live.preemptions, b.live.preemptions) == (0, 1)


class TestChoices:
    """n choices compute one prompt, and need n seats when it is done."""

    def test_places(self) -> None:
        """Four seats: three choices leave one, which those two behind can't use; who comes behind them waits too."""
        driver = Driver(max_sequences=4)
        three = driver.add("three", 7, num_choices=3)
        driver.add("two", 7, num_choices=2)
        driver.add("one", 7)
        assert driver.steps(2) == [{"three/0": 7}, {"three/0": 1, "three/1": 1, "three/2": 1}]
        assert driver.waiting == ["two/0", "one/0"]
        # With one choice at its end two seats are free.
        driver.scheduler.finish([three.live.sequences[1]])
        assert driver.steps(1) == [{"three/0": 1, "three/2": 1, "two/0": 7}]
        assert driver.waiting == ["one/0"]

    def test_writers_to_a_shared_block_get_copies(self) -> None:
        """Blocks of 4, a prompt of 7: three choices share a block of 3 tokens; two get copies, the last stays."""
        driver = Driver(block_size=4)
        first = driver.add("a", 7, num_choices=3)
        assert driver.step().copies == []
        shared = first.block_table[1]
        plan = driver.step()
        tables = [sequence.block_table for sequence in first.live.sequences]
        assert plan.copies == [CopyOrder(shared, tables[0][1], 3), CopyOrder(shared, tables[1][1], 3)]
        assert tables[2][1] == shared
        assert len({table[0] for table in tables}) == 1
        assert len({table[1] for table in tables}) == 3
        # With 8 tokens each the blocks are full, and grow by one each: nothing is shared any more.
        assert driver.step().copies == []

    def test_a_full_last_block_needs_no_copy(self) -> None:
        driver = Driver(block_size=4)
        first = driver.add("a", 8, num_choices=3)
        assert [driver.step().copies for _ in range(3)] == [[], [], []]
        # Two blocks shared by all, and one of its own for each.
        assert driver.held_blocks == 2 + 3
        assert len({table.block_table[2] for table in first.live.sequences}) == 3

    def test_a_choice_that_was_preempted_comes_back_alone(self) -> None:
        """Blocks of 4, 3 usable: after 4 prompt tokens two choices have a block each beside the shared one.

        With 9 tokens each they need another: the second gives way, and takes one seat when it comes back.
        """
        driver = Driver(usable_blocks=3, block_size=4, max_sequences=2)
        first = driver.add("a", 4, num_choices=2)
        # 5 tokens each after step 1, 9 after step 5.
        assert [driver.step().preemptions for _ in range(6)] == [0, 0, 0, 0, 0, 1]
        assert (driver.running, driver.waiting) == (["a/0"], ["a/1"])
        driver.scheduler.finish([first])
        driver.step()
        assert (driver.running, driver.waiting) == (["a/1"], [])


class TestTheEnd:
    def test_the_running_and_the_waiting(self) -> None:
        """Published: each that ends makes one less, wherever it was."""
        driver = Driver(max_sequences=2)
        a, b, c, d = (driver.add(name, 20) for name in "abcd")
        driver.step()
        left = {"a/0", "b/0", "c/0", "d/0"}
        for sequence in (c, a, d, b):
            driver.scheduler.finish([sequence])
            left.remove(sequence.sequence_id)
            assert {*driver.running, *driver.waiting} == left
        assert driver.held_blocks == 0

    def test_the_books_are_told_once_and_only_of_those_with_blocks(self) -> None:
        driver = Driver(max_sequences=2)
        a, b, c = (driver.add(name, 20) for name in "abc")
        driver.step()
        driver.asked()
        driver.scheduler.finish([a, b, c])
        assert driver.asked() == [Call("free", ("a/0", "b/0"))]
        assert (driver.running, driver.waiting) == ([], [])

    def test_one_that_waits_again_holds_nothing(self) -> None:
        """Its blocks went when it was preempted."""
        driver = Driver(usable_blocks=5)
        driver.add("a", 32)
        b = driver.add("b", 32)
        assert [driver.step().preemptions for _ in range(2)] == [0, 1]
        driver.asked()
        driver.scheduler.finish([b])
        assert driver.asked() == []
        assert (driver.running, driver.waiting) == (["a/0"], [])

    def test_what_was_computed_stays_in_the_cache(self) -> None:
        # 20 prompt tokens and 13 outputs, of which the last was never computed: 32, so two blocks.
        driver = Driver()
        a = driver.add("a", 20)
        driver.steps(13)
        assert (len(a.token_ids), a.computed) == (33, 32)
        driver.scheduler.finish([a])
        occupancy = driver.manager.pool("default").occupancy()
        assert (occupancy.held_blocks, occupancy.cached_blocks) == (0, 2)

    def test_a_returned_token_is_not_cached_yet(self) -> None:
        """Published: blocks of 1, a prompt of 2 tokens; after two more a probe of all 4 hits 2, and then 3."""
        driver = Driver(block_size=1)
        a = driver.add("a", 2)
        pool = driver.manager.pool("default")
        driver.step()
        driver.step()
        # Both outputs are known; of the first the K/V was computed in the second step, and is committed in the third.
        assert len(a.token_ids) == 4
        assert pool.lookup([*a.token_ids, 7]).cached_tokens == 2
        driver.step()
        assert pool.lookup([*a.token_ids[:4], 7]).cached_tokens == 3


class TestReset:
    def test_all_go_back_in_line_in_their_order(self) -> None:
        """Published: the order stays. The running come before those that waited, with the tokens they have."""
        driver = Driver(max_sequences=3)
        sequences = [driver.add(name, 20) for name in "abcde"]
        driver.steps(4)
        tokens = [sequence.token_ids[:] for sequence in sequences]
        driver.scheduler.reset()
        assert driver.running == []
        assert driver.waiting == ["a/0", "b/0", "c/0", "d/0", "e/0"]
        assert all((each.block_table, each.computed, each.told, each.committed) == ([], 0, 0, 0) for each in sequences)
        # The books are empty, as they are after a restart.
        driver.books.free([SequenceUpdate(name, (), 0) for name in ("a/0", "b/0", "c/0")])
        driver.asked()
        driver.step()
        assert driver.running == ["a/0", "b/0", "c/0"]
        assert [call.resumed for call in driver.asked()] == [True] * 3
        # 20 prompt tokens and 4 outputs each, and the token of this step.
        assert [sequence.token_ids for sequence in sequences[:3]] == [[*each, DRAWN] for each in tokens[:3]]
        assert [sequence.token_ids for sequence in sequences[3:]] == tokens[3:]


class TestWhatTheBooksAreAsked:
    """Once a block, not once a token."""

    @pytest.mark.parametrize(
        ("prompt", "append_steps"),
        [
            # Before step k there are prompt + k - 1 tokens: 17 in step 2, 33 in step 18, 49 in step 34, 65 in step 50.
            pytest.param(16, [2, 18, 34, 50], id="a prompt that ends with its block"),
            # 17 tokens in step 8, and then each 16 steps.
            pytest.param(10, [8, 24, 40, 56], id="a prompt inside a block"),
            # 17 in step 17: the 81st token would want a fifth block in step 81.
            pytest.param(1, [17, 33, 49], id="a prompt of one token"),
            # The full first block is committed in step 2; 33 tokens in step 14.
            pytest.param(20, [2, 14, 30, 46, 62], id="a prompt over a block"),
        ],
    )
    def test_a_decode_asks_at_block_boundaries_only(self, prompt: int, append_steps: list[int]) -> None:
        """64 tokens are generated in blocks of 16."""
        driver = Driver()
        sequence = driver.add("a", prompt)
        asked = {}
        for step in range(1, 65):
            driver.step()
            if calls := driver.asked():
                asked[step] = calls
        assert sequence.num_outputs == 64
        assert asked == {1: [Call("allocate", ("a/0",))], **{step: [Call("append", ("a/0",))] for step in append_steps}}

    def test_one_call_for_all_of_a_step(self) -> None:
        """Four sequences that reach their boundary in the same steps: 4 calls in 64 steps, each for all of them."""
        driver = Driver()
        for name in "abcd":
            driver.add(name, 16)
        driver.step()
        driver.asked()
        driver.steps(63)
        assert driver.asked() == [Call("append", ("a/0", "b/0", "c/0", "d/0"))] * 4

    def test_a_prompt_in_chunks_commits_full_blocks(self) -> None:
        """40 tokens in chunks of 10 have room from the start; full blocks are told of when the next step begins."""
        driver = Driver(prefill_chunk_tokens=10)
        driver.add("a", 40)
        asked = []
        for _ in range(6):
            driver.step()
            asked.append([call.verb for call in driver.asked()])
        # 20 tokens are computed before step 3, which is one full block; 40 before step 5, which is two.
        assert asked == [["allocate"], [], ["append"], [], ["append"], []]


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before a step."""

    step: int
    prompt: int
    outputs: int
    num_choices: int


arrivals = st.lists(
    st.builds(Arrival, st.integers(0, 30), st.integers(1, 40), st.integers(1, 20), st.sampled_from([1, 1, 1, 2, 3])),
    min_size=1,
    max_size=12,
)


@given(
    arrivals=arrivals,
    usable_blocks=st.integers(15, 40),
    max_sequences=st.integers(3, 8),
    budget=st.integers(3, 64),
    chunk=st.sampled_from([0, 1, 7, 16]),
)
@settings(max_examples=60)
def test_everybody_gets_an_answer_and_newcomers_come_in_order(
    arrivals: list[Arrival], usable_blocks: int, max_sequences: int, budget: int, chunk: int
) -> None:
    """Whatever arrives, each choice gets its tokens, first admissions are in order of arrival, and no block is lost.

    No sequence can be larger than the pool: 60 tokens are 15 blocks of 4.
    """
    driver = Driver(
        usable_blocks=usable_blocks,
        block_size=4,
        max_sequences=max_sequences,
        max_batched_tokens=budget,
        prefill_chunk_tokens=chunk,
    )
    due = sorted(arrivals, key=lambda arrival: arrival.step)
    outputs: dict[str, int] = {}
    for step in range(5_000):
        while due and due[0].step <= step:
            arrival = due.pop(0)
            name = str(len(outputs))
            outputs[name] = arrival.outputs
            driver.add(name, arrival.prompt, num_choices=arrival.num_choices)
        if not (due or driver.running or driver.waiting):
            break
        driver.step()
        ready = [each for each in driver.scheduler.running if each.num_outputs == outputs[each.live.request.request_id]]
        driver.scheduler.finish(ready)
    assert (due, driver.running, driver.waiting) == ([], [], [])
    assert driver.held_blocks == 0
    admitted = [
        call.names[0] for call in driver.asked() if call.verb == "allocate" and call.granted and not call.resumed
    ]
    assert admitted == [f"{number}/0" for number in range(len(arrivals))]
    for sequence in driver.sequences:
        request = sequence.live.request
        choices = sequence.live.sequences
        assert len(choices) == request.num_choices
        for choice in choices:
            assert choice.token_ids == [*request.prompt_token_ids, *[DRAWN] * outputs[request.request_id]]
