"""A model's chat template: messages to the prompt text it was trained on, in jinja2's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """One sentence on why messages cannot become a prompt."""


class ChatTemplate:
    """A compiled template. Rendering may happen in many threads at once."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Compiles the jinja2 `source`. Raises ChatTemplateError when it is not valid."""
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"The chat template has an error in line {error.lineno}: {error.message}."
            ) from None
        except Exception as error:
            raise ChatTemplateError(f"The chat template cannot be compiled: {_reason(error)}.") from None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises ChatTemplateError, also for what the template itself refuses.

        messages: each with its role and content. add_generation_prompt: end where the assistant begins to speak.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except _Refusal as refusal:
            raise ChatTemplateError(f"The chat template refuses these messages: {_reason(refusal)}.") from None
        except Exception as error:
            # A template is a program of the model's author: it can fail in any way.
            raise ChatTemplateError(f"The chat template fails on these messages: {_reason(error)}.") from None


class _Refusal(TemplateError):
    """What a template raises by itself."""


class _GenerationBlock(Extension):
    """Lets {% generation %} blocks through, by which some templates mark what the assistant said."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates on the Hugging Face hub are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter would write < and & as escapes, for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
