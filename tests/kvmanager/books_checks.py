"""What the machine of the books compares after each verb: the pool's answers with the naive model and the events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis.stateful import RuleBasedStateMachine

from kvmanager.errors import KvError
from kvmanager.types import HashAlgorithm, IndexKind, PoolSpec
from tests.kvmanager.books_port import BooksPort, InProcessPort
from tests.kvmanager.books_prompts import SALTS
from tests.kvmanager.index_watcher import IndexWatcher
from tests.kvmanager.naive_books import NaiveBooks, NaivePrompt

COUNTED = ["queried_tokens", "hit_tokens", "forks", "copies", "removed_blocks", "unknown_frees", "allocation_failures"]


class BooksChecks(RuleBasedStateMachine):
    """The state of the machine, and its checks. `names` are those of the held blocks after the last verb."""

    port: BooksPort
    promises_parts = True
    """Whether a step may promise less than all tokens of a prompt."""

    def begin(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.port = self.make_port(spec)
        self.model = NaiveBooks(spec.usable_blocks, spec.block_size, spec.hash_algorithm)
        self.watcher = IndexWatcher()
        self.names: dict[int, bytes] = {}
        self.now = 0.0
        self.expired_at = 0.0
        """When the pool last looked at its clock; pins that have run out since still count."""
        self.next_id = 0
        self.prompts: list[NaivePrompt] = []
        """Prompts asked for lately, so that later ones can continue them."""
        self.counted = dict.fromkeys(COUNTED, 0)

    def make_port(self, spec: PoolSpec) -> BooksPort:
        return InProcessPort(spec)

    def teardown(self) -> None:
        if hasattr(self, "port"):
            self.port.close()

    # What the model says.

    @property
    def takes_salts(self) -> bool:
        return self.spec.hash_algorithm is HashAlgorithm.SHA256

    def new_id(self) -> str:
        self.next_id += 1
        return f"s{self.next_id}"

    def pick(self, number: int) -> str:
        return list(self.model.live)[number % len(self.model.live)]

    def longest(self, prompt: NaivePrompt, max_tokens: int) -> int:
        """Tokens of a prompt that must be found now."""
        if self.spec.index is IndexKind.NONE:
            return 0
        found = self.watcher.longest(prompt, max_tokens)
        return found if self.spec.index is IndexKind.RADIX else found // prompt.size * prompt.size

    def idle(self) -> set[bytes]:
        """Names of cached blocks."""
        return set(self.watcher.parents) - set(self.names.values())

    def pinned_idle(self, now: float, salt: str | None = None) -> set[bytes]:
        pinned = self.watcher.pinned(now) & self.idle()
        return {name for name in pinned if salt is None or self.watcher.known[name].salt == salt}

    def cached_of(self, salt: str) -> int:
        return sum(1 for name in self.idle() if self.watcher.known[name].salt == salt)

    def available(self) -> int:
        return self.model.usable - len(self.model.held()) - len(self.pinned_idle(self.now))

    def room(self, salt: str) -> int:
        """Blocks that the quota of a salt leaves; all when it has none."""
        quota = self.model.quota(salt)
        return quota - len(self.model.held(salt)) - len(self.pinned_idle(self.now, salt)) if quota else 1 << 30

    # What the pool shows.

    def watch(self, on_removed: Callable[[bytes], None] | None = None) -> int:
        """Replays what has happened to the index since; returns how many names were removed."""
        return self.watcher.replay(self.port.events(self.watcher.last + 1), on_removed)

    def see_names(self) -> None:
        self.names = {block: name for key in self.model.live for block, name in self.port.views(key)[1] if name}

    def shown(self) -> object:
        """All that a refused verb must leave as it was."""
        totals = self.port.totals()
        for failures in ("allocation_failures", "quota_failures", "pin_failures"):
            totals.pop(failures, None)
        return (
            replace(self.port.occupancy(), pinned_blocks=0),  # pins run out by themselves
            totals,
            [self.port.views(key) for key in self.model.live],
            self.port.index_tree(),
            self.port.events(self.watcher.last + 1),
            [self.port.tenant_usage(salt) for salt in set(SALTS)],
        )

    def refused(self, kind: type[KvError], call: Callable[[], object]) -> None:
        """Asserts that a call is refused, for a reason of this kind, and that nothing changes."""
        before = self.shown()
        error: KvError | None = None
        try:
            call()
        except KvError as refusal:
            error = refusal
        assert type(error) is kind, f"not refused as {kind.__name__}: {error!r}"
        assert self.shown() == before

    def check_evictions(self, salt: str, own: int, rest: int, spared: set[bytes]) -> None:
        """Replays the removals of one allocation: `own` blocks of the salt, then `rest` of anybody's.

        Each was a leaf that nobody held, unpinned, and of the least priority among such.
        """
        done = 0

        def was_least(name: bytes) -> None:
            nonlocal done
            candidates = set(self.watcher.leaves()) & self.idle() - spared - self.watcher.pinned(self.now)
            if done < own:
                candidates = {other for other in candidates if self.watcher.known[other].salt == salt}
            done += 1
            assert name in candidates, "a block that may not be given up was given up"
            assert self.watcher.priorities.get(name, 0) == min(
                self.watcher.priorities.get(other, 0) for other in candidates
            ), "a block was given up before one of lower priority"

        assert self.watch(was_least) == own + rest

    # After each verb.

    def check_all(self) -> None:
        assert self.port.events(self.watcher.last + 1) == []
        assert self.port.violations() == ()
        self.see_names()
        self.check_index()
        self.check_tables()
        self.check_sums()
        self.check_tenants()
        assert self.model.misplaced() == []

    def check_index(self) -> None:
        tree = self.port.index_tree()
        assert tree is None or tree == self.watcher.parents
        assert set(self.names.values()) <= set(self.watcher.parents)
        assert self.watcher.pinned(self.expired_at) <= set(self.watcher.parents), "a pinned block can't be found"
        if self.spec.index is IndexKind.NONE:
            assert not self.watcher.parents

    def check_tables(self) -> None:
        for key, sequence in self.model.live.items():
            computed, views = self.port.views(key)
            assert computed == sequence.computed
            assert [block for block, _ in views] == sequence.table
            findable = min(computed, sequence.findable())
            full = 0 if self.spec.index is IndexKind.NONE else findable // self.spec.block_size
            assert [name for _, name in views[:full]] == sequence.prompt.names(full, self.model.algorithm)
            if sequence.skips_cache_write:
                behind = [name for _, name in views[full:]]
                # A rewind may have ended inside a block that it found, and that keeps its name until it is written.
                assert behind[:1] in ([], [b""], sequence.found[full : full + 1]), "a name that was not to be cached"
                assert not any(behind[1:]), "what was not to be cached can be found"

    def check_sums(self) -> None:
        now, held = self.port.occupancy(), self.model.held()
        assert now.held_blocks == len(held)
        assert now.cached_blocks == len(self.idle())
        assert now.free_blocks + now.cached_blocks + now.held_blocks == self.model.usable
        assert now.shared_blocks == sum(1 for block in held if self.model.count(block) > 1)
        assert now.pinned_blocks == len(self.pinned_idle(self.expired_at))
        assert now.leased_blocks == len(self.model.lease)
        assert now.sequences == len(self.model.live)
        assert now.reserved_tokens == len(held) * self.spec.block_size
        assert now.stored_tokens <= now.reserved_tokens
        totals = self.port.totals()
        assert {name: totals[name] for name in COUNTED} == self.counted
        assert totals["allocated_blocks"] + totals["reused_blocks"] - totals["freed_blocks"] == len(held)

    def check_tenants(self) -> None:
        holders: dict[int, str] = {}
        for sequence in self.model.live.values():
            salt = sequence.prompt.scope.salt
            for block in sequence.table:
                assert holders.setdefault(block, salt) == salt, "tenants share a block"
        for salt in set(SALTS):
            usage = self.port.tenant_usage(salt)
            assert usage.quota_blocks == self.model.quota(salt)
            assert usage.held_blocks == len(self.model.held(salt))
            assert usage.cached_blocks == self.cached_of(salt)
