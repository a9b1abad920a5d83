"""The tokens behind a pool's names: all that can be found is known, whatever the engine and the channel did."""

from __future__ import annotations

import random
from array import array

import pytest

from kvmanager.hashing import NONE_HASH, hash_block
from kvmanager.types import HashAlgorithm
from model_runner.request import BeamSearch
from services.index_tokens import SPARE_NAMES, IndexTokens
from services.session.cached_tree import CachedBlock
from services.session.tap import Glance, SequenceLog
from tests.model_runner.toy_model import habitual_logits
from tests.services.session.bad_channel import FakeClock, FakeServer, Faults
from tests.services.session.stepped_engine import Bench

BLOCK = 4
ROUGH = Faults(lost=0.03, doubled=0.05, delayed=0.2, delay=0.1, cut=0.01)


def names(tokens: list[int], salt: str = "") -> list[bytes]:
    """By the rule itself, one block at a time."""
    found: list[bytes] = []
    for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        extra = (("cache_salt", salt),) if salt and not start else None
        found.append(hash_block(found[-1] if found else NONE_HASH, tuple(tokens[start : start + BLOCK]), extra))
    return found


def fresh() -> IndexTokens:
    return IndexTokens(BLOCK, HashAlgorithm.SHA256)


def log_of(*tokens: int, salt: str = "") -> SequenceLog:
    log = SequenceLog()
    log.begin(1, salt, array("I", tokens))
    return log


def test_full_blocks_get_names_as_their_tokens_come() -> None:
    tokens, log = fresh(), log_of(*range(6))
    log.tell(1, 6, array("I", [6, 7, 8]))
    tokens.take(log.take())
    first, second = names(list(range(8)))
    assert tokens.block(first) == (b"", array("I", [0, 1, 2, 3]), "")
    assert tokens.block(second) == (first, array("I", [4, 5, 6, 7]), "")
    assert log.take() == []


def test_the_same_news_twice_change_nothing() -> None:
    tokens, log = fresh(), log_of(*range(6))
    log.tell(1, 4, array("I", [4, 5, 6, 7]))
    log.tell(1, 4, array("I", [4, 5]))
    log.tell(1, 8, array("I", [8, 9, 10, 11]))
    tokens.take(log.take())
    assert tokens.block(names(list(range(12)))[2]) is not None


def test_a_salt_is_part_of_the_name_and_of_what_is_told() -> None:
    tokens = fresh()
    tokens.take(log_of(*range(8), salt="secret").take())
    first, second = names(list(range(8)), "secret")
    assert tokens.block(names(list(range(8)))[0]) is None
    assert (tokens.block(first).salt, tokens.block(second).salt) == ("secret", "secret")


def test_tokens_that_are_taken_back_are_followed_by_others() -> None:
    tokens, log = fresh(), log_of(*range(8))
    log.cut(1, 5)
    log.tell(1, 5, array("I", [50, 60, 70]))
    tokens.take(log.take())
    assert tokens.block(names([0, 1, 2, 3, 4, 50, 60, 70])[1]) is not None


def test_news_of_a_sequence_that_is_not_known_are_passed_over() -> None:
    tokens, log = fresh(), SequenceLog()
    log.tell(9, 0, array("I", range(8)))
    log.cut(9, 1)
    log.end(9)
    tokens.take(log.take())
    assert tokens.block(names(list(range(8)))[0]) is None


def test_what_was_held_before_is_named_from_block_tables_and_the_cache() -> None:
    # Sequence 1 holds blocks 5 and 6; 7 is cached behind 6, 8 behind 7, and 9 begins a prompt of its own.
    def cached(parent: int, first: int, salt: str = "") -> CachedBlock:
        return CachedBlock(parent, array("I", range(first, first + BLOCK)).tobytes(), salt)

    tokens = fresh()
    tokens.seed(
        Glance(
            sequences=[(1, "", array("I", range(9)), [5, 6])],
            cached={8: cached(7, 12), 7: cached(6, 8), 9: cached(0, 90, "s"), 10: cached(44, 1)},
        )
    )
    chain = names(list(range(16)))
    assert [tokens.block(name).parent for name in chain] == [b"", *chain[:-1]]
    assert tokens.block(chain[3]).tokens == array("I", [12, 13, 14, 15])
    assert tokens.block(names([90, 91, 92, 93], "s")[0]).salt == "s"


def test_what_nobody_has_any_more_is_forgotten() -> None:
    tokens, log = fresh(), SequenceLog()
    for handle in range(SPARE_NAMES + 2):
        log.begin(handle, "", array("I", [handle, 1, 2, 3]))
        log.end(handle)
    tokens.take(log.take())
    first, second, third = (names([handle, 1, 2, 3])[0] for handle in (0, 1, 2))
    tokens.keep({second})
    # The index may not have heard of the third yet.
    assert [tokens.block(name) is not None for name in (first, second, third)] == [True, True, True]
    for handle in range(SPARE_NAMES + 1):
        tokens.take(log_of(handle, 9, 9, 9).take())
    tokens.keep({second})
    assert [tokens.block(name) is not None for name in (first, second, third)] == [False, True, False]


def assert_all_known(bench: Bench, tokens: IndexTokens) -> None:
    pool = bench.server.manager.pool("default")
    found = [name for chain in pool.snapshot() for name in chain.names]
    assert found
    for name in found:
        block = tokens.block(name)
        assert block is not None
        extra = (("cache_salt", block.salt),) if block.salt and not block.parent else None
        assert hash_block(block.parent or NONE_HASH, tuple(block.tokens), extra) == name


@pytest.mark.parametrize("seed", range(6))
def test_all_that_can_be_found_is_known(seed: int) -> None:
    """Forks, guesses that are taken back, searches, preemptions, salts, and a KV manager that loses its books."""
    rng = random.Random(seed)
    server = FakeServer(FakeClock(), rng=random.Random(seed + 1), faults=ROUGH)
    bench = Bench(server, num_blocks=rng.choice([40, 65]), max_sequences=8, model=habitual_logits, speculative_tokens=4)
    bench.until_served()
    tokens, log = fresh(), SequenceLog()
    shared = [rng.randrange(40) for _ in range(16)]
    for number in range(30):
        if number == 10:
            # Who listens only now must know what came before.
            tokens.seed(bench.books.listen(log))
        prompt = shared[: rng.randrange(16)] + rng.choices(range(40), k=rng.randrange(1, 9))
        options = rng.choice([{}, {"num_choices": 3}, {"beam_search": BeamSearch(2)}, {"cache_salt": "s"}])
        bench.submit(str(number), prompt, rng.randrange(1, 20), **options)
        bench.turn(rng.randrange(6))
        if rng.random() < 0.1:
            server.kill()
            bench.turn(rng.randrange(20))
            server.start()
        if number >= 10:
            tokens.take(log.take())
    bench.until_all_ended()
    bench.assert_books_agree()
    tokens.take(log.take())
    assert_all_known(bench, tokens)
