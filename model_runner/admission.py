"""How many blocks an admission must leave over, so that nobody has to give blocks up for it later.

Each running sequence is taken to produce one token in a step until its expected end, when it gives back the blocks that
are its own. What is needed beyond today's blocks at the worst moment, less what has come back by then, is left over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from model_runner.output_lengths import OutputLengths
from model_runner.sequence import Sequence

MOMENTS = 128
"""Moments that are looked at; with more ends than these, neighbouring ones are taken together, as the last of them."""

KNOWN_END = 0.5
"""Of a block, kept for a sequence that grows to a known end: it asks for room at the moment that suits it."""


class Future(NamedTuple):
    """What a sequence holds and will need: tokens it has, blocks in its table, and those of them that are its own.

    It produces a token in each step from `begins` to `ends`, counted from now. choices: 1, or those yet to be forked.
    """

    tokens: int
    blocks: int
    own_blocks: int
    begins: int
    ends: int
    choices: int


def headroom(
    running: Iterable[Sequence], candidate: Sequence, lengths: OutputLengths, block_size: int, budget: int
) -> int:
    """Blocks to leave over when `candidate` is admitted beside `running`. budget: tokens in a step.

    At least one for each running sequence that can still outgrow its blocks and whose end is a guess, and KNOWN_END for
    each whose end is known. None when nothing runs.
    """
    futures: list[Future] = []
    floor = 0.0
    due = 0
    for sequence in running:
        due += sequence.pending
        future = _future(sequence, lengths, due // budget, len(sequence.block_table))
        futures.append(future)
        if _can_outgrow(sequence, block_size):
            floor += 1 if _may_go_on(sequence, future) else KNOWN_END
    if not futures:
        return 0
    due += candidate.pending
    blocks = -(-len(candidate.token_ids) // block_size)
    futures.append(_future(candidate, lengths, due // budget, blocks))
    return max(math.ceil(floor), peak(futures, block_size))


def peak(futures: Iterable[Future], block_size: int) -> int:
    """Blocks beyond today's that they need together at the worst moment, which is somebody's end; may be negative."""
    tokens, blocks, own_blocks, begins, ends, choices = np.array(list(futures)).T
    moments = np.unique(ends)
    stride = -(-len(moments) // MOMENTS)
    sooner = moments[::stride, None]
    later = moments[np.minimum(np.arange(0, len(moments), stride) + stride, len(moments)) - 1, None]
    # Who ends between the two is taken to hold its blocks until the later.
    moment: npt.NDArray[np.int64] = np.where(ends >= sooner, np.minimum(ends, later), later)
    # Room is asked for one step before it is needed. The last output needs none.
    outputs = np.minimum(moment - begins, ends - begins - 1)
    needed = -(-(tokens + outputs) // block_size)
    growth = needed - blocks + (choices - 1) * (needed - tokens // block_size)
    # A block that it has and does not need yet is no block for others.
    growth = np.where(outputs < 1, 0, np.maximum(growth, 0))
    return int(np.where(moment > ends, -own_blocks, growth).sum(axis=1).max())


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


def _future(sequence: Sequence, lengths: OutputLengths, begins: int, blocks: int) -> Future:
    live = sequence.live
    outputs = lengths.remaining(sequence.num_outputs + sequence.coming, live.max_outputs)
    return Future(
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


def _may_go_on(sequence: Sequence, future: Future) -> bool:
    """Whether it may have more outputs than were foreseen."""
    limit = sequence.live.max_outputs
    return limit is None or future.ends - future.begins < limit - sequence.num_outputs - sequence.coming
