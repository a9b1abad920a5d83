"""A hypothesis machine that drives a pool beside the naive model with every verb and every failure.

The strongest check is `every_table_holds_its_data`: the model writes what a runner would write where the tables say,
so a block handed to two writers, a copy left out or a hit on foreign data shows as wrong contents.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvmanager.errors import KvError, NeverFits, PoolBusy, PoolShort, UnknownSequence
from kvmanager.pool import Pool
from kvmanager.types import Append, CacheScope, PoolSpec
from tests.kvmanager.naive_books import NaiveBooks

TOKENS = st.integers(0, 1)
SALTS = st.sampled_from(["", "", "s"])


class BooksMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 0

    @initialize(num_blocks=st.integers(2, 12), size=st.sampled_from([1, 2, 4]))
    def open(self, num_blocks: int, size: int) -> None:
        self.pool = Pool(PoolSpec(num_blocks, size))
        self.model = NaiveBooks(num_blocks - 1, size)

    def new_id(self) -> str:
        self.next_id += 1
        return f"s{self.next_id}"

    @rule(
        target=sequences,
        tokens=st.lists(TOKENS, min_size=1, max_size=20),
        salt=SALTS,
        skip=st.booleans(),
        headroom=st.integers(0, 2),
    )
    def allocate(self, tokens, salt, skip, headroom):
        sequence_id, model = self.new_id(), self.model
        needed = model.blocks_for(len(tokens))
        scope = CacheScope(salt=salt)
        hit = self.pool.lookup(tokens, scope)
        try:
            allocation = self.pool.allocate(
                sequence_id, tokens, scope=scope, headroom_blocks=headroom, skip_cache_read=skip
            )
        except NeverFits:
            assert needed > model.usable
            return multiple()
        except PoolShort:
            taken = needed if skip else needed - sum(1 for block in hit.block_ids if block in model.held())
            assert taken + headroom > model.usable - len(model.held())
            return multiple()
        assert needed <= model.usable
        assert len(allocation.block_ids) == needed
        assert allocation.cached_tokens == (0 if skip else hit.cached_tokens)
        assert allocation.cached_tokens < len(tokens)
        fresh = allocation.block_ids[allocation.cached_tokens // model.size :]
        assert not set(fresh) & model.held()
        assert 0 not in allocation.block_ids
        model.tokens[sequence_id] = list(tokens)
        model.salts[sequence_id] = salt
        model.tables[sequence_id] = list(allocation.block_ids)
        model.computed[sequence_id] = allocation.cached_tokens
        return sequence_id

    def parse(self, sequence_id, tokens, share):
        """An append of `tokens` after the runner has computed a share of what it may compute."""
        model = self.model
        room = len(model.tables[sequence_id]) * model.size
        ready = min(room, len(model.tokens[sequence_id]))
        computed = model.computed[sequence_id]
        writable = computed
        while writable < ready and model.count(model.tables[sequence_id][writable // model.size]) == 1:
            writable += 1
        return Append(sequence_id, tokens, computed + (writable - computed) * share // 2)

    @rule(
        first=sequences,
        second=sequences,
        tokens=st.lists(TOKENS, max_size=5),
        share=st.integers(0, 2),
        both=st.booleans(),
    )
    def append(self, first, second, tokens, share, both):
        model = self.model
        names = [first, second] if both and first != second else [first]
        names = [name for name in names if name in model.tables]
        if not names:
            return
        appends = [self.parse(name, tokens, share) for name in names]
        for item in appends:
            model.write(item.sequence_id, model.computed[item.sequence_id], item.computed_tokens)
        try:
            grants = self.pool.append(appends)
        except NeverFits:
            assert any(model.blocks_for(len(model.tokens[n]) + len(tokens)) > model.usable for n in names)
            return
        except PoolShort:
            assert self.needed(appends) > model.usable - len(model.held())
            return
        for item, grant in zip(appends, grants, strict=True):
            self.apply(item, grant)

    def needed(self, appends):
        """Fresh blocks that the appends need: growth, and every holder but the last of a shared block to be written."""
        model, needed, left = self.model, 0, {}
        for item in appends:
            table = model.tables[item.sequence_id]
            total = len(model.tokens[item.sequence_id]) + len(item.token_ids)
            needed += max(0, model.blocks_for(total) - len(table))
            if item.computed_tokens < total:
                for block in table[item.computed_tokens // model.size :]:
                    left.setdefault(block, model.count(block))
                    if left[block] > 1:
                        left[block] -= 1
                        needed += 1
        return needed

    def apply(self, item, grant):
        model, name = self.model, item.sequence_id
        model.tokens[name] += item.token_ids
        model.computed[name] = item.computed_tokens
        for copy in grant.copies:
            model.contents[copy.target] = model.contents.get(copy.source, ())[: copy.num_tokens]
        model.tables[name][grant.first_index :] = grant.block_ids
        assert len(model.tables[name]) == model.blocks_for(len(model.tokens[name]))
        if model.computed[name] < len(model.tokens[name]):
            for block in model.tables[name][model.computed[name] // model.size :]:
                assert model.count(block) == 1, "a block that will be written has another holder"

    @rule(target=sequences, parent=sequences, count=st.integers(1, 3))
    def fork(self, parent, count):
        model = self.model
        children = [self.new_id() for _ in range(count)]
        if parent not in model.tables:
            return multiple()
        held = self.pool.occupancy().held_blocks
        assert self.pool.fork(parent, children) == tuple(model.tables[parent])
        assert self.pool.occupancy().held_blocks == held
        for child in children:
            for facts in (model.tokens, model.tables):
                facts[child] = list(facts[parent])
            model.computed[child] = model.computed[parent]
            model.salts[child] = model.salts[parent]
        return multiple(*children)

    @rule(names=st.lists(consumes(sequences), min_size=1, max_size=3), share=st.integers(0, 2))
    def free(self, names, share):
        model = self.model
        known = [name for name in dict.fromkeys(names) if name in model.tables]
        frees = [self.parse(name, (), share) for name in known]
        for item in frees:
            model.write(item.sequence_id, model.computed[item.sequence_id], item.computed_tokens)
        outcome = self.pool.free([*frees, Append("nobody")])
        assert (outcome.freed, outcome.unknown) == (len(known), 1)
        for name in known:
            for facts in (model.tokens, model.tables, model.computed, model.salts):
                del facts[name]

    @rule(sequence=sequences)
    def refusals_change_nothing(self, sequence):
        before = self.pool.occupancy()
        bad = [
            lambda: self.pool.append([Append(sequence, (), 10_000)]),
            lambda: self.pool.append([Append("nobody", (0,), 0)]),
            lambda: self.pool.fork(sequence, [self.new_id(), ""]),
            lambda: self.pool.free([Append(sequence, (), 10_000)]),
            lambda: self.pool.allocate(sequence, [0]),
        ]
        for call in bad if sequence in self.model.tables else bad[1:2]:
            try:
                call()
            except KvError:
                continue
            raise AssertionError("a request that makes no sense was not refused")
        assert self.pool.occupancy() == before

    @rule()
    def reset_cache(self):
        cached = self.pool.occupancy().cached_blocks
        try:
            assert self.pool.reset_cache() == cached
        except PoolBusy:
            assert self.model.tables
            assert self.pool.occupancy().cached_blocks == cached
        else:
            assert not self.model.tables
            assert self.pool.occupancy().free_blocks == self.model.usable

    @rule(name=st.text(max_size=3))
    def unknown(self, name):
        try:
            self.pool.block_table("no" + name)
        except UnknownSequence:
            return
        raise AssertionError("a sequence that never began has a block table")

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.check().violations == ()
        assert self.pool.imbalance() == 0
        model, now = self.model, self.pool.occupancy()
        assert now.held_blocks == len(model.held())
        assert now.free_blocks + now.cached_blocks + now.held_blocks == model.usable
        assert now.shared_blocks == sum(1 for block in model.held() if model.count(block) > 1)
        assert now.sequences == len(model.tables)

    @invariant()
    def every_table_is_the_models(self):
        for name, table in getattr(self, "model", NaiveBooks(0, 1)).tables.items():
            assert [view.block_id for view in self.pool.block_table(name)[1]] == table

    @invariant()
    def every_table_holds_its_data(self):
        model = getattr(self, "model", NaiveBooks(0, 1))
        for name in model.tables:
            assert model.holds_its_data(name), name
