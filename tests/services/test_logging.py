"""Logs: one JSON object a line, and never a secret from a traceback's locals."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from services.logging import configure_logging


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def fail() -> None:
    salt = "s3cr3t"
    raise ValueError(f"bad salt of {len(salt)} bytes")


def logged(capsys: pytest.CaptureFixture[str], log_format: str) -> str:
    configure_logging("info", log_format, service="x")  # type: ignore[arg-type]
    log = structlog.get_logger()
    log.debug("unseen")
    try:
        fail()
    except ValueError as error:
        log.error("it failed", blocks=3, exc_info=error)
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = logged(capsys, "json")
    line = json.loads(text)
    assert (line["event"], line["level"], line["service"], line["blocks"]) == ("it failed", "error", "x", 3)
    assert line["exception"][0]["exc_value"] == "bad salt of 6 bytes"
    assert "s3cr3t" not in text


def test_console_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = logged(capsys, "console")
    assert "it failed" in text
    assert "ValueError: bad salt of 6 bytes" in text
    assert "s3cr3t" not in text
    assert "unseen" not in text
