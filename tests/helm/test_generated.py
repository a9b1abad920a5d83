"""What is made from code is up to date, and the check says so when it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helm.generated import CHART, write_or_check
from helm.values_schema import schema_text
from helm.values_table import BEGIN, END, README, Value, chart_values, readme_with, table

VALUES = """\
# What the chart takes.

# -- First of all.
name: ""
folder:
  # -- A list,
  # over two lines.
  list: [1, {a: b}]
  deeper:
    # -- A map is one value when it has a sentence.
    map:
      key: true
"""


def test_the_chart_has_what_the_code_makes() -> None:
    assert (CHART / "values.schema.json").read_text() == schema_text(), "run `python -m helm.values_schema`"
    readme = README.read_text()
    assert readme == readme_with(table(chart_values()), readme), "run `python -m helm.values_table`"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "values.yaml"
    path.write_text(text)
    return path


def test_a_value_has_its_name_its_default_and_its_sentence(tmp_path: Path) -> None:
    assert chart_values(written(tmp_path, VALUES)) == [
        Value("name", '""', "First of all."),
        Value("folder.list", '[1, {"a": "b"}]', "A list, over two lines."),
        Value("folder.deeper.map", '{"key": true}', "A map is one value when it has a sentence."),
    ]


@pytest.mark.parametrize("text", ["name: 1\n", "folder:\n  # A remark.\n  name: 1\n", "# -- Far away.\n\nname: 1\n"])
def test_a_value_without_a_sentence_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"name in values\.yaml has no comment that begins with `# -- `"):
        chart_values(written(tmp_path, text))


def test_the_table_goes_between_the_marks(tmp_path: Path) -> None:
    rows = table([Value("a.b", "1", "One.")])
    assert rows.splitlines()[-1] == "| `a.b` | `1` | One. |"
    before = f"# Chart\n{BEGIN}\nold\n{END}\nThe end.\n"
    assert readme_with(rows, before) == f"# Chart\n{BEGIN}\n{rows}\n{END}\nThe end.\n"
    with pytest.raises(ValueError, match="each once"):
        readme_with(rows, "# Chart\n")


def test_a_check_writes_nothing_and_fails_for_what_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "old")
    monkeypatch.setattr(sys, "argv", ["made", "--check"])
    assert write_or_check(path, "new", "python -m made") == 1
    assert path.read_text() == "old"
    assert capsys.readouterr().err == "values.yaml is not what the code makes now: run `python -m made`.\n"
    assert write_or_check(path, "old", "python -m made") == 0
    monkeypatch.setattr(sys, "argv", ["made"])
    assert write_or_check(path, "new", "python -m made") == 0
    assert path.read_text() == "new"
