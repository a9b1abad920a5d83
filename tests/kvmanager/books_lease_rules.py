"""Rules of the machine: what a runner does with a lease, and that books can be made anew from what it holds."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvmanager.errors import InvalidArgument, NeverFits
from kvmanager.runner_pool import RunnerPool
from kvmanager.types import Append, CacheScope, EvictionKind
from tests.kvmanager.books_operator_rules import OperatorRules
from tests.kvmanager.books_port import InProcessPort
from tests.kvmanager.books_prompts import NUMBERS, TOKENS
from tests.kvmanager.held import assert_equal_books, assert_given_up_in_the_same_order, holdings_of


class LeaseRules(OperatorRules):
    @precondition(lambda self: self.port.has_lease)
    @rule(wanted=st.integers(0, 4))
    def fill_lease(self, wanted):
        """As long as the pool has as many left, and the quota of who gives no salt allows it."""
        model, quota = self.model, self.model.quota("")
        count = min(wanted - len(model.lease), self.available() - wanted, self.room(""))
        used, free = len(model.held("")) + self.cached_of(""), self.port.occupancy().free_blocks
        self.expired_at = self.now
        blocks = self.port.fill_lease(wanted)
        assert len(blocks) == len(set(blocks)) == max(0, count)
        assert 0 not in blocks
        assert not set(blocks) & model.held()
        if blocks:
            own = max(0, used + count - quota) if quota else 0
            self.check_evictions("", own, max(0, count - free - own), set())
        model.lease += blocks

    @precondition(lambda self: self.model.lease)
    @rule(number=NUMBERS, count=st.integers(1, 3))
    def give_back(self, number, count):
        lease = self.model.lease
        blocks = [lease.pop(number % len(lease)) for _ in range(min(count, len(lease)))]
        self.refused(InvalidArgument, lambda: self.port.give_back([*blocks, blocks[0]]))
        self.port.give_back(blocks)
        self.refused(InvalidArgument, lambda: self.port.give_back(blocks[:1]))

    @precondition(lambda self: self.model.live and self.model.lease)
    @rule(name=NUMBERS, number=NUMBERS, count=st.integers(1, 3), back=st.integers(0, 2), tokens=TOKENS)
    def take_from_lease(self, name, number, count, back, tokens):
        """Blocks that the runner put behind what it knows of a table, and computed into at once."""
        model, key = self.model, self.pick(name)
        sequence, lease = model.live[key], model.lease
        entries = max(model.blocks_for(max(sequence.computed, sequence.ready)), len(sequence.table) - back)
        taken = [lease.pop(number % len(lease)) for _ in range(min(count, len(lease)))]
        sequence.table = sequence.table[:entries] + taken
        item = model.parse(key, tokens, 0, 2, set(self.names))
        row = (key, item.token_ids, item.computed_tokens, entries, taken, 0)
        beyond = len(sequence.prompt.tokens) + len(tokens) + 1
        self.refused(InvalidArgument, lambda: self.port.progress([(key, tokens, beyond, entries, taken, 0)]))
        self.refused(InvalidArgument, lambda: self.port.progress([row, row]))
        assert self.port.progress([row]) == ([], [])
        self.expired_at = self.now
        self.commit(item)
        sequence.ready = sequence.computed
        self.watch()

    @precondition(lambda self: self.port.has_lease and self.model.live)
    @rule(name=NUMBERS, ask=st.sampled_from([1, 1, 2, 6]))
    def ask(self, name, ask):
        key = self.pick(name)
        sequence = self.model.live[key]
        item = Append(key, (), sequence.computed, ask - 1)
        error = self.expect_append([item], writes=True)
        before = self.shown()
        self.expired_at = self.now
        grants, refused = self.port.progress([(key, (), sequence.computed, 0, (), ask)])
        if error is not None:
            assert (grants, refused) == ([], [error])
            assert self.shown() == before
            self.counted["allocation_failures"] += error is not NeverFits
            return
        assert refused == []
        self.accept(grants, [key])
        # Whatever was written before a fork and not committed is not in the copy.
        sequence.ready = sequence.computed
        self.watch()
        self.see_names()
        self.check_own_writes(item, writes=True)

    @precondition(lambda self: isinstance(self.port, InProcessPort))
    @rule()
    def restore(self):
        """What content stands behind tokens is not reported: only books without such can be made anew."""
        pool, watcher = self.port.pool, self.watcher
        known = {
            name: (CacheScope(*block.adapter, block.salt), block.tokens)
            for name, block in watcher.known.items()
            if name in watcher.parents
        }
        if any(watcher.known[name].has_spans for name in known) or self.any_spans():
            return
        restored = RunnerPool(pool.spec, pool.clock)
        restored.restore(holdings_of(pool, known), caller=1)
        assert_equal_books(pool, restored)
        for prompt in self.prompts:
            tokens, scope = prompt.tokens, prompt.scope
            assert restored.lookup(tokens, scope).cached_tokens == pool.lookup(tokens, scope).cached_tokens
        if self.spec.eviction is EvictionKind.LRU and not watcher.pins and not watcher.priorities:
            assert_given_up_in_the_same_order(pool, restored)

    def any_spans(self) -> bool:
        prompts = [sequence.prompt for sequence in self.model.live.values()]
        return any(prompt.spans or any(prompt.old_keys) for prompt in prompts)
