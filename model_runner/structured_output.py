"""Answers of a given form: each choice has a matcher that says which tokens may come next."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from model_runner.form_grammar import grammar_of
from model_runner.form_matcher import NO_TOKEN, Words, fault_of, open_matcher
from model_runner.form_trial import Trial
from model_runner.invalid import InvalidRequest
from model_runner.json_text import NotJson
from model_runner.request import StructuredOutput, StructureKind

MAX_CACHED_FORMS = 64

_NAMES = {
    StructureKind.JSON_SCHEMA: "JSON schema",
    StructureKind.REGEX: "regular expression",
    StructureKind.GRAMMAR: "grammar",
    StructureKind.CHOICES: "list of choices",
    StructureKind.JSON_OBJECT: "form",
}


class FormConstraint:
    """A Constraint over a grammar. Tokens that end an answer are allowed exactly when the form is complete."""

    __slots__ = ("_eos", "_mask", "_matcher", "failure", "is_complete", "is_over")

    def __init__(self, matcher: LLMatcher, eos: NDArray[np.uint32]) -> None:
        """eos: the mask of the tokens that end an answer."""
        self._matcher = matcher
        self._eos = eos
        self.is_complete = self.is_over = False
        self.failure = ""
        self._mask = self._next_mask()

    def mask(self) -> NDArray[np.uint32]:
        return self._mask

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._mask = self._next_mask()

    def copy(self) -> FormConstraint:
        twin = object.__new__(FormConstraint)
        twin._matcher, twin._eos = self._matcher.deep_copy(), self._eos
        # A mask is never written to: both may have this one.
        twin._mask, twin.failure = self._mask, self.failure
        twin.is_complete, twin.is_over = self.is_complete, self.is_over
        return twin

    def _next_mask(self) -> NDArray[np.uint32]:
        """Looks at the new state: tens of microseconds, a fraction of a millisecond where the lexer has not been."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._eos.size]
        text = mask & ~self._eos
        self.failure = fault_of(self._matcher)
        self.is_complete = not self.failure and self._matcher.is_accepting()
        if self.failure:
            return np.zeros_like(self._eos)
        if self.is_complete:
            self.is_over = not text.any()
            return mask
        if not text.any():
            self.failure = NO_TOKEN
        return text


class Forms:
    """Compiles forms for one model, and keeps the latest. Thread-safe."""

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        """tokens: the bytes of each id of the model's vocabulary. eos_token_ids: what ends an answer; at least one."""
        self._words = Words(tokens, eos_token_ids)
        self._eos = _mask_of(eos_token_ids, len(tokens))
        self._trial = Trial(self._words)
        self._tokenizer = self._words.tokenizer()
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutput, FormConstraint | str] = OrderedDict()

    def known(self, form: StructuredOutput) -> FormConstraint | None:
        """The constraint of a form that was compiled lately, at its beginning. Raises InvalidRequest as compile()."""
        with self._lock:
            found = self._known.get(form)
            if found is None:
                return None
            self._known.move_to_end(form)
            return _open(form, found)

    def compile(self, form: StructuredOutput) -> FormConstraint:
        """The constraint at its beginning. Blocks, for seconds at worst. Raises InvalidRequest, with the reason."""
        made = self._make(form)
        with self._lock:
            self._known[form] = made
            if len(self._known) > MAX_CACHED_FORMS:
                self._known.popitem(last=False)
            return _open(form, made)

    def close(self) -> None:
        """Ends the process in which forms are tried."""
        self._trial.close()

    def _make(self, form: StructuredOutput) -> FormConstraint | str:
        """The constraint, or why there can be none."""
        try:
            grammar = grammar_of(form)
        except NotJson as error:
            return str(error)
        fault = self._trial.fault_of(grammar)
        if fault:
            return fault
        constraint = FormConstraint(open_matcher(self._tokenizer, grammar), self._eos)
        return "only the empty text has it" if constraint.is_over else constraint.failure or constraint


def _open(form: StructuredOutput, found: FormConstraint | str) -> FormConstraint:
    if isinstance(found, str):
        raise InvalidRequest(
            f"structured_output.{form.kind.value}", f"The {_NAMES[form.kind]} cannot be used: {found}."
        )
    return found.copy()


def _mask_of(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.uint32]:
    mask = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask
