"""A chat of the wire as templates take it, and every malformed part with its place."""

from __future__ import annotations

import json

import pytest
from octavo.runner.v1 import model_runner_pb2 as pb

from model_runner.invalid import InvalidRequest
from services.chat import MAX_TOOLS, read_chat
from services.client_request import generate_request

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Warm?", "name": "Ann"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}},
            {"type": "function", "function": {"name": "clock", "arguments": {}}},
        ],
    },
    {"role": "tool", "content": "21", "tool_call_id": "1"},
]


def test_what_a_client_says_is_what_the_template_gets() -> None:
    message = generate_request(
        chat=HISTORY, tools=[TOOL, json.dumps(TOOL)], continue_final_message=True, template_arguments={"x": [1]}
    )
    conversation = read_chat(message.chat)
    assert conversation.messages == HISTORY
    assert conversation.options == {
        "tools": [TOOL, TOOL],
        "continue_final_message": True,
        "template_arguments": {"x": [1]},
    }


def test_arguments_of_a_call_may_be_json_already() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    message = generate_request(chat=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    read = read_chat(message.chat).messages[0]
    assert read == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }


USER = pb.ChatMessage(role="user", content="hi")


@pytest.mark.parametrize(
    ("chat", "path", "why"),
    [
        (pb.Chat(), "chat.messages", "at least 1"),
        (pb.Chat(messages=[USER, {"content": "hi"}]), "chat.messages[1].role", "no role"),
        (pb.Chat(messages=[USER], tools=["{}", "{"]), "chat.tools[1]", "character 1"),
        (pb.Chat(messages=[USER], tools=["[]"]), "chat.tools[0]", "no object"),
        (pb.Chat(messages=[USER], tools=[""]), "chat.tools[0]", "character 0"),
        (pb.Chat(messages=[USER], tools=['{"a": NaN}']), "chat.tools[0]", "NaN"),
        (pb.Chat(messages=[USER], tools=['{"a":' * 100_000]), "chat.tools[0]", "nested too deep"),
        (pb.Chat(messages=[USER], tools=['{"a": 1' + "0" * 5000 + "}"]), "chat.tools[0]", "digits"),
        (pb.Chat(messages=[USER], tools=["{}"] * (MAX_TOOLS + 1)), "chat.tools", "257 tools; the most is 256"),
        (pb.Chat(messages=[USER], template_arguments="7"), "chat.template_arguments", "no object"),
        (pb.Chat(messages=[USER], template_arguments="{} {}"), "chat.template_arguments", "extra data"),
        (pb.Chat(messages=[USER], template_arguments='{"tools": []}'), "chat.template_arguments", "has tools"),
        (pb.Chat(messages=[USER], template_arguments='{"messages": 1}'), "chat.template_arguments", "has messages"),
        (
            pb.Chat(
                messages=[{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}, {"arguments": "{}"}]}]
            ),
            "chat.messages[0].tool_calls[1].name",
            "no name",
        ),
        (
            pb.Chat(messages=[USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x"}]}]),
            "chat.messages[1].tool_calls[0].arguments",
            "character 0",
        ),
    ],
)
def test_a_malformed_part_is_named(chat: pb.Chat, path: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        read_chat(chat)
    assert caught.value.field == path
    assert str(caught.value).endswith(".")
