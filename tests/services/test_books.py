"""The engine's books: the same cases over a session with a real KV manager and in process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvmanager.manager import KvManager
from kvmanager.pool import Pool
from kvmanager.types import EvictionKind, HashAlgorithm, IndexKind
from model_runner.books import (
    INVALID_ARGUMENT,
    NEVER_FITS,
    PINS_EXHAUSTED,
    QUOTA_SHORT,
    Admission,
    AllocationRequest,
    BooksLost,
    BooksRefused,
    BooksTaken,
    BooksUnreachable,
    CopyOrder,
    Growth,
    KvBooks,
    PoolFacts,
    SequenceUpdate,
)
from model_runner.request import Retention
from services.books_inprocess import InProcessBooks
from services.cache_options import DEFAULT_CACHE, CacheOptions
from services.session.dial import SessionDial
from services.session.limits import SessionLimits
from services.session.link import Dial, GrpcLink, Link
from services.session_books import SessionBooks
from tests.services.kv_support import kv_manager_on_a_thread, kv_settings

FACTS = PoolFacts(num_blocks=9, block_size=4, bytes_per_block=1024, model_fingerprint="m")
PATIENT = SessionLimits(ask=10, admit=10, answer=20)
"""So that a busy machine changes no outcome."""


class Bench:
    """Books over one manager, and as many runners as a case needs."""

    def __init__(
        self,
        manager: KvManager,
        make: Callable[[CacheOptions, int], KvBooks],
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """catch_up: returns when the manager has written down all that it has answered."""
        self.manager = manager
        self._make = make
        self._catch_up = catch_up
        self.made: list[KvBooks] = []

    def make(self, cache: CacheOptions = DEFAULT_CACHE, lease_blocks: int = 0) -> KvBooks:
        self.made.append(self._make(cache, lease_blocks))
        return self.made[-1]

    @property
    def pool(self) -> Pool:
        """The pool, once it has been told all that was said."""
        for books in self.made:
            if isinstance(books, SessionBooks) and books._opened is not None:
                books._opened.settle(PATIENT.answer)
        self._catch_up()
        return self.manager.pool("default")

    def opened(self, cache: CacheOptions = DEFAULT_CACHE, lease_blocks: int = 0) -> KvBooks:
        books = self.make(cache, lease_blocks)
        books.open(FACTS)
        return books


@pytest.fixture(params=["session by gRPC", "session by socket", "in process"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "in process":
        manager = KvManager("boot")
        yield Bench(manager, lambda cache, lease_blocks: InProcessBooks(manager, cache=cache))
        return
    with kv_manager_on_a_thread(kv_settings(tmp_path)) as (running, thread):
        dial = SessionDial(running.address) if request.param == "session by socket" else None
        make = partial(session_books, dial or partial(GrpcLink, running.address))
        bench = Bench(running.manager, make, thread.catch_up)
        yield bench
        for books in bench.made:
            books.close()


def session_books(dial: Dial, cache: CacheOptions = DEFAULT_CACHE, lease_blocks: int = 0) -> SessionBooks:
    return SessionBooks(dial, cache=cache, lease_blocks=lease_blocks, limits=PATIENT)


def allocate(books: KvBooks, name: str, tokens: range | list[int], **more: object) -> Admission | None:
    return books.allocate(AllocationRequest(name, list(tokens), **more))  # type: ignore[arg-type]


def ids(admission: Admission | None) -> list[int]:
    assert admission is not None
    return list(admission.block_ids)


def test_open_ends_what_was_held(bench: Bench) -> None:
    books = bench.opened()
    assert bench.pool.spec.bytes_per_block == 1024
    allocate(books, "a", range(8))
    books.open(FACTS)
    assert bench.pool.occupancy().sequences == 0
    assert allocate(books, "a", range(8)) is not None


def test_other_facts_are_refused_with_the_numbers(bench: Bench) -> None:
    bench.opened()
    with pytest.raises(BooksRefused, match=r"num_blocks 9.*asked for 10"):
        bench.make().open(replace(FACTS, num_blocks=10))


RADIX = CacheOptions(HashAlgorithm.XXH3, IndexKind.RADIX, EvictionKind.LRU)


def test_how_the_pool_is_kept_reaches_the_books(bench: Bench) -> None:
    bench.opened(RADIX)
    spec = bench.pool.spec
    assert (spec.hash_algorithm, spec.index, spec.eviction) == (HashAlgorithm.XXH3, IndexKind.RADIX, EvictionKind.LRU)


def test_a_pool_that_is_kept_otherwise_is_refused_in_plain_words(bench: Bench) -> None:
    bench.opened(RADIX)
    with pytest.raises(BooksRefused) as caught:
        bench.make().open(FACTS)
    words = "hash_algorithm xxh3 (asked for sha256), index radix (asked for hash), eviction lru (asked for adaptive);"
    assert words in str(caught.value)
    assert caught.value.reason == "POOL_DIFFERS"


def test_impossible_facts_are_refused(bench: Bench) -> None:
    with pytest.raises(BooksRefused, match="3"):
        bench.make().open(replace(FACTS, block_size=3))


def test_a_prompt_is_admitted_and_its_prefix_is_found_later(bench: Bench) -> None:
    books = bench.opened()
    first = allocate(books, "a", range(10))
    assert first is not None
    assert (len(first.block_ids), first.cached_tokens) == (3, 0)
    books.free([SequenceUpdate("a", [10], 10)])

    again = allocate(books, "b", range(10))
    assert again is not None
    assert again.cached_tokens == 8
    assert list(again.block_ids)[:2] == list(first.block_ids)[:2]
    assert bench.pool.totals.queried_tokens == 20


def test_salt_opt_out_and_resumption_reach_the_books(bench: Bench) -> None:
    books = bench.opened()
    allocate(books, "a", range(8), cache_salt="one")
    books.free([SequenceUpdate("a", [], 8)])
    other = allocate(books, "b", range(8), cache_salt="two")
    assert other is not None
    assert other.cached_tokens == 0
    opted_out = allocate(books, "c", range(8), cache_salt="one", skip_cache_read=True)
    assert opted_out is not None
    assert opted_out.cached_tokens == 0
    asked = bench.pool.totals.queried_tokens
    resumed = allocate(books, "d", range(8), cache_salt="one", resumed=True)
    assert resumed is not None
    assert resumed.cached_tokens == 4
    assert bench.pool.totals.queried_tokens == asked


def test_a_part_of_a_block_is_found_and_must_be_copied(bench: Bench) -> None:
    books = bench.opened(CacheOptions(index=IndexKind.RADIX))
    source = ids(allocate(books, "a", range(8)))[1]
    books.free([SequenceUpdate("a", [], 8)])
    # 4 tokens of the first block and 2 of the second.
    partial = allocate(books, "b", [0, 1, 2, 3, 4, 5, 60, 70])
    target = ids(partial)[1]
    assert partial == Admission(partial.block_ids, 6, (CopyOrder(source, target, 2),))
    assert target != source


def test_a_salt_in_a_pool_named_by_xxh3_is_refused(bench: Bench) -> None:
    books = bench.opened(CacheOptions(HashAlgorithm.XXH3))
    with pytest.raises(BooksRefused, match="salt") as caught:
        allocate(books, "a", range(4), cache_salt="s")
    assert caught.value.reason == INVALID_ARGUMENT
    assert bench.pool.occupancy().sequences == 0


def test_a_pinned_prompt_stays_and_too_many_pins_have_a_reason_of_their_own(bench: Bench) -> None:
    books = bench.opened()
    keep = Retention(priority=5, pin_seconds=60)
    # 8 usable blocks: 4 may be pinned.
    allocate(books, "a", range(12), retention=keep)
    with pytest.raises(BooksRefused, match="2 blocks are to be pinned, 3 are already, and at most 4 may be") as caught:
        allocate(books, "b", range(100, 108), retention=keep)
    assert caught.value.reason == PINS_EXHAUSTED
    books.free([SequenceUpdate("a", [], 12)])
    assert bench.pool.occupancy().pinned_blocks == 3
    assert allocate(books, "b", range(100, 121)) is None, "6 blocks with 3 of 8 pinned"


def test_a_full_quota_is_told_from_a_full_pool(bench: Bench) -> None:
    books = bench.opened()
    bench.pool.set_quota("s", 2)
    allocate(books, "a", range(8), cache_salt="s")
    with pytest.raises(BooksRefused, match="1 blocks are needed, and the salt's quota of 2 leaves 0") as caught:
        allocate(books, "b", range(4), cache_salt="s")
    assert caught.value.reason == QUOTA_SHORT
    with pytest.raises(BooksRefused, match="the quota of its salt is 2 usable") as caught:
        books.append([SequenceUpdate("a", [1], 8)])
    assert caught.value.reason == NEVER_FITS


def test_who_is_preempted_pins_nothing_yet(bench: Bench) -> None:
    books = bench.opened()
    keep = Retention(pin_seconds=60)
    allocate(books, "a", range(8), retention=keep)
    books.free([SequenceUpdate("a", [], 8)], preempted=True)
    assert (bench.pool.occupancy().pinned_blocks, bench.pool.occupancy().cached_blocks) == (0, 2)
    allocate(books, "a", range(8), retention=keep, resumed=True)
    books.free([SequenceUpdate("a", [], 8)])
    assert bench.pool.occupancy().pinned_blocks == 2
    assert bench.pool.check().violations == ()


@pytest.mark.parametrize("computed", [10, 0])
def test_equal_prompts_of_one_step_share_what_is_promised(bench: Bench, computed: int) -> None:
    """Of 10 tokens 2 blocks are full. The step computes them, or fails."""
    books = bench.opened()
    first = allocate(books, "a", range(10), promised_tokens=10)
    second = allocate(books, "b", range(10), promised_tokens=10)
    assert second is not None
    assert (second.cached_tokens, ids(first)[:2]) == (8, ids(second)[:2])
    books.free([SequenceUpdate("a", [], computed), SequenceUpdate("b", [], computed or 8)])
    assert bench.pool.occupancy().cached_blocks == (2 if computed else 0)
    assert bench.pool.check().violations == ()


def test_a_full_pool_admits_and_grows_nothing(bench: Bench) -> None:
    books = bench.opened()
    assert allocate(books, "a", range(28)) is not None
    assert allocate(books, "b", range(100, 104), headroom_blocks=1) is None
    assert allocate(books, "b", range(100, 104)) is not None
    before = bench.pool.block_table("a")[1]
    assert books.append([SequenceUpdate("a", [1], 28)]) is None
    assert [block.block_id for block in bench.pool.block_table("a")[1]] == [block.block_id for block in before]
    assert bench.pool.occupancy().free_blocks == 0


def test_growth_is_granted_in_order(bench: Bench) -> None:
    books = bench.opened()
    a, b = ids(allocate(books, "a", range(4))), ids(allocate(books, "b", range(50, 53)))
    growth = books.append([SequenceUpdate("b", [1], 3), SequenceUpdate("a", [2], 4)])
    assert growth is not None
    # b's one block has room for its fourth token: nothing to grant.
    ((name, index, granted),) = [(grant.sequence_id, grant.first_index, grant.block_ids) for grant in growth.grants]
    assert (name, index, len(granted)) == ("a", 1, 1)
    assert set(granted).isdisjoint(a + b)
    assert growth.stalled == frozenset()
    assert books.append([]) == Growth([])


def test_the_first_writer_after_a_fork_copies(bench: Bench) -> None:
    books = bench.opened()
    tail = ids(allocate(books, "a", range(6)))[1]
    books.fork("a", ["b"])
    growth = books.append([SequenceUpdate("a", [7], 6), SequenceUpdate("b", [8], 6)])
    assert growth is not None
    (grant,) = growth.grants
    (target,) = grant.block_ids
    # The second writer is the last holder by then, and keeps the block.
    assert (grant.sequence_id, grant.first_index, grant.copies) == ("a", 1, (CopyOrder(tail, target, 2),))
    assert target != tail


def test_guesses_get_room_and_are_taken_back(bench: Bench) -> None:
    books = bench.opened(lease_blocks=2)
    first = ids(allocate(books, "a", range(6)))
    growth = books.extend([SequenceUpdate("a", [10, 11, 12, 13], 6)])
    assert growth.stalled == frozenset()
    ((index, granted),) = [(grant.first_index, list(grant.block_ids)) for grant in growth.grants]
    assert (index, len(granted)) == (2, 1)
    assert bench.pool.sequence("a").num_tokens == 10
    assert list(bench.pool.sequence("a").blocks) == first + granted
    books.truncate("a", 7)
    assert bench.pool.sequence("a").num_tokens == 7
    assert list(bench.pool.sequence("a").blocks) == first
    # What is told next follows what stayed; its full blocks are found by those tokens, and not by the guesses.
    growth = books.append([SequenceUpdate("a", [21, 22], 7)])
    assert growth is not None
    assert [(grant.first_index, len(grant.block_ids)) for grant in growth.grants] == [(2, 1)]
    books.free([SequenceUpdate("a", [], 9)])
    assert bench.pool.lookup([*range(6), 10, 21, 22]).cached_tokens == 8
    assert bench.pool.lookup([*range(6), 10, 11, 12]).cached_tokens == 4
    assert bench.pool.check().violations == ()


def test_guesses_that_fit_need_no_block(bench: Bench) -> None:
    books = bench.opened()
    allocate(books, "a", range(5))
    assert books.extend([SequenceUpdate("a", [1, 2, 3], 5)]) == Growth([])
    books.truncate("a", 8)
    books.truncate("a", 5)
    assert (bench.pool.sequence("a").num_tokens, len(bench.pool.sequence("a").blocks)) == (5, 2)


def test_in_a_full_pool_guesses_get_nothing_and_change_nothing(bench: Bench) -> None:
    """Each for itself: b has room in its own block."""
    books = bench.opened()
    allocate(books, "a", range(28))
    allocate(books, "b", range(100, 102))
    before = bench.pool.occupancy()
    growth = books.extend([SequenceUpdate("a", [1], 28), SequenceUpdate("b", [2], 2)])
    assert growth == Growth([], frozenset({"a"}))
    assert (bench.pool.sequence("a").num_tokens, bench.pool.sequence("b").num_tokens) == (28, 3)
    assert bench.pool.occupancy().held_blocks == before.held_blocks
    # It is told again by who must have it.
    assert books.append([SequenceUpdate("a", [1], 28)]) is None


def test_guesses_keep_to_a_quota(bench: Bench) -> None:
    books = bench.opened()
    bench.pool.set_quota("s", 2)
    allocate(books, "a", range(8), cache_salt="s")
    assert books.extend([SequenceUpdate("a", [1], 8)]).stalled == frozenset({"a"})


def test_freeing_what_is_unknown_is_no_error(bench: Bench) -> None:
    books = bench.opened()
    allocate(books, "a", range(4))
    books.free([SequenceUpdate("nobody", [], 0)])
    assert bench.pool.occupancy().sequences == 1


@pytest.mark.parametrize(
    "fault",
    [
        lambda books: allocate(books, "a", range(4)),
        lambda books: allocate(books, "b", []),
        lambda books: allocate(books, "b", range(33)),
        lambda books: books.append([SequenceUpdate("nobody", [1], 0)]),
        lambda books: books.append([SequenceUpdate("a", [], 5)]),
        lambda books: books.extend([SequenceUpdate("nobody", [1], 0)]),
        lambda books: books.truncate("nobody", 1),
        lambda books: books.truncate("a", 0),
        lambda books: books.truncate("a", 5),
        lambda books: books.fork("nobody", ["b"]),
        lambda books: books.free([SequenceUpdate("a", [], 9)]),
    ],
)
def test_faults_of_the_engine_are_refused_and_change_nothing(bench: Bench, fault: Callable[[KvBooks], object]) -> None:
    books = bench.opened()
    allocate(books, "a", range(4))
    before = bench.pool.occupancy()
    with pytest.raises(BooksRefused):
        fault(books)
    assert bench.pool.occupancy() == before
    assert bench.pool.check().ok


VERBS = [
    lambda books: allocate(books, "a", range(4)),
    lambda books: books.append([]),
    lambda books: books.extend([SequenceUpdate("a", [1], 0)]),
    lambda books: books.truncate("a", 1),
    lambda books: books.fork("a", ["b"]),
    lambda books: books.free([]),
    lambda books: books.flush(),
]


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_can_be_said_before_open(bench: Bench, verb: Callable[[KvBooks], object]) -> None:
    with pytest.raises(BooksLost):
        verb(bench.make())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_tells_that_another_runner_has_the_pool(bench: Bench, verb: Callable[[KvBooks], object]) -> None:
    books, other = bench.opened(), bench.opened()
    with pytest.raises(BooksTaken):
        # The news takes a moment to come over a stream.
        until_it_raises(books.flush)
    with pytest.raises(BooksTaken):
        verb(books)
    assert allocate(other, "b", range(4)) is not None


def until_it_raises(act: Callable[[], object]) -> None:
    for _ in range(2000):
        act()
        time.sleep(0.005)


def test_close_gives_the_pool_up_and_never_raises(bench: Bench) -> None:
    books, late = bench.opened(), bench.make()
    books.close()
    books.close()
    assert bench.manager.pools() == []
    late.close()


def test_close_leaves_the_pool_of_the_next_runner(bench: Bench) -> None:
    before, after = bench.opened(), bench.opened()
    before.close()
    assert after.append([]) == Growth([])


@pytest.mark.parametrize(
    ("dial", "sentence"), [(GrpcLink, "does not answer"), (lambda address: SessionDial(address)(), "nobody listens")]
)
def test_nobody_at_the_address_is_unreachable(tmp_path: Path, dial: Callable[[str], Link], sentence: str) -> None:
    books = SessionBooks(partial(dial, f"unix:{tmp_path}/kv.sock"), limits=SessionLimits(admit=0.05, connect=0.01))
    with pytest.raises(BooksUnreachable, match=sentence):
        books.open(FACTS)
    books.close()
