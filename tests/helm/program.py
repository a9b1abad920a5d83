"""The command lines of the chart, read by the programs that they start."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import Any

import typer

from services.cli import app
from services.config import KvManagerSettings, ModelRunnerSettings, load_settings
from services.config_base import COMMAND_OPTIONS, SETTING_NAMES
from services.errors import StartupError
from tests.required import require_program

ENTRYPOINT = ("octavo",)
"""What the images start when a container has no command."""
SERVICES = {"kv-manager": KvManagerSettings, "model-runner": ModelRunnerSettings}
ENVIRONMENT = "OCTAVO_"


def command_line(container: dict[str, Any]) -> list[str]:
    """The whole command line of a container of ours."""
    return [*(container.get("command") or ENTRYPOINT), *(container.get("args") or [])]


def options(words: Sequence[str]) -> dict[str, str]:
    """--name=value of a command line, by name without dashes; a flag has ''."""
    pairs = (word.removeprefix("--").partition("=") for word in words if word.startswith("--"))
    return {name: value for name, _, value in pairs}


def refusal(words: Sequence[str]) -> str | None:
    """What `octavo` has against its arguments; None when it takes them. Nothing is started."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("octavo", list(words), resilient_parsing=True)
    command = group.get_command(context, words[0])
    if command is None:
        return f"No such command: {words[0]}"
    try:
        parsed = command.make_context(words[0], list(words[1:]), parent=context).params
        if words[0] in SERVICES:
            load_settings(SERVICES[words[0]], {name: value for name, value in parsed.items() if value is not None})
    except StartupError as error:
        return str(error)
    except Exception as error:
        # Usage errors are of a class that typer keeps to itself.
        if not hasattr(error, "format_message"):
            raise
        return str(error.format_message())
    return None


def is_known_variable(name: str) -> bool:
    """Whether a variable that begins with OCTAVO_ is one of ours."""
    return name.removeprefix(ENVIRONMENT).lower() in SETTING_NAMES | COMMAND_OPTIONS


@cache
def flags_of(*command: str) -> frozenset[str]:
    """All --flags that another program's --help tells of."""
    program = require_program(command[0], "`make test` brings it")
    done = subprocess.run(
        [program, *command[1:], "--help"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={"COLUMNS": "200"},
    )
    return frozenset(re.findall(r"--[a-z][a-z0-9-]+", done.stdout))
