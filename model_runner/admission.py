"""How many blocks an admission must leave over, so that nobody has to give blocks up for it later.

Each running sequence is taken to produce one token in a step until its expected end, when it gives back the blocks that
are its own. What is needed beyond today's blocks at the worst moment, less what has come back by then, is left over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from model_runner.output_lengths import OutputLengths
from model_runner.sequence import Sequence

MOMENTS = 8
"""Moments that are looked at; with more ends than these, neighbouring ones are taken together, as the last of them."""


@dataclass(frozen=True, slots=True)
class Future:
    """What a sequence holds and will need: tokens it has, blocks in its table, and those of them that are its own.

    It produces a token in each step from `begins` to `ends`, counted from now. choices: 1, or those yet to be forked.
    """

    block_size: int
    tokens: int
    blocks: int
    own_blocks: int
    begins: int
    ends: int
    choices: int

    def growth(self, step: int) -> int:
        """Blocks beyond today's that it needs for its outputs up to a step; less than none after its end."""
        if step > self.ends:
            return -self.own_blocks
        outputs = step - self.begins
        if outputs < 2:
            return 0
        # The last output needs no room before it is computed itself.
        needed = -(-(self.tokens + outputs - 1) // self.block_size)
        return needed - self.blocks + (self.choices - 1) * (needed - self.tokens // self.block_size)


def headroom(
    running: Iterable[Sequence], candidate: Sequence, lengths: OutputLengths, block_size: int, budget: int
) -> int:
    """Blocks to leave over when `candidate` is admitted beside `running`. budget: tokens in a step.

    At least one for each running sequence that can still outgrow its blocks. None when nothing runs.
    """
    futures: list[Future] = []
    floor = due = 0
    for sequence in running:
        due += sequence.pending
        futures.append(_future(sequence, lengths, block_size, due // budget, len(sequence.block_table)))
        floor += _can_outgrow(sequence, block_size)
    if not futures:
        return 0
    due += candidate.pending
    blocks = -(-len(candidate.token_ids) // block_size)
    futures.append(_future(candidate, lengths, block_size, due // budget, blocks))
    return max(floor, _peak(futures))


def parting(candidate: Sequence, block_size: int) -> int:
    """Blocks to leave over so that the beams of a search, which never wait for each other, all get back to work.

    Without them a search that is alone could be admitted and preempted again and again.
    """
    live = candidate.live
    if live.search is None or live.forked or live.search.limit == 1:
        return 0
    tokens = len(candidate.token_ids)
    shared, longest = tokens // block_size, -(-live.longest_beam // block_size)
    return shared + live.num_parting * (longest - shared) - -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class SearchRoom:
    """The pool as one beam search sees it that has it for itself; usable_blocks of block_size tokens."""

    usable_blocks: int
    block_size: int

    def limit(self, prompt_tokens: int, width: int) -> int:
        """Tokens of an answer, at least 1, up to which `width` beams fit that share nothing but the prompt."""
        shared = prompt_tokens // self.block_size
        blocks = shared + (self.usable_blocks - shared) // width
        # The last token needs no room, and the first one's beams need none of their own before the second.
        return max(1, blocks * self.block_size - prompt_tokens + 1)


def _peak(futures: list[Future]) -> int:
    ends = sorted(future.ends for future in futures)
    stride = -(-len(ends) // MOMENTS)
    return max(
        sum([each.growth(_moment(each.ends, ends[first], later)) for each in futures])
        for first in range(0, len(ends), stride)
        for later in (ends[min(first + stride, len(ends)) - 1],)
    )


def _moment(end: int, sooner: int, later: int) -> int:
    """Who ends between the two is taken to hold its blocks until the later."""
    return min(end, later) if end >= sooner else later


def _future(sequence: Sequence, lengths: OutputLengths, block_size: int, begins: int, blocks: int) -> Future:
    live = sequence.live
    outputs = lengths.remaining(sequence.num_outputs + sequence.coming, live.max_outputs)
    return Future(
        block_size=block_size,
        tokens=sequence.num_tokens,
        blocks=blocks,
        own_blocks=blocks - sequence.shared_blocks,
        begins=begins,
        ends=begins + outputs,
        choices=1 if live.forked else live.num_parting,
    )


def _can_outgrow(sequence: Sequence, block_size: int) -> bool:
    limit = sequence.live.max_outputs
    if limit is None or (not sequence.live.forked and sequence.live.num_parting > 1):
        return True
    return len(sequence.token_ids) + limit - sequence.num_outputs - 1 > len(sequence.block_table) * block_size
