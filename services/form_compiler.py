"""From a request's structured_output to what constrains its answers, compiled outside of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from octavo.runner.v1 import model_runner_pb2 as pb

from model_runner.constraint import Constraint
from model_runner.invalid import InvalidRequest
from model_runner.request import StructuredOutput
from model_runner.token_text import Tokenizer, bytes_of_tokens
from services.runner_errors import FormsUnavailable

if TYPE_CHECKING:
    from model_runner.structured_output import Forms


def check_form(message: pb.GenerateRequest) -> None:
    """Refuses a structured_output that asks for nothing. Raises InvalidRequest."""
    form = message.structured_output.WhichOneof("form")
    if message.HasField("structured_output") and form is None:
        raise InvalidRequest("structured_output", "structured_output has no form; give one, or leave it out.")
    if form == "json_object" and not message.structured_output.json_object:
        raise InvalidRequest("structured_output.json_object", "json_object is false; make it true, or leave it out.")


class FormCompiler:
    """The forms of one model. Compiling goes on in a thread of its own, one form after the other."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._forms: Forms | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-forms")

    async def constraint(self, form: StructuredOutput | None) -> Constraint | None:
        """The constraint of a validated form, at its beginning. Raises InvalidRequest, FormsUnavailable."""
        if form is None:
            return None
        if self._forms is not None and (known := self._forms.known(form)) is not None:
            return known
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, form)

    def close(self) -> None:
        """Ends what compiles."""
        self._thread.shutdown(cancel_futures=True)
        if self._forms is not None:
            self._forms.close()

    def _compile(self, form: StructuredOutput) -> Constraint:
        if self._forms is None:
            self._forms = self._open()
        return self._forms.known(form) or self._forms.compile(form)

    def _open(self) -> Forms:
        """Loads the library with the model's vocabulary: a fraction of a second, which only who needs it spends."""
        try:
            from model_runner.structured_output import Forms
        except ModuleNotFoundError:
            raise FormsUnavailable(
                "This server has no structured output: llguidance is not installed (pip install 'octavo[structured]')."
            ) from None
        tokens = bytes_of_tokens(self._tokenizer, self._vocab_size)
        if tokens is None:
            raise FormsUnavailable(
                "This model has no structured output: what its tokens mean depends on their neighbours."
            )
        if not self._eos_token_ids:
            raise FormsUnavailable("This model has no structured output: no token of it ends an answer.")
        return Forms(tokens, self._eos_token_ids)
