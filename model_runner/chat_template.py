"""A model's chat template: messages to the prompt text it was trained on, in jinja2's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Marks where the last message ends in the rendered text. Templates that trim messages take the space.
_END = "<end of the last message> "
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables that template_arguments may not have."""


class ChatTemplateError(ValueError):
    """One sentence on why messages cannot become a prompt. field: the part of the chat at fault, if it is one part."""

    def __init__(self, sentence: str, field: str = "") -> None:
        super().__init__(sentence)
        self.field = field


class ChatTemplate:
    """A compiled template. Rendering may happen in many threads at once."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Compiles the jinja2 `source`. Raises ChatTemplateError when it is not valid."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"The chat template has an error in line {error.lineno}: {error.message}."
            ) from None
        except Exception as error:
            raise ChatTemplateError(f"The chat template cannot be compiled: {_reason(error)}.") from None
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises ChatTemplateError, also for what the template itself refuses.

        messages: at least one; each with its role and content, and where they are needed name, tool_calls and
        tool_call_id, as OpenAI's API has them; but the arguments of a call are an object. add_generation_prompt: end
        where the assistant begins to speak. continue_final_message: end where the last message ends instead.
        template_arguments: further variables, none of them RESERVED.
        """
        if tools and "tools" not in self._variables:
            raise ChatTemplateError("The model's chat template knows no tools; leave them out.", "tools")
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END}]
        # What is not there is None, not undefined: some templates only compare.
        variables = {"documents": None, **self._tokens, **(template_arguments or {})}
        text = self._render(
            variables,
            messages=[dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
        )
        return _up_to_the_end(text) if continue_final_message else text

    def _render(self, variables: Mapping[str, Any], **inputs: Any) -> str:
        try:
            return self._template.render(variables, **inputs)
        except _Refusal as refusal:
            raise ChatTemplateError(f"The chat template refuses these messages: {_reason(refusal)}.") from None
        except Exception as error:
            # A template is a program of the model's author: it can fail in any way.
            raise ChatTemplateError(f"The chat template fails on these messages: {_reason(error)}.") from None


def _up_to_the_end(text: str) -> str:
    """What comes before the mark; without the white space before it where the template trims messages."""
    before, mark, after = text.rpartition(_END.rstrip())
    if not mark:
        raise ChatTemplateError(
            "The chat template leaves the last message out, so that it cannot be continued.", "continue_final_message"
        )
    return before if after.startswith(" ") else before.rstrip()


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
