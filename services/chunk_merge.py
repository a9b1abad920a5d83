"""Several chunks of one request as fewer: what a client has not read yet goes out in one chunk for each choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from model_runner.request import Chunk, PositionLogprobs


def merged(chunks: Sequence[Chunk]) -> list[Chunk]:
    """One chunk for each choice that `chunks` have something of; whose last chunk came last is the last."""
    runs: dict[int, list[Chunk]] = {}
    for each in chunks:
        run = runs.pop(each.choice_index, [])
        run.append(each)
        runs[each.choice_index] = run
    return [_joined(run) for run in runs.values()]


def entries(chunk: Chunk) -> int:
    """How large a chunk is: its tokens, and each log-probability that comes with it; at least 1."""
    return max(1, len(chunk.token_ids) + _logprobs(chunk.logprobs) + _logprobs(chunk.prompt_logprobs))


def _joined(run: Sequence[Chunk]) -> Chunk:
    if len(run) == 1:
        return run[0]
    return replace(
        run[-1],
        token_ids=tuple(chain.from_iterable(each.token_ids for each in run)),
        text="".join(each.text for each in run),
        logprobs=tuple(chain.from_iterable(each.logprobs for each in run)),
        prompt_logprobs=tuple(chain.from_iterable(each.prompt_logprobs for each in run)),
    )


def _logprobs(positions: Iterable[PositionLogprobs]) -> int:
    return sum(1 + len(position.top) for position in positions)
