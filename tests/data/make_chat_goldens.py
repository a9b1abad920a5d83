"""Makes tests/data/chat/golden.json: what transformers makes of chats by the templates in tests/data/chat/.

Run it in a virtual environment of its own, from the repository's root:

    python3 -m venv /tmp/hf
    /tmp/hf/bin/pip install "transformers==5.24.0"
    /tmp/hf/bin/python tests/data/make_chat_goldens.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "chat"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather, <in °C> & more.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}},
}
ASKED = {"role": "user", "content": "How warm is it in Zürich?"}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 1}},
        }
    ],
}
TWO_CALLS = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [
        *CALLS["tool_calls"],
        {"id": "abcdef124", "type": "function", "function": {"name": "clock", "arguments": {}}},
    ],
}
ANSWER = {"role": "tool", "content": '{"celsius": 21.5}', "tool_call_id": "abcdef123"}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
BEGUN = {"role": "assistant", "content": "It is warm:"}
CHATS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [ASKED]},
    "a system message": {"messages": [SYSTEM, ASKED]},
    "a name": {"messages": [{**ASKED, "name": "Ann"}, BEGUN, {"role": "user", "content": "Sure?"}]},
    "tools": {"messages": [ASKED], "tools": [WEATHER, CLOCK]},
    "tools and a system message": {"messages": [SYSTEM, ASKED], "tools": [WEATHER]},
    "a call and its answer": {"messages": [ASKED, CALLS, ANSWER], "tools": [WEATHER]},
    "a call without tools": {"messages": [ASKED, CALLS, ANSWER]},
    "two calls": {
        "messages": [ASKED, TWO_CALLS, ANSWER, {"role": "tool", "content": '"12:00"', "tool_call_id": "abcdef124"}],
        "tools": [WEATHER, CLOCK],
    },
    "go on": {"messages": [ASKED, BEGUN], "continue_final_message": True},
    "go on after white space": {
        "messages": [ASKED, {"role": "assistant", "content": "  It is \n"}],
        "continue_final_message": True,
    },
    "go on with nothing": {
        "messages": [ASKED, {"role": "assistant", "content": ""}],
        "continue_final_message": True,
    },
    "go on with tools": {"messages": [ASKED, CALLS, ANSWER, BEGUN], "tools": [WEATHER], "continue_final_message": True},
    "go on as the user": {"messages": [SYSTEM, ASKED], "continue_final_message": True},
    "variables": {"messages": [ASKED], "template_arguments": {"enable_thinking": False, "date_string": "2 Feb 2026"}},
}


def rendered(tokenizer: PreTrainedTokenizerFast, template: str, chat: dict[str, Any]) -> str | None:
    """None where the template refuses the chat."""
    goes_on = chat.get("continue_final_message", False)
    try:
        return tokenizer.apply_chat_template(
            chat["messages"],
            tools=chat.get("tools"),
            chat_template=template,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            tokenize=False,
            **chat.get("template_arguments", {}),
        )
    except Exception as error:
        print(f"refused: {error}")
        return None


def main() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    items = [
        {"template": file.stem, "name": name, "chat": chat, "text": rendered(tokenizer, file.read_text(), chat)}
        for file in sorted(FOLDER.glob("*.jinja"))
        for name, chat in CHATS.items()
    ]
    golden = {"by": f"transformers {transformers.__version__}", "items": items}
    (FOLDER / "golden.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
