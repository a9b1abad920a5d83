"""32 requests of every kind at once, in a pool so small that some lose their blocks: each gets what it gets alone."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_runner.request import Chunk, FinishReason
from services.client import Client, OctavoError
from tests.e2e.stack import SERVING, Stack, health_of, running_stack, wait_until
from tests.e2e.tiny_chat_model import VOCAB_SIZE, write_tiny_chat_model

SMALL_POOL = ("--block-size", "8", "--num-blocks", "64", "--max-sequences", "40")
"""Room for the largest request, a search of three beams that needs some 42 blocks, and little more."""
PROMPTS = ["Once upon a time", "The sea, the sea! " * 3, "naïve \U0001f600 字", "0123456789" * 5]
LONG = {"max_tokens": 90, "ignore_eos": True}
DRAWN = {**LONG, "temperature": 1.0, "top_p": 0.95}
KINDS: list[dict[str, Any]] = [
    {**LONG},
    {**LONG, "logprobs": 3},
    {**DRAWN, "seed": 1, "n": 3},
    {**DRAWN, "seed": 2, "top_k": 20, "min_p": 0.01, "logprobs": 0},
    {**DRAWN, "seed": 3, "best_of": 3, "n": 2},
    {**LONG, "beam_width": 3, "n": 2},
    {"max_tokens": 30, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "first"},
    {**DRAWN, "seed": 4, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    {**DRAWN, "seed": 5, "logit_bias": {65: 4.0, 66: -100.0}, "bad_words": ["a", "the"]},
    {**DRAWN, "seed": 6, "allowed_token_ids": list(range(40, 90)), "min_tokens": 5},
    {**DRAWN, "seed": 7, "regex": "[a-z]{20,60}"},
    {**DRAWN, "seed": 8, "json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 8}},
    {"max_tokens": 90, "choices": ["yes, certainly", "no, never"], "temperature": 1.0, "seed": 9, "n": 2},
    {**DRAWN, "seed": 10, "stop": ["e", "7"]},
    {**DRAWN, "seed": 11, "stop": ["qu", "x"], "include_stop_string": True},
    {**DRAWN, "seed": 12, "stop_token_ids": list(range(200, 210))},
    {**LONG, "skip_cache_write": True, "cache_salt": "s"},
    {"max_tokens": 20, "ignore_eos": True, "prompt_logprobs": 2},
    {"ignore_eos": True, "temperature": 1.0, "seed": 13, "stop_token_ids": list(range(VOCAB_SIZE))[::60]},
]
"""Options of generate(); of what a server does not have it says so, alone and among others."""


@dataclass(frozen=True)
class Answer:
    """What came of a request: by choice its tokens, text, log-probabilities and end; or how it was refused."""

    choices: dict[int, tuple[tuple[int, ...], str, tuple[Any, ...], FinishReason | None]]
    refused: str = ""


def plans() -> list[dict[str, Any]]:
    rng = random.Random(5)
    chosen = [*KINDS, *rng.choices(KINDS, k=32 - len(KINDS))]
    return [{"prompt": rng.choice(PROMPTS), **options, "request_id": f"r{i}"} for i, options in enumerate(chosen)]


def ask(client: Client, options: dict[str, Any]) -> Answer:
    try:
        chunks = list(client.generate(**options))
    except OctavoError as error:
        if error.code not in ("INVALID_ARGUMENT", "UNIMPLEMENTED"):
            raise
        return Answer({}, error.sentence)
    return Answer({index: _choice(chunks, index) for index in sorted({each.choice_index for each in chunks})})


def ask_when_ready(client: Client, options: dict[str, Any]) -> Answer:
    """As ask(), and again while the runner takes nothing in since it has no KV manager."""
    while True:
        try:
            return ask(client, options)
        except OctavoError as error:
            if not error.sentence.startswith("The runner waits for"):
                raise
        time.sleep(0.05)


@contextmanager
def asked_together(stack: Stack, client: Client, asked: list[dict[str, Any]]) -> Iterator[dict[str, Future[Answer]]]:
    """The answers to come, by request id, of requests that all run at once and that the runner takes to be short.

    It has seen answers end of up to 48 tokens only, so that it lets too many in. The KV manager stands still until all
    are in line, for nobody is let in without it; a runner that has given it up before gets the rest when it is back.
    """
    assert stack.manager
    with ThreadPoolExecutor(len(asked)) as threads:
        list(threads.map(lambda length: ask(client, {"prompt": "a", "regex": f"a{{{length}}}"}), range(1, 49)))
        stack.manager.signal(signal.SIGSTOP)
        try:
            futures = {options["request_id"]: threads.submit(ask_when_ready, client, options) for options in asked}
            wait_until(
                "the arrival of all",
                lambda: len(client.requests()) == len(asked) or health_of(stack.runner_address) != SERVING,
            )
        finally:
            stack.manager.signal(signal.SIGCONT)
        yield futures


def _choice(chunks: list[Chunk], index: int) -> tuple[tuple[int, ...], str, tuple[Any, ...], FinishReason | None]:
    own = [each for each in chunks if each.choice_index == index]
    return (
        tuple(token_id for each in own for token_id in each.token_ids),
        "".join(each.text for each in own),
        tuple(position for each in own for position in (*each.prompt_logprobs, *each.logprobs)),
        own[-1].finish_reason,
    )


def is_beginning(answer: Answer, whole: Answer) -> bool:
    """Whether what an aborted request got is how its answer begins; what it ends in may be half a character."""
    return all(
        tokens == whole.choices[index][0][: len(tokens)] and whole.choices[index][1].startswith(text.rstrip("\ufffd"))
        for index, (tokens, text, _, _) in answer.choices.items()
    )


def test_each_of_32_mixed_requests_gets_what_it_gets_alone(tmp_path: Path) -> None:
    model = write_tiny_chat_model(tmp_path / "model")
    with running_stack(tmp_path, "--model", str(model), *SMALL_POOL) as stack:
        asked = plans()
        aborted = {f"r{number}" for number in (0, 2, 5, 13, 20, 27)}
        with stack.client() as client:
            assert client.model().deterministic
            with asked_together(stack, client, asked) as futures:
                for name in sorted(aborted):
                    wait_until(
                        "the abort",
                        lambda name=name: (
                            futures[name].done()
                            or any(each.request_id == name and each.output_tokens > 3 for each in client.requests())
                        ),
                    )
                    client.abort(name)
                together = {name: future.result() for name, future in futures.items()}
            assert stack.runner_samples()["octavo_runner_preemptions_total"] > 0
            stack.assert_nothing_held()
            stack.reset_cache()
            for options in asked:
                name = options["request_id"]
                alone = ask(client, options)
                assert not alone.refused, options
                if name in aborted:
                    assert is_beginning(together[name], alone), options
                else:
                    assert together[name] == alone, options
        stack.assert_nothing_held()


def test_guesses_change_none_of_32_mixed_answers(tmp_path: Path) -> None:
    """All at once in a small pool, with guesses and without."""
    model = write_tiny_chat_model(tmp_path / "model")
    answers: list[list[Answer]] = []
    for guesses in ("0", "5"):
        folder = tmp_path / guesses
        folder.mkdir()
        with running_stack(folder, "--model", str(model), *SMALL_POOL, "--speculative-tokens", guesses) as stack:
            with stack.client() as client, asked_together(stack, client, plans()) as futures:
                answers.append([future.result() for future in futures.values()])
            stack.assert_nothing_held()
            samples = stack.runner_samples()
            assert samples["octavo_runner_preemptions_total"] > 0
            right, all_guesses = (
                samples[f"octavo_runner_{name}_total"] for name in ("accepted_draft_tokens", "draft_tokens")
            )
            assert (0 < right < all_guesses) == (guesses != "0")
    for options, without, guessing in zip(plans(), *answers, strict=True):
        assert without == guessing, options
