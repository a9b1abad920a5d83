"""Bad input at a live server: the right code, a sentence with the numbers, and no effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from octavo.kv.v1 import kv_manager_pb2 as kv_pb
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc

from services.channels import open_channel
from services.client import Client, OctavoError
from services.errors import rpc_error_details
from tests.e2e.stack import PATIENCE_SECONDS, Stack, running_stack

USABLE_BLOCKS = 20
CAPACITY = USABLE_BLOCKS * 16


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("bad")
    with running_stack(directory, "--num-blocks", str(USABLE_BLOCKS + 1), "--max-sequences", "8") as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    """A client; after each test nothing is held and the server still answers."""
    with stack.client() as client:
        yield client
        assert len(list(client.generate([504], max_tokens=1))) == 1
    stack.assert_nothing_held()


QUESTION = [{"role": "user", "content": "hi"}]


def text_of_size(count: int) -> str:
    return "a" * count


BAD_REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty text": ({"prompt": ""}, "text", "at least 1"),
    "no token ids": ({"prompt": []}, "token_ids.ids", "at least 1"),
    "too long for the pool": ({"prompt": [504] * (CAPACITY + 1)}, "token_ids.ids", f"{CAPACITY + 1} .* {CAPACITY}"),
    "far too long": ({"prompt": [504] * 100_000}, "token_ids.ids", f"100000 .* {CAPACITY}"),
    "token outside the vocabulary": ({"prompt": [1, 49152]}, "token_ids.ids", "49152.*49151"),
    "largest token id": ({"prompt": [2**32 - 1]}, "token_ids.ids", "4294967295"),
    "no messages": ({"chat": []}, "chat.messages", "at least 1"),
    "negative temperature": ({"temperature": -0.5}, "sampling.temperature", "-0.5"),
    "NaN temperature": ({"temperature": math.nan}, "sampling.temperature", "nan"),
    "infinite temperature": ({"temperature": math.inf}, "sampling.temperature", "inf"),
    "huge temperature": ({"temperature": 1e30}, "sampling.temperature", "100"),
    "top_p 0": ({"top_p": 0.0}, "sampling.top_p", "0"),
    "top_p above 1": ({"top_p": 1.5}, "sampling.top_p", "1.5"),
    "NaN top_p": ({"top_p": math.nan}, "sampling.top_p", "nan"),
    "negative top_k": ({"top_k": -1}, "sampling.top_k", "-1"),
    "min_p above 1": ({"min_p": 2.0}, "sampling.min_p", "2"),
    "NaN min_p": ({"min_p": math.nan}, "sampling.min_p", "nan"),
    "repetition_penalty 0": ({"repetition_penalty": 0.0}, "sampling.repetition_penalty", "above 0"),
    "presence_penalty above 2": ({"presence_penalty": 3.0}, "sampling.presence_penalty", "3.0.*2"),
    "NaN frequency_penalty": ({"frequency_penalty": math.nan}, "sampling.frequency_penalty", "nan"),
    "a bias of no token": ({"logit_bias": {49_152: 1.0}}, "sampling.logit_bias", "49152.*49151"),
    "an infinite bias": ({"logit_bias": {5: math.inf}}, "sampling.logit_bias", "token 5 is inf"),
    "no allowed token": ({"allowed_token_ids": []}, "sampling.allowed_token_ids", "empty"),
    "an empty bad word": ({"bad_words": ["a", ""]}, "sampling.bad_words", "Bad word 1 .* 0 bytes"),
    "300 bad words": ({"bad_words": ["a"] * 300}, "sampling.bad_words", "300.*256"),
    "min_tokens above max_tokens": ({"min_tokens": 5}, "stop.min_tokens", "5.*4"),
    "negative min_tokens": ({"min_tokens": -1}, "stop.min_tokens", "-1"),
    "too many prompt_logprobs": ({"prompt_logprobs": 101}, "prompt_logprobs", "101.*100"),
    "max_tokens 0": ({"max_tokens": 0}, "stop.max_tokens", "0"),
    "negative max_tokens": ({"max_tokens": -5}, "stop.max_tokens", "-5"),
    "10,000 stop strings": ({"stop": [f"s{n}" for n in range(10_000)]}, "stop.stop_strings", "10000.*64"),
    "empty stop string": ({"stop": [""]}, "stop.stop_strings", "empty"),
    "huge stop string": ({"stop": ["x" * 5000]}, "stop.stop_strings", "5000.*1024"),
    "stop token outside the vocabulary": ({"stop_token_ids": [50_000]}, "stop.stop_token_ids", "50000"),
    "negative n": ({"n": -1}, "num_choices", "-1"),
    "more choices than may run": ({"n": 9}, "num_choices", "9.*8"),
    "too many logprobs": ({"logprobs": 101}, "logprobs", "101.*100"),
    "negative logprobs": ({"logprobs": -1}, "logprobs", "-1"),
    "long salt": ({"cache_salt": "s" * 129}, "cache_salt", "129"),
    "priority above 100": ({"priority": 101}, "retention.priority", "101.*100"),
    "negative priority": ({"priority": -1}, "retention.priority", "-1"),
    "queue priority above 100": ({"queue_priority": 101}, "priority", "101.*100"),
    "a pin for longer than a week": ({"pin_seconds": 604801}, "retention.pin_seconds", "604801.*604800"),
    "NaN seconds": ({"pin_seconds": math.nan}, "retention.pin_seconds", "nan"),
    "long request id": ({"request_id": "r" * 129}, "request_id", "129"),
    "no JSON schema": ({"json_schema": "{"}, "structured_output.json_schema", "character 1"),
    "a JSON schema of no known type": ({"json_schema": {"type": "x"}}, "structured_output.json_schema", "type: x"),
    "a huge schema": (
        {"json_schema": '{"a": "' + "x" * 65_536 + '"}'},
        "structured_output.json_schema",
        "65545.*65536",
    ),
    "no regular expression": ({"regex": "("}, "structured_output.regex", "unclosed group"),
    "an empty regular expression": ({"regex": ""}, "structured_output.regex", "empty text"),
    "no grammar": ({"grammar": "begin: x"}, "structured_output.grammar", "no start rule"),
    "no choices": ({"choices": []}, "structured_output.choices", "at least 1"),
    "an empty choice": ({"choices": ["a", ""]}, "structured_output.choices", "Choice 1 .* empty"),
    "1,025 choices": ({"choices": [f"c{n}" for n in range(1025)]}, "structured_output.choices", "1025.*1024"),
    "a tool that is no object": ({"chat": QUESTION, "tools": ["{}", "[]"]}, "chat.tools[1]", "no object"),
    "a call of nothing": (
        {"chat": [{"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": {}}}]}]},
        "chat.messages[0].tool_calls[0].name",
        "no name",
    ),
    "variables that the chat has": (
        {"chat": QUESTION, "template_arguments": {"messages": []}},
        "chat.template_arguments",
        "has messages",
    ),
    "unprintable request id": ({"request_id": "a\u200bb"}, "request_id", "U\\+200B"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_with_the_numbers(client: Client, name: str) -> None:
    options, field, sentence = BAD_REQUESTS[name]
    prompt = options.get("prompt", None if "chat" in options else [504])
    rest = {key: value for key, value in options.items() if key != "prompt"}
    with pytest.raises(OctavoError, match=f"(?s){sentence}") as caught:
        list(client.generate(prompt, **{"max_tokens": 4, **rest}))
    assert (caught.value.code, caught.value.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    details = rpc_error_details(caught.value.__context__)
    bad = next(each for each in details if isinstance(each, error_details_pb2.BadRequest))
    assert bad.field_violations[0].field == field


@pytest.mark.parametrize(
    ("structure", "field", "sentence"),
    [
        (pb.StructuredOutput(), "structured_output", "has no form"),
        (pb.StructuredOutput(json_object=False), "structured_output.json_object", "json_object is false"),
    ],
)
def test_a_form_that_asks_for_nothing(
    client: Client, structure: pb.StructuredOutput, field: str, sentence: str
) -> None:
    request = pb.GenerateRequest(text="x", structured_output=structure)
    with pytest.raises(OctavoError, match=sentence) as caught:
        list(client.stream(request))
    assert caught.value.code == "INVALID_ARGUMENT"
    details = rpc_error_details(caught.value.__context__)
    bad = next(each for each in details if isinstance(each, error_details_pb2.BadRequest))
    assert bad.field_violations[0].field == field


def test_tools_for_a_model_that_knows_none(client: Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(OctavoError, match="knows no tools") as caught:
        list(client.generate(chat=QUESTION, tools=[tool]))
    assert (caught.value.code, caught.value.reason) == ("INVALID_ARGUMENT", "CHAT_TEMPLATE")
    with pytest.raises(OctavoError, match="knows no tools"):
        client.tokenize(chat=QUESTION, tools=[tool])


def test_a_prompt_that_fits_exactly_runs(client: Client) -> None:
    chunks = list(client.generate([504] * CAPACITY))
    assert len(chunks) == 1
    assert chunks[0].finish_reason is not None
    assert chunks[0].finish_reason.value == "length"


def test_more_pins_than_may_be_are_refused_at_once(stack: Stack, client: Client) -> None:
    most = USABLE_BLOCKS // 2
    with pytest.raises(OctavoError, match=f"{most + 1} blocks .* 0 are already, and at most {most} may be") as caught:
        list(client.generate([504] * 16 * (most + 1), max_tokens=1, pin_seconds=60))
    assert (caught.value.code, caught.value.reason) == ("RESOURCE_EXHAUSTED", "PINS_EXHAUSTED")
    assert stack.pool().occupancy.pinned_blocks == 0


def test_who_outgrows_a_quota_ends_with_the_numbers(stack: Stack, client: Client) -> None:
    with stack.kv() as kv:
        kv.SetQuota(kv_pb.SetQuotaRequest(salt="small", max_blocks=2), timeout=10)
        stream = client.generate([504] * 20, cache_salt="small", ignore_eos=True)
        with pytest.raises(OctavoError, match="the quota of its salt is 2 usable: at most 32 tokens fit") as caught:
            list(stream)
        assert (caught.value.code, caught.value.reason) == ("INVALID_ARGUMENT", "REFUSED_BY_KV_MANAGER")
        kv.SetQuota(kv_pb.SetQuotaRequest(salt="small", max_blocks=0), timeout=10)


def test_a_request_without_a_prompt(stack: Stack, client: Client) -> None:
    with open_channel(stack.runner_address) as channel:
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="no prompt") as caught:
            list(stub.Generate(pb.GenerateRequest(), timeout=PATIENCE_SECONDS))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unknown_model(client: Client) -> None:
    with pytest.raises(OctavoError, match="'gpt-9' is not served here; the model is 'SmolLM2-135M-Instruct'") as caught:
        list(client.generate([1], model="gpt-9"))
    assert (caught.value.code, caught.value.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")
    assert len(list(client.generate([1], model="SmolLM2-135M-Instruct", max_tokens=1))) == 1


def test_a_message_of_100_mb(client: Client) -> None:
    with pytest.raises(OctavoError, match="16777216") as caught:
        list(client.generate(text_of_size(100_000_000)))
    assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_a_text_that_must_be_too_long_is_refused_unread(client: Client) -> None:
    with pytest.raises(OctavoError, match=r"10000000 bytes, and a sequence here holds at most 320 tokens") as caught:
        list(client.generate(text_of_size(10_000_000)))
    assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(OctavoError, match="10000000 bytes") as caught:
        client.tokenize(text_of_size(10_000_000))
    assert caught.value.code == "INVALID_ARGUMENT"


def test_names_that_take_much_room_on_the_wire(stack: Stack, client: Client) -> None:
    name = "\N{GRINNING FACE}" * 1100
    with pytest.raises(OctavoError) as caught:
        list(client.generate([1], model=name))
    assert (caught.value.code, caught.value.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")
    with stack.kv() as stub, pytest.raises(grpc.RpcError) as refused:
        stub.GetBlockTable(kv_pb.GetBlockTableRequest(sequence_id=name))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_name_that_somebody_took_by_hand(stack: Stack, client: Client) -> None:
    with stack.kv() as stub:
        stub.Allocate(kv_pb.AllocateRequest(sequence_id="taken/0", token_ids=[1]))
        with pytest.raises(OctavoError, match="'taken/0' lives already") as caught:
            list(client.generate([1], request_id="taken", max_tokens=1))
        assert caught.value.code == "ALREADY_EXISTS"
        stub.Free(kv_pb.FreeRequest(sequences=[kv_pb.SequenceAppend(sequence_id="taken/0")]))


def test_the_engines_sequences_are_not_for_others(stack: Stack, client: Client) -> None:
    stream = client.generate([504] * 20, request_id="mine", ignore_eos=True)
    next(stream)
    mine = kv_pb.SequenceAppend(sequence_id="mine/0", token_ids=[1] * 4)
    with stack.kv() as stub:
        for verb, request in (
            (stub.Free, kv_pb.FreeRequest(sequences=[mine])),
            (stub.Append, kv_pb.AppendRequest(appends=[mine])),
            (stub.Fork, kv_pb.ForkRequest(parent_id="mine/0", child_ids=["theirs"])),
        ):
            with pytest.raises(grpc.RpcError, match="'mine/0' belongs to the runner") as caught:
                verb(request)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    stream.close()


def test_a_live_request_id(client: Client) -> None:
    first = client.generate([504], request_id="twice", ignore_eos=True)
    next(first)
    with pytest.raises(OctavoError, match="'twice' is live already") as caught:
        list(client.generate([504], request_id="twice", max_tokens=1))
    assert caught.value.code == "ALREADY_EXISTS"
    first.close()


def test_detokenize_and_abort(client: Client) -> None:
    with pytest.raises(OctavoError, match="Token id 60000 at index 1") as caught:
        client.detokenize([1, 60_000])
    assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(OctavoError, match="at least one"):
        client.abort()
    assert client.abort("nobody") == (0, 1)


def _calls() -> dict[str, tuple[Callable[[Any], Any], grpc.StatusCode, str]]:
    spec = kv_pb.PoolSpec
    return {
        "unknown pool": (
            lambda s: s.GetPool(kv_pb.GetPoolRequest(pool_id="nope")),
            grpc.StatusCode.NOT_FOUND,
            "'nope'",
        ),
        "unknown sequence": (
            lambda s: s.GetBlockTable(kv_pb.GetBlockTableRequest(sequence_id="nope")),
            grpc.StatusCode.NOT_FOUND,
            "'nope'",
        ),
        "fork of an unknown parent": (
            lambda s: s.Fork(kv_pb.ForkRequest(parent_id="nope", child_ids=["c"])),
            grpc.StatusCode.NOT_FOUND,
            "'nope'",
        ),
        "never fits": (
            lambda s: s.Allocate(kv_pb.AllocateRequest(sequence_id="x", token_ids=[1] * (CAPACITY + 1))),
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{CAPACITY + 1} tokens needs 21 blocks",
        ),
        "pools of 0 and 1 blocks": (
            lambda s: s.OpenPool(
                kv_pb.OpenPoolRequest(pool_id="p", runner_id="r", spec=spec(num_blocks=1, block_size=16))
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "not 1",
        ),
        **{
            f"block size {size}": (
                lambda s, size=size: s.OpenPool(
                    kv_pb.OpenPoolRequest(pool_id="p", runner_id="r", spec=spec(num_blocks=9, block_size=size))
                ),
                grpc.StatusCode.INVALID_ARGUMENT,
                f"not {size}",
            )
            for size in (0, -1, 3, 2**31)
        },
        "other facts": (
            lambda s: s.OpenPool(kv_pb.OpenPoolRequest(runner_id="r", spec=spec(num_blocks=9, block_size=8))),
            grpc.StatusCode.FAILED_PRECONDITION,
            "block_size 16 .asked for 8",
        ),
        "stale epoch": (
            lambda s: s.Allocate(kv_pb.AllocateRequest(epoch=1, sequence_id="x", token_ids=[1])),
            grpc.StatusCode.FAILED_PRECONDITION,
            "epoch 1",
        ),
    }


@pytest.mark.parametrize("name", _calls())
def test_the_kv_manager_refuses(stack: Stack, client: Client, name: str) -> None:
    call, code, sentence = _calls()[name]
    with stack.kv() as stub, pytest.raises(grpc.RpcError, match=sentence) as caught:
        call(stub)
    assert caught.value.code() is code
    assert any(isinstance(each, error_details_pb2.ErrorInfo) for each in rpc_error_details(caught.value))


def test_an_id_that_exists_and_one_that_is_unknown(stack: Stack, client: Client) -> None:
    with stack.kv() as stub:
        request = kv_pb.AllocateRequest(sequence_id="by hand", token_ids=[1, 2, 3])
        stub.Allocate(request)
        with pytest.raises(grpc.RpcError, match="'by hand' lives already") as caught:
            stub.Allocate(request)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        before = stub.GetPool(kv_pb.GetPoolRequest()).totals.unknown_frees
        ids = [kv_pb.SequenceAppend(sequence_id=name) for name in ("by hand", "nobody")]
        answer = stub.Free(kv_pb.FreeRequest(sequences=ids))
        assert (answer.freed_sequences, answer.unknown_sequences) == (1, 1)
        assert stub.GetPool(kv_pb.GetPoolRequest()).totals.unknown_frees == before + 1
