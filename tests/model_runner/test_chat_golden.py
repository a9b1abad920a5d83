"""Chats by templates with tools, calls and answers to go on from, against what transformers renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_runner.chat_template import ChatTemplate, ChatTemplateError

FOLDER = Path(__file__).parent.parent / "data" / "chat"
ITEMS = json.loads((FOLDER / "golden.json").read_text())["items"]


def template(name: str) -> ChatTemplate:
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), "<s>", "</s>")


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item['template']}: {item['name']}")
def test_as_transformers_renders_it(item: dict[str, Any]) -> None:
    options = dict(item["chat"])
    messages = options.pop("messages")
    if item["text"] is None:
        with pytest.raises(ChatTemplateError, match="The chat template refuses"):
            template(item["template"]).render(messages, **options)
    else:
        assert template(item["template"]).render(messages, **options) == item["text"]


def test_the_golden_chats_cover_what_they_should() -> None:
    assert len(ITEMS) == 42
    assert sum(item["text"] is None for item in ITEMS) == 4
    assert sum("continue_final_message" in item["chat"] for item in ITEMS if item["text"]) == 14


QUESTION = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("source", "knows"),
    [
        ("{{ messages[0].content }}", False),
        ("{% set tools = [] %}{{ messages[0].content }}{{ tools }}", False),
        ("{% for tools in messages %}{{ tools.content }}{% endfor %}", False),
        ("{# tools #}{{ 'tools' }}{{ messages[0].tools }}", False),
        ("{{ tools }}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{% macro show() %}{{ tools }}{% endmacro %}{{ show() }}", True),
    ],
)
def test_tools_for_a_template_that_knows_none(source: str, knows: bool) -> None:
    rendered = ChatTemplate(source)
    if knows:
        assert rendered.render(QUESTION, tools=[TOOL]) != rendered.render(QUESTION)
        return
    with pytest.raises(ChatTemplateError, match="knows no tools") as caught:
        rendered.render(QUESTION, tools=[TOOL])
    assert caught.value.field == "tools"


def test_a_last_message_that_is_left_out_cannot_go_on() -> None:
    source = "{% for message in messages[:-1] %}{{ message.content }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="leaves the last message out") as caught:
        ChatTemplate(source).render([*QUESTION, *QUESTION], continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_variables_are_for_the_template_and_tokens_may_be_replaced() -> None:
    source = "{{ bos_token }}{{ mood }}{{ documents[0].title if documents else 'none' }}"
    shown = ChatTemplate(source, "<s>")
    assert shown.render(QUESTION, template_arguments={"mood": "glad"}) == "<s>gladnone"
    given = {"bos_token": "<b>", "documents": [{"title": "T"}]}
    assert shown.render(QUESTION, template_arguments=given) == "<b>T"


def test_inputs_stay_as_they_are() -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "well"}]
    ChatTemplate("{{ messages[-1].content }}").render(messages, continue_final_message=True)
    assert messages[-1] == {"role": "assistant", "content": "well"}
