"""Chat templates: what the hub's templates rely on, and every failure as one sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from model_runner.chat_template import ChatTemplate, ChatTemplateError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2 & 3?"},
]
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def render(source: str, **settings: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(MESSAGES, **settings)


def test_chatml() -> None:
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 < 2 & 3?<|im_end|>\n"
    assert render(CHATML) == turns + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == turns


def test_tokens_of_the_model() -> None:
    assert render("{{ bos_token }}{{ messages[1].content }}{{ eos_token }}") == "<s>1 < 2 & 3?</s>"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n  {% set x = 1 %}\na{{ x }}\n{% endif %}\nb") == "a1\nb"


def test_loop_controls() -> None:
    assert render("{% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}"
                  "{% if x == 3 %}{% break %}{% endif %}{% endfor %}") == "13"  # fmt: skip


def test_generation_blocks_are_let_through() -> None:
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c") == "absystemc"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("tojson", '{"b": "<é&\'>", "a": [1, null]}'),
        ("tojson(sort_keys=true)", '{"a": [1, null], "b": "<é&\'>"}'),
        ("tojson(indent=2)", '{\n  "b": "<é&\'>",\n  "a": [\n    1,\n    null\n  ]\n}'),
        ("tojson(ensure_ascii=true)", '{"b": "<\\u00e9&\'>", "a": [1, null]}'),
    ],
)
def test_json_is_not_escaped_for_html(call: str, expected: str) -> None:
    assert render("{{ {'b': \"<é&'>\", 'a': [1, none]} | " + call + " }}") == expected


def test_date_of_today() -> None:
    assert re.fullmatch(r"20\d\d-[01]\d", render("{{ strftime_now('%Y-%m') }}"))


def test_text_of_a_message_is_not_a_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}]) == "{{ 7 * 7 }}{% raw %}"


def test_a_template_refuses() -> None:
    with pytest.raises(ChatTemplateError, match=r"^The chat template refuses these messages: No system role\.$"):
        render("{% if messages[0].role == 'system' %}{{ raise_exception('No system role.') }}{% endif %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ no_such_function() }}",
        "{{ messages.missing() }}",
        "{{ strftime_now(3) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include 'other' %}",
        "{{ raise_exception() }}",
    ],
)
def test_failures_are_sentences(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"^The chat template [^\n]*\.$"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append({'role': 'user', 'content': ''}) }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ messages", "{% for x in %}", "{% endfor %}", "{{ x | no_such_filter }}", "{% generation %}"]
)
def test_invalid_source(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"^The chat template has an error in line 2: .*\.$"):
        ChatTemplate("\n" + source)


def test_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "hi"}]
    ChatTemplate("{% set m = messages[0] %}{{ m.content }}").render(messages)
    assert messages == [{"role": "user", "content": "hi"}]
