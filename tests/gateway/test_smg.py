"""A real smg before two pods, asked by the openai client: answers, aborts, routing by prefix, and a pod that dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.e2e.stack import PATIENCE_SECONDS, SERVING, assert_kill, golden_items, health_of, wait_until
from tests.gateway.needed import need

need("smg", "smg_grpc_proto", "openai")

import openai  # noqa: E402

from tests.gateway.pods import MODEL, Pods, running_pods  # noqa: E402

CONVERSATIONS = 100
BLOCK = 16
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
CLEAR_GAP = 0.02
TEXTS = [item for item in golden_items() if item["kind"] == "text" and min(item["gaps"]) > CLEAR_GAP][1:3]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with running_pods(tmp_path_factory.mktemp("pods")) as running:
        yield running


def test_health_and_reflection_tell_of_the_second_contract(pods: Pods) -> None:
    address = pods.stacks[0].runner_address
    assert health_of(address, "vllm.grpc.engine.VllmEngine") == SERVING
    with grpc.insecure_channel(address) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"octavo.runner.v1.ModelRunnerService", "vllm.grpc.engine.VllmEngine"} <= set(services)


@pytest.mark.parametrize("item", TEXTS, ids=lambda each: each["prompt"])
def test_a_completion_is_the_recorded_one(pods: Pods, item: dict[str, Any]) -> None:
    answer = pods.client().completions.create(
        model=MODEL, prompt=item["prompt"], max_tokens=48, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == item["text"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(item["prompt_token_ids"]), 48)


def test_a_streamed_chat_is_what_the_runner_itself_answers(pods: Pods) -> None:
    chunks = list(
        pods.client().chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    with pods.stacks[0].client() as client:
        ours = list(client.generate(chat=QUESTION, max_tokens=40))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "".join(chunk.text for chunk in ours)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (ours[-1].usage.prompt_tokens, 40)


def test_two_choices_are_those_of_the_runner(pods: Pods) -> None:
    drawn = {"temperature": 0.9, "seed": 7, "max_tokens": 16}
    answer = pods.client().chat.completions.create(model=MODEL, messages=QUESTION, n=2, **drawn)
    with pods.stacks[0].client() as client:
        ours = list(client.generate(chat=QUESTION, n=2, **drawn))
    texts = ["".join(chunk.text for chunk in ours if chunk.choice_index == index) for index in (0, 1)]
    assert texts[0] != texts[1]
    assert [choice.message.content for choice in answer.choices] == texts
    # The prompt is computed, and counted, once.
    assert answer.usage.prompt_tokens == ours[-1].usage.prompt_tokens
    assert answer.usage.completion_tokens == ours[-1].usage.output_tokens


def test_log_probabilities_are_those_of_the_runner(pods: Pods) -> None:
    answer = pods.client().chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    with pods.stacks[0].client() as client:
        ours = [
            position
            for chunk in client.generate(chat=QUESTION, max_tokens=5, logprobs=3)
            for position in chunk.logprobs
        ]
    theirs = answer.choices[0].logprobs.content
    assert [each.logprob for each in theirs] == pytest.approx([each.logprob for each in ours], abs=1e-5)
    assert [[top.logprob for top in each.top_logprobs] for each in theirs] == [
        pytest.approx([logprob for _, logprob in each.top], abs=1e-5) for each in ours
    ]


def test_a_stop_string_ends_the_answer_in_the_engine(pods: Pods) -> None:
    before = {stack: stack.runner_samples()["octavo_runner_generation_tokens_total"] for stack in pods.stacks}
    answer = pods.client().chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=200, temperature=0, stop=["light"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "The answer to this question lies in the intricate dance of "
    made = sum(stack.runner_samples()["octavo_runner_generation_tokens_total"] - before[stack] for stack in pods.stacks)
    assert made == answer.usage.completion_tokens < 20


def test_an_answer_of_a_given_form(pods: Pods) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = pods.client().chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=30,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content)["ok"] in (True, False)


def test_a_client_that_leaves_ends_its_request(pods: Pods) -> None:
    stream = pods.client().chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    for stack in pods.stacks:
        stack.assert_nothing_held()
    assert sum(_finished(stack, "abort") for stack in pods.stacks) == 1


def test_what_cannot_be_is_refused_with_the_runner_s_sentence(pods: Pods) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        pods.client().completions.create(model=MODEL, prompt="a", temperature=200.0)


def test_a_conversation_goes_on_where_its_prefix_is(pods: Pods) -> None:
    # Few at a time: a gateway rather goes to another pod than to one that has much more to do.
    with ThreadPoolExecutor(2) as users:
        first = list(users.map(partial(_conversation, pods, turns=1), range(CONVERSATIONS)))
        pods.wait_for_events()
        second = list(users.map(partial(_conversation, pods, turns=2), range(CONVERSATIONS)))
    found = [
        later.prompt_tokens_details.cached_tokens >= earlier.prompt_tokens // BLOCK * BLOCK
        for earlier, later in zip(first, second, strict=True)
    ]
    assert sum(found) == CONVERSATIONS, pods.decisions()
    # Both pods have had their share, so that chance alone would not have found them all.
    assert all(_finished(stack, "length") > CONVERSATIONS // 10 for stack in pods.stacks)


def test_pods_at_rest_say_so_under_vllm_s_names(pods: Pods) -> None:
    for stack in pods.stacks:
        stack.assert_nothing_held()
        samples = {name.partition("{")[0]: value for name, value in stack.runner_samples().items()}
        assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
        assert samples["vllm:kv_cache_usage_perc"] == 0


def test_a_pod_that_is_killed_loses_no_request_that_had_not_begun(pods: Pods) -> None:
    victim = pods.stacks[1]
    failed_before_the_first_token: list[str] = []
    broken: list[str] = []

    def ask(number: int) -> None:
        tokens = 0
        try:
            for chunk in pods.client().completions.create(
                model=MODEL,
                prompt=f"Story {number}: once upon a time",
                max_tokens=20,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                tokens += bool(chunk.choices and chunk.choices[0].text)
        except Exception as error:
            (broken if tokens else failed_before_the_first_token).append(str(error))

    with ThreadPoolExecutor(8) as users, victim.client() as client:
        asked = [users.submit(ask, number) for number in range(40)]
        wait_until("streams of the pod", lambda: sum(live.output_tokens > 3 for live in client.requests()) > 1)
        assert_kill(victim.runner)
        for each in asked:
            each.result(PATIENCE_SECONDS)
    assert failed_before_the_first_token == []
    # Those that were streaming then are cut off, since nobody has the rest.
    assert broken


def _conversation(pods: Pods, number: int, *, turns: int) -> Any:
    """The usage of a conversation's latest request. Each begins differently from its first block on."""
    system = f"Number {number * 7919 % 1000}."
    messages: list[dict[str, str]] = [{"role": "system", "content": system}, {"role": "user", "content": "Hello!"}]
    if turns == 2:
        messages += [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "What?"}]
    answer = pods.client().chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.usage


def _finished(stack: Any, reason: str) -> float:
    return float(stack.runner_samples().get(f'octavo_runner_requests_finished_total{{reason="{reason}"}}', 0.0))
