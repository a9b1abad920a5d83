"""A Chat of the wire as a chat template takes it; what is malformed is refused with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.runner.v1 import model_runner_pb2 as pb

from model_runner.chat_template import RESERVED
from model_runner.invalid import InvalidRequest
from model_runner.json_text import NotJson, read_json_object

MAX_TOOLS = 256


@dataclass(frozen=True, slots=True)
class Conversation:
    """What ChatTemplate.render() takes: messages, and the rest by name."""

    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


def chat_size(chat: pb.Chat) -> int:
    """About how many characters there will be to tokenise."""
    said = sum(len(each.content) for each in chat.messages)
    called = sum(len(call.arguments) for each in chat.messages for call in each.tool_calls)
    return said + called + sum(map(len, chat.tools)) + len(chat.template_arguments)


def read_chat(chat: pb.Chat) -> Conversation:
    """Raises InvalidRequest with the path of the part at fault, as in chat.tools[1]."""
    if not chat.messages:
        raise InvalidRequest("chat.messages", "The chat has no messages; give at least 1.")
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidRequest("chat.tools", f"The chat has {len(chat.tools)} tools; the most is {MAX_TOOLS}.")
    options: dict[str, Any] = {
        "tools": [_read_object(f"chat.tools[{index}]", tool) for index, tool in enumerate(chat.tools)],
        "continue_final_message": chat.continue_final_message,
        "template_arguments": _read_arguments(chat.template_arguments),
    }
    messages = [_read_message(f"chat.messages[{index}]", each) for index, each in enumerate(chat.messages)]
    return Conversation(messages, options)


def _read_message(path: str, message: pb.ChatMessage) -> dict[str, Any]:
    """Keys that have no value are left out: templates ask whether they are there."""
    if not message.role:
        raise InvalidRequest(f"{path}.role", f"{path} has no role; say who speaks.")
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        read["name"] = message.name
    if message.tool_calls:
        read["tool_calls"] = [
            _read_call(f"{path}.tool_calls[{index}]", call) for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        read["tool_call_id"] = message.tool_call_id
    return read


def _read_call(path: str, call: pb.ToolCall) -> dict[str, Any]:
    if not call.name:
        raise InvalidRequest(f"{path}.name", f"{path} has no name; name the tool that is called.")
    function = {"name": call.name, "arguments": _read_object(f"{path}.arguments", call.arguments)}
    read = {"type": "function", "function": function}
    return {"id": call.id, **read} if call.id else read


def _read_arguments(text: str) -> dict[str, Any]:
    path = "chat.template_arguments"
    arguments = _read_object(path, text) if text else {}
    if taken := sorted(RESERVED & arguments.keys()):
        raise InvalidRequest(path, f"{path} has {taken[0]}, which the chat says by itself; leave it out.")
    return arguments


def _read_object(path: str, text: str) -> dict[str, Any]:
    try:
        return read_json_object(text)
    except NotJson as error:
        raise InvalidRequest(path, f"{path} must be a JSON object: {error}.") from None
