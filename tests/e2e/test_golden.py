"""Golden outputs through the public RPC: the same answer whatever happens around a request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from model_runner import native
from model_runner.request import Chunk
from services.client import Client, OctavoError
from tests.e2e.stack import Stack, golden_items, running_stack

ITEMS = golden_items()
TOLERANCE = 1e-3
CLEAR_GAP = 0.02
"""Below this distance of the two best logits, either may win."""

CLEAR_ITEMS = [item for item in ITEMS if min(item["gaps"]) > CLEAR_GAP][:4]


def collect(client: Client, item: dict[str, Any], max_tokens: int = 48) -> list[Chunk]:
    chunks = client.generate(
        item["prompt_token_ids"], max_tokens=max_tokens, ignore_eos=True, logprobs=32, temperature=0.0
    )
    return list(chunks)


def assert_golden(client: Client, item: dict[str, Any], chunks: list[Chunk]) -> None:
    """First log-probabilities within the tolerance, and each clear token equal.

    Where two tokens tie, ours may take the other; then the rest is compared by feeding the recorded tokens.
    """
    assert_first_logits(item, chunks[0])
    ours = [token_id for chunk in chunks for token_id in chunk.token_ids]
    recorded, gaps = item["output_ids"], item["gaps"]
    assert len(ours) == len(recorded)
    parting = next((index for index, pair in enumerate(zip(ours, recorded, strict=True)) if pair[0] != pair[1]), None)
    while parting is not None:
        assert gaps[parting] <= CLEAR_GAP, f"token {parting}: {ours[parting]} for {recorded[parting]}"
        done = parting + 1
        if done == len(recorded):
            return
        prompt = item["prompt_token_ids"] + recorded[:done]
        rest = [
            t for c in client.generate(prompt, max_tokens=len(recorded) - done, ignore_eos=True) for t in c.token_ids
        ]
        ours = recorded[:done] + rest
        parting = next((index for index in range(done, len(recorded)) if ours[index] != recorded[index]), None)


def assert_first_logits(item: dict[str, Any], chunk: Chunk) -> None:
    logits = item["first_logits"]
    expected = {
        token_id: logit - logits["logsumexp"] for token_id, logit in zip(logits["ids"], logits["logits"], strict=True)
    }
    ours = dict(chunk.logprobs[0].top)
    common = expected.keys() & ours.keys()
    # The 32 best of both; ties at the rim may differ.
    assert len(common) >= 30
    for token_id in common:
        assert ours[token_id] == pytest.approx(expected[token_id], abs=TOLERANCE)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("golden")) as stack:
        yield stack


class TestOneStack:
    @pytest.fixture(autouse=True)
    def _nothing_held_afterwards(self, stack: Stack) -> Iterator[None]:
        yield
        stack.assert_nothing_held()

    def test_text_and_chat_become_the_recorded_tokens(self, stack: Stack) -> None:
        with stack.client() as client:
            for item in ITEMS:
                assert client.tokenize(item["prompt"]) == item["prompt_token_ids"]
                if item["kind"] == "chat":
                    assert client.tokenize(chat=item["messages"]) == item["prompt_token_ids"]

    def test_alone_and_cold(self, stack: Stack) -> None:
        stack.reset_cache()
        with stack.client() as client:
            for item in ITEMS:
                chunks = collect(client, item)
                assert_golden(client, item, chunks)

    def test_with_the_prefix_cached(self, stack: Stack) -> None:
        def collect_twice(item: dict[str, Any]) -> list[Chunk]:
            collect(client, item, 1)
            return collect(client, item)

        with stack.client() as client, ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(collect_twice, ITEMS))
            for item, chunks in zip(ITEMS, answers, strict=True):
                whole_blocks = (len(item["prompt_token_ids"]) - 1) // 16 * 16
                assert chunks[-1].usage is not None
                assert chunks[-1].usage.cached_tokens == whole_blocks
                assert_golden(client, item, chunks)

    def test_among_sixteen(self, stack: Stack) -> None:
        stack.reset_cache()
        with stack.client() as client, ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(lambda item: collect(client, item), ITEMS[:16]))
            for item, chunks in zip(ITEMS, answers, strict=False):
                assert_golden(client, item, chunks)

    def test_text_is_the_recorded_text(self, stack: Stack) -> None:
        with stack.client() as client:
            item = ITEMS[0]
            text = "".join(chunk.text for chunk in client.generate(item["prompt"], max_tokens=48, ignore_eos=True))
            assert text == item["text"]

    def test_choices_of_a_greedy_prompt_are_all_the_golden_one(self, stack: Stack) -> None:
        item = ITEMS[14]
        with stack.client() as client:
            chunks = list(client.generate(item["prompt_token_ids"], max_tokens=48, ignore_eos=True, n=3))
            for choice in range(3):
                ours = [t for chunk in chunks if chunk.choice_index == choice for t in chunk.token_ids]
                assert ours == item["output_ids"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--block-size", "8"),
        ("--block-size", "32"),
        ("--prefill-chunk-tokens", "7"),
        ("--attention-backend", "reference"),
        ("--prefix-index", "none"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_other_ways_to_compute_it(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with running_stack(tmp_path, *arguments) as stack, stack.client() as client, ThreadPoolExecutor(16) as threads:
        items = [*ITEMS[:4], ITEMS[6], ITEMS[12], ITEMS[17], ITEMS[19]]
        for item, chunks in zip(items, threads.map(lambda item: collect(client, item), items), strict=True):
            assert_golden(client, item, chunks)
        stack.assert_nothing_held()


@pytest.mark.parametrize(
    ("arguments", "env", "kernels"),
    [
        (("--async-steps", "on", "--num-threads", "2"), {}, "weights held as "),
        (("--weights-dtype", "float32"), {}, "weights held as "),
        ((), {"OCTAVO_NATIVE_ISA": "scalar"}, "scalar, weights held as "),
        ((), {"OCTAVO_NATIVE": "0"}, "kernels: torch; OCTAVO_NATIVE=0 turns the CPU kernels off"),
    ],
    ids=["as the file, steps planned ahead, two threads", "float32", "scalar", "off"],
)
def test_kernels(tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str], kernels: str) -> None:
    with running_stack(tmp_path, *arguments, afresh=True, **env) as stack, stack.client() as client:
        assert stack.runner is not None
        if env.get("OCTAVO_NATIVE") == "0" or native.library() is not None:
            assert kernels in stack.runner.log
        with ThreadPoolExecutor(4) as threads:
            items = [*CLEAR_ITEMS[:2], ITEMS[19]]
            for item, chunks in zip(items, threads.map(lambda item: collect(client, item), items), strict=True):
                assert_golden(client, item, chunks)
        stack.assert_nothing_held()


def test_with_guesses(tmp_path: Path) -> None:
    """Recorded answers that repeat themselves: what the last chunks say of guesses sums up to the metrics."""
    with running_stack(tmp_path, "--speculative-tokens", "6") as stack:
        with stack.client() as client, ThreadPoolExecutor(16) as threads:
            assert client.model().speculative_tokens == 6
            answers = list(threads.map(lambda item: collect(client, item), ITEMS[:16]))
            for item, chunks in zip(ITEMS, answers, strict=False):
                assert_golden(client, item, chunks)
        usages = [chunks[-1].usage for chunks in answers]
        samples = stack.runner_samples()
        drafted, accepted = (
            sum(getattr(usage, name) for usage in usages) for name in ("drafted_tokens", "accepted_tokens")
        )
        assert 0 < accepted < drafted
        assert samples["octavo_runner_draft_tokens_total"] >= drafted
        assert samples["octavo_runner_accepted_draft_tokens_total"] >= accepted
        assert samples["octavo_kv_session_restores_total"] == 0
        stack.assert_nothing_held()


def test_an_index_to_the_token(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--prefix-index", "radix") as stack, stack.client() as client:
        for item in CLEAR_ITEMS:
            assert_golden(client, item, collect(client, item))
            # Of the prompt and 48 tokens, at least 32 of these lie in full blocks: a continuation that ends inside a
            # block finds all but the token that it must compute.
            turn = item["prompt_token_ids"] + item["output_ids"][:20]
            chunks = list(client.generate(turn, max_tokens=28, ignore_eos=True))
            assert [token_id for chunk in chunks for token_id in chunk.token_ids] == item["output_ids"][20:]
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.cached_tokens == len(turn) - 1
        stack.assert_nothing_held()


def test_names_by_xxh3_evicted_by_age(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--block-hash", "xxh3", "--eviction-policy", "lru", "--num-blocks", "26") as stack:
        with stack.client() as client:
            for item in ITEMS[2:7]:
                assert_golden(client, item, collect(client, item))
                assert_golden(client, item, collect(client, item))
            with pytest.raises(OctavoError, match="salt") as caught:
                list(client.generate([504], max_tokens=1, cache_salt="s"))
            assert (caught.value.code, caught.value.reason) == ("INVALID_ARGUMENT", "REFUSED_BY_KV_MANAGER")
        assert stack.pool().totals.evicted_blocks > 0
        stack.assert_nothing_held()


def collect_without_limit(client: Client, item: dict[str, Any]) -> list[Chunk]:
    """As many chunks as are recorded; then the client goes away."""
    chunks = client.generate(item["prompt_token_ids"], ignore_eos=True, logprobs=32, temperature=0.0)
    return list(islice(chunks, len(item["output_ids"])))


def test_in_a_pool_so_small_that_some_are_preempted(tmp_path: Path) -> None:
    # 25 usable blocks are 400 tokens; the longest request takes 192, and all of them more than 400. Without a limit
    # nothing is known of their lengths, so that too many are admitted.
    with running_stack(tmp_path, "--num-blocks", "26", "--scheduling-policy", "priority") as stack:
        with stack.client() as client, ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda item: collect_without_limit(client, item), ITEMS[:8]))
            for item, chunks in zip(ITEMS, answers, strict=False):
                assert_golden(client, item, chunks)
        assert stack.runner_samples()["octavo_runner_preemptions_total"] > 0
        stack.assert_nothing_held()
