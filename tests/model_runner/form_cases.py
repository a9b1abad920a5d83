"""Forms for the tests of structured output, each with an independent judge of what has it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from model_runner.request import StructuredOutput, StructureKind


@dataclass(frozen=True)
class Form:
    """likely_ends: of 50 random answers of 150 tokens at most, so many end at least."""

    asked: StructuredOutput
    accepts: Callable[[str], bool]
    likely_ends: int = 50


@dataclass(frozen=True)
class Schema:
    """valid: values that must be possible."""

    schema: Any
    valid: tuple[Any, ...]
    likely_ends: int = 50


WORD = {"type": "string", "pattern": "^[A-Z][a-z]{0,7}$"}
PERSON = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["glad", "sad", 3, None, True]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 20}, "number": {"type": "integer"}},
            "required": ["street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "mood", "address"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
SCHEMAS = {
    "nested": Schema(
        PERSON,
        (
            {"name": "Ann", "age": 30, "mood": "glad", "address": {"street": 'Main "St" é', "number": -5}},
            {"name": "B", "age": 0, "mood": None, "address": {"street": ""}},
        ),
        40,
    ),
    "enum": Schema({"enum": ["red", "green", 7, {"a": [1]}, None]}, ("red", 7, {"a": [1]}, None)),
    "array": Schema(
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}, ([True, False], [False] * 4)
    ),
    "numbers": Schema(
        {
            "type": "array",
            "prefixItems": [
                {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2},
                {"type": "integer", "multipleOf": 5},
            ],
            "items": False,
            "minItems": 2,
        },
        ([0.25, -10], [-1.25, 0], [2, 35]),
        40,
    ),
    "reference": Schema(TREE, ({"value": 1, "children": [{"value": 2, "children": []}]},), 5),
    "any of": Schema({"anyOf": [{"const": "x"}, {"type": "null"}, {"type": "integer", "maximum": 5}]}, ("x", None, -3)),
    "formats": Schema(
        {
            "type": "object",
            "properties": {"day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}},
            "required": ["day", "id"],
            "additionalProperties": False,
        },
        ({"day": "2024-02-29", "id": "123e4567-e89b-12d3-a456-426614174000"},),
    ),
}


def _valid(schema: Any) -> Callable[[str], bool]:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())

    def accepts(text: str) -> bool:
        validator.validate(json.loads(text))
        return True

    return accepts


def _of_schema(case: Schema) -> Form:
    asked = StructuredOutput(StructureKind.JSON_SCHEMA, (json.dumps(case.schema),))
    return Form(asked, _valid(case.schema), case.likely_ends)


def _of_regex(pattern: str, likely_ends: int = 50) -> Form:
    asked = StructuredOutput(StructureKind.REGEX, (pattern,))
    return Form(asked, lambda text: re.fullmatch(pattern, text) is not None, likely_ends)


def _is_sum(text: str) -> bool:
    """The grammar below, by Python's parser, which knows more operators and more kinds of numbers."""
    if not re.fullmatch(r"[0-9()+*]+", text) or re.search(r"[0-9]{4}|\*\*|(?:^|[(+*])\+", text):
        return False
    # Python has no numbers with leading zeros.
    tree = ast.parse(re.sub(r"[0-9]+", "1", text), mode="eval")
    return not any(isinstance(node, ast.Call | ast.Tuple) for node in ast.walk(tree))


SUM = r"""
start: term ("+" term)*
term: factor ("*" factor)*
factor: NUMBER | "(" start ")"
NUMBER: /[0-9]{1,3}/
"""
CHOICES = ("yes", "no", "yesterday", 'say "no"\\/', "日本 é 😀", "two\nlines")

FORMS: dict[str, Form] = {
    **{name: _of_schema(case) for name, case in SCHEMAS.items()},
    "any object": Form(StructuredOutput(StructureKind.JSON_OBJECT), lambda text: isinstance(json.loads(text), dict), 0),
    "date": _of_regex(r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"),
    "words": _of_regex(r"[A-Z][a-zäöü]{2,10}( [a-z]{1,8}){1,3}[.!?]"),
    "any characters": _of_regex(r".{3,9}"),
    "slashes": _of_regex(r"(/[a-z]{1,3}){2}\\?\"/"),
    "grammar": Form(StructuredOutput(StructureKind.GRAMMAR, (SUM,)), _is_sum, 20),
    "choices": Form(StructuredOutput(StructureKind.CHOICES, CHOICES), lambda text: text in CHOICES),
}
