"""Beam search in lists, over whole histories and without any cache: what the engine's searches must come to.

It follows transformers' vectorised search (5.24, `_beam_search`) step by step, with its names, for one prompt; only
what has no probability is left out, where that one carries it along with a score of minus a billion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf

import torch
from torch import Tensor

from model_runner.request import EarlyStopping
from tests.model_runner.toy_model import next_logits

Answer = tuple[float, tuple[int, ...]]
"""A score, and the tokens after the prompt."""


def naive_search(
    prompt: Sequence[int],
    width: int,
    max_new_tokens: int,
    *,
    eos: Collection[int] = (),
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    min_new_tokens: int = 0,
    bias: Callable[[tuple[int, ...]], Tensor] | None = None,
    stops: Callable[[tuple[int, ...]], bool] = lambda answer: False,
    logits: Callable[[Sequence[int]], Tensor] = next_logits,
) -> list[Answer]:
    """The `width` best finished answers, best first. bias is added to the log-probabilities after an answer so far."""
    running: list[Answer] = [(0.0, ())]
    finished: list[Answer] = []
    for length in range(1, max_new_tokens + 1):
        topk = _top(running, prompt, max(2, 1 + len(eos)) * width, eos, min_new_tokens, bias, logits)
        hits = [answer[-1] in eos or length == max_new_tokens or stops(answer) for _, answer in topk]
        just_finished = [
            (total / length**length_penalty, answer)
            for (total, answer), hit in list(zip(topk, hits, strict=True))[:width]
            if hit
        ]
        finished = sorted([*finished, *just_finished], key=lambda each: -each[0])[:width]
        running = [each for each, hit in zip(topk, hits, strict=True) if not hit][:width]
        if not running:
            break
        if len(finished) < width:
            continue
        best_length = max_new_tokens if early_stopping is EarlyStopping.NEVER and length_penalty > 0 else length
        best_possible = running[0][0] / best_length**length_penalty
        if early_stopping is EarlyStopping.FIRST or best_possible <= finished[-1][0]:
            break
    return finished


def _top(
    running: list[Answer],
    prompt: Sequence[int],
    count: int,
    eos: Collection[int],
    min_new_tokens: int,
    bias: Callable[[tuple[int, ...]], Tensor] | None,
    logits: Callable[[Sequence[int]], Tensor],
) -> list[Answer]:
    candidates = []
    for total, answer in running:
        log_probs = torch.log_softmax(logits([*prompt, *answer]).double(), dim=-1)
        if bias is not None:
            log_probs = log_probs + bias(answer)
        for token_id, value in enumerate(log_probs.tolist()):
            masked = token_id in eos and len(answer) < min_new_tokens
            if value > -inf and not masked:
                candidates.append((value + total, (*answer, token_id)))
    # Sorting is stable: among equals the better beam comes first, then the lower token id.
    return sorted(candidates, key=lambda each: -each[0])[:count]
