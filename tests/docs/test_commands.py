"""Each command and option that the documents show exists, and each link leads somewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from services.cli import app
from services.config import ClientSettings
from tests.docs.written import ROOT, Command, anchors, code_lines, commands, links, read

DOCUMENTS = ("README.md", "docs/operations.md", "helm/octavo/README.md")
OTHERS_FLAGS = {"README.md": {"--beam"}, "docs/operations.md": {"--previous", "--tail"}}
"""Options of other programs that stand alone in the text."""
CLI: Any = typer.main.get_command(app)


def options(name: str) -> set[str]:
    """All spellings of the options of a command."""
    parameters = CLI.commands[name].params
    return {spelling for each in parameters for spelling in (*each.opts, *each.secondary_opts)} | {"--help"}


def shown() -> list[Command]:
    return [each for document in DOCUMENTS for each in commands(document)]


def test_commands_exist_with_their_options() -> None:
    for each in shown():
        assert each.name in CLI.commands, f"{each.document}: octavo {' '.join(each.words)}"
        assert set(each.flags) <= options(each.name), f"{each.document}: octavo {' '.join(each.words)}"


def test_many_commands_are_looked_at() -> None:
    """So that a change of how the documents are written can't make the test above look at nothing."""
    seen = {(each.document, each.name) for each in shown()}
    assert {name for document, name in seen if document == "README.md"} >= {"generate", "pool", "quota", "events"}
    assert {name for document, name in seen if document == "docs/operations.md"} >= {"check", "drain", "requests"}


@pytest.mark.parametrize("document", ["README.md", "docs/operations.md"])
def test_options_that_stand_alone_exist(document: str) -> None:
    known = {spelling for name in CLI.commands for spelling in options(name)} | OTHERS_FLAGS[document]
    alone = {
        word.split("=")[0]
        for line in code_lines(read(document))
        if line.startswith("--")
        for word in re.findall(r"(?<!\S)--[a-z][a-z=-]*", line)
    }
    assert alone
    assert alone <= known, alone - known


def test_variables_exist() -> None:
    spelled = {variable for name in CLI.commands for each in CLI.commands[name].params for variable in env_of(each)}
    # Tokens have no option, since others see a command line.
    spelled |= {f"OCTAVO_{name.upper()}" for name in ClientSettings.model_fields}
    for document in DOCUMENTS:
        named = set(re.findall(r"\bOCTAVO_[A-Z_]+[A-Z]\b", read(document))) - {"OCTAVO_COMPILE"}
        assert named <= spelled, named - spelled


def env_of(parameter: Any) -> list[str]:
    given = parameter.envvar
    return [given] if isinstance(given, str) else list(given or ())


@pytest.mark.parametrize("document", [*DOCUMENTS, *(f"docs/{each.name}" for each in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    for link in links(document):
        if re.match("https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(str(target.relative_to(ROOT))), link
