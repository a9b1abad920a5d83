"""Forms at the service: who waits for whom, and what is said where there can be none."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import cast

import grpc
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from model_runner.invalid import InvalidRequest
from model_runner.request import StructuredOutput, StructureKind
from model_runner.token_text import Tokenizer
from services.form_compiler import FormCompiler
from services.runner_errors import FormsUnavailable, runner_failure
from tests.model_runner.toy_model import ToyTokenizer

EOS = 39
FORM = StructuredOutput(StructureKind.REGEX, ("[ab]c",))


@pytest.fixture
def compiler() -> Iterator[FormCompiler]:
    made = FormCompiler(ToyTokenizer(), 40, [EOS])
    yield made
    made.close()


def words_of(constraint: object) -> list[int]:
    return constraint.mask().tolist()  # type: ignore[attr-defined]


def test_no_form_is_no_constraint(compiler: FormCompiler) -> None:
    assert asyncio.run(compiler.constraint(None)) is None


def test_each_request_gets_a_constraint_of_its_own(compiler: FormCompiler) -> None:
    async def run() -> None:
        first, second = await asyncio.gather(compiler.constraint(FORM), compiler.constraint(FORM))
        assert first is not None
        assert second is not None
        assert words_of(first) == words_of(second) == [0b11, 0]
        first.advance(0)
        assert (words_of(first), words_of(second)) == ([0b100, 0], [0b11, 0])

    asyncio.run(run())


def test_a_bad_form_is_the_clients(compiler: FormCompiler) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed group"):
            asyncio.run(compiler.constraint(StructuredOutput(StructureKind.REGEX, ("(",))))


def test_a_known_form_waits_for_nobody(compiler: FormCompiler) -> None:
    async def run() -> None:
        assert await compiler.constraint(FORM) is not None
        held = threading.Event()
        compiler._thread.submit(held.wait)
        other = asyncio.ensure_future(compiler.constraint(StructuredOutput(StructureKind.REGEX, ("a",))))
        assert await compiler.constraint(FORM) is not None
        assert not other.done()
        held.set()
        assert await other is not None

    asyncio.run(run())


def unavailable(compiler: FormCompiler) -> str:
    with pytest.raises(FormsUnavailable) as caught:
        asyncio.run(compiler.constraint(FORM))
    compiler.close()
    failure = runner_failure(caught.value)
    assert failure is not None
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NO_STRUCTURED_OUTPUT")
    return failure.sentence


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_runner.structured_output", None)
    assert "pip install 'octavo[structured]'" in unavailable(FormCompiler(ToyTokenizer(), 40, [EOS]))


def test_for_a_model_that_never_ends() -> None:
    assert "no token of it ends an answer" in unavailable(FormCompiler(ToyTokenizer(), 40, []))


def test_for_tokens_that_are_no_bytes() -> None:
    class WordPieces(ToyTokenizer):
        def __init__(self) -> None:
            self.backend = Backend(models.WordLevel({"do": 0, "##g": 1, "end": 2}, unk_token="do"))
            self.backend.decoder = decoders.WordPiece()

    assert "depends on their neighbours" in unavailable(FormCompiler(cast(Tokenizer, WordPieces()), 3, [2]))
