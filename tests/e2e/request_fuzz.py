"""GenerateRequests at random, from the contract itself: fields that it gets later are drawn as well.

Most values can work, so that many requests get as far as the engine; others lie at the edges of what a message can say,
or beyond: numbers that are none, enum numbers that nobody knows, messages with nothing in them, bytes that are no text.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from octavo.runner.v1 import model_runner_pb2 as pb

from tests.e2e.tiny_chat_model import VOCAB_SIZE

INT32 = [-(1 << 31), -1, 0, 1, 63, 64, 65, 100, 101, (1 << 31) - 1]
INT64 = [-(1 << 63), -(1 << 32), -1, 0, 1, 1 << 31, (1 << 63) - 1]
FLOATS = [-math.inf, -1e38, -1.0, -0.0, 0.0, 1e-45, 0.5, 1.0, 2.0, 100.0, 101.0, 3e38, math.inf, math.nan]
EDGES = {
    FieldDescriptor.TYPE_INT32: INT32,
    FieldDescriptor.TYPE_INT64: INT64,
    FieldDescriptor.TYPE_UINT32: [0, 1, VOCAB_SIZE - 1, VOCAB_SIZE, 1 << 31, (1 << 32) - 1],
    FieldDescriptor.TYPE_UINT64: [0, 1, 1 << 63, (1 << 64) - 1],
    FieldDescriptor.TYPE_FLOAT: FLOATS,
    FieldDescriptor.TYPE_DOUBLE: [*FLOATS, 5e-324, 604800.0, 604801.0, 1e308],
    FieldDescriptor.TYPE_ENUM: [-(1 << 31), -1, 0, 1, 2, 3, 99, (1 << 31) - 1],
    FieldDescriptor.TYPE_BOOL: [False, True],
}
TEXTS = [
    "",
    "a",
    "\0",
    "\n",
    "a b",
    "\u200b",
    "é" * 64,
    "\U0001f600",
    "\ufffd",
    "x" * 128,
    "x" * 129,
    "x" * 1024,
    "x" * 1025,
]

SCHEMAS = [
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}',
    '{"type": "boolean"}',
    '{"enum": ["a", 1, null]}',
    "{}",
    "true",
    "false",
    "[]",
    "{",
    '{"type": "nonsense"}',
    '{"$ref": "#"}',
    '{"$ref": "http://localhost/none"}',
    '{"type": "string", "pattern": "("}',
    '{"anyOf": []}',
    '{"type": "array", "items": ' * 60 + "{}" + "}" * 60,
]
REGEXES = [
    "[a-z]{1,4}",
    "(yes|no)",
    "",
    "(",
    "[",
    "a{1000000}",
    "(a|b)*c?",
    "\\",
    "(?=a)b",
    "(" * 300 + ")" * 300,
    ".*",
    "é+",
]
GRAMMARS = [
    'start: "a" | "b"',
    'start: start "a" |',
    "start:",
    "",
    "start: other",
    'start: /[0-9]+/ ("," /[0-9]+/)*',
    "%%",
]
JSONS = ["{}", "[]", "{", "null", '{"a": 1}', '{"messages": []}', '{"type": "function", "function": {"name": "f"}}']
PROMPTS = [
    "Once upon a time",
    "a",
    "",
    "\0",
    "naïve \U0001f600 字",
    "<|user|>hello<|assistant|>",
    "<|eos|>",
    "word " * 60,
    "x" * 600,
    "y" * 20_000,
]
LIKELY: dict[str, Callable[[random.Random], Any]] = {
    "request_id": lambda rng: rng.choice(["", "", "", "", "", "a", "b", "c"]),
    "model": lambda rng: rng.choice(["", "", "", "", "model", "other"]),
    "text": lambda rng: rng.choice(PROMPTS[:1] * 6 + PROMPTS),
    "role": lambda rng: rng.choice(["user", "user", "assistant", "system", "tool", "nobody", ""]),
    "content": lambda rng: rng.choice(["hello", "what is it?", "", "x" * 100]),
    "arguments": lambda rng: rng.choice(JSONS),
    "tools": lambda rng: rng.choice(JSONS[-1:] * 4 + JSONS),
    "template_arguments": lambda rng: rng.choice(["", "{}", *JSONS]),
    "json_schema": lambda rng: rng.choice(SCHEMAS[:3] * 4 + SCHEMAS),
    "regex": lambda rng: rng.choice(REGEXES[:2] * 4 + REGEXES),
    "grammar": lambda rng: rng.choice(GRAMMARS[:1] * 4 + GRAMMARS),
    "texts": lambda rng: rng.choice(["yes", "no", "perhaps", ""]),
    "stop_strings": lambda rng: rng.choice(["a", "the", "\n", "é"]),
    "bad_words": lambda rng: rng.choice(["a", "bad", " "]),
    "cache_salt": lambda rng: rng.choice(["", "", "s", "t"]),
    "tenant": lambda rng: rng.choice(["", "acme", "é"]),
    "ids": lambda rng: rng.randrange(VOCAB_SIZE),
    "stop_token_ids": lambda rng: rng.randrange(VOCAB_SIZE),
    "max_tokens": lambda rng: rng.randint(1, 8),
    "min_tokens": lambda rng: rng.randint(0, 3),
    "temperature": lambda rng: rng.choice([0.0, 0.7, 1.0, 2.0]),
    "top_k": lambda rng: rng.randint(0, 50),
    "top_p": lambda rng: rng.choice([0.1, 0.9, 1.0]),
    "min_p": lambda rng: rng.choice([0.0, 0.1, 1.0]),
    "seed": lambda rng: rng.randrange(1 << 64),
    "repetition_penalty": lambda rng: rng.choice([0.5, 1.0, 1.2]),
    "presence_penalty": lambda rng: rng.choice([-2.0, 0.5, 2.0]),
    "frequency_penalty": lambda rng: rng.choice([-2.0, 0.5, 2.0]),
    "length_penalty": lambda rng: rng.choice([-1.0, 0.0, 1.0]),
    "num_choices": lambda rng: rng.choice([0, 1, 1, 2, 4]),
    "best_of": lambda rng: rng.choice([0, 0, 1, 4]),
    "width": lambda rng: rng.randint(1, 4),
    "logprobs": lambda rng: rng.randint(0, 5),
    "prompt_logprobs": lambda rng: rng.randint(0, 5),
    "priority": lambda rng: rng.choice([0, 0, 1, 50]),
    "pin_seconds": lambda rng: rng.choice([0.0, 0.0, 0.5]),
    "early_stopping": lambda rng: rng.randint(0, 2),
}
"""Values that can work, by the field's name."""
OFTEN = ("max_tokens", "stop", "ids", "content", "role", "messages", "texts", "width")
"""Fields without which a request runs long or can hardly succeed."""
SELDOM = ("model", "beam_search", "structured_output", "best_of", "retention", "tools", "template_arguments", "form")


def random_request(rng: random.Random) -> bytes:
    """A request as it goes on the wire; one in twelve is no message at all, or one of something else."""
    edge = rng.choice([0.0, 0.0, 0.02, 0.1, 0.5])
    message = pb.GenerateRequest()
    _fill(rng, message, edge)
    if rng.random() < 0.9:
        prompt = rng.choice(["text", "token_ids", "token_ids", "chat"])
        message.ClearField(message.WhichOneof("prompt") or prompt)
        _set(rng, message, message.DESCRIPTOR.fields_by_name[prompt], edge)
    data = message.SerializeToString()
    return _damaged(rng, data) if rng.random() < 1 / 12 else data


def shown(data: bytes) -> str:
    """A request for the report of a failure."""
    try:
        return str(pb.GenerateRequest.FromString(data))[:2000]
    except Exception:
        return json.dumps(data.hex())[:2000]


def _fill(rng: random.Random, message: Message, edge: float) -> None:
    for field in message.DESCRIPTOR.fields:
        share = 0.95 if field.name in OFTEN else 0.06 if field.name in SELDOM else 0.2
        if rng.random() < share:
            _set(rng, message, field, edge)


def _set(rng: random.Random, message: Message, field: FieldDescriptor, edge: float) -> None:
    if field.message_type and field.message_type.GetOptions().map_entry:
        entries = getattr(message, field.name)
        key, value = field.message_type.fields
        for _ in range(_count(rng, edge)):
            entries[rng.randrange(VOCAB_SIZE) if rng.random() > edge else rng.choice(EDGES[key.type])] = _value(
                rng, value, edge
            )
    elif field.is_repeated:
        into = getattr(message, field.name)
        for _ in range(_count(rng, edge)):
            if field.message_type:
                _fill(rng, into.add(), edge)
            else:
                into.append(_value(rng, field, edge))
    elif field.message_type:
        getattr(message, field.name).SetInParent()
        if rng.random() >= edge / 2:
            _fill(rng, getattr(message, field.name), edge)
    else:
        setattr(message, field.name, _value(rng, field, edge))


def _count(rng: random.Random, edge: float) -> int:
    return rng.choice([0, 65, 257, 1025]) if rng.random() < edge / 10 else rng.randint(1, 6)


def _value(rng: random.Random, field: FieldDescriptor, edge: float) -> Any:
    if rng.random() >= edge and field.name in LIKELY:
        return LIKELY[field.name](rng)
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if rng.random() >= edge and field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.random()
    return rng.choice(EDGES[field.type])


def _damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut, or put behind; half a surrogate pair in UTF-8 among them."""
    spoilt = bytearray(data)
    how = rng.randrange(4)
    if how == 0 and spoilt:
        for _ in range(rng.randint(1, 8)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
    elif how == 1:
        del spoilt[rng.randrange(len(spoilt) + 1) :]
    elif how == 2:
        spoilt += rng.randbytes(rng.randint(1, 40))
    else:
        # Field 3, text; field 11, cache_salt; field 19, tenant.
        for tag in rng.sample([b"\x1a", b"\x5a", b"\x9a\x01"], 2):
            spoilt += tag + b"\x05a\xed\xa0\x80b"
    return bytes(spoilt)
