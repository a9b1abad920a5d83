"""The table of values in the chart's README, from the comments of values.yaml: `python -m helm.values_table`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from helm.generated import CHART, write_or_check

README = CHART / "README.md"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
_COMMENT = re.compile(r"^\s*# ?(.*)$")
_MARK = "-- "


@dataclass(frozen=True, slots=True)
class Value:
    """A value: its name with dots, its default as JSON, and what values.yaml says of it."""

    name: str
    default: str
    text: str


def chart_values(path: Path = CHART / "values.yaml") -> list[Value]:
    """All values in the order of the file. ValueError for one without a comment `# -- ...`."""
    text = path.read_text(encoding="utf-8")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return list(_values(root, "", text.splitlines()))


def table(values: list[Value]) -> str:
    """The values as a table of Markdown."""
    rows = [f"| `{value.name}` | `{value.default}` | {value.text} |" for value in values]
    return "\n".join(["| value | default | |", "|---|---|---|", *rows])


def readme_with(rows: str, readme: str) -> str:
    """The README's text with the rows between its two marks. ValueError when it does not have each once."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"The README needs the marks {BEGIN} and {END}, each once.")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{rows}\n{END}{rest.split(END)[1]}"


def main() -> int:
    text = readme_with(table(chart_values()), README.read_text(encoding="utf-8"))
    return write_or_check(README, text, "python -m helm.values_table")


def _values(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[Value]:
    """A key with a comment of its own is a value, whatever is below it; one without is a folder of others."""
    for key, below in node.value:
        name = f"{prefix}{key.value}"
        text = _comment_above(key.start_mark.line, lines)
        if text:
            yield Value(name, json.dumps(yaml.SafeLoader("").construct_document(below)), text)
        elif isinstance(below, yaml.MappingNode) and below.value and below.start_mark.line > key.start_mark.line:
            yield from _values(below, f"{name}.", lines)
        else:
            raise ValueError(f"{name} in values.yaml has no comment that begins with `# {_MARK}`.")


def _comment_above(line: int, lines: list[str]) -> str:
    """The lines of comment right above a line, from the one with the mark on; empty without such."""
    block: list[str] = []
    for above in reversed(lines[:line]):
        match = _COMMENT.match(above)
        if match is None:
            return ""
        block.insert(0, match[1])
        if match[1].startswith(_MARK):
            return " ".join(block).removeprefix(_MARK)
    return ""


if __name__ == "__main__":
    sys.exit(main())
