"""The text of one choice while its tokens arrive, ended by the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from model_runner.stop_strings import StopSearch
from model_runner.token_text import Tokenizer, token_text


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a choice, and the stop string that ended it, if one did.

    The text holds no part of that string, or ends with the whole of it, as the Detokenizer was told.
    """

    text: str
    stop_string: str | None = None


class Detokenizer:
    """Detokenises one choice. All text returned, joined, is the decoding of all tokens, cut at the first stop string.

    Text comes in whole characters, invalid bytes as U+FFFD. Held back are an unfinished character, a run of byte
    tokens such as <0xE2> (one invalid byte turns the whole run into U+FFFD), and what may begin a stop string. The
    cost of a token does not grow with the length of the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        skip_special_tokens: bool = True,
        *,
        unsearched_tokens: int = 0,
        include_stop_string: bool = False,
        strip: bool = True,
    ) -> None:
        """unsearched_tokens: of the first so many, the text is let through whatever it has. include_stop_string: the
        text ends after the stop string, not before it. strip: as token_text() has it.

        Raises ValueError for an empty stop string.
        """
        self._text = token_text(tokenizer, skip_special_tokens, strip=strip)
        self._search = StopSearch(stop_strings, include=include_stop_string)
        self._unsearched = unsearched_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; finish() may still find one in what it flushes."""
        return self._search.found

    def copy(self) -> Detokenizer:
        """The same text, for another choice to go on from."""
        twin = copy(self)
        twin._text, twin._search = self._text.copy(), copy(self._search)
        return twin

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Adds tokens, which may also be none. After a stop string they change nothing."""
        free, searched = token_ids[: self._unsearched], token_ids[self._unsearched :]
        self._unsearched -= len(free)
        text = self._text.push(free) if free else ""
        text += self._search.push(self._text.push(searched))
        return TextDelta(text, self._search.found)

    def finish(self) -> str:
        """Ends the tokens and returns what was held back, cut at a stop string (see `stop_string`)."""
        rest = self._text.finish()
        return rest if self._unsearched else self._search.push(rest) + self._search.finish()
