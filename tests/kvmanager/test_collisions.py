"""Names that collide: xxh3 can be made to, so a pool that uses it must be right whatever the digest says."""

import random
from contextlib import suppress
from types import SimpleNamespace

import pytest
import xxhash

from kvmanager.errors import InvalidArgument, KvError
from kvmanager.types import BASE_SCOPE, NO_RETENTION, Append, CacheScope, HashAlgorithm, IndexKind, PoolSpec
from tests.kvmanager.books_port import InProcessPort
from tests.kvmanager.naive_books import NaiveBooks, NaivePrompt, NaiveSequence
from tests.kvmanager.pools import COMMON, cache, end, pool_of, prefill, right

INDEXES = [IndexKind.HASH, IndexKind.RADIX]


@pytest.fixture(params=[1, 2, 5], ids="{} digests".format)
def digests(request, monkeypatch):
    """xxh3 with so few values that names collide all the time."""
    real = xxhash.xxh3_128

    def few(data):
        return SimpleNamespace(digest=lambda: bytes([real(data).digest()[0] % request.param]) * 16)

    monkeypatch.setattr(xxhash, "xxh3_128", few)


@pytest.fixture
def constant(monkeypatch):
    """xxh3 that gives everything the same name."""
    monkeypatch.setattr(xxhash, "xxh3_128", lambda data: SimpleNamespace(digest=lambda: b"x" * 16))


def xxh3_pool(index, num_blocks=11):
    return pool_of(num_blocks, index=index, hash_algorithm=HashAlgorithm.XXH3)


@pytest.mark.parametrize("index", INDEXES)
class TestOneNameForAll:
    @pytest.fixture(autouse=True)
    def _constant(self, constant):
        """Each test here."""

    def test_a_chain_of_one_name_is_found_as_far_as_it_could_be_published(self, index):
        pool = xxh3_pool(index)
        cache(pool, [*COMMON, 9])
        assert pool.lookup([*COMMON, 9]).cached_tokens == 16
        assert pool.occupancy().cached_blocks == 1
        assert right(pool)

    def test_other_content_of_that_name_is_not_found(self, index):
        pool = xxh3_pool(index)
        cache(pool, [1] * 33)
        assert pool.lookup([2] * 33).cached_tokens == 0
        assert pool.lookup([1] * 33).cached_tokens == 16
        assert pool.lookup([1] * 33, CacheScope("adapter")).cached_tokens == 0

    def test_what_cannot_be_published_is_free_when_it_ends(self, index):
        pool = xxh3_pool(index)
        cache(pool, [1] * 33)
        prefill(pool, "a", [2] * 48)
        assert pool.lookup([2] * 49).cached_tokens == 0
        assert pool.occupancy().stored_tokens == 48
        assert right(pool)
        end(pool, "a")
        assert pool.occupancy().cached_blocks == 1
        assert pool.occupancy().free_blocks == 9

    def test_a_name_that_is_given_up_may_be_taken(self, index):
        pool = xxh3_pool(index, num_blocks=4)
        cache(pool, [1] * 17)
        cache(pool, [2] * 48)
        assert pool.lookup([1] * 17).cached_tokens == 0
        cache(pool, [2] * 48)
        assert pool.lookup([2] * 17).cached_tokens == 16
        assert right(pool)

    def test_a_rewound_sequence_may_publish_again(self, index):
        pool = xxh3_pool(index)
        prefill(pool, "a", [1] * 32)
        pool.truncate("a", 10)
        pool.append([Append("a", [3] * 8, 10)])
        pool.append([Append("a", (), 18)])
        assert pool.lookup([1] * 10 + [3] * 8).cached_tokens == 16
        assert right(pool)


class Driver:
    """Drives a pool with random verbs, and checks nothing but where the data is and that the books agree."""

    def __init__(self, index, seed):
        self.random = random.Random(seed)
        self.port = InProcessPort(PoolSpec(14, 4, hash_algorithm=HashAlgorithm.XXH3, index=index))
        self.model = NaiveBooks(13, 4, HashAlgorithm.XXH3)
        self.ids = 0

    def named(self):
        return {block for key in self.model.live for block, name in self.port.views(key)[1] if name}

    def step(self):
        verbs = [self.allocate, self.append, self.append, self.append, self.fork, self.truncate, self.free]
        verb = self.allocate if not self.model.live else self.random.choice(verbs)
        with suppress(KvError):
            verb()
        assert self.port.violations() == ()
        assert self.model.misplaced() == []

    def pick(self):
        return self.random.choice(list(self.model.live))

    def tokens(self, most):
        return [self.random.randint(0, 1) for _ in range(self.random.randint(1, most))]

    def new_id(self):
        self.ids += 1
        return str(self.ids)

    def allocate(self):
        key, tokens = self.new_id(), self.tokens(24)
        answer = self.port.allocate(key, tokens, BASE_SCOPE, (), NO_RETENTION, 0, 0, False, False)
        self.model.copy(answer.copies)
        cached = answer.cached_tokens
        prompt = self.model.prompt(tokens, BASE_SCOPE, ())
        self.model.live[key] = NaiveSequence(prompt, list(answer.block_ids), cached, cached, cached)

    def append(self):
        key = self.pick()
        item = self.model.parse(key, self.tokens(6), 0, self.random.randint(0, 2), self.named())
        for grant in self.port.append([item]):
            self.model.live[key].table[grant.first_index :] = grant.block_ids
            self.model.copy(grant.copies)
        sequence = self.model.live[key]
        sequence.prompt.extend(item.token_ids)
        sequence.computed = sequence.ready = item.computed_tokens

    def fork(self):
        key, child = self.pick(), self.new_id()
        self.port.fork(key, [child])
        parent = self.model.live[key]
        prompt = NaivePrompt(4, tokens=parent.prompt.tokens[:], content=parent.prompt.content[:])
        self.model.live[child] = NaiveSequence(prompt, parent.table[:], parent.computed, 0, parent.computed)

    def truncate(self):
        key = self.pick()
        sequence = self.model.live[key]
        num_tokens = self.random.randint(1, len(sequence.prompt.tokens))
        self.port.truncate(key, num_tokens)
        sequence.prompt.cut(num_tokens)
        del sequence.table[self.model.blocks_for(num_tokens) :]
        sequence.computed = sequence.ready = min(sequence.computed, num_tokens)

    def free(self):
        key = self.pick()
        self.port.free([self.model.parse(key, [], 0, 2, self.named())])
        del self.model.live[key]


@pytest.mark.parametrize("index", INDEXES)
def test_no_history_hits_wrong_data_when_names_collide(index, digests):
    for seed in range(12):
        driver = Driver(index, seed)
        for _ in range(60):
            driver.step()


def test_a_pool_whose_names_may_collide_takes_no_salt():
    pool = xxh3_pool(IndexKind.RADIX)
    with pytest.raises(InvalidArgument, match="takes no cache salt; open it with sha256"):
        pool.allocate("a", [1], scope=CacheScope(salt="s"))
    assert pool.occupancy().sequences == 0
