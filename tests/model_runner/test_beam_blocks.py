"""Beam searches through the real engine: their blocks, and the same answers whatever happens meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kvmanager import KvManager
from kvmanager.types import IndexKind
from model_runner.batch import BatchEntry
from model_runner.books import Admission, AllocationRequest, BlockGrant, CopyOrder, Growth, SequenceUpdate
from model_runner.engine_types import Failure, FailureKind
from model_runner.request import (
    EarlyStopping,
    FinishReason,
    Retention,
)
from model_runner.waiting_line import SchedulingPolicy
from services.books_inprocess import InProcessBooks
from services.cache_options import CacheOptions
from tests.model_runner.beam_support import answers, assert_answers, prompt_of, submit
from tests.model_runner.engine_harness import Harness
from tests.model_runner.naive_beams import naive_search
from tests.model_runner.test_engine import UnreliableBooks
from tests.model_runner.toy_model import ToyExecutor, answer


class Watched(ToyExecutor):
    """Notes what the books have given out before each step, and what each step computes."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.harness: Harness | None = None
        self.allocated: list[int] = []
        self.copied: list[int] = []

    def execute(self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder]) -> torch.Tensor:
        logits = super().execute(entries, copies)
        pool = self.harness.pool
        self.allocated.append(pool.totals.allocated_blocks)
        self.copied.append(len(copies))
        # As few blocks as there are different contents: whatever two beams have in common they share.
        size = self.block_size
        contents = set()
        for entry in entries:
            history = [self.slots[self._slot(entry, at)] for at in range(entry.first_position + len(entry.token_ids))]
            contents |= {tuple(history[: start + size]) for start in range(0, len(history), size)}
        assert pool.occupancy().held_blocks == len(contents)
        assert pool.check().ok
        return logits


class TestTheBlocks:
    @pytest.mark.parametrize("block_size", [1, 2, 8, 16])
    @pytest.mark.parametrize(("width", "length"), [(2, 70), (4, 1), (4, 33), (6, 64)])
    def test_no_more_than_must_be(self, width: int, length: int, block_size: int) -> None:
        """What was proved of the books, by `test_waste.py`, holds of the engine."""
        executor = Watched(block_size)
        with Harness(executor=executor, block_size=block_size, num_blocks=1_000, max_batched_tokens=2_000) as harness:
            executor.harness = harness
            submit(harness, "a", prompt_of(length), width, 40)
            assert_answers(harness, "a", naive_search(prompt_of(length), width, 40))
            # The prompt once, and then each beam its own token.
            assert executor.steps == [[length]] + [[1] * width] * 39
            new = [after - before for before, after in zip(executor.allocated, executor.allocated[1:], strict=False)]
            assert max(new) <= width
            assert max(executor.copied) <= width - 1
            assert harness.pool.totals.forks > width

    def test_ids_are_never_used_twice(self) -> None:
        names: list[str] = []

        class Noting(InProcessBooks):
            def fork(self, parent_id: str, child_ids: Sequence[str]) -> None:
                names.extend(child_ids)
                super().fork(parent_id, child_ids)

        manager = KvManager("boot")
        with Harness(books=Noting(manager), manager=manager) as harness:
            submit(harness, "a", prompt_of(5), 4, 30)
            harness.wait("a")
        assert len(names) > 20
        assert sorted(names) == sorted(f"a/{number}" for number in range(1, len(names) + 1))

    def test_a_prompt_in_chunks(self) -> None:
        with Harness(prefill_chunk_tokens=7) as harness:
            submit(harness, "a", prompt_of(40), 4, 8)
            assert_answers(harness, "a", naive_search(prompt_of(40), 4, 8))
            assert harness.executor.steps == [[7]] * 5 + [[5]] + [[1] * 4] * 7

    def test_a_second_search_hits_the_prompt(self) -> None:
        with Harness(num_blocks=200) as harness:
            for name, cached in (("cold", 0), ("warm", 20)):
                submit(harness, name, prompt_of(21), 3, 8)
                assert harness.last(name).usage.cached_tokens == cached
            assert answers(harness, "warm") == answers(harness, "cold")
            assert_answers(harness, "warm", naive_search(prompt_of(21), 3, 8))


MIXED = [{"length_penalty": penalty, "early_stopping": way} for penalty in (1.0, 0.4) for way in EarlyStopping]


class TestPreemption:
    @pytest.mark.usefixtures("no_foresight")
    @pytest.mark.parametrize("chunk", [0, 5])
    @pytest.mark.parametrize("num_blocks", [24, 40])
    def test_in_a_pool_so_small_that_searches_are_preempted(self, num_blocks: int, chunk: int) -> None:
        prompts = {f"r{number}": prompt_of(6 + number, number) for number in range(12)}
        with Harness(num_blocks=num_blocks, prefill_chunk_tokens=chunk, eos=[0, 1]) as harness:
            for number, (name, prompt) in enumerate(prompts.items()):
                if number % 3:
                    submit(harness, name, prompt, 2 + number % 3, 14, **MIXED[number % 6])
                else:
                    harness.submit(name, prompt, 14, ignore_eos=True)
            for number, (name, prompt) in enumerate(prompts.items()):
                if number % 3:
                    expected = naive_search(prompt, 2 + number % 3, 14, eos=[0, 1], **MIXED[number % 6])
                    assert_answers(harness, name, expected)
                else:
                    assert harness.tokens(name) == answer(prompt, 14)
            preempted = sum(
                usage.preemptions
                for name in prompts
                if (usage := harness.last(name).usage) and harness.last(name).score
            )
            assert preempted > 0

    @pytest.mark.usefixtures("no_foresight")
    @pytest.mark.parametrize("index", IndexKind)
    def test_however_prefixes_are_kept(self, index: IndexKind) -> None:
        with Harness(num_blocks=24, cache=CacheOptions(index=index)) as harness:
            for number in range(6):
                submit(harness, str(number), [*prompt_of(7), *prompt_of(3, number)], 3, 12)
            for number in range(6):
                expected = naive_search([*prompt_of(7), *prompt_of(3, number)], 3, 12)
                assert_answers(harness, str(number), expected)
            assert sum(step.preemptions for step in harness.recorder.steps) > 0

    @pytest.mark.usefixtures("no_foresight")
    def test_the_search_that_counts_least_gives_way(self) -> None:
        with Harness(num_blocks=24, policy=SchedulingPolicy.PRIORITY) as harness:
            for number in range(5):
                submit(harness, str(number), prompt_of(6 + number, number), 3, 12, queue_priority=-20 * number)
            for number in range(5):
                assert_answers(harness, str(number), naive_search(prompt_of(6 + number, number), 3, 12))
            assert sum(step.preemptions for step in harness.recorder.steps) > 0
            assert harness.last("4").usage.preemptions == 0

    def test_a_search_that_pins_leave_no_room_for_waits_and_is_not_preempted_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """8 of 16 blocks are pinned, and the search comes to need 14: it waits until the pins end."""
        monkeypatch.setattr("model_runner.engine.STARVED_SECONDS", 0.001)
        now = [0.0]

        class Patient(InProcessBooks):
            refusals = 0

            def allocate(self, request: AllocationRequest) -> Admission | None:
                admission = super().allocate(request)
                self.refusals += admission is None
                if self.refusals == 3:
                    now[0] = 100.0
                return admission

        manager = KvManager("boot", clock=lambda: now[0])
        with Harness(books=Patient(manager), manager=manager, num_blocks=17) as harness:
            harness.submit("pinned", prompt_of(32, 1), 1, retention=Retention(pin_seconds=50))
            harness.wait("pinned")
            submit(harness, "a", prompt_of(9), 4, 12)
            assert_answers(harness, "a", naive_search(prompt_of(9), 4, 12))
            assert harness.last("a").usage.preemptions == 1

    def test_a_search_that_comes_back_computes_what_its_beams_share_once(self) -> None:
        """Without a prefix cache: 30 tokens of the prompt are computed twice, not once more for each beam."""
        books = UnreliableBooks(KvManager("boot"))
        books._cache = CacheOptions(index=IndexKind.NONE)
        with Harness(books=books, manager=books.manager) as harness:
            harness.executor.before_step[4] = books.restart
            submit(harness, "a", prompt_of(30), 4, 10)
            assert_answers(harness, "a", naive_search(prompt_of(30), 4, 10))
            # Behind the prompt each beam has at most 4 tokens to compute again, and 9 steps to take.
            assert 30 + 30 <= harness.executor.computed_tokens - 9 * 4 <= 30 + 30 + 4 * 4
            harness.manager = books.manager

    @pytest.mark.parametrize("width", [2, 3, 6])
    def test_a_search_ends_where_its_beams_no_longer_fit(self, width: int) -> None:
        """16 blocks of 4: all share the 2 that the prompt fills, and each has its part of the rest."""
        limit = (2 + 14 // width) * 4 - 9 + 1
        with Harness(num_blocks=17) as harness:
            submit(harness, "a", prompt_of(9), width, None)
            assert_answers(harness, "a", naive_search(prompt_of(9), width, limit))
            submit(harness, "b", prompt_of(9), width, 1_000, early_stopping=EarlyStopping.NEVER)
            assert_answers(harness, "b", naive_search(prompt_of(9), width, limit, early_stopping=EarlyStopping.NEVER))
            assert all(step.preemptions == 0 for step in harness.recorder.steps)

    def test_a_prompt_that_fills_the_pool_gets_one_token(self) -> None:
        with Harness(num_blocks=5) as harness:
            submit(harness, "a", prompt_of(16), 3, None)
            assert_answers(harness, "a", naive_search(prompt_of(16), 3, 1))

    def test_a_search_that_outgrows_its_quota_is_refused(self) -> None:
        with Harness() as harness:
            harness.submit("first", [1], 1, cache_salt="s")
            harness.wait("first")
            harness.pool.set_quota("s", 6)
            submit(harness, "a", prompt_of(9), 4, 30, cache_salt="s")
            failure = harness.wait("a")[-1]
            assert isinstance(failure, Failure)
            assert failure.kind is FailureKind.REQUEST
            assert "quota of 6" in failure.sentence
            submit(harness, "b", prompt_of(9), 2, 5, cache_salt="s")
            assert_answers(harness, "b", naive_search(prompt_of(9), 2, 5))


class TestPauses:
    @pytest.mark.parametrize("step", [0, 1, 2, 6])
    def test_the_beams_of_a_paused_search_come_back_together(self, step: int) -> None:
        """Others run meanwhile, and then with it, in a pool where one of them gives way."""
        harness = Harness(num_blocks=24)
        live = submit(harness, "a", prompt_of(9), 4, 12)
        submit(harness, "other", prompt_of(9, 1), 3, 12)
        harness.executor.before_step[step] = lambda: harness.engine.throttle(live, True)
        harness.executor.before_step[step + 3] = lambda: harness.engine.throttle(live, False)
        with harness:
            assert_answers(harness, "a", naive_search(prompt_of(9), 4, 12))
            assert_answers(harness, "other", naive_search(prompt_of(9, 1), 3, 12))
            assert harness.last("a").usage.pauses == 1


class TestFaults:
    @pytest.mark.parametrize("step", [0, 1, 2, 7])
    def test_books_that_start_anew(self, step: int) -> None:
        books = UnreliableBooks(KvManager("boot"))
        with Harness(books=books, manager=books.manager) as harness:
            harness.executor.before_step[step] = books.restart
            submit(harness, "a", prompt_of(9), 4, 12)
            assert_answers(harness, "a", naive_search(prompt_of(9), 4, 12))
            harness.manager = books.manager

    @pytest.mark.parametrize("seed", range(6))
    def test_verbs_that_fail_at_random(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model_runner.engine.RETRY_SECONDS", 0.001)
        books = UnreliableBooks(KvManager("boot"), random.Random(seed), 0.08)
        prompts = {f"r{number}": prompt_of(4 + number, number) for number in range(6)}
        with Harness(num_blocks=40, books=books, manager=books.manager) as harness:
            for number, (name, prompt) in enumerate(prompts.items()):
                submit(harness, name, prompt, 1 + number % 4, 10)
            for number, (name, prompt) in enumerate(prompts.items()):
                assert_answers(harness, name, naive_search(prompt, 1 + number % 4, 10))
            assert books.failures > 0
            books.rate = 0.0
            harness.submit("last", [1], 1)
            harness.wait("last")

    def test_aborts_at_random_moments_leave_nothing(self) -> None:
        rng = random.Random(5)
        with Harness(num_blocks=40, max_sequences=8) as harness:
            for number in range(120):
                submit(harness, str(number), prompt_of(rng.randint(1, 12), number), rng.randint(1, 4), 10)
                step = len(harness.executor.steps) + rng.randrange(12)
                harness.executor.before_step[step] = lambda name=str(number): harness.engine.abort([name])
                if number % 4 == 3:
                    harness.wait(str(number))
            reasons = {harness.last(str(number)).finish_reason for number in range(120)}
            assert FinishReason.ABORT in reasons

    def test_an_abort_ends_each_choice_without_a_token(self) -> None:
        with Harness() as harness:
            harness.executor.before_step[5] = lambda: harness.engine.abort(["a"])
            submit(harness, "a", [1], 4, None, num_choices=3)
            chunks = harness.wait("a")
            assert [chunk.choice_index for chunk in chunks] == [0, 1, 2]
            assert {(chunk.token_ids, chunk.text, chunk.finish_reason) for chunk in chunks} == {
                ((), "", FinishReason.ABORT)
            }
            assert chunks[-1].usage.output_tokens == 6 * 4


class LateBooks(InProcessBooks):
    """Books over a slow wire: a block comes a call later than asked for, its copy with whoever is answered first."""

    def __init__(self, manager: KvManager, rng: random.Random) -> None:
        super().__init__(manager)
        self.rng = rng
        self.late: dict[str, BlockGrant] = {}
        self.copies: list[CopyOrder] = []
        self.stalls = self.strays = 0

    def append(self, updates: Sequence[SequenceUpdate]) -> Growth | None:
        growth = super().append([each for each in updates if each.sequence_id not in self.late])
        if growth is None:
            return None
        fresh = {grant.sequence_id: grant for grant in growth.grants}
        grants, stalled = [], set()
        due, self.copies = self.copies, []
        for name in [each.sequence_id for each in updates]:
            if name in fresh and self.rng.random() < 0.4:
                self.late[name] = replace(fresh[name], copies=())
                self.copies += fresh[name].copies
                stalled.add(name)
            else:
                grants.append(self.late.pop(name, None) or fresh.get(name) or BlockGrant(name, 1_000_000, ()))
        if grants:
            grants[0] = replace(grants[0], copies=(*due, *grants[0].copies))
            self.strays += bool(due)
        else:
            self.copies = due + self.copies
        self.stalls += len(stalled)
        return Growth(grants, frozenset(stalled))

    def free(self, updates: Sequence[SequenceUpdate], *, preempted: bool = False) -> None:
        for each in updates:
            self.late.pop(each.sequence_id, None)
        super().free(updates, preempted=preempted)


class TestSlowBooks:
    @pytest.mark.parametrize("seed", range(6))
    def test_copies_come_in_time_whoever_waits(self, seed: int) -> None:
        manager = KvManager("boot")
        books = LateBooks(manager, random.Random(seed))
        with Harness(books=books, manager=manager, num_blocks=200) as harness:
            for number in range(4):
                submit(harness, str(number), prompt_of(5 + number, number), 1 + number, 14)
                harness.submit(f"n{number}", prompt_of(6 + number, number), 14, num_choices=3)
            for number in range(4):
                assert_answers(harness, str(number), naive_search(prompt_of(5 + number, number), 1 + number, 14))
                for choice in range(3):
                    assert harness.tokens(f"n{number}", choice) == answer(prompt_of(6 + number, number), 14)
            assert min(books.stalls, books.strays) > 0

    @pytest.mark.parametrize("seed", range(4))
    def test_copies_of_beams_that_wait_for_others(self, seed: int) -> None:
        """Then a step may have a copy to carry out, and no work."""
        manager = KvManager("boot")
        books = LateBooks(manager, random.Random(seed))
        with Harness(books=books, manager=manager) as harness:
            submit(harness, "a", prompt_of(7), 4, 14)
            assert_answers(harness, "a", naive_search(prompt_of(7), 4, 14))
            assert min(books.stalls, books.strays) > 0
