"""A sequence as its runner's mirror knows it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from model_runner.request import Retention

MAX_TOKENS = 1 << 62
"""More than any sequence has."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the KV manager did not carry something out: its word for it, and its sentence."""

    reason: str
    sentence: str


@dataclass(slots=True, eq=False)
class Held:
    """One live sequence. Counts are in tokens from the first, but for `shown`, which is in blocks.

    blocks: the block table; shown: how much of it the engine has seen. told: tokens that the engine need not tell
    again. sent, sent_computed: what is in orders. taken: blocks of the lease that are in no order yet; taken_at: where
    in the table the first of them is. asked: the message whose answer brings room, 0 for none. copy_due: that answer
    may replace a block that would be written next, so nothing may be written before it is there.
    """

    sequence_id: str
    handle: int
    salt: str
    retention: Retention
    tokens: array[int]
    blocks: list[int] = field(default_factory=list)
    shown: int = 0
    computed: int = 0
    cached: int = 0
    told: int = 0
    ahead: int = 0
    """Tokens behind the told ones that are being drawn, and need room as well."""
    prompt_tokens: int = 0
    """What it pins when it ends."""
    sent: int = 0
    sent_computed: int = 0
    taken: list[int] = field(default_factory=list)
    taken_at: int = 0
    wants: int = 0
    """Tokens that room is to be asked for in the next order; 0 for none."""
    asked: int = 0
    forked: bool = False
    """Others may hold the blocks that it will write."""
    forks_often: bool = False
    """It may be forked after any step, when no answer may be under way: it asks for no room ahead."""
    copy_due: bool = False
    refused: Refused | None = None
    """The answer to the last question for room."""
    due: int = 0
    """The step at which room is asked for ahead; 0 for none."""
    promised: int = 0
    """Tokens, from the first, that the next step is certain to compute; 0 once that is told, or for none."""
    sound: int = MAX_TOKENS
    """Tokens, from the first, that may stay cached: what lies behind was to be computed by a step that failed, or is
    not to be found."""
    skips_cache_write: bool = False
    """Nothing that it computes is to be found."""

    def begin(self, blocks: list[int], cached_tokens: int) -> None:
        """Its prompt is admitted: the block table, and how many tokens were found in the cache."""
        self.blocks = blocks
        self.shown = len(blocks)
        self.computed = self.cached = self.sent_computed = cached_tokens
        self.sent = self.told = self.prompt_tokens = len(self.tokens)
        if self.promised:
            self.promised = min(cached_tokens + self.promised, len(self.tokens))
        if self.skips_cache_write:
            self.sound = cached_tokens

    def child(self, sequence_id: str, handle: int) -> Held:
        """A sequence with the same tokens and blocks. It pins nothing: the parent pins the prompt for all."""
        return Held(
            sequence_id,
            handle,
            self.salt,
            Retention(self.retention.priority),
            self.tokens[:],
            self.blocks[:],
            shown=self.shown,
            computed=self.computed,
            cached=self.cached,
            told=self.told,
            ahead=self.ahead,
            sound=self.sound,
            skips_cache_write=self.skips_cache_write,
            sent=len(self.tokens),
            sent_computed=self.computed,
            forked=True,
            forks_often=self.forks_often,
        )

    def cut_tokens(self, num_tokens: int) -> None:
        """Goes back to its first tokens."""
        del self.tokens[num_tokens:]
        self.told = min(self.told, num_tokens)
        self.sent = min(self.sent, num_tokens)

    def cut_blocks(self, num_blocks: int) -> list[int]:
        """Goes back to its first blocks, and returns the others. Room that it has asked for goes with them."""
        dropped = self.blocks[num_blocks:]
        del self.blocks[num_blocks:]
        self.taken = []
        self.asked = self.wants = 0
        return dropped

    def mark_sent(self) -> None:
        """All of it is in orders, or in a report."""
        self.sent = len(self.tokens)
        self.sent_computed = self.computed
        self.taken = []
