"""Plays a workload on a system that streams, and notes when each token came. The standard library only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from bench.serve.workloads import Conversation, Workload

Stream = Callable[[Sequence[int], int], AsyncIterator[Sequence[int]]]
"""Generates: prompt and number of tokens to the next tokens, as they come. Greedy; EOS does not end it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn. Times in seconds since the workload began: when it was asked, and when each of its tokens came."""

    asked: float
    times: tuple[float, ...]
    token_ids: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: dict[str, Any]) -> Answer:
        return Answer(found["asked"], tuple(found["times"]), tuple(found["token_ids"]))


async def play(workload: Workload, stream: Stream) -> list[Answer]:
    """The answers to all turns of all conversations. Raises ValueError for an answer of the wrong length."""
    start = perf_counter()
    talks = await asyncio.gather(*(_talk(each, stream, start) for each in workload.conversations))
    return [answer for talk in talks for answer in talk]


async def _talk(conversation: Conversation, stream: Stream, start: float) -> list[Answer]:
    if conversation.arrival:
        await asyncio.sleep(start + conversation.arrival - perf_counter())
    history: list[int] = []
    answers = []
    for turn in conversation.turns:
        history.extend(turn.prompt)
        answers.append(await _ask(history, turn.max_tokens, stream, start))
        history.extend(answers[-1].token_ids)
    return answers


async def _ask(prompt: Sequence[int], max_tokens: int, stream: Stream, start: float) -> Answer:
    asked = perf_counter() - start
    times: list[float] = []
    token_ids: list[int] = []
    async for new in stream(prompt, max_tokens):
        times.extend([perf_counter() - start] * len(new))
        token_ids.extend(new)
    if len(token_ids) != max_tokens:
        raise ValueError(f"an answer has {len(token_ids)} tokens, not {max_tokens}")
    return Answer(asked, tuple(times), tuple(token_ids))
