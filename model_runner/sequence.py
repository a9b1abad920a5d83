"""A live request and its sequences: one sequence for each choice, each with its own tokens and block table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from model_runner.batch import BatchEntry
from model_runner.books import AllocationRequest, BlockGrant, SequenceUpdate
from model_runner.constraint import Constraint
from model_runner.detokenizer import Detokenizer
from model_runner.logit_rules import LogitRules
from model_runner.prompt_lookup import PromptLookup
from model_runner.request import FinishReason, GenerateRequest, PositionLogprobs, RequestView, Usage


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request from arrival to its last chunk. Times are seconds on the engine's clock."""

    request: GenerateRequest
    arrived_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    """The choices that have not finished; until the prompt is computed only the first, which stands for all."""
    forked: bool = False
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are known; the first chunk takes them along."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still to be found, for which its tokens must be computed."""
        return self.request.prompt_logprobs is not None and not self.forked

    def take_prompt_logprobs(self) -> tuple[PositionLogprobs, ...]:
        """What the request's first chunk takes along; nothing is left for others."""
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken

    @property
    def is_running(self) -> bool:
        """Whether a choice holds blocks. Any thread may ask."""
        return any(sequence.block_table for sequence in list(self.sequences))

    def view(self, now: float) -> RequestView:
        """What an operator sees. Any thread may ask."""
        holding = [sequence.sequence_id for sequence in list(self.sequences) if sequence.block_table]
        return RequestView(
            request_id=self.request.request_id,
            running=bool(holding),
            prompt_tokens=len(self.request.prompt_token_ids),
            output_tokens=self.output_tokens,
            age_seconds=now - self.arrived_at,
            sequence_ids=tuple(holding),
            tenant=self.request.tenant,
        )

    def usage(self, now: float) -> Usage:
        admitted = now if self.admitted_at is None else self.admitted_at
        first = now if self.first_token_at is None else self.first_token_at
        last = first if self.last_token_at is None else self.last_token_at
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            preemptions=self.preemptions,
            queue_seconds=admitted - self.arrived_at,
            prefill_seconds=max(0.0, first - admitted),
            decode_seconds=max(0.0, last - first),
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one choice and where their K/V is.

    computed: tokens, from the first, whose K/V is in the cache. told: tokens that the books know. committed: computed
    tokens that the books know of. Without a block table it holds nothing and waits.
    """

    live: LiveRequest
    choice_index: int
    sequence_id: str
    token_ids: list[int]
    seed: int
    detokenizer: Detokenizer
    rules: LogitRules | None = None
    constraint: Constraint | None = None
    block_table: list[int] = field(default_factory=list)
    computed: int = 0
    told: int = 0
    committed: int = 0
    must_ask: bool = False
    """After a fork: the next write needs the books' word, for the last block may be shared."""
    shared_blocks: int = 0
    """Blocks at the beginning of the table that others may hold as well."""
    number: int = 0
    """Of its arrival until it is first admitted, then of its latest admission."""
    prefix_keys: tuple[int, ...] = ()
    overtaken: int = 0
    admitted_before: bool = False
    num_outputs: int = 0
    last_token_at: float = 0.0
    lookup: PromptLookup | None = None
    """What its tokens are looked up in, once it was to be guessed how it goes on."""
    draft: tuple[int, ...] = ()
    """Tokens that the step at hand computes behind the known ones, for they may be the next."""
    finish_reason: FinishReason | None = None

    @property
    def pending(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return len(self.token_ids) - self.computed

    def room(self, block_size: int) -> int:
        """Tokens that fit into the block table beside the known ones."""
        return len(self.block_table) * block_size - len(self.token_ids)

    def entry(self, num_tokens: int) -> BatchEntry:
        """The next `num_tokens` tokens as the executor computes them, with logits for a draw and the prompt's own.

        Behind them comes the draft, with logits for a draw after each of its tokens.
        """
        first, end = self.computed, self.computed + num_tokens
        # Those of a token are for the one after it; `known` of the prompt's have been read.
        known = len(self.live.prompt_logprobs) if self.live.wants_prompt_logprobs else len(self.token_ids) - 1
        return BatchEntry(
            token_ids=[*self.token_ids[first:end], *self.draft],
            first_position=first,
            block_table=self.block_table,
            num_logits=max(0, end - max(first, known)) + len(self.draft),
        )

    def allocation(self, headroom_blocks: int, promised_tokens: int) -> AllocationRequest:
        """What to ask the books for, with so many blocks left for others and so many tokens of the next step's.

        The first choice pins the prompt for all.
        """
        request = self.live.request
        retention = request.retention if not self.choice_index else replace(request.retention, pin_seconds=0.0)
        return AllocationRequest(
            self.sequence_id,
            self.token_ids,
            headroom_blocks=headroom_blocks,
            cache_salt=request.cache_salt,
            skip_cache_read=request.skip_cache_read or self.live.wants_prompt_logprobs,
            resumed=self.admitted_before,
            promised_tokens=promised_tokens,
            retention=retention,
            skip_cache_write=request.skip_cache_write,
        )

    def needs_books(self, block_size: int) -> bool:
        """Whether the next step has something to ask or to commit: once a block, not once a token."""
        out_of_room = len(self.token_ids) > len(self.block_table) * block_size
        return self.must_ask or out_of_room or self.computed // block_size > self.committed // block_size

    def update(self) -> SequenceUpdate:
        """What the books don't know yet."""
        return SequenceUpdate(self.sequence_id, self.token_ids[self.told :], self.computed)

    def apply(self, grant: BlockGrant | None) -> None:
        """Takes over what the books answered to update(); None when the block table is as it was."""
        if grant is not None:
            self.block_table[grant.first_index :] = grant.block_ids
        self.told = len(self.token_ids)
        self.committed = self.computed
        self.must_ask = False

    def draft_update(self) -> SequenceUpdate:
        """What the books don't know yet, and the draft."""
        return SequenceUpdate(self.sequence_id, [*self.token_ids[self.told :], *self.draft], self.computed)

    def apply_draft(self, grant: BlockGrant | None) -> None:
        """Takes over what the books answered to draft_update()."""
        self.apply(grant)
        self.told += len(self.draft)

    @property
    def told_too_much(self) -> bool:
        """Whether the books know guesses that were wrong. To be asked only once all known tokens are computed."""
        return self.told > self.computed

    def take_back(self, block_size: int) -> None:
        """The books have been told to forget wrong guesses, and with them the blocks that only they needed."""
        self.told = self.computed
        del self.block_table[-(-self.computed // block_size) :]

    def commit(self) -> SequenceUpdate:
        """Tells the books what is computed, and no token beyond it."""
        update = SequenceUpdate(self.sequence_id, self.token_ids[self.told : self.computed], self.computed)
        self.told = self.committed = self.computed
        return update

    def share_with(self, children: list[Sequence]) -> None:
        """Gives forked children this block table. Before any of them writes next, the books must be asked."""
        for child in children:
            child.block_table = self.block_table[:]
            child.computed, child.told, child.committed = self.computed, self.told, self.committed
            child.prefix_keys = self.prefix_keys
            child.admitted_before = True
        for sequence in (self, *children):
            sequence.shared_blocks = len(sequence.block_table)
            sequence.must_ask = True

    def start(self, block_ids: Seq[int], cached_tokens: int, block_size: int) -> None:
        """Takes over the block table of a new admission."""
        self.block_table = list(block_ids)
        self.shared_blocks = cached_tokens // block_size
        self.computed = self.committed = cached_tokens
        self.told = len(self.token_ids)
        self.admitted_before = True

    def lose_blocks(self) -> None:
        """Holds nothing any more; everything will be computed again."""
        self.block_table = []
        self.shared_blocks = 0
        self.computed = self.committed = self.told = 0
        self.must_ask = False
        self.draft = ()
