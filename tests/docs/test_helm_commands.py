"""Each `helm install` and `helm upgrade` that the documents show renders with what it sets."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.docs.written import ROOT, code_lines, read
from tests.helm.tools import helm

DOCUMENTS = ("README.md", "docs/operations.md", "helm/octavo/README.md")


def shown() -> list[str]:
    lines = (line for document in DOCUMENTS for line in code_lines(read(document)))
    return sorted({line for line in lines if line.startswith(("helm install octavo", "helm upgrade octavo"))})


@pytest.mark.parametrize("line", shown())
def test_it_renders(line: str, tmp_path: Path) -> None:
    (tmp_path / "my-values.yaml").write_text("replicaCount: 2\n")
    words = shlex.split(line, comments=True)
    paths = {"my-values.yaml": tmp_path / "my-values.yaml"}
    given = [paths.get(word, ROOT / word if word.startswith("helm/octavo") else word) for word in words[2:]]
    done = helm("template", *given, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kind: Deployment" in done.stdout


def test_some_are_shown() -> None:
    assert len(shown()) >= 4
