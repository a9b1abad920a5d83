"""What one choice's request asks to be changed in its logits, and what that means at the token to be drawn next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model_runner.logit_edits import LogitEdits, mask_of
from model_runner.request import GenerateRequest

Ids = NDArray[np.int32]
Mask = NDArray[np.uint32]
_FIRST_ROOM = 256


class TokenCounts:
    """How often an answer has each token of its text: of the answer's own, and with_prompt of the prompt's too.

    The cost of a look is that of the tokens which are new since the last one.
    """

    def __init__(self, prompt_tokens: int, with_prompt: bool) -> None:
        self._prompt_tokens = prompt_tokens
        self._with_prompt = with_prompt
        self._looked_at = 0
        self._places: dict[int, int] = {}
        self._ids = np.empty(_FIRST_ROOM, dtype=np.int32)
        self._counts = np.zeros(_FIRST_ROOM, dtype=np.int32)

    def look(self, token_ids: Sequence[int], draft: Sequence[int] = ()) -> tuple[Ids, NDArray[np.int32]]:
        """Distinct ids and their counts, int32 [N] each, valid until other tokens are looked at.

        token_ids: prompt and answer; they begin like those of the last look, or are fewer. draft: tokens of the answer
        that are counted in this look only.
        """
        if len(token_ids) < self._looked_at:
            self._forget()
        if not self._looked_at:
            self._take_prompt(token_ids[: self._prompt_tokens])
        for token_id in token_ids[self._looked_at :]:
            self._counts[self._place(token_id)] += 1
        self._looked_at = len(token_ids)
        size = len(self._places)
        ids, counts = self._ids[:size], self._counts[:size]
        return self._with_draft(ids, counts, draft) if draft else (ids, counts)

    def _with_draft(self, ids: Ids, counts: NDArray[np.int32], draft: Sequence[int]) -> tuple[Ids, NDArray[np.int32]]:
        drafted = Counter(draft)
        new = [token_id for token_id in drafted if token_id not in self._places]
        ids = np.concatenate((ids, np.array(new, dtype=np.int32)))
        counts = np.concatenate((counts, np.zeros(len(new), dtype=np.int32)))
        fresh = {token_id: len(self._places) + index for index, token_id in enumerate(new)}
        for token_id, times in drafted.items():
            counts[fresh[token_id] if token_id in fresh else self._places[token_id]] += times
        return ids, counts

    def _forget(self) -> None:
        self._looked_at = 0
        self._places.clear()
        self._counts[:] = 0

    def _take_prompt(self, token_ids: Sequence[int]) -> None:
        self._looked_at = len(token_ids)
        if self._with_prompt:
            for token_id in dict.fromkeys(token_ids):
                self._place(token_id)

    def _place(self, token_id: int) -> int:
        """Where a token's count is; a new one gets a place."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        return place


class BadWords:
    """Words, as tokens, that an answer must not have: which token would complete one."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """Each word has a token at least."""
        self.single = [word[0] for word in words if len(word) == 1]
        """Words of one token, which may never come."""
        self._by_token_before: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._by_token_before[word[-2]].append((list(word[:-1]), word[-1]))

    def next(self, token_ids: Sequence[int], begin: int) -> list[int]:
        """Tokens that would complete a word of several; the answer begins at `begin`."""
        answered = len(token_ids) - begin
        words = self._by_token_before.get(token_ids[-1], ()) if answered else ()
        return [
            last
            for beginning, last in words
            if len(beginning) <= answered and list(token_ids[-len(beginning) :]) == beginning
        ]


class LogitRules:
    """The rules of one choice. What they say depends on the choice's tokens alone, however it got them."""

    def __init__(self, request: GenerateRequest, eos_token_ids: frozenset[int]) -> None:
        sampling, stop = request.sampling, request.stop
        self._prompt_tokens = len(request.prompt_token_ids)
        self._repetition = sampling.repetition_penalty
        self._frequency, self._presence = sampling.frequency_penalty, sampling.presence_penalty
        # The prompt's tokens matter to no other penalty.
        repeats = self._repetition != 1
        penalises = repeats or self._frequency != 0 or self._presence != 0
        self._counts = TokenCounts(self._prompt_tokens, with_prompt=repeats) if penalises else None
        self._biased = np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.int32)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        self._words = BadWords(sampling.bad_words)
        self._ends = eos_token_ids | stop.stop_token_ids
        self._min_tokens = stop.min_tokens
        self._allowed = sampling.allowed_token_ids
        self._mask: Mask | None = None

    @classmethod
    def of(cls, request: GenerateRequest, eos_token_ids: frozenset[int]) -> LogitRules | None:
        """The rules of a valid request; None when its logits stay as they are. eos_token_ids: the model's."""
        sampling = request.sampling
        changes = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
            or sampling.logit_bias
            or sampling.allowed_token_ids is not None
            or sampling.bad_words
            or request.stop.min_tokens > 0
        )
        return cls(request, eos_token_ids) if changes else None

    def edits(
        self, token_ids: Sequence[int], vocabulary: int, form: Mask | None = None, draft: Sequence[int] = ()
    ) -> LogitEdits:
        """What becomes of the logits after token_ids, the prompt's and the answer's, and a draft that may follow them.

        form: a Constraint's mask.
        """
        seen = {}
        if self._counts is not None:
            ids, counts = self._counts.look(token_ids, draft)
            seen = {"seen": ids, "counts": counts}
        if draft:
            token_ids = [*token_ids, *draft]
        return LogitEdits(
            repetition=self._repetition,
            frequency=self._frequency,
            presence=self._presence,
            biased=self._biased,
            biases=self._biases,
            banned=self._banned(token_ids, vocabulary),
            mask=self._allowed_mask(vocabulary, form),
            **seen,
        )

    def _banned(self, token_ids: Sequence[int], vocabulary: int) -> Ids:
        banned = [*self._words.single, *self._words.next(token_ids, self._prompt_tokens)]
        if len(token_ids) - self._prompt_tokens < self._min_tokens:
            # A model may name an end that it has no logit for.
            banned.extend(token_id for token_id in self._ends if token_id < vocabulary)
        return np.array(sorted(set(banned)), dtype=np.int32)

    def _allowed_mask(self, vocabulary: int, form: Mask | None) -> Mask | None:
        if self._allowed is None:
            return form
        if self._mask is None:
            self._mask = mask_of(sorted(self._allowed), vocabulary)
        return self._mask if form is None else self._mask & form
