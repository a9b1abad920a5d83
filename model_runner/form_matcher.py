"""llguidance on a model's vocabulary: which tokens may follow, under limits that no grammar gets past."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from model_runner.form_grammar import reason_of

NO_TOKEN = "no token of this model goes on from there"

# The library's defaults, but for the states of the lexer (one or two KB each) and the work of one step.
LIMITS = LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=100_000, verbose_errors=False)


class Words:
    """A vocabulary as llguidance asks for it: the bytes of each token id, and the ids that end an answer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        """eos_token_ids: at least one. A token without bytes is never allowed, unless it ends the answer."""
        self.tokens = list(tokens)
        for token_id in eos_token_ids:
            # The library marks tokens that are no text so, and wants at least one to have a name.
            self.tokens[token_id] = b"\xff<end>"
        self.special_token_ids = list(eos_token_ids)
        self.eos_token_id = eos_token_ids[0]

    def __call__(self, text: str) -> list[int]:
        """Needed only to force tokens, which our grammars turn off."""
        return []

    def tokenizer(self) -> LLTokenizer:
        """The library's index of the vocabulary; takes a fraction of a second."""
        return LLTokenizer(self, eos_token=self.special_token_ids)  # type: ignore[arg-type]


def open_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The grammar at the beginning of a text; is_error() tells whether it was refused."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def fault_of(matcher: LLMatcher) -> str:
    """Why the matcher goes no further; empty while all is well."""
    if not matcher.is_error():
        return ""
    error = matcher.get_error()
    return NO_TOKEN if error.startswith("NoExtension") else reason_of(error)
