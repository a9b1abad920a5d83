"""A model of a pool that is too simple to be wrong: lists of tokens and blocks, and what each physical slot holds.

It plays the runner: it writes where the tables say, when the books allow it, and copies when it is told to. The K/V of
a position is named by everything that it depends on: all tokens up to it, what stands behind them, adapter and salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmanager.hashing import hash_block, none_hash
from kvmanager.types import BASE_SCOPE, NO_RETENTION, Append, BlockCopy, CacheScope, ContentSpan, Retention
from kvmanager.types import HashAlgorithm as Algorithm

Slot = tuple[int, tuple[tuple[str, int], ...]]
"""The content of a position, and the spans that the index sees in its block."""


@dataclass
class NaivePrompt:
    """Tokens with all that parts them from equal ones."""

    size: int
    scope: CacheScope = BASE_SCOPE
    spans: list[ContentSpan] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    content: list[int] = field(default_factory=list)
    """Of each position."""
    old_keys: list[tuple[tuple[str, int], ...]] = field(default_factory=list)
    """Of the blocks before a cut: the spans as they were then."""

    def extend(self, token_ids: Sequence[int]) -> None:
        scope = self.scope
        last = self.content[-1] if self.content else hash((scope.adapter_id, scope.adapter_version, scope.salt))
        for token_id in token_ids:
            position = len(self.tokens)
            inside = [
                (span.content_id, position - span.offset)
                for span in self.spans
                if span.offset <= position < span.offset + span.length
            ]
            last = hash((last, token_id, *inside))
            self.tokens.append(token_id)
            self.content.append(last)

    def cut(self, num_tokens: int) -> None:
        full = num_tokens // self.size
        self.old_keys = [self.keys(index) for index in range(full)]
        del self.tokens[num_tokens:], self.content[num_tokens:]
        kept = [span for span in self.spans if span.offset < num_tokens]
        self.spans = [
            span
            if span.offset + span.length <= num_tokens
            else ContentSpan(f"{span.content_id}\0{num_tokens - span.offset}", span.offset, num_tokens - span.offset)
            for span in kept
        ]

    def keys(self, block_index: int) -> tuple[tuple[str, int], ...]:
        if block_index < len(self.old_keys):
            return self.old_keys[block_index]
        start = block_index * self.size
        return tuple(
            (span.content_id, span.offset - start)
            for span in self.spans
            if span.offset < start + self.size and span.offset + span.length > start
        )

    def slots(self, block_index: int) -> list[Slot]:
        """Of the tokens that there are of a block."""
        start = block_index * self.size
        return [(content, self.keys(block_index)) for content in self.content[start : start + self.size]]

    def names(self, num_blocks: int, algorithm: Algorithm) -> list[bytes]:
        """By the published rule, one block at a time."""
        names: list[bytes] = []
        parent = none_hash(algorithm)
        scope = self.scope
        for index in range(num_blocks):
            keys: list[tuple[str | int, ...]] = [("mm", *key) for key in self.keys(index)]
            if scope.adapter_id:
                keys.insert(0, ("lora", scope.adapter_id, scope.adapter_version))
            if scope.salt and not index:
                keys.append(("cache_salt", scope.salt))
            tokens = tuple(self.tokens[index * self.size : (index + 1) * self.size])
            parent = hash_block(parent, tokens, tuple(keys) or None, algorithm)
            names.append(parent)
        return names


@dataclass
class NaiveSequence:
    prompt: NaivePrompt
    table: list[int]
    computed: int
    cached: int
    ready: int = 0
    """The runner has written up to here, some of it perhaps before a fork and not committed yet."""
    retention: Retention = NO_RETENTION
    pinned_blocks: int = 0
    skips_cache_write: bool = False
    found: list[bytes] = field(default_factory=list)
    """Of who leaves nothing: the names of the full blocks that it found, as far as it has not written over them."""

    def findable(self) -> int:
        """Tokens, from the first, that can be found once they are computed; of who leaves nothing, those it found."""
        return self.cached if self.skips_cache_write else len(self.prompt.tokens)

    def commit(self, token_ids: Sequence[int], computed: int) -> None:
        self.prompt.extend(token_ids)
        self.computed = computed
        if computed > self.cached:
            del self.found[self.cached // self.prompt.size :]

    def cut(self, num_tokens: int) -> None:
        self.prompt.cut(num_tokens)
        self.computed = min(self.computed, num_tokens)
        self.ready = min(self.ready, num_tokens)
        self.cached = min(self.cached, num_tokens)
        self.pinned_blocks = min(self.pinned_blocks, num_tokens // self.prompt.size)
        del self.found[-(-self.cached // self.prompt.size) :]


class NaiveBooks:
    """Live sequences, physical contents, and what operators have set."""

    def __init__(self, usable: int, size: int, algorithm: Algorithm = Algorithm.SHA256) -> None:
        self.usable = usable
        self.size = size
        self.algorithm = algorithm
        self.live: dict[str, NaiveSequence] = {}
        self.contents: dict[int, list[int]] = {}
        """What the slots of the physical blocks hold."""
        self.lease: list[int] = []
        """Spare blocks of the runner; they count as those of the empty salt."""
        self.quotas: dict[str, int] = {}
        self.default_quota = 0

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.size - 1) // self.size

    def quota(self, salt: str) -> int:
        return self.quotas.get(salt, self.default_quota if salt else 0)

    def limit(self, salt: str) -> int:
        """Blocks that a sequence of this salt may ever have."""
        return min(self.usable, self.quota(salt) or self.usable)

    def held(self, salt: str | None = None) -> set[int]:
        leased = () if salt else self.lease
        return {
            *leased,
            *self.tabled(salt),
        }

    def tabled(self, salt: str | None = None) -> set[int]:
        return {
            block
            for sequence in self.live.values()
            if salt is None or sequence.prompt.scope.salt == salt
            for block in sequence.table
        }

    def count(self, block: int) -> int:
        return sum(sequence.table.count(block) for sequence in self.live.values())

    def promised_pins(self) -> int:
        return sum(sequence.pinned_blocks for sequence in self.live.values())

    def prompt(self, tokens: Sequence[int], scope: CacheScope, spans: Sequence[ContentSpan]) -> NaivePrompt:
        prompt = NaivePrompt(self.size, scope, list(spans))
        prompt.extend(tokens)
        return prompt

    # The runner.

    def parse(self, name: str, tokens: list[int], lookahead: int, share: int, named: set[int]) -> Append:
        """An append of `tokens` after the runner has computed a share of what it may compute, half or whole.

        `named` are the blocks that later prompts may hit. It writes only into blocks that are the sequence's own.
        """
        sequence = self.live[name]
        told = len(sequence.prompt.tokens)
        end = min(len(sequence.table) * self.size, told + len(tokens))
        writable = self._writable(sequence, max(sequence.computed, sequence.ready), end, named)
        computed = sequence.computed + (writable - sequence.computed) * share // 2
        future = NaivePrompt(self.size, sequence.prompt.scope, sequence.prompt.spans)
        future.tokens, future.content = sequence.prompt.tokens[:], sequence.prompt.content[:]
        future.extend(tokens)
        self._write(sequence.table, future, sequence.ready, computed)
        return Append(name, tuple(tokens), computed, lookahead)

    def run_ahead(self, name: str, named: set[int]) -> None:
        """The runner computes all that it was told, and does not commit it yet."""
        sequence = self.live[name]
        first = max(sequence.computed, sequence.ready)
        end = min(len(sequence.table) * self.size, len(sequence.prompt.tokens))
        last = self._writable(sequence, first, end, named)
        self._write(sequence.table, sequence.prompt, first, last)
        sequence.ready = last

    def compute(self, name: str, end: int) -> None:
        """The runner computes up to position `end` where the table says, as it has promised."""
        sequence = self.live[name]
        self._write(sequence.table, sequence.prompt, sequence.computed, end)
        sequence.ready = end

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for order in copies:
            self.contents[order.target] = self.contents.get(order.source, [])[: order.num_tokens]

    def _writable(self, sequence: NaiveSequence, first: int, end: int, named: set[int]) -> int:
        position = first
        while position < end:
            block = sequence.table[position // self.size]
            if block in named or self.count(block) > 1:
                break
            position += 1
        return position

    def _write(self, table: list[int], prompt: NaivePrompt, first: int, last: int) -> None:
        for position in range(first, last):
            slots = self.contents.setdefault(table[position // self.size], [])
            slot = position % self.size
            slots += [0] * (slot + 1 - len(slots))
            slots[slot] = prompt.content[position]

    def misplaced(self) -> list[str]:
        """A sentence for each computed position of a live sequence that isn't where its block table says."""
        wrong = []
        for name, sequence in self.live.items():
            for position in range(max(sequence.computed, sequence.ready)):
                block = sequence.table[position // self.size]
                slots, slot = self.contents.get(block, []), position % self.size
                if len(slots) <= slot or slots[slot] != sequence.prompt.content[position]:
                    wrong.append(f"position {position} of {name} is not in slot {slot} of block {block}")
        return wrong
