"""What `octavo generate` has of an answer while its chunks come, as text and as JSON."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from model_runner.request import Chunk, PositionLogprobs, Usage


@dataclass(slots=True)
class Choice:
    """What has come of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    score: float | None = None

    def as_json(self, index: int) -> dict[str, Any]:
        line = {
            "choice_index": index,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
        }
        return line if self.score is None else {**line, "score": self.score}


class Answer:
    """What has come of a request, and when."""

    def __init__(self, num_choices: int, *, is_streamed: bool = True) -> None:
        """is_streamed: chunks come while tokens are generated, not all at the end."""
        self.num_choices = num_choices
        self.is_streamed = is_streamed
        self.choices: defaultdict[int, Choice] = defaultdict(Choice)
        self.usage: Usage | None = None
        self._started = time.monotonic()
        self._first: float | None = None
        self._last = self._started

    def add(self, chunk: Chunk) -> None:
        """Takes a chunk in."""
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last
        choice = self.choices[chunk.choice_index]
        choice.token_ids.extend(chunk.token_ids)
        choice.text += chunk.text
        if chunk.finish_reason is not None:
            choice.finish_reason = chunk.finish_reason.value
            choice.score = chunk.score
        self.usage = chunk.usage or self.usage

    def as_json(self) -> dict[str, Any]:
        """The last JSON line: the first choice at the top, all of them under `choices` when there are several."""
        first = self.choices[0].as_json(0)
        del first["choice_index"]
        line: dict[str, Any] = {**first, "usage": _usage_json(self.usage)}
        if self.num_choices > 1:
            line["choices"] = [choice.as_json(index) for index, choice in sorted(self.choices.items())]
        return line

    def summary(self) -> str:
        """One line: prompt tokens, cached tokens, and for a stream TTFT and tokens/s."""
        usage = self.usage
        if usage is None or self._first is None:
            return "no answer"
        if not self.is_streamed:
            return (
                f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached, {usage.output_tokens} tokens in "
                f"{self._last - self._started:.2f} s, those of answers that are not shown too"
            )
        decoding = self._last - self._first
        later = usage.output_tokens - self.num_choices
        speed = f"{later / decoding:.1f}" if decoding > 0 and later > 0 else "-"
        guesses = f", {usage.accepted_tokens} of {usage.drafted_tokens} guesses right" if usage.drafted_tokens else ""
        return (
            f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached, "
            f"TTFT {(self._first - self._started) * 1000:.0f} ms, "
            f"{usage.output_tokens} tokens at {speed} tokens/s{guesses}"
        )


def chunk_json(chunk: Chunk) -> dict[str, Any]:
    """A chunk as a JSON object."""
    line: dict[str, Any] = {
        "choice_index": chunk.choice_index,
        "token_ids": list(chunk.token_ids),
        "text": chunk.text,
        "finish_reason": chunk.finish_reason.value if chunk.finish_reason else None,
    }
    if chunk.score is not None:
        line["score"] = chunk.score
    for name in ("logprobs", "prompt_logprobs"):
        if positions := getattr(chunk, name):
            line[name] = [_position_json(each) for each in positions]
    return line


def _position_json(position: PositionLogprobs) -> dict[str, Any]:
    top = [list(pair) for pair in position.top]
    return {"token_id": position.token_id, "logprob": position.logprob, "top": top}


def _usage_json(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {name: getattr(usage, name) for name in Usage.__slots__}
