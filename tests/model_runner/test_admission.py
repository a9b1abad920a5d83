"""What an admission leaves over: expected lengths against closed forms, and pools that neither thrash nor lie idle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.admission import Future, peak
from model_runner.output_lengths import WINDOW, OutputLengths
from tests.model_runner.scheduler_driver import Driver


def learnt(*answers: tuple[int, bool]) -> OutputLengths:
    lengths = OutputLengths()
    for length, ended in answers:
        lengths.note(length, ended=ended)
    return lengths


class TestOutputLengths:
    def test_nothing_is_known(self) -> None:
        """An answer is taken to go on to its limit; without a limit nothing is expected."""
        lengths = learnt()
        assert [lengths.remaining(0, 100), lengths.remaining(40, 100), lengths.remaining(100, 100)] == [100, 60, 0]
        assert lengths.remaining(7, None) == 0

    def test_the_mean_of_those_that_go_on(self) -> None:
        # 10 and 20: 15 on average; after 10 tokens only the one of 20 is like it.
        lengths = learnt((10, True), (20, True))
        assert [lengths.remaining(0, 100), lengths.remaining(10, 100), lengths.remaining(16, 100)] == [15, 10, 4]
        assert lengths.remaining(0, None) == 15

    def test_a_limit_cuts(self) -> None:
        # With a limit of 12 they would have been 10 and 12.
        assert learnt((10, True), (20, True)).remaining(0, 12) == 11

    def test_longer_than_all_that_ended(self) -> None:
        """As long again, or to the limit."""
        lengths = learnt((10, True))
        assert [lengths.remaining(10, 100), lengths.remaining(30, 100), lengths.remaining(90, 100)] == [10, 30, 10]
        assert lengths.remaining(10, None) == 0

    def test_a_cut_answer_says_only_that_it_was_longer(self) -> None:
        assert learnt((5, False), (5, False)).remaining(0, 100) == 100
        # Of three one was cut at 5, and the two that went on ended at 20.
        assert learnt((5, False), (20, True), (20, True)).remaining(0, 100) == 20
        # One of two ended at 10, the other was cut at 10: half of all answers go on, to the limit.
        assert learnt((10, True), (10, False)).remaining(0, 100) == 10 + 90 / 2

    def test_old_answers_are_forgotten(self) -> None:
        assert learnt((1000, True), *[(10, True)] * (WINDOW - 1)).remaining(0, 10_000) == round(10 + 990 / WINDOW)
        assert learnt((1000, True), *[(10, True)] * WINDOW).remaining(0, 10_000) == 10

    @given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(0, 50), st.integers(1, 60))
    def test_without_cuts_it_is_the_mean(self, ended: list[int], done: int, limit: int) -> None:
        longer = [min(length, limit) - done for length in ended if length > done]
        if longer and limit > done:
            mean = sum(longer) / len(longer)
            assert abs(learnt(*[(length, True) for length in ended]).remaining(done, limit) - mean) <= 0.5 + 1e-9


class TestRoomForTheFuture:
    """Blocks of 16. The last output of an answer needs no room: it is never computed."""

    @pytest.mark.parametrize(("usable_blocks", "running"), [(8, ["a/0", "b/0"]), (7, ["a/0"])])
    def test_what_two_will_need_at_their_ends(self, usable_blocks: int, running: list[str]) -> None:
        # 32 + 33 - 1 = 64 tokens, 4 blocks each.
        driver = Driver(usable_blocks=usable_blocks)
        driver.add("a", 32, max_tokens=33)
        driver.add("b", 32, max_tokens=33)
        driver.step()
        assert driver.running == running

    @pytest.mark.parametrize(("usable_blocks", "running"), [(7, ["a/0", "b/0"]), (6, ["a/0"])])
    def test_what_one_gives_back_another_may_use(self, usable_blocks: int, running: list[str]) -> None:
        # a ends with 48 + 16 tokens in 4 blocks, when b has 16 + 16, and asks for its third. b alone will have 80 in 5.
        driver = Driver(usable_blocks=usable_blocks)
        driver.add("a", 48, max_tokens=17)
        driver.add("b", 16, max_tokens=65)
        driver.step()
        assert driver.running == running
        while driver.scheduler.running:
            driver.step()
            driver.end_after(17, "a")
            driver.end_after(65, "b")
        assert driver.preemptions == 0

    @pytest.mark.parametrize(("usable_blocks", "waiting"), [(10, []), (9, ["b/0"])])
    def test_choices_that_are_yet_to_part(self, usable_blocks: int, waiting: list[str]) -> None:
        # Three choices of 24 + 16 tokens share one full block and have 2 more each: 7. b has 24 + 16 in 3.
        driver = Driver(usable_blocks=usable_blocks)
        driver.add("a", 24, num_choices=3, max_tokens=17)
        driver.add("b", 24, max_tokens=17)
        driver.step()
        assert driver.waiting == waiting
        while driver.scheduler.running:
            driver.step()
            driver.end_after(17)
        assert driver.preemptions == 0

    def test_blocks_are_not_kept_for_those_that_need_no_more(self) -> None:
        """Five of 17 tokens and at most 16 outputs have all the blocks they will ever need, so that none is spare."""
        driver = Driver(usable_blocks=10)
        for name in "abcde":
            driver.add(name, 17, max_tokens=16)
        driver.step()
        assert (len(driver.running), driver.held_blocks) == (5, 10)

    @pytest.mark.parametrize(("usable_blocks", "running"), [(14, "abcde"), (13, "abcd")])
    def test_half_a_block_is_kept_for_those_whose_end_is_known(self, usable_blocks: int, running: str) -> None:
        """a holds 4 blocks and ends after 3 steps. b to e have 2 each, and a third one 13 steps later."""
        driver = Driver(usable_blocks=usable_blocks)
        driver.add("a", 60, max_tokens=3)
        for name in "bcde":
            driver.add(name, 17, max_tokens=30)
        driver.step()
        # e comes beside b, c and d: 12 blocks, and 2 for the three.
        assert driver.running == [f"{name}/0" for name in running]
        while driver.running or driver.waiting:
            driver.end_after(3, "a")
            driver.end_after(30, *"bcde")
            driver.step()
        assert driver.preemptions == 0

    def test_a_block_each_is_kept_for_those_whose_end_is_a_guess(self) -> None:
        """Answers end after 4 tokens, as far as is known: 17 tokens need no third block until then, but they may."""
        driver = Driver(usable_blocks=8)
        driver.add("first", 17, max_tokens=100)
        driver.steps(4)
        driver.end_after(4)
        for name in "abcd":
            driver.add(name, 17, max_tokens=100)
        driver.step()
        # 2 blocks for each, and 1 more for each that runs already.
        assert driver.running == ["a/0", "b/0", "c/0"]

    def test_what_is_learnt_counts(self) -> None:
        """Answers of at most 1,000 tokens that end after 8: the first run one by one, later ones side by side."""
        driver = Driver(usable_blocks=70)
        for number in range(4):
            driver.add(str(number), 32, max_tokens=1_000)
        driver.step()
        # 32 + 999 tokens are 65 blocks, so that two don't fit.
        assert len(driver.running) == 1
        driver.steps(7)
        driver.end_after(8)
        driver.step()
        assert len(driver.running) == 3

    def test_who_is_alone_needs_no_room_for_the_future(self) -> None:
        driver = Driver(usable_blocks=2)
        driver.add("a", 32, max_tokens=1_000)
        assert driver.steps(1) == [{"a/0": 32}]


@st.composite
def futures(draw: st.DrawFn) -> Future:
    """Of a sequence of at most 60 tokens, in blocks of 4, that has all the blocks of its tokens."""
    tokens, begins, choices = draw(st.integers(1, 60)), draw(st.integers(0, 5)), draw(st.integers(1, 3))
    blocks = -(-tokens // 4) + draw(st.integers(0, 1))
    return Future(tokens, blocks, draw(st.integers(0, blocks)), begins, begins + draw(st.integers(0, 40)), choices)


@given(st.lists(futures(), min_size=1, max_size=12))
def test_the_worst_moment_of_all(found: list[Future]) -> None:
    """Step by step: who has ended has given its own blocks back, the others have room for the outputs of the next step.

    The last output needs none.
    """

    def beyond_today(each: Future, step: int) -> int:
        if step > each.ends:
            return -each.own_blocks
        outputs = min(step, each.ends - 1) - each.begins
        blocks = {
            (choice if token >= each.tokens // 4 * 4 else 0, token // 4)
            for choice in range(each.choices)
            for token in range(each.tokens + outputs)
        }
        return max(0, len(blocks) - each.blocks) if outputs >= 1 else 0

    worst = max(sum(beyond_today(each, step) for each in found) for step in range(max(each.ends for each in found) + 1))
    assert max(0, peak(found, 4)) == max(0, worst)


class TestThrashing:
    """A pool of P tokens and k + 1 prompts of P/k."""

    POOL_TOKENS = 960

    def serve(self, k: int, outputs: int, max_tokens: int | None) -> Driver:
        driver = Driver(usable_blocks=self.POOL_TOKENS // 16)
        for number in range(k + 1):
            driver.add(str(number), self.POOL_TOKENS // k, max_tokens=max_tokens)
        for _ in range(20_000):
            driver.step()
            driver.end_after(outputs)
            if not (driver.running or driver.waiting):
                return driver
        raise AssertionError("it does not end")

    @pytest.mark.parametrize("k", [2, 3, 5, 8, 12])
    @pytest.mark.parametrize("share", [0.02, 0.25, 0.9])
    def test_known_lengths(self, k: int, share: float) -> None:
        """Nothing is computed twice: each prompt token once, and each output token but the last."""
        prompt = self.POOL_TOKENS // k
        # A sequence can't be larger than the pool.
        outputs = max(2, round(share * (self.POOL_TOKENS - prompt)))
        driver = self.serve(k, outputs, outputs)
        assert driver.preemptions == 0
        assert driver.computed_tokens == (k + 1) * (prompt + outputs - 1)

    @pytest.mark.parametrize("k", [2, 3, 5, 8, 12])
    @pytest.mark.parametrize("share", [0.02, 0.25, 0.9])
    @pytest.mark.parametrize("max_tokens", [None, 10_000])
    def test_unknown_lengths(self, k: int, share: float, max_tokens: int | None) -> None:
        """Whether clients give no limit or one that is too high."""
        prompt = self.POOL_TOKENS // k
        outputs = max(2, round(share * (self.POOL_TOKENS - prompt)))
        driver = self.serve(k, outputs, max_tokens)
        assert driver.computed_tokens < 1.3 * (k + 1) * (prompt + outputs)


def test_a_pool_is_full_while_anybody_waits() -> None:
    """200 answers of 24 tokens to prompts of 100: at least 90 % of the blocks are held, and nobody is preempted."""
    driver = Driver(usable_blocks=120, max_batched_tokens=256, max_sequences=64)
    for number in range(200):
        driver.add(str(number), 100, max_tokens=24)
    held = []
    while driver.running or driver.waiting:
        driver.step()
        if driver.waiting:
            held.append(driver.held_blocks)
        driver.end_after(24)
    assert driver.preemptions == 0
    assert sum(held) / len(held) >= 0.9 * 120
