"""Rules of the machine: what operators do, what makes no sense, and time that passes."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvmanager.errors import InvalidArgument, KvError, NeverFits, NotOwner, PoolBusy, SequenceExists, UnknownSequence
from kvmanager.types import BASE_SCOPE, NO_RETENTION, Append, CacheScope, ContentSpan, Removal, Retention
from tests.kvmanager.books_engine_rules import EngineRules
from tests.kvmanager.books_port import STRANGER
from tests.kvmanager.books_prompts import NUMBERS, SALTS, wishes
from tests.kvmanager.naive_books import NaivePrompt

Refusal = tuple[type[KvError], Callable[[], object]]


class OperatorRules(EngineRules):
    @rule(wish=wishes(), seconds=st.sampled_from([0.0, 1.0, 4.0, 30.0]))
    def look_later(self, wish, seconds):
        self.port.advance(seconds)
        self.now += seconds
        self.find(self.make_prompt(wish))

    @rule(wish=wishes(), everything=st.booleans())
    def forget(self, wish, everything):
        if everything:
            self.reset_cache()
        else:
            self.remove_prefix(self.make_prompt(wish))

    def reset_cache(self) -> None:
        if self.model.live:
            self.refused(PoolBusy, self.port.reset_cache)
            return
        assert self.port.reset_cache() == len(self.watcher.parents)
        self.watch()
        assert self.port.occupancy().free_blocks == self.model.usable - len(self.model.lease)
        assert not self.watcher.parents

    def remove_prefix(self, prompt: NaivePrompt) -> None:
        full = len(prompt.tokens) // self.spec.block_size
        path = prompt.names(full, self.model.algorithm)
        left, expected = dict(self.watcher.parents), Removal(0, 0)
        if path and path[-1] in left:
            family, held = self.watcher.family(path), set(self.names.values())
            while leaves := [name for name in family if name in left and name not in [*left.values(), *held]]:
                for name in leaves:
                    del left[name]
            expected = Removal(len(self.watcher.parents) - len(left), len(set(family) & held))
        assert self.port.remove_prefix(prompt.tokens, prompt.scope, prompt.spans) == expected
        assert self.watch() == expected.removed_blocks
        assert self.watcher.parents == left
        self.counted["removed_blocks"] += expected.removed_blocks

    @rule(salt=st.sampled_from([*SALTS, None]), blocks=st.sampled_from([0, 0, 0, 2, 5, 8]))
    def set_quota(self, salt, blocks):
        """Of a salt, or of all that have none of their own."""
        blocks = min(blocks, self.model.usable)
        if salt is None:
            self.port.set_default_quota(blocks)
            self.model.default_quota = blocks
        else:
            self.port.set_quota(salt, blocks)
            self.model.quotas[salt] = blocks

    @rule(name=NUMBERS)
    def nonsense_changes_nothing(self, name):
        bad = self.nonsense()
        if self.model.live:
            bad += self.nonsense_about(self.pick(name))
        if len(self.model.live) > 1:
            bad += self.one_bad_commit_of_two(self.pick(name), self.pick(name + 1))
        for kind, call in bad:
            self.refused(kind, call)
        self.expired_at = self.now

    def nonsense(self) -> list[Refusal]:
        port, too_many = self.port, self.model.usable + 1

        def allocate(
            tokens=(0,), scope=BASE_SCOPE, spans=(), retention=NO_RETENTION, headroom=0, lookahead=0, promised=0
        ):
            return lambda: port.allocate(
                "new", tokens, scope, spans, retention, headroom, lookahead, False, False, promised
            )

        cat, late = ContentSpan("cat", 0, 1), ContentSpan("cat", 1, 1)
        refused = [
            allocate(tokens=()),
            allocate(headroom=-1),
            allocate(lookahead=-1),
            allocate(promised=-1),
            allocate(scope=CacheScope("", "1")),
            allocate(scope=CacheScope(salt="s" * 129)),
            allocate(spans=[late]),
            allocate(tokens=(0, 1), spans=[cat, cat]),
            allocate(tokens=(0, 1), spans=[late, cat]),
            allocate(spans=[ContentSpan("", 0, 1)]),
            allocate(spans=[ContentSpan("cat\0", 0, 1)]),
            allocate(spans=[ContentSpan("cat", 0, 0)]),
            allocate(retention=Retention(-1)),
            allocate(retention=Retention(101)),
            allocate(retention=Retention(0, -1.0)),
            lambda: port.lookup((), CacheScope(), ()),
            lambda: port.remove_prefix((), CacheScope(), ()),
            lambda: port.set_quota("s", -1),
            lambda: port.set_quota("s", too_many),
            lambda: port.set_default_quota(-1),
            lambda: port.set_default_quota(too_many),
        ]
        if not self.takes_salts:
            refused += [allocate(scope=CacheScope(salt="s")), lambda: port.lookup((1,), CacheScope(salt="s"), ())]
        unknown = [
            lambda: port.append([Append("nobody", (0,), 0)]),
            lambda: port.fork("nobody", ["child"]),
            lambda: port.truncate("nobody", 1),
            lambda: port.views("nobody"),
        ]
        return [(InvalidArgument, call) for call in refused] + [(UnknownSequence, call) for call in unknown]

    def nonsense_about(self, key: str) -> list[Refusal]:
        port, sequence = self.port, self.model.live[key]
        told, computed = len(sequence.prompt.tokens), sequence.computed
        refused = [
            lambda: port.append([Append(key, (), told + 1)]),
            lambda: port.append([Append(key, (0,) * 100, told + 100)]),
            lambda: port.append([Append(key), Append(key)]),
            lambda: port.append([Append(key, (), 0, -1)]),
            lambda: port.append([Append(key, (), -1)]),
            lambda: port.free([Append(key, (), told + 1)]),
            lambda: port.free([Append(key, (-1,), 0)]),
            lambda: port.fork(key, ["child", "child"]),
            lambda: port.fork(key, ["child", ""]),
            lambda: port.fork(key, []),
            lambda: port.truncate(key, 0),
            lambda: port.truncate(key, told + 1),
        ]
        whole = computed // self.spec.block_size * self.spec.block_size
        if whole > 1:
            # Less than whole blocks, because a pool that finds nothing inside a block may have computed just those.
            refused.append(lambda: port.append([Append(key, (), whole - 1)]))
        written_unasked = told < len(sequence.table) * self.spec.block_size
        place = told // self.spec.block_size
        if written_unasked and (self.model.count(sequence.table[place]) > 1 or sequence.table[place] in self.names):
            # What was told and computed at once in a block that others hold or may hit.
            refused.append(lambda: port.append([Append(key, (0,), told + 1)]))
            refused.append(lambda: port.free([Append(key, (0,), told + 1)]))
        strangers = [
            lambda: port.append([Append(key, (0,), 0)], STRANGER),
            lambda: port.fork(key, ["child"], STRANGER),
            lambda: port.truncate(key, 1, STRANGER),
            lambda: port.free([Append(key)], False, STRANGER),
        ]
        exists = [
            lambda: port.allocate(key, (0,), CacheScope(), (), NO_RETENTION, 0, 0, False, False),
            lambda: port.fork(key, ["child", key]),
        ]
        return [
            *[(InvalidArgument, call) for call in refused],
            *[(NotOwner, call) for call in strangers],
            *[(SequenceExists, call) for call in exists],
        ]

    def one_bad_commit_of_two(self, good: str, bad: str) -> list[Refusal]:
        told = len(self.model.live[bad].prompt.tokens)
        # A quota that has shrunk may be too small for what the good one has been told already.
        first = NeverFits if self.expect_append([Append(good)]) is NeverFits else InvalidArgument
        refused: list[Refusal] = []
        for verb, kind in ((self.port.append, first), (self.port.free, InvalidArgument)):
            refused += [
                (kind, lambda verb=verb: verb([Append(good), Append(bad, (), told + 1)])),
                (NotOwner, lambda verb=verb: verb([Append(good), Append(bad)], epoch=STRANGER)),
            ]
        return refused
