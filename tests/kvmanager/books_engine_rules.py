"""Rules of the machine: what an engine does. The model says beforehand whether each verb must succeed, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvmanager.errors import InvalidArgument, KvError, NeverFits, PinsExhausted, PoolShort, QuotaShort
from kvmanager.events import EventKind
from kvmanager.types import NO_RETENTION, Allocation, Append, Grant, Hit, IndexKind, Retention
from tests.kvmanager.books_checks import BooksChecks
from tests.kvmanager.books_prompts import NUMBERS, TOKENS, Wish, grant_wish, wishes
from tests.kvmanager.naive_books import NaiveBooks, NaivePrompt, NaiveSequence

RETENTIONS = st.sampled_from(
    [Retention(), Retention(), Retention(priority=1), Retention(priority=9), Retention(0, 5.0), Retention(1, 20.0)]
)
RARELY = st.sampled_from([False, False, False, True])
EVERYTHING = 1 << 20
"""A promise of all tokens."""


def planned(
    model: NaiveBooks, names: dict[int, bytes], continued: set[bytes], appends: Sequence[Append], writes: bool
) -> Counter:
    """Blocks that appends need, by salt: growth, and a copy for what will be written but is not the sequence's own.

    writes: something will be written even where all that is known is computed.

    The last holder of a block may keep it: if nobody can find it, or if the name can go, or goes on to an equal block.
    """
    needed: Counter[str] = Counter()
    holders = Counter({block: model.count(block) for block in model.held()})
    blocks = Counter(names.values())
    for item in appends:
        sequence = model.live[item.sequence_id]
        salt = sequence.prompt.scope.salt
        room = len(sequence.prompt.tokens) + len(item.token_ids) + item.lookahead_tokens
        needed[salt] += max(0, model.blocks_for(room) - len(sequence.table))
        if item.computed_tokens >= room and not writes:
            continue
        for block in sequence.table[item.computed_tokens // model.size :]:
            name = names.get(block, b"")
            if holders[block] > 1:
                holders[block] -= 1
                needed[salt] += 1
            elif name and blocks[name] == 1 and name in continued:
                needed[salt] += 1
            elif name:
                blocks[name] -= 1
    return needed


class EngineRules(BooksChecks):
    def make_prompt(self, wish: Wish) -> NaivePrompt:
        fit = self.model.usable * self.spec.block_size
        prompt = grant_wish(wish, self.prompts, self.spec.block_size, fit, self.takes_salts)
        self.prompts = [*self.prompts[-7:], prompt]
        return prompt

    def find(self, prompt: NaivePrompt) -> Hit:
        """A lookup, compared with the longest beginning that can be found."""
        hit = self.port.lookup(prompt.tokens, prompt.scope, prompt.spans)
        assert hit.cached_tokens == self.longest(prompt, len(prompt.tokens) - 1)
        full, inside = divmod(hit.cached_tokens, self.spec.block_size)
        assert len(hit.block_ids) == full
        assert bool(hit.partial_block) == bool(inside)
        return hit

    @rule(
        wish=wishes(),
        retention=RETENTIONS,
        headroom=st.sampled_from([0, 0, 0, 1, 3]),
        lookahead=st.sampled_from([0, 0, 1, 5]),
        skip=st.sampled_from([False, False, False, True]),
        resumed=st.booleans(),
        leaves_nothing=RARELY,
    )
    def allocate(self, wish, retention, headroom, lookahead, skip, resumed, leaves_nothing):
        self.start(wish, retention, headroom, lookahead, skip, resumed, leaves_nothing=leaves_nothing)

    @rule(wishes=st.lists(wishes(), min_size=1, max_size=3), retention=RETENTIONS, leaves_nothing=RARELY)
    def serve(self, wishes, retention, leaves_nothing):
        """Requests that come, are computed and end: they leave cached blocks behind, if they are to."""
        for wish in wishes:
            key = self.start(wish, retention, 0, 0, False, False, leaves_nothing=leaves_nothing)
            if key:
                self.see_names()
                self.append_to({key: []}, 0, 2)
                self.end([key], [], 2, False)
                self.see_names()

    @rule(
        wishes=st.lists(wishes(), min_size=1, max_size=4),
        retention=RETENTIONS,
        promises=st.lists(st.sampled_from([EVERYTHING, EVERYTHING, 1, 3, 5, 8]), min_size=4, max_size=4),
        leave_nothing=st.lists(RARELY, min_size=4, max_size=4),
        backwards=st.booleans(),
        outcome=st.sampled_from(["committed", "committed", "freed", "failed", "failed one by one", "preempted"]),
    )
    def step(self, wishes, retention, promises, leave_nothing, backwards, outcome):
        """Prompts that are admitted in one step share what the step will compute; then it has run, or it has failed."""
        started: dict[str, int] = {}
        for wish, promise, leaves_nothing in zip(wishes, promises, leave_nothing, strict=False):
            promised = promise if self.promises_parts else EVERYTHING
            key = self.start(wish, retention, 0, 0, False, False, promised, leaves_nothing)
            self.see_names()
            if key:
                sequence = self.model.live[key]
                started[key] = min(sequence.computed + promised, len(sequence.prompt.tokens))
        keys = list(started)[::-1] if backwards else list(started)
        if outcome in ("committed", "freed"):
            for key, end in started.items():
                self.model.compute(key, end)
            self.watcher.promised.clear()
            self.settle([Append(key, (), started[key]) for key in keys], outcome == "freed")
            return
        for call in [[key] for key in keys] if outcome == "failed one by one" else [keys]:
            self.settle([Append(key, (), self.model.live[key].computed) for key in call], True, outcome == "preempted")
        assert not self.watcher.promised & set(self.watcher.parents), "what was never computed can be found"
        self.watcher.promised.clear()

    def settle(self, words: list[Append], ends: bool, preempted: bool = False) -> None:
        if not words:
            return
        if not ends:
            self.apply(words)
            return
        self.port.free(words, preempted)
        for item in words:
            self.commit(item)
        self.watch()
        for item in words:
            self.retain(self.model.live.pop(item.sequence_id), preempted)

    def start(
        self,
        wish: Wish,
        retention: Retention,
        headroom: int,
        lookahead: int,
        skip: bool,
        resumed: bool,
        promised: int = 0,
        leaves_nothing: bool = False,
    ) -> str | None:
        """Allocates as the model expects it; the sequence, if there is one now."""
        prompt, key = self.make_prompt(wish), self.new_id()
        hit = self.find(prompt)
        if skip:
            hit = Hit((), 0)
        blocks = self.model.blocks_for(len(prompt.tokens) + lookahead)
        arguments = prompt.tokens, prompt.scope, prompt.spans, retention, headroom, lookahead, skip, resumed, promised
        if leaves_nothing and retention != NO_RETENTION:
            self.refused(InvalidArgument, lambda: self.port.allocate(key, *arguments, leaves_nothing))
            return None
        error = self.expect_allocate(prompt, hit, blocks, headroom, retention)
        arguments = *arguments, leaves_nothing
        if error is not NeverFits:
            self.expired_at = self.now
        if error is not None:
            self.refused(error, lambda: self.port.allocate(key, *arguments))
            self.counted["allocation_failures"] += error is not NeverFits
            return None

        held = self.model.held()
        before = self.port.occupancy()
        used = len(self.model.held(prompt.scope.salt)) + self.cached_of(prompt.scope.salt)
        allocation = self.port.allocate(key, *arguments)
        self.check_allocation(allocation, prompt, hit, blocks, held)
        if not leaves_nothing:
            self.expect_promise(prompt, allocation.cached_tokens, promised)
        fresh = blocks - len(hit.block_ids)
        quota = self.model.quota(prompt.scope.salt)
        own = max(0, used + fresh - quota) if quota else 0
        spared = set(prompt.names(len(hit.block_ids), self.model.algorithm))
        self.check_evictions(prompt.scope.salt, own, max(0, fresh - before.free_blocks - own), spared)
        usage = self.port.tenant_usage(prompt.scope.salt)
        assert not quota or usage.held_blocks + usage.cached_blocks <= quota
        self.model.copy(allocation.copies)
        self.counted["copies"] += len(allocation.copies)
        pinned = len(prompt.tokens) // self.spec.block_size if retention.pin_seconds else 0
        cached = allocation.cached_tokens
        self.model.live[key] = NaiveSequence(
            self.model.prompt(prompt.tokens, prompt.scope, prompt.spans),
            list(allocation.block_ids),
            cached,
            cached,
            cached,
            retention,
            pinned,
            leaves_nothing,
            prompt.names(cached // self.spec.block_size, self.model.algorithm) if leaves_nothing else [],
        )
        if not skip and not resumed and self.spec.index is not IndexKind.NONE:
            self.counted["queried_tokens"] += len(prompt.tokens)
            self.counted["hit_tokens"] += cached
        return key

    def expect_promise(self, prompt: NaivePrompt, cached: int, promised: int) -> None:
        """New names of the full blocks that will be computed can be found from now on."""
        size = self.spec.block_size
        last = min(cached + promised, len(prompt.tokens)) // size
        if self.spec.index is IndexKind.NONE or last <= cached // size:
            return
        names = prompt.names(last, self.model.algorithm)
        # What this very call gave up can be promised again.
        events = self.port.events(self.watcher.last + 1)
        given_up = {name for event in events if event.kind is EventKind.REMOVED for name in event.names}
        findable = self.watcher.parents.keys() - given_up
        known = [index for index in range(cached // size, last) if names[index] in findable]
        names = names[: known[0] if known else last]
        self.watcher.learn(prompt, names)
        self.watcher.promised.update(names[cached // size :])

    def expect_allocate(
        self, prompt: NaivePrompt, hit: Hit, blocks: int, headroom: int, retention: Retention
    ) -> type[KvError] | None:
        salt, full = prompt.scope.salt, len(hit.block_ids)
        idle = self.idle() - self.watcher.pinned(self.now)
        needed = blocks - full + len(idle & set(prompt.names(full, self.model.algorithm)))
        pins = len(prompt.tokens) // self.spec.block_size if retention.pin_seconds else 0
        pinned = len(self.watcher.pinned(self.now)) + self.model.promised_pins()
        if blocks > self.model.limit(salt):
            return NeverFits
        if pins and pinned + pins > self.model.usable // 2:
            return PinsExhausted
        if needed + headroom > self.available():
            return PoolShort
        return QuotaShort if needed > self.room(salt) else None

    def check_allocation(
        self, allocation: Allocation, prompt: NaivePrompt, hit: Hit, blocks: int, held: set[int]
    ) -> None:
        full = len(hit.block_ids)
        assert allocation.cached_tokens == hit.cached_tokens < len(prompt.tokens)
        assert allocation.block_ids[:full] == hit.block_ids
        assert len(allocation.block_ids) == len(set(allocation.block_ids)) == blocks
        assert 0 not in allocation.block_ids
        assert not set(allocation.block_ids[full:]) & held
        inside = hit.cached_tokens % self.spec.block_size
        orders = [(order.source, order.target, order.num_tokens) for order in allocation.copies]
        target = allocation.block_ids[full]
        assert orders == ([(hit.partial_block, target, inside)] if hit.partial_block not in (0, target) else [])

    @precondition(lambda self: self.model.live)
    @rule(
        first=NUMBERS,
        second=NUMBERS,
        tokens=TOKENS,
        more=TOKENS,
        lookahead=st.sampled_from([0, 0, 1, 5]),
        share=st.integers(0, 2),
        both=st.booleans(),
    )
    def append(self, first, second, tokens, more, lookahead, share, both):
        keys = dict.fromkeys([self.pick(first), self.pick(second)] if both else [self.pick(first)])
        self.append_to(dict(zip(keys, (tokens, more), strict=False)), lookahead, share)

    @precondition(lambda self: self.model.live)
    @rule(name=NUMBERS, tokens=TOKENS)
    def compute_all(self, name, tokens):
        """As after a prefill: what is known is committed, and more is known."""
        self.append_to({self.pick(name): []}, 0, 2)
        self.see_names()
        self.append_to({self.pick(name): tokens}, 0, 2)

    def append_to(self, told: dict[str, list[int]], lookahead: int, share: int) -> None:
        model, named = self.model, set(self.names)
        self.apply([model.parse(key, tokens, lookahead, share, named) for key, tokens in told.items()])

    def apply(self, appends: Sequence[Append]) -> None:
        model, keys = self.model, [item.sequence_id for item in appends]
        error = self.expect_append(appends)
        self.expired_at = self.now
        if error is not None:
            self.refused(error, lambda: self.port.append(appends))
            self.counted["allocation_failures"] += error is not NeverFits
            return

        self.accept(self.port.append(appends), keys)
        for item in appends:
            self.commit(item)
            sequence = model.live[item.sequence_id]
            sequence.ready = sequence.computed
        self.watch()
        self.see_names()
        for item in appends:
            self.check_own_writes(item)

    def accept(self, grants: Sequence[Grant], keys: Sequence[str]) -> None:
        """Takes the grants of one call, in the order of `keys`, and does their copies."""
        model = self.model
        assert [grant.sequence_id for grant in grants] == [
            key for key in keys if key in {grant.sequence_id for grant in grants}
        ]
        for grant in grants:
            sequence = model.live[grant.sequence_id]
            table = sequence.table[: grant.first_index] + list(grant.block_ids)
            assert table != sequence.table, "a grant that changes nothing"
            fresh = set(table) - set(sequence.table)
            assert 0 not in fresh
            assert {order.target for order in grant.copies} <= set(table)
            sequence.table = []
            # What an earlier grant of this call has replaced may be given up for this one: it was copied before.
            assert not fresh & model.held()
            sequence.table = table
            assert len(set(table)) == len(table)
            model.copy(grant.copies)
            self.counted["copies"] += len(grant.copies)
            usage = self.port.tenant_usage(sequence.prompt.scope.salt)
            assert not usage.quota_blocks or usage.held_blocks + usage.cached_blocks <= usage.quota_blocks

    def expect_append(self, appends: Sequence[Append], writes: bool = False) -> type[KvError] | None:
        model = self.model
        continued = set(self.watcher.parents.values()) | self.watcher.pinned(self.now)
        needed = planned(model, self.names, continued, appends, writes)
        for item in appends:
            sequence = model.live[item.sequence_id]
            room = len(sequence.prompt.tokens) + len(item.token_ids) + item.lookahead_tokens
            if len(sequence.table) < model.blocks_for(room) > model.limit(sequence.prompt.scope.salt):
                return NeverFits
        if needed.total() > max(0, self.available()):
            return PoolShort
        short = any(blocks > self.room(salt) for salt, blocks in needed.items() if blocks)
        return QuotaShort if short else None

    def commit(self, item: Append) -> None:
        """What the pool was told, told to the model, and the names of what is full now to the watcher."""
        sequence = self.model.live[item.sequence_id]
        sequence.commit(item.token_ids, item.computed_tokens)
        full = min(sequence.computed, sequence.findable()) // self.spec.block_size
        self.watcher.learn(sequence.prompt, sequence.prompt.names(full, self.model.algorithm))

    def check_own_writes(self, item: Append, writes: bool = False) -> None:
        """What the runner writes next is its own: nobody else holds it, and nobody can find it."""
        sequence = self.model.live[item.sequence_id]
        room = len(sequence.prompt.tokens) + item.lookahead_tokens
        assert len(sequence.table) >= self.model.blocks_for(room)
        if sequence.computed < room or writes:
            for block in sequence.table[sequence.computed // self.spec.block_size :]:
                assert self.model.count(block) == 1, "a block that will be written has another holder"
                assert block not in self.names, "a block that will be written can be hit"

    @precondition(lambda self: self.model.live)
    @rule(parent=NUMBERS, count=st.integers(1, 3), runs_ahead=st.booleans())
    def fork(self, parent, count, runs_ahead):
        key = self.pick(parent)
        children = [self.new_id() for _ in range(count)]
        if runs_ahead:
            self.model.run_ahead(key, set(self.names))
        sequence = self.model.live[key]
        held = self.port.occupancy().held_blocks
        assert self.port.fork(key, children) == tuple(sequence.table)
        assert self.port.occupancy().held_blocks == held
        for child in children:
            prompt = NaivePrompt(self.spec.block_size, sequence.prompt.scope, sequence.prompt.spans[:])
            prompt.tokens, prompt.content = sequence.prompt.tokens[:], sequence.prompt.content[:]
            prompt.old_keys = sequence.prompt.old_keys[:]
            retention = Retention(sequence.retention.priority)
            self.model.live[child] = NaiveSequence(
                prompt,
                sequence.table[:],
                sequence.computed,
                sequence.cached,
                sequence.ready,
                retention,
                skips_cache_write=sequence.skips_cache_write,
                found=sequence.found[:],
            )
        self.counted["forks"] += count

    @precondition(lambda self: self.model.live)
    @rule(name=NUMBERS, back=st.integers(0, 12))
    def truncate(self, name, back):
        self.rewind(self.pick(name), back)

    @precondition(lambda self: self.model.live)
    @rule(numbers=st.tuples(NUMBERS, NUMBERS), back=st.integers(0, 12), tokens=TOKENS)
    def rewind_and_go_on(self, numbers, back, tokens):
        """As after a draft that was refused: two sequences write elsewhere at once."""
        keys = dict.fromkeys(self.pick(number) for number in numbers)
        for key in keys:
            self.rewind(key, back)
        self.see_names()
        self.append_to(dict.fromkeys(keys, tokens), 0, 0)

    @rule(
        wish=wishes(),
        back=st.integers(0, 8),
        tokens=TOKENS,
        retention=RETENTIONS,
        leaves_nothing=RARELY,
        ends=st.booleans(),
    )
    def start_and_rewind(self, wish, back, tokens, retention, leaves_nothing, ends):
        """A sequence whose prompt was perhaps a hit goes on from inside it."""
        key = self.start(wish, retention, 0, 0, False, False, leaves_nothing=leaves_nothing)
        self.rewind_all([key] if key else [], back, tokens, ends)

    @rule(wish=wishes(), back=st.integers(0, 8), tokens=TOKENS, ends=st.booleans())
    def compute_side_by_side(self, wish, back, tokens, ends):
        """Two sequences compute the same, so that names belong to two blocks; both are rewound."""
        keys = [self.start(wish, NO_RETENTION, 0, 0, True, False) for _ in range(2)]
        self.rewind_all([key for key in keys if key], back, tokens, ends)

    def rewind_all(self, keys: list[str], back: int, tokens: list[int], ends: bool) -> None:
        """Commits all that sequences know, rewinds them, and lets all write at once."""
        if not keys:
            return
        self.see_names()
        self.append_to({key: [] for key in keys}, 0, 2)
        for key in keys:
            self.rewind(key, back)
        self.see_names()
        self.append_to(dict.fromkeys(keys, tokens), 0, 0)
        if ends:
            self.see_names()
            self.end(keys, [], 2, False)

    def rewind(self, key: str, back: int) -> None:
        sequence = self.model.live[key]
        num_tokens = max(1, len(sequence.prompt.tokens) - back)
        kept = self.model.blocks_for(num_tokens)
        assert self.port.truncate(key, num_tokens) == max(0, len(sequence.table) - kept)
        del sequence.table[kept:]
        sequence.cut(num_tokens)

    @precondition(lambda self: self.model.live)
    @rule(
        numbers=st.lists(NUMBERS, min_size=1, max_size=4),
        tokens=TOKENS,
        share=st.integers(0, 2),
        preempted=st.sampled_from([False, False, True]),
    )
    def free(self, numbers, tokens, share, preempted):
        self.end(list(dict.fromkeys(self.pick(number) for number in numbers)), tokens, share, preempted)

    def end(self, keys: list[str], tokens: list[int], share: int, preempted: bool) -> None:
        model, named = self.model, set(self.names)
        frees = [model.parse(key, tokens, 0, share, named) for key in keys]
        outcome = self.port.free([*frees, Append("nobody")], preempted)
        assert (outcome.freed, outcome.unknown) == (len(keys), 1)
        self.counted["unknown_frees"] += 1
        for item in frees:
            self.commit(item)
        self.watch()
        for item in frees:
            self.retain(model.live.pop(item.sequence_id), preempted)

    def retain(self, sequence: NaiveSequence, preempted: bool) -> None:
        """The priority and the pin of a sequence that has ended, on as many of its blocks as can be found."""
        full = sequence.computed // self.spec.block_size
        names = sequence.prompt.names(full, self.model.algorithm)
        names += [self.names.get(block, b"") for block in sequence.table[full:]]
        pinned = 0 if preempted else sequence.pinned_blocks
        for index, name in enumerate(names):
            if name not in self.watcher.parents:
                break
            priority = sequence.retention.priority
            if priority:
                self.watcher.priorities[name] = max(priority, self.watcher.priorities.get(name, 0))
            if index < pinned:
                until = self.now + sequence.retention.pin_seconds
                self.watcher.pins[name] = max(until, self.watcher.pins.get(name, 0.0))
