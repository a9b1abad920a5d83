"""The runner's RPCs over a tokenizer that a test holds up: a long text holds up nobody but other long texts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest
from octavo.runner.v1 import model_runner_pb2 as pb

from model_runner.engine import Engine
from model_runner.tokenizer import Tokenizer
from model_runner.validation import Limits
from services.answering import Answering, ServedModel
from services.form_compiler import FormCompiler
from services.long_texts import LONG_TEXT
from services.runner_service import ModelRunnerServicer
from services.streams import Streams

CONTEXT = cast(Any, None)
PATIENCE_SECONDS = 30


class HeldTokenizer:
    """Each text is one token, its length; long texts wait until they are let go."""

    longest_token_bytes = 1

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.let_go = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.begun.append(len(text))
        if len(text) >= LONG_TEXT:
            assert self.let_go.wait(PATIENCE_SECONDS)
        return [len(text)]

    def render_chat(self, messages: list[dict[str, str]], **options: object) -> str:
        return "".join(each["content"] for each in messages)


def servicer_with(tokenizer: HeldTokenizer) -> ModelRunnerServicer:
    answering = Answering(Streams(asyncio.get_running_loop()))
    limits = Limits(vocab_size=100, max_sequence_tokens=1_000_000)
    engine, forms = cast(Engine, None), cast(FormCompiler, None)
    answering.served = ServedModel(engine, cast(Tokenizer, tokenizer), limits, pb.GetModelResponse(), forms)
    return ModelRunnerServicer(answering)


def text(length: int) -> pb.TokenizeRequest:
    return pb.TokenizeRequest(text="x" * length)


def chat(length: int) -> pb.TokenizeRequest:
    messages = [pb.ChatMessage(role="user", content="x" * (length // 2))] * 2
    return pb.TokenizeRequest(chat=pb.Chat(messages=messages))


@pytest.mark.parametrize("of_kind", [text, chat])
def test_long_texts_wait_for_each_other_and_short_ones_for_none(of_kind: Any) -> None:
    async def run() -> None:
        tokenizer = HeldTokenizer()
        servicer = servicer_with(tokenizer)
        sizes = [LONG_TEXT + 2 * number for number in range(20)]
        long = [asyncio.ensure_future(servicer.Tokenize(of_kind(size), CONTEXT)) for size in sizes]
        # More long texts than any pool of threads has, and the short one is served all the same.
        short = await asyncio.wait_for(servicer.Tokenize(of_kind(10), CONTEXT), PATIENCE_SECONDS)
        assert list(short.token_ids) == [10]
        assert sorted(tokenizer.begun) in ([10], [10, LONG_TEXT])
        assert not any(each.done() for each in long)
        tokenizer.let_go.set()
        answers = await asyncio.wait_for(asyncio.gather(*long), PATIENCE_SECONDS)
        assert [list(answer.token_ids) for answer in answers] == [[size] for size in sizes]
        assert [size for size in tokenizer.begun if size != 10] == sizes

    asyncio.run(run())


def test_a_call_that_is_cancelled_in_line_is_never_tokenised() -> None:
    async def run() -> None:
        tokenizer = HeldTokenizer()
        servicer = servicer_with(tokenizer)
        first, second, third = (
            asyncio.ensure_future(servicer.Tokenize(text(LONG_TEXT + size), CONTEXT)) for size in range(3)
        )
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        tokenizer.let_go.set()
        await asyncio.wait_for(asyncio.gather(first, third), PATIENCE_SECONDS)
        assert tokenizer.begun == [LONG_TEXT, LONG_TEXT + 2]

    asyncio.run(run())
