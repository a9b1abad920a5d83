"""A missing tool is a skipped test on a user's machine, and a failed one in CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.required import require, require_module, require_program


def test_what_is_there_lets_the_test_go_on() -> None:
    require(True, "never said")
    require_module("pytest", "never said")
    assert require_program("sh", "never said").is_file()


def test_a_user_is_told_what_was_skipped_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program is not installed: apt-get install it"):
        require_program("no-such-program", "apt-get install it")


def test_ci_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no_such_module is not installed: pip install it"):
        require_module("no_such_module", "pip install it")


def test_a_program_in_the_virtual_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = tmp_path / "sh"
    ours.write_text("#!/bin/sh\n")
    ours.chmod(0o755)
    monkeypatch.setattr("tests.required.TOOLS", tmp_path)
    assert require_program("sh", "never said") == ours
