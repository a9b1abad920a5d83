"""Prompts for the machine of the books: mostly of few kinds, and often an earlier one's beginning, gone on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from kvmanager.types import CacheScope, ContentSpan
from tests.kvmanager.naive_books import NaivePrompt

SALTS = ["", "", "", "s", "t"]
ADAPTERS = [("", ""), ("", ""), ("", ""), ("x", "1"), ("x", "2")]
LENGTHS = {"cat": 1, "dog": 3, "fox": 3}
"""Tokens that each content stands behind."""

MAX_TOKENS = 20
PATTERNS = [0, (1 << MAX_TOKENS) - 1, 0b1100_1100_1100_1100, 0b1010_1010_0000_1111]
SPANS = [(), (), (), (), (("cat", 1),), (("dog", 2),), (("fox", 2),), (("dog", 0), ("cat", 7)), (("dog", 6),)]
NUMBERS = st.integers(0, 1 << 16)
TOKENS = st.integers(0, 6).flatmap(
    lambda length: st.sampled_from(PATTERNS).map(lambda bits: [bits >> index & 1 for index in range(length)])
)


@dataclass(frozen=True)
class Wish:
    """A prompt of `length` tokens after the first `keep` of an earlier one, if there is any."""

    earlier: int
    keep: int
    length: int
    bits: int
    scope: CacheScope
    spans: tuple[tuple[str, int], ...]


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    scope = CacheScope(*draw(st.sampled_from(ADAPTERS)), draw(st.sampled_from(SALTS)))
    bits = draw(st.one_of(st.sampled_from(PATTERNS), st.integers(0, (1 << MAX_TOKENS) - 1)))
    keep = draw(st.sampled_from([0, 0, 0, 3, 4, 8, 9, 13, 24, 24, 24]))
    length = draw(st.sampled_from([0, 1, 1, 2, 6])) if keep else draw(st.integers(1, MAX_TOKENS))
    return Wish(draw(NUMBERS), keep, length, bits, scope, draw(st.sampled_from(SPANS)))


def grant_wish(
    wish: Wish, earlier: Sequence[NaivePrompt], size: int, max_tokens: int, takes_salts: bool
) -> NaivePrompt:
    """Only some prompts are longer than `max_tokens`, what the pool could hold."""
    tokens, scope, wanted = [wish.bits >> index & 1 for index in range(wish.length)], wish.scope, wish.spans
    if wish.keep and earlier:
        old = earlier[wish.earlier % len(earlier)]
        tokens, scope = old.tokens[: wish.keep] + tokens, old.scope
        if wish.earlier % 4:
            wanted = tuple((span.content_id, span.offset) for span in old.spans)
    if wish.earlier % 16:
        tokens = tokens[:max_tokens]
    if not takes_salts:
        scope = CacheScope(scope.adapter_id, scope.adapter_version)
    prompt = NaivePrompt(size, scope)
    end = 0
    for content, offset in wanted:
        if offset >= end and offset + LENGTHS[content] <= len(tokens):
            prompt.spans.append(ContentSpan(content, offset, LENGTHS[content]))
            end = offset + LENGTHS[content]
    prompt.extend(tokens or [0])
    return prompt
