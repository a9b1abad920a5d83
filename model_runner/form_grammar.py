"""The form of an answer as a grammar in llguidance's variant of Lark."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from model_runner.json_text import NotJson, read_json
from model_runner.request import StructuredOutput, StructureKind

# Between the parts of JSON: at most one space, or one new line and its indentation. Without a bound, a model that likes
# white space would write nothing else.
JSON_SPACE = r"(?: |\n {0,24})?"
# Without it llguidance allows only the tokens that its tokenizer would choose where the text is forced. The last
# declaration counts: a client's own cannot turn it off.
_EXACT = '%llguidance {"no_forcing": true}'


def grammar_of(form: StructuredOutput) -> str:
    """The grammar, which may still be refused when it is compiled. Raises NotJson for a schema that is no JSON."""
    match form.kind:
        case StructureKind.JSON_SCHEMA:
            rules = _json(read_json(form.texts[0]))
        case StructureKind.JSON_OBJECT:
            rules = _json({"type": "object"})
        case StructureKind.REGEX:
            rules = _regex(form.texts[0])
        case StructureKind.CHOICES:
            rules = _regex("|".join(map(_literal, form.texts)))
        case StructureKind.GRAMMAR:
            rules = form.texts[0]
    return f"{rules}\n{_EXACT}\n"


def _json(schema: Any) -> str:
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        # The library's own options are ours to choose: one of them lets it pass over keywords that it does not know.
        schema = {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACE}}
    elif schema is not False:
        raise NotJson("a schema is a JSON object, true or false")
    return f"start: %json {json.dumps(schema)}"


def _regex(pattern: str) -> str:
    wrapped = json.loads(LLMatcher.grammar_from_regex(pattern))
    return str(wrapped["grammars"][0]["lark_grammar"])


def _literal(text: str) -> str:
    """An expression that matches `text` alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def reason_of(error: str) -> str:
    """The sense of an error of llguidance, without the grammar, which it repeats."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    reason = told or (lines[0] if lines else "the library gives no reason")
    return reason.removeprefix("at 1(8): ").removeprefix("failed to compile JSON schema: ").rstrip(".")[:300]
