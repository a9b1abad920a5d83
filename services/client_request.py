"""The messages that a client sends, from Python's own types."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from octavo.runner.v1 import model_runner_pb2 as pb

Prompt = str | Sequence[int] | None
ChatMessages = Sequence[Mapping[str, Any]]
"""OpenAI's form: role and content, and where they are needed name, tool_calls and tool_call_id."""


class ChatOptions(TypedDict, total=False):
    """What the chat template gets besides the messages. A tool and template_arguments may be Python objects or JSON."""

    tools: Sequence[Mapping[str, Any] | str]
    continue_final_message: bool
    template_arguments: Mapping[str, Any] | str


class GenerateOptions(ChatOptions, total=False):
    """How an answer is made; what is left out or None has no effect. The .proto file says what each does.

    priority is that of the retention, queue_priority the request's own. beam_width begins a beam search. A schema may
    be a Python object or JSON.
    """

    chat: ChatMessages | None
    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    stop: Sequence[str]
    include_stop_string: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    best_of: int
    beam_width: int | None
    length_penalty: float | None
    early_stopping: Literal["first", "never"] | None
    json_schema: Mapping[str, Any] | str | None
    json_object: bool | None
    regex: str | None
    grammar: str | None
    choices: Sequence[str] | None
    logprobs: int | None
    prompt_logprobs: int | None
    request_id: str
    model: str
    skip_cache_read: bool
    skip_cache_write: bool
    cache_salt: str
    tenant: str
    priority: int
    pin_seconds: float
    queue_priority: int


_OPTIONS = ChatOptions.__annotations__.keys() | GenerateOptions.__annotations__.keys()
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
)
_STOP = {
    "max_tokens": "max_tokens",
    "stop": "stop_strings",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_tokens",
    "include_stop_string": "include_stop_string",
}
_RETENTION = ("priority", "pin_seconds")
_REST = {
    "n": "num_choices",
    "best_of": "best_of",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "request_id": "request_id",
    "model": "model",
    "skip_cache_read": "skip_cache_read",
    "skip_cache_write": "skip_cache_write",
    "cache_salt": "cache_salt",
    "tenant": "tenant",
    "queue_priority": "priority",
}
_EARLY_STOPPING = {"first": pb.EARLY_STOPPING_FIRST, "never": pb.EARLY_STOPPING_NEVER}
_FORMS = ("json_schema", "json_object", "regex", "grammar", "choices")


def generate_request(prompt: Prompt = None, **options: Unpack[GenerateOptions]) -> pb.GenerateRequest:
    """The message for a prompt (text or token ids) or a chat ({"role", "content"} each).

    Raises ValueError when there is not exactly one of prompt and chat, or a value that no message can carry, and
    TypeError for an option that does not exist.
    """
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
    chat = options.get("chat")
    if (prompt is None) == (chat is None):
        raise ValueError("give either a prompt or a chat")
    given = {name: value for name, value in options.items() if value is not None}
    message = pb.GenerateRequest(
        sampling=pb.SamplingParams(**{name: given[name] for name in _SAMPLING if name in given}),
        stop=pb.StopConditions(**{field: given[name] for name, field in _STOP.items() if name in given}),
        **{field: given[name] for name, field in _REST.items() if name in given},
    )
    if retention := {name: given[name] for name in _RETENTION if name in given}:
        message.retention.CopyFrom(pb.Retention(**retention))
    if (allowed := given.get("allowed_token_ids")) is not None:
        message.sampling.allowed_token_ids.CopyFrom(pb.TokenIds(ids=allowed))
    _write_search(message, given)
    _write_form(message, given)
    if chat is not None:
        message.chat.CopyFrom(_chat(chat, given))
    elif isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    return message


def _write_search(message: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    if "beam_width" in given:
        way = given.get("early_stopping")
        if way is not None and way not in _EARLY_STOPPING:
            raise ValueError(f"early_stopping is {way!r}; say 'first' or 'never', or leave it out")
        search = pb.BeamSearch(
            width=given["beam_width"],
            length_penalty=given.get("length_penalty"),
            early_stopping=_EARLY_STOPPING.get(way),
        )
        message.beam_search.CopyFrom(search)
    elif lone := [name for name in ("length_penalty", "early_stopping") if name in given]:
        raise ValueError(f"{lone[0]} is of a beam search: give its beam_width too")


def _write_form(message: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    forms = [name for name in _FORMS if given.get(name, False) is not False]
    if len(forms) > 1:
        raise ValueError(f"{' and '.join(forms)} cannot go together")
    for form in forms:
        value = given[form]
        if form == "choices":
            message.structured_output.choices.CopyFrom(pb.Choices(texts=value))
        else:
            setattr(message.structured_output, form, _as_json(value) if form == "json_schema" else value)


def _as_json(value: Mapping[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tokenize_request(
    text: str | None = None, chat: ChatMessages | None = None, **options: Unpack[ChatOptions]
) -> pb.TokenizeRequest:
    """The message for a text or a chat. Raises ValueError when there is not exactly one of them."""
    if (text is None) == (chat is None):
        raise ValueError("give either a text or a chat")
    return pb.TokenizeRequest(text=text) if chat is None else pb.TokenizeRequest(chat=_chat(chat, options))


def _chat(messages: ChatMessages, options: Mapping[str, Any]) -> pb.Chat:
    return pb.Chat(
        messages=[_message(each) for each in messages],
        tools=[_as_json(each) for each in options.get("tools", ())],
        continue_final_message=options.get("continue_final_message", False),
        template_arguments=_as_json(options.get("template_arguments", "")),
    )


def _message(message: Mapping[str, Any]) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=message["role"],
        content=message.get("content") or "",
        name=message.get("name"),
        tool_calls=[_tool_call(each) for each in message.get("tool_calls") or ()],
        tool_call_id=message.get("tool_call_id"),
    )


def _tool_call(call: Mapping[str, Any]) -> pb.ToolCall:
    function = call["function"]
    return pb.ToolCall(id=call.get("id"), name=function["name"], arguments=_as_json(function["arguments"]))
