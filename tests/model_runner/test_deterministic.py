"""A request's tokens and log-probabilities through the engine are the same bits whatever happens around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.speculative import DOCUMENTS
from kvmanager.types import Append
from model_runner.attention import AttentionShape, create_backend
from model_runner.batch import BatchEntry
from model_runner.books import CopyOrder
from model_runner.executor import TorchExecutor
from model_runner.loading import LoadedModel, demo_model_path, load_model
from model_runner.request import PositionLogprobs, SamplingParams
from tests.model_runner.engine_harness import Harness
from tests.model_runner.native_support import INSTRUCTION_SETS, using

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="the CPU kernels are not built")

SIZE = 16
NUM_BLOCKS = 65
PROMPT_TOKENS = 55
OUTPUT_TOKENS = 14
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0, seed=1234)
RULED = SamplingParams(
    temperature=1.0, top_p=0.95, seed=1234, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5
)
Answer = list[tuple[int, PositionLogprobs]]


class HookedExecutor:
    """The real model; before the step of a number something may happen, in the engine's thread."""

    def __init__(self, loaded: LoadedModel, num_blocks: int) -> None:
        c = loaded.config
        cpu = torch.device("cpu")
        shape = AttentionShape(
            c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, SIZE, num_blocks, torch.float32, cpu
        )
        backend = create_backend("cpu", shape)
        backend.poison(range(num_blocks))
        self._executor = TorchExecutor(loaded.model, backend, SIZE, cpu)
        self.before_step: dict[int, Callable[[], object]] = {}
        self.batches: list[list[int]] = []

    def execute(self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder]) -> Tensor:
        self.before_step.pop(len(self.batches), lambda: None)()
        self.batches.append([len(entry.token_ids) for entry in entries])
        return self._executor.execute(entries, copies)


@pytest.fixture(scope="module", params=["auto", "float32", "int8 activations"])
def loaded(request: pytest.FixtureRequest, smollm2: LoadedModel) -> LoadedModel:
    """SmolLM2 with its weights in 4 and 8 bits, in float32, and in 4 and 8 bits with rounded activations."""
    match request.param:
        case "auto":
            return smollm2
        case "float32":
            return load_model(demo_model_path(), weights_dtype="float32")
        case _:
            return load_model(demo_model_path(), activations_dtype="int8")


@pytest.fixture(scope="module")
def prompts(golden_smollm2: list[dict[str, Any]]) -> list[list[int]]:
    """Eight prompts of other lengths; the first is the one that is looked at."""
    texts = [item["prompt_token_ids"] + item["output_ids"] for item in golden_smollm2]
    others = [texts[number + 1][: 7 + 9 * number] for number in range(7)]
    return [(texts[0] * PROMPT_TOKENS)[:PROMPT_TOKENS], *others]


@pytest.fixture(scope="module", params=[GREEDY, DRAWN, RULED], ids=["greedy", "drawn", "ruled"])
def sampling(request: pytest.FixtureRequest) -> SamplingParams:
    return request.param


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, prompts: list[list[int]], sampling: SamplingParams) -> Answer:
    with engine(loaded) as harness:
        ask(harness, "alone", prompts[0], sampling)
        answer = answer_of(harness, "alone")
    assert len(answer) == OUTPUT_TOKENS
    return answer


def engine(loaded: LoadedModel, **options: Any) -> Harness:
    executor = HookedExecutor(loaded, NUM_BLOCKS)
    return Harness(num_blocks=NUM_BLOCKS, block_size=SIZE, executor=executor, tokenizer=loaded.tokenizer, **options)


def ask(harness: Harness, name: str, prompt: list[int], sampling: SamplingParams, tokens: int = OUTPUT_TOKENS) -> None:
    harness.submit(name, prompt, tokens, sampling=sampling, ignore_eos=True, logprobs=3)


def answer_of(harness: Harness, name: str) -> Answer:
    chunks = harness.wait(name)
    return [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]


def test_the_draws_are_not_the_likeliest_tokens(loaded: LoadedModel, prompts: list[list[int]]) -> None:
    """Or else the tests at temperature 1 would say no more than those at 0."""
    with engine(loaded) as harness:
        for name, sampling in (("greedy", GREEDY), ("drawn", DRAWN), ("ruled", RULED)):
            ask(harness, name, prompts[0], sampling)
        assert len({tuple(harness.tokens(name)) for name in ("greedy", "drawn", "ruled")}) == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_alone_with_any_number_of_threads(
    loaded: LoadedModel, prompts: list[list[int]], sampling: SamplingParams, alone: Answer, threads: int
) -> None:
    with using(threads=threads), engine(loaded) as harness:
        ask(harness, "again", prompts[0], sampling)
        assert answer_of(harness, "again") == alone


@pytest.mark.parametrize("chunk", [0, 16])
def test_among_others(
    loaded: LoadedModel, prompts: list[list[int]], sampling: SamplingParams, alone: Answer, chunk: int
) -> None:
    """With prompts computed whole, and in chunks of 16."""
    with engine(loaded, prefill_chunk_tokens=chunk) as harness:
        # Prompts beside decodes too: some come before, some later.
        for number, prompt in enumerate(prompts[1:4]):
            ask(harness, f"before{number}", prompt, SamplingParams(1.0, seed=number))
        ask(harness, "looked at", prompts[0], sampling)
        for number, prompt in enumerate(prompts[4:]):
            ask(harness, f"after{number}", prompt, SamplingParams(0.7, top_p=0.9, seed=number))
        assert answer_of(harness, "looked at") == alone
        for other in [*(f"before{number}" for number in range(3)), *(f"after{number}" for number in range(4))]:
            harness.wait(other)
        assert max(map(len, harness.executor.batches)) == 8
        assert (max(max(batch) for batch in harness.executor.batches) == 16) == (chunk == 16)


def test_alone_in_chunks(
    loaded: LoadedModel, prompts: list[list[int]], sampling: SamplingParams, alone: Answer
) -> None:
    with engine(loaded, prefill_chunk_tokens=16) as harness:
        ask(harness, "chunked", prompts[0], sampling)
        assert answer_of(harness, "chunked") == alone
        assert harness.executor.batches[:4] == [[16], [16], [16], [7]]


def test_with_a_cached_prefix(
    loaded: LoadedModel, prompts: list[list[int]], sampling: SamplingParams, alone: Answer
) -> None:
    with engine(loaded) as harness:
        # Cached by a request that goes on in another way, and computed in other chunks.
        ask(harness, "first", [*prompts[0][:50], 1, 2, 3], GREEDY, tokens=4)
        harness.wait("first")
        ask(harness, "second", prompts[0], sampling)
        assert answer_of(harness, "second") == alone
        assert harness.last("second").usage.cached_tokens == 48


def test_with_guesses(loaded: LoadedModel, prompts: list[list[int]], sampling: SamplingParams, alone: Answer) -> None:
    """Alone, where all guesses may be right, for the prompt repeats itself; and beside one that guesses wrongly too."""
    with engine(loaded, speculative_tokens=6) as harness:
        ask(harness, "first", prompts[0], sampling)
        assert answer_of(harness, "first") == alone
        # Greedy, so that it repeats itself whatever the others do: penalties keep an answer from that.
        ask(harness, "other", prompts[-1], GREEDY, tokens=40)
        ask(harness, "second", prompts[0], sampling)
        assert answer_of(harness, "second") == alone
        usages = [harness.last(name).usage for name in ("first", "other", "second")]
        accepted, drafted = sum(each.accepted_tokens for each in usages), sum(each.drafted_tokens for each in usages)
        assert 0 < accepted < drafted


def test_after_a_preemption(
    loaded: LoadedModel, prompts: list[list[int]], sampling: SamplingParams, alone: Answer
) -> None:
    with engine(loaded) as harness:
        # Somebody takes whatever is left of the pool, and gives it back when the request has had to wait.
        harness.executor.before_step |= {
            2: lambda: ask(harness, "looked at", prompts[0], sampling),
            5: lambda: harness.pool.allocate("other/0", tokens_for(harness.pool.occupancy().free_blocks)),
            25: lambda: harness.pool.free([Append("other/0")]),
        }
        ask(harness, "older", prompts[1], GREEDY, tokens=40)
        harness.wait("older")
        assert answer_of(harness, "looked at") == alone
        assert harness.last("looked at").usage.preemptions == 1


def tokens_for(blocks: int) -> list[int]:
    return [5] * (blocks * SIZE)


@pytest.mark.parametrize("document", ["lighthouse", "printer"])
def test_a_summary_takes_fewer_steps_than_it_has_tokens(smollm2: LoadedModel, document: str) -> None:
    """The answer is the one without guesses, and each step of the model brings at least 1.3 tokens of it."""
    tokenizer = smollm2.tokenizer
    text = json.loads(DOCUMENTS.read_text(encoding="utf-8"))[document]
    chat = [{"role": "user", "content": f"Summarize the following text in a few sentences.\n\n{text}"}]
    prompt = tokenizer.encode(tokenizer.render_chat(chat), add_special_tokens=False)
    answers = []
    for guesses in (0, 8):
        with engine(smollm2, speculative_tokens=guesses) as harness:
            harness.submit("a", prompt, 64)
            answers.append(harness.tokens("a"))
            steps = len(harness.executor.batches)
    assert answers[0] == answers[1]
    assert steps <= len(answers[1]) / 1.3
