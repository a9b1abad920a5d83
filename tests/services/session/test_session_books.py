"""What the engine's thread gets while the KV manager is late, away, or short of blocks, on the test's own clock."""

from __future__ import annotations

import pytest

from kvmanager.types import IndexKind
from model_runner.books import (
    AllocationRequest,
    BooksLost,
    BooksTaken,
    BooksUnreachable,
    Growth,
    PoolFacts,
    SequenceUpdate,
)
from services.cache_options import DEFAULT_CACHE, CacheOptions
from services.session.check import violations
from services.session.foresight import PACE_STEPS
from services.session.limits import SessionLimits
from services.session.link import LinkBroken
from services.session.punctuality import STEPS
from services.session.session import SessionState
from services.session.spares import MIN_SPARES, SHORT_STEPS
from services.session_books import SessionBooks
from tests.services.session.bad_channel import FakeClock, FakeServer

FACTS = PoolFacts(num_blocks=33, block_size=4, bytes_per_block=0, model_fingerprint="m")
LIMITS = SessionLimits(beat=0)


class Waits(list):
    """A watch that keeps what it is told."""

    def on_wait(self, seconds: float) -> None:
        self.append(seconds)

    def on_round_trip(self, seconds: float) -> None:
        pass


class Runner:
    """Books that are open at a fake KV manager."""

    def __init__(
        self,
        server: FakeServer | None = None,
        lease: int = 2,
        facts: PoolFacts = FACTS,
        cache: CacheOptions = DEFAULT_CACHE,
    ) -> None:
        self._facts = facts
        self.server = server or FakeServer(FakeClock())
        self.clock = self.server.clock
        self.waits = Waits()
        self.books = SessionBooks(
            self.server.dial, cache=cache, lease_blocks=lease, limits=LIMITS, clock=self.clock, watch=self.waits
        )
        self.until_open()

    def until_open(self) -> None:
        for _ in range(100):
            try:
                self.books.open(self._facts)
                return
            except BooksUnreachable:
                self.clock.now += 0.25
        raise AssertionError("it does not open")

    def flush(self, steps: int = 1, seconds: float = 0.01) -> None:
        for _ in range(steps):
            self.clock.now += seconds
            self.books.flush()

    def spent(self, act) -> float:
        """Seconds that a verb makes the engine's thread wait."""
        before = self.clock.now
        act()
        return self.clock.now - before


def admit(runner: Runner, name: str, tokens: int) -> list[int]:
    admission = runner.books.allocate(AllocationRequest(name, list(range(tokens))))
    assert admission is not None
    return list(admission.block_ids)


def grow(runner: Runner, name: str, computed: int) -> Growth:
    """A sequence that has computed all it had tells its next token."""
    growth = runner.books.append([SequenceUpdate(name, [7], computed)])
    assert growth is not None
    return growth


def test_room_is_there_before_it_is_needed() -> None:
    runner = Runner(lease=0)
    admit(runner, "a", 5)
    growth = grow(runner, "a", 5)  # 6 tokens in 2 blocks: the 9th, in three steps, needs another
    assert growth.grants == []
    runner.flush()
    waited = runner.waits[:]
    runner.flush(2)
    # Its tokens 7 and 8 fill the block; the 9th is drawn.
    growth = runner.books.append([SequenceUpdate("a", [7] * 3, 8)])
    assert growth is not None
    assert [(grant.first_index, len(grant.block_ids)) for grant in growth.grants] == [(2, 1)]
    runner.flush()
    assert runner.waits == waited, "nobody waited"


def test_a_late_kv_manager_is_waited_for_once_and_for_a_moment() -> None:
    runner = Runner(lease=0)
    admit(runner, "a", 4)
    runner.flush()
    runner.waits.clear()
    runner.server.stop()
    first = runner.spent(lambda: grow_in_vain(runner))
    assert first == pytest.approx(LIMITS.ask, abs=1e-4)
    runner.clock.now += 0.01
    assert runner.spent(lambda: grow_in_vain(runner)) == 0, "an answer is late already"
    assert runner.books.away == "", "late is not away"
    runner.server.go_on()
    runner.flush(2)
    growth = runner.books.append([SequenceUpdate("a", [7], 4)])
    assert growth is not None
    assert (growth.stalled, len(growth.grants)) == (frozenset(), 1)
    runner.flush()
    assert runner.waits == [pytest.approx(LIMITS.ask, abs=1e-4)]


def grow_in_vain(runner: Runner) -> None:
    growth = runner.books.append([SequenceUpdate("a", [7], 4)])
    assert growth == Growth([], frozenset({"a"}))


def test_the_lease_serves_while_the_kv_manager_is_away_and_then_sequences_stall() -> None:
    runner = Runner(lease=2)
    admit(runner, "a", 4)
    runner.server.kill()
    taken = grow(runner, "a", 4).grants
    assert [len(grant.block_ids) for grant in taken] == [1]
    assert runner.books.away
    growth = runner.books.append([SequenceUpdate("a", [7] * 4, 8)])
    assert growth is not None
    assert [len(grant.block_ids) for grant in growth.grants] == [1]
    assert runner.books.status().lease_blocks == 0
    growth = runner.books.append([SequenceUpdate("a", [7] * 4, 12)])
    assert growth == Growth([], frozenset({"a"}))
    assert runner.books.allocate(AllocationRequest("b", [1])) is None
    status = runner.books.status()
    assert status.state is SessionState.AWAY
    runner.clock.now += 3
    assert runner.books.status().away_seconds == pytest.approx(3, abs=0.5)

    runner.server.start()
    runner.flush(60)
    assert runner.books.away == ""
    assert runner.books.status().restores == 1
    pool = runner.server.manager.pool("default")
    assert pool.check().violations == ()
    assert pool.live["a"].blocks == runner.books._opened.mirror.live["a"].blocks
    assert pool.live["a"].num_tokens == 13


def test_an_answer_that_does_not_come_ends_the_session_and_the_next_one_restores() -> None:
    runner = Runner()
    blocks = admit(runner, "a", 6)
    runner.server.stop()
    runner.books.append([SequenceUpdate("a", [], 6)])
    runner.flush(PACE_STEPS)
    runner.clock.now += LIMITS.answer + 0.1
    runner.flush()
    assert "not answered for 3 s" in runner.books.away
    runner.server.go_on()
    runner.flush(60)
    assert list(runner.server.manager.pool("default").live["a"].blocks) == blocks


def test_a_kv_manager_that_is_always_slow_admits_all_the_same() -> None:
    """An admission takes 0.5 s. The waits are 0.2, 0.4 and 0.8 s; after a success they begin anew."""
    runner = Runner()
    runner.server.latency = 0.25

    def tries(name: str) -> int:
        for number in range(1, 10):
            if runner.books.allocate(AllocationRequest(name, [1, 2, 3])) is not None:
                return number
            runner.flush(2, seconds=0.6)
        raise AssertionError("nobody is admitted")

    assert (tries("a"), tries("b")) == (3, 3)


def test_what_a_failed_step_was_to_compute_is_not_reported_as_cached() -> None:
    """Two equal prompts of one step, whose session breaks before it fails; the second relied on the first."""
    runner = Runner()
    for name in ("a", "b"):
        admission = runner.books.allocate(AllocationRequest(name, list(range(10)), promised_tokens=10))
        assert admission is not None
    assert admission.cached_tokens == 8
    runner.books._opened.give_up(LinkBroken("cut"))
    runner.books.free([SequenceUpdate("a", [], 0), SequenceUpdate("b", [], 8)])
    runner.flush(60)
    pool = runner.server.manager.pool("default")
    assert (pool.occupancy().held_blocks, pool.occupancy().cached_blocks) == (2, 0), "the lease alone"
    assert pool.check().violations == ()


def test_a_promise_outlives_the_session_that_it_was_made_in() -> None:
    runner = Runner()
    for name in ("a", "b"):
        runner.books.allocate(AllocationRequest(name, list(range(10)), promised_tokens=10))
    runner.books._opened.give_up(LinkBroken("cut"))
    runner.flush(60)
    pool = runner.server.manager.pool("default")
    assert pool.lookup([*range(8), 9]).cached_tokens == 8
    growth = runner.books.append([SequenceUpdate("a", [7], 10), SequenceUpdate("b", [7], 10)])
    assert growth is not None
    runner.books.free([SequenceUpdate("a", [], 10), SequenceUpdate("b", [], 10)])
    runner.flush(3)
    assert pool.occupancy().cached_blocks == 2
    assert pool.check().violations == ()


def relied_on() -> Runner:
    """A prompt that promises 10 tokens; one of 13 that began like it has ended in the same step, and is cached."""
    runner = Runner()
    runner.books.allocate(AllocationRequest("a", list(range(10)), promised_tokens=10))
    admission = runner.books.allocate(AllocationRequest("b", [*range(8), *range(20, 25)], promised_tokens=13))
    assert admission is not None
    assert admission.cached_tokens == 8
    runner.books.free([SequenceUpdate("b", [], 13)])
    assert violations(runner.books._opened.mirror) == []
    return runner


def test_who_ends_in_the_step_of_a_promise_is_reported_before_it_is_told_to_be_kept() -> None:
    runner = relied_on()
    runner.books._opened.give_up(LinkBroken("cut"))
    runner.flush(60)
    assert runner.books.status().restores == 1
    pool = runner.server.manager.pool("default")
    assert pool.lookup([*range(8), *range(20, 24), 9]).cached_tokens == 12
    runner.books.free([SequenceUpdate("a", [], 10)])
    runner.flush(3)
    assert pool.occupancy().cached_blocks == 3
    assert pool.check().violations == ()


def test_what_was_cached_behind_a_promise_goes_with_it() -> None:
    runner = relied_on()
    runner.books._opened.give_up(LinkBroken("cut"))
    runner.books.free([SequenceUpdate("a", [], 0)])
    assert violations(runner.books._opened.mirror) == []
    runner.flush(60)
    pool = runner.server.manager.pool("default")
    assert (pool.occupancy().held_blocks, pool.occupancy().cached_blocks) == (2, 0), "the lease alone"


def test_nothing_is_said_of_a_prompt_before_what_it_promises_is_computed() -> None:
    """All but one of its tokens are found in the cache, so that its next step needs another block."""
    runner = Runner(cache=CacheOptions(index=IndexKind.RADIX))
    runner.books.allocate(AllocationRequest("a", [*range(11), 99]))
    runner.books.free([SequenceUpdate("a", [], 12)])
    admission = runner.books.allocate(AllocationRequest("b", list(range(12)), promised_tokens=12))
    assert admission is not None
    assert admission.cached_tokens == 11
    runner.flush()
    assert len(grow(runner, "b", 12).grants) == 1
    runner.flush(3)
    assert (runner.books.status().restores, runner.server.refusals) == (0, [])


def test_the_refusal_of_an_ask_that_the_lease_has_served_since_changes_nothing() -> None:
    """The pool is full. Room is asked for ahead; before the refusal comes, a spare block has served."""
    runner = Runner(lease=2)
    admit(runner, "a", 4)
    runner.flush()
    pool = runner.server.manager.pool("default")
    pool.allocate("other", [5] * 4 * pool.occupancy().free_blocks)
    runner.server.stop()
    runner.books.append([SequenceUpdate("a", [], 4)])
    runner.flush(PACE_STEPS)
    assert len(grow(runner, "a", 4).grants) == 1, "from the lease"
    runner.server.go_on()
    runner.flush(3)
    assert (runner.books.away, runner.books.status().restores) == ("", 0)
    assert list(pool.live["a"].blocks) == runner.books._opened.mirror.live["a"].blocks
    assert pool.check().violations == ()


def test_copies_that_an_answer_brings_are_handed_out_with_room_for_guesses() -> None:
    """The first writer after a fork waits for its copy; the answer comes while a third sequence asks for room."""
    runner = Runner()
    admit(runner, "a", 6)
    admit(runner, "c", 5)
    runner.books.fork("a", ["b"])
    runner.server.stop()
    growth = runner.books.append([SequenceUpdate("a", [7], 6)])
    assert growth is not None
    assert growth.stalled == frozenset({"a"})
    runner.server.go_on()
    runner.clock.now += 0.01
    growth = runner.books.extend([SequenceUpdate("c", [8, 9], 5)])
    assert growth.stalled == frozenset()
    assert [copy.num_tokens for grant in growth.grants for copy in grant.copies] == [2]


def test_guesses_leave_half_of_the_lease_and_wait_for_nobody() -> None:
    runner = Runner(lease=3)
    for name in "abc":
        admit(runner, name, 4)
    runner.flush(2)
    runner.server.stop()
    waits = runner.waits[:]
    guesses = [SequenceUpdate(name, [7], 4) for name in "abc"]
    growth = runner.books.extend(guesses)
    # Half of 3 is 1, and half of the 2 that are left is 1.
    assert (len(growth.grants), growth.stalled) == (2, frozenset({"c"}))
    runner.flush(PACE_STEPS)
    runner.clock.now += 1
    assert runner.books.extend(guesses[2:]) == Growth([], frozenset({"c"})), "the KV manager is late"
    assert runner.waits == waits


def test_decode_speaks_in_every_second_step_and_never_waits() -> None:
    size, steps = 16, 96
    runner = Runner(lease=16, facts=PoolFacts(400, size, bytes_per_block=0, model_fingerprint="m"))
    lengths = {f"s{number}": size + 1 + number for number in range(size)}
    for name, length in lengths.items():
        admit(runner, name, length)
    told = dict(lengths)
    runner.flush(PACE_STEPS)
    runner.waits.clear()
    said = runner.server.counts.steps
    for step in range(1, steps + 1):
        # As the engine does: a sequence tells its news when it has filled a block.
        now = {name: length + step for name, length in lengths.items() if (length + step - 1) % size == 0}
        news = [SequenceUpdate(name, [7] * (tokens - told[name]), tokens - 1) for name, tokens in now.items()]
        if news:
            assert runner.books.append(news).stalled == frozenset()
        told |= now
        runner.flush()
    assert runner.server.counts.steps - said == steps / PACE_STEPS
    assert runner.waits == []
    # The lease served the one whose prompt ends with its block.
    assert runner.books.status().taken_blocks == 1
    assert runner.server.manager.pool("default").check().violations == ()


@pytest.mark.parametrize("is_quick", [True, False])
def test_scarce_blocks_are_asked_for_late_and_never_waited_for(is_quick: bool) -> None:
    """Sequences that begin a block by turns, in a pool that they nearly fill: nobody has a block to spare.

    One that knows t tokens has their blocks, ceil(t / 16), and the next one from the step on in which t is a multiple
    of 16. Where answers take longer than steps it is there one step or two sooner.
    """
    size, steps = 16, 40
    runner = Runner(lease=16, facts=PoolFacts(12 * 5 + 1, size, bytes_per_block=0, model_fingerprint="m"))
    runner.server.latency = 0.001 if is_quick else 0.006
    lengths = {f"s{number}": size + 1 + number for number in range(12)}
    runner.flush(STEPS + 1)
    for name, length in lengths.items():
        admit(runner, name, length)
    told = dict(lengths)
    runner.flush()
    pool = runner.server.manager.pool("default")
    runner.waits.clear()
    runner.clock.now += 0.01
    for step in range(1, steps + 1):
        news = [
            SequenceUpdate(name, [7] * (length + step - told[name]), length + step - 1)
            for name, length in lengths.items()
            if (length + step - 1) % size == 0
        ]
        if news:
            assert runner.books.append(news).stalled == frozenset()
        told |= {each.sequence_id: lengths[each.sequence_id] + step for each in news}
        runner.books.flush()
        runner.clock.now += 0.01
        # What the KV manager has answered by the end of the step.
        runner.books._opened.pump()
        # The first blocks were asked for before any were scarce.
        for name, length in lengths.items() if step > size else ():
            tokens = length + step
            ahead = len(pool.live[name].blocks) - -(-tokens // size)
            if is_quick:
                assert ahead == (tokens % size == 0), (step, name, tokens)
            else:
                assert ahead >= (tokens % size == 0), (step, name, tokens)
        assert len(pool.lease) == (0 if is_quick else 6)
    assert runner.waits == []


def test_an_end_is_said_at_once() -> None:
    for steps in range(PACE_STEPS):
        runner = Runner()
        admit(runner, "a", 6)
        runner.flush(1 + steps)
        runner.books.free([SequenceUpdate("a", [], 6)])
        runner.clock.now += 0.01
        runner.books.flush()
        assert "a" not in runner.server.manager.pool("default").live


def test_the_lease_is_given_back_for_an_admission_that_needs_it() -> None:
    runner = Runner(lease=8)
    assert runner.books.status().lease_blocks == MIN_SPARES
    assert len(admit(runner, "all", 32 * 4)) == 32
    runner.flush()
    assert runner.books.status().lease_blocks == 0
    runner.books.free([SequenceUpdate("all", [], 0)])
    runner.flush(SHORT_STEPS + 2)
    assert runner.books.status().lease_blocks == MIN_SPARES


def test_a_refused_admission_is_not_waited_for_again_before_there_is_room() -> None:
    runner = Runner(lease=0)
    admit(runner, "most", 30 * 4)
    request = AllocationRequest("a", range(500, 512))

    def attempt() -> tuple[bool, float]:
        before, started = runner.server.counts.steps, runner.clock.now
        granted = runner.books.allocate(request) is not None
        assert (runner.server.counts.steps > before) == (runner.clock.now > started)
        return granted, runner.clock.now - started

    granted, waited = attempt()
    assert (granted, waited > 0) == (False, True)
    assert [attempt() for _ in range(3)] == [(False, 0)] * 3
    runner.books.free([SequenceUpdate("most", [], 0)])
    granted, waited = attempt()
    assert (granted, waited > 0) == (True, True)


@pytest.mark.parametrize("steps", [3, 4])
def test_the_lease_follows_the_sequences(steps: int) -> None:
    """Half a block for each of them; the KV manager and the runner agree on it."""
    runner = Runner(lease=8, facts=PoolFacts(201, 4, bytes_per_block=0, model_fingerprint="m"))
    for number in range(12):
        admit(runner, str(number), 5)
    runner.flush(steps)
    pool = runner.server.manager.pool("default")
    assert (runner.books.status().lease_blocks, len(pool.lease)) == (6, 6)
    runner.books.free([SequenceUpdate(str(number), [], 5) for number in range(12)])
    # At the first look while nothing runs, for the next one may be a second later.
    runner.flush()
    runner.clock.now += 0.01
    runner.books._opened.pump()
    assert (runner.books.status().lease_blocks, len(pool.lease)) == (MIN_SPARES, MIN_SPARES)
    assert pool.occupancy().held_blocks == MIN_SPARES


def test_another_runner_takes_the_pool_and_keeps_it() -> None:
    first = Runner()
    second = Runner(first.server)
    # The fake channel tells of the end only when something is sent.
    first.books.free([SequenceUpdate("nobody", [], 0)])
    first.books._opened.beat()
    with pytest.raises(BooksTaken):
        first.flush(3)
    admit(second, "a", 4)


def test_a_report_that_is_refused_loses_the_books() -> None:
    runner = Runner()
    admit(runner, "a", 6)
    runner.books.append([SequenceUpdate("a", [], 6)])
    session = runner.books._opened
    session.give_up(LinkBroken("cut"))
    # What can't be true: the null block.
    session.mirror.live["a"].blocks[0] = 0
    with pytest.raises(BooksLost):
        runner.flush(60)
    runner.until_open()
    assert runner.server.manager.pool("default").live == {}
    admit(runner, "a", 6)


def test_the_lease_that_goes_unused_and_the_pool_come_back_at_the_end() -> None:
    runner = Runner()
    admit(runner, "a", 6)
    runner.books.close()
    assert runner.server.manager.pools() == []
