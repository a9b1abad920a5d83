"""A live request and its sequences: one sequence for each choice, each with its own tokens and block table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from model_runner.batch import BatchEntry
from model_runner.beam_search import Search
from model_runner.best_of import BestOf
from model_runner.books import AllocationRequest, BlockGrant, SequenceUpdate
from model_runner.constraint import Constraint
from model_runner.detokenizer import Detokenizer
from model_runner.logit_edits import LogitEdits
from model_runner.logit_rules import LogitRules
from model_runner.prompt_lookup import PromptLookup
from model_runner.request import FinishReason, GenerateRequest, PositionLogprobs, RequestView, Usage


@dataclass(slots=True, eq=False, repr=False)
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
    pauses: int = 0
    paused: bool = False
    """Its client has not read enough: it holds no blocks and is not in line."""
    sequences: list[Sequence] = field(default_factory=list)
    """The choices that have not finished; until the prompt is computed only the first, which stands for all."""
    forked: bool = False
    constraint: Constraint | None = None
    """The form of every choice, before its first token."""
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are known; the first chunk takes them along."""
    search: Search | None = None
    best_of: BestOf | None = None
    no_text: Detokenizer | None = None
    """What the text of every answer begins with."""
    num_named: int = 0
    """The last number of a sequence's id; the first sequence has 0."""
    _folded: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    """The beams of a search, each with its tokens, while one of them stands for all."""

    @property
    def max_outputs(self) -> int | None:
        """Tokens of each answer at most; None when nobody has said."""
        return self.request.stop.max_tokens if self.search is None else self.search.limit

    @property
    def longest_beam(self) -> int:
        """Tokens of the longest sequence that a split of the first one brings, its next token included."""
        return max((len(token_ids) for _, token_ids in self._folded), default=len(self.sequences[0].token_ids) + 1)

    @property
    def num_parting(self) -> int:
        """Sequences that a split of the first one brings, itself included."""
        return len(self._folded) or self.request.num_sequences

    def fold(self) -> Sequence:
        """Lets one sequence, with the tokens that all beams of a search begin with, stand for them until unfold()."""
        first = self.sequences[0]
        if len(self.sequences) > 1:
            self._folded = [(sequence, sequence.token_ids) for sequence in self.sequences]
            shared = _shared_tokens([token_ids for _, token_ids in self._folded])
            first.num_outputs -= len(first.token_ids) - shared
            first.token_ids = first.token_ids[:shared]
            self.sequences = [first]
            self.forked = False
        return first

    def unfold(self) -> list[Sequence]:
        """Takes fold() back, and returns the beams that must be forked from the first; none when nothing is folded."""
        folded, self._folded = self._folded, []
        if not folded:
            return []
        self.sequences = [sequence for sequence, _ in folded]
        first, token_ids = folded[0]
        first.num_outputs += len(token_ids) - len(first.token_ids)
        first.token_ids = token_ids
        self.forked = True
        return self.sequences[1:]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still to be found, for which its tokens must be computed."""
        return self.request.prompt_logprobs is not None and not self.forked and not self._folded

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
            paused=self.paused,
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
            pauses=self.pauses,
        )


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The tokens of one choice and where their K/V is.

    computed: tokens, from the first, whose K/V is in the cache. told: tokens that the books know. committed: computed
    tokens that the books know of. Without a block table it holds nothing and waits.

    While a step is in flight, flying tokens behind the computed ones are computed by it, or by the one before it, and
    coming ones are drawn: they follow the known tokens, and the next step goes on from them.
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
    flying: int = 0
    coming: int = 0
    owes: bool = False
    """What its admission promised to compute is not known to be done: nothing may be said to the books before."""
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
        """Tokens that the steps to come must compute before the next one can be sampled."""
        return len(self.token_ids) + self.coming - self.computed - self.flying

    @property
    def num_tokens(self) -> int:
        """Tokens, with those that are being drawn."""
        return len(self.token_ids) + self.coming

    @property
    def has_outputs(self) -> bool:
        """Whether its answer has begun, or is about to by a step in flight."""
        return self.num_outputs + self.coming > 0

    @property
    def needs_its_draw(self) -> bool:
        """Whether its next step can't be planned before it is known what the last one drew.

        Or what it draws depends on the tokens before. The same is true of guesses, of a prompt whose own
        log-probabilities are noted, and of one that is yet to split.
        """
        live = self.live
        is_ruled = self.constraint is not None or self.rules is not None
        splits = not live.forked and live.request.num_sequences > 1
        return self.is_beam or is_ruled or splits or bool(self.draft) or live.wants_prompt_logprobs

    @property
    def is_beam(self) -> bool:
        """Whether it takes its steps with the others of its search, loses its blocks and comes back with them."""
        return self.live.search is not None

    def room(self, block_size: int) -> int:
        """Tokens that fit into the block table beside those that it has; less than none when these don't fit."""
        return len(self.block_table) * block_size - len(self.token_ids) - self.coming

    def stand_in(self) -> Sequence:
        """Who waits for it when it has no blocks: itself, or for a beam the one that stands for its search."""
        return self.live.fold() if self.is_beam else self

    def edits(self, vocabulary: int, draft: Seq[int] = ()) -> LogitEdits | None:
        """What its request and its form make of the logits, [vocabulary], of its next token.

        Or of the one after a draft, which it has only without a form.
        """
        form = None if self.constraint is None else self.constraint.mask()
        if self.rules is not None:
            return self.rules.edits(self.token_ids, vocabulary, form, draft)
        return None if form is None else LogitEdits(mask=form)

    def entry(self, num_tokens: int, follows: int | None = None) -> BatchEntry:
        """The next `num_tokens` tokens as the executor computes them, with logits for a draw and the prompt's own.

        Behind them comes the draft, with logits for a draw after each of its tokens. follows: the draw of the step
        before that is the last of the tokens, if there is one coming.
        """
        first = self.computed + self.flying
        end = first + num_tokens
        # Those of a token are for the one after it; `known` of the prompt's have been read.
        known = len(self.live.prompt_logprobs) if self.live.wants_prompt_logprobs else self.num_tokens - 1
        token_ids = self.token_ids[first:end]
        is_unknown = end > len(self.token_ids)
        token_ids += (0,) if is_unknown else self.draft
        return BatchEntry(
            token_ids=token_ids,
            first_position=first,
            # The table may grow while the step is in flight.
            block_table=self.block_table[:],
            num_logits=max(0, end - max(first, known)) + len(self.draft),
            follows=follows if is_unknown else None,
        )

    def launch(self, num_tokens: int, *, goes_on: bool) -> None:
        """A step that computes its next tokens is in flight; goes_on: from the token that it draws."""
        self.flying += num_tokens
        self.coming += goes_on

    def land(self, num_tokens: int) -> None:
        """The step is done; the token that it drew is taken next, and is not coming any more."""
        self.flying -= num_tokens
        self.computed += num_tokens
        self.owes = False

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
            forks_often=self.is_beam,
            skip_cache_write=request.skip_cache_write,
        )

    def needs_books(self, block_size: int) -> bool:
        """Whether the next step has something to ask or to commit: once a block, not once a token."""
        if self.owes:
            return False
        news = self.computed // block_size > self.committed // block_size
        return self.must_ask or self.room(block_size) < 0 or news

    def update(self) -> SequenceUpdate:
        """What the books don't know yet."""
        return SequenceUpdate(self.sequence_id, self.token_ids[self.told :], self.computed, self.coming)

    def apply(self, grant: BlockGrant | None) -> None:
        """Takes over what the books answered to update(); None when the block table is as it was."""
        if grant is not None:
            self.take_over(grant)
        self.told = len(self.token_ids)
        self.committed = self.computed
        self.must_ask = False

    def take_over(self, grant: BlockGrant) -> None:
        """Takes over a part of the block table."""
        self.block_table[grant.first_index :] = grant.block_ids

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
        self.owes = True
        self.admitted_before = True

    def lose_blocks(self) -> None:
        """Holds nothing any more; everything will be computed again."""
        self.block_table = []
        self.shared_blocks = 0
        self.computed = self.committed = self.told = 0
        self.flying = self.coming = 0
        self.owes = self.must_ask = False
        self.draft = ()


def _shared_tokens(histories: list[list[int]]) -> int:
    """Tokens that all begin with."""
    # What the least and the greatest share, all share.
    pairs = zip(min(histories), max(histories), strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), len(min(histories)))
