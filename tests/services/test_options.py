"""Options that are made from settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from services.cli_up import _arguments
from services.config import ClientSettings, ModelRunnerSettings, OctavoSettings, UpSettings
from services.errors import StartupError
from services.options import with_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UpSettings.model_fields:
        monkeypatch.delenv(f"OCTAVO_{name.upper()}", raising=False)


def invoked(app: typer.Typer, *arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, arguments, env=environment)


def app_with(settings_class: type[OctavoSettings], seen: list[Any], **more: Any) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @with_settings(settings_class, **more)
    def main(settings: OctavoSettings, text: Annotated[str, typer.Argument()] = "none", loud: bool = False) -> None:
        """Does it."""
        seen.append((settings, text, loud))

    return app


def test_a_command_gets_settings_and_its_own_parameters() -> None:
    seen: list[Any] = []
    app = app_with(UpSettings, seen)
    result = invoked(app, "hello", "--loud", "--block-size", "32", "--pool", "p", OCTAVO_MAX_SEQUENCES="3")
    assert result.exit_code == 0, result.output
    settings, text, loud = seen[0]
    assert (settings.block_size, settings.pool_id, settings.max_sequences, text, loud) == (32, "p", 3, "hello", True)
    assert "num_blocks" not in settings.model_fields_set


def test_only_some_fields_and_other_names() -> None:
    seen: list[Any] = []
    app = app_with(ClientSettings, seen, only=("runner_address",), names={"runner_address": ("--address",)})
    assert invoked(app, "--address", "h:1").exit_code == 0
    assert seen[0][0].runner_address == "h:1"
    assert invoked(app, "--kv-address", "unix:/x").exit_code == 2
    assert "--config" in invoked(app, "--help").output


def test_every_setting_is_an_option_with_help() -> None:
    output = invoked(app_with(UpSettings, []), "--help", COLUMNS="250").output
    for name, field in UpSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in output
        assert f"OCTAVO_{name.upper()}" in output
        assert str(field.description)[:40] in output
    for default in (
        "One of: hash, radix, none.",
        "(hash)",
        "(sha256)",
        "(adaptive)",
        "(1GiB on a CPU;",
        "(16)",
        "(512)",
        "(what --kv-cache-memory has room for)",
        "One of: auto, float32",
    ):
        assert default in output


def test_a_value_that_cannot_be_ends_with_one_line() -> None:
    result = invoked(app_with(UpSettings, []), "--block-size", "3")
    assert result.exit_code == 2
    assert result.stderr.startswith("octavo: --block-size (or OCTAVO_BLOCK_SIZE): a block of 3 tokens")
    assert result.stderr.count("\n") == 1


def test_a_startup_error_in_the_command_ends_with_one_line() -> None:
    app = typer.Typer()

    @app.command()
    @with_settings(ClientSettings)
    def main(settings: ClientSettings) -> None:
        raise StartupError("It cannot be.")

    result = invoked(app)
    assert (result.exit_code, result.stderr, result.stdout) == (2, "octavo: It cannot be.\n", "")


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ((), {}, (7, True, ["x", "y"])),
        ((), {"OCTAVO_COUNT": "5"}, (5, True, ["x", "y"])),
        (("--count", "3", "--word", "z"), {"OCTAVO_COUNT": "5"}, (3, True, ["z"])),
    ],
)
def test_a_commands_own_options_come_from_file_environment_and_command_line(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], expected: tuple[Any, ...]
) -> None:
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @with_settings(ClientSettings)
    def main(
        settings: ClientSettings,
        count: Annotated[int, typer.Option("--count")] = 1,
        loud: Annotated[bool, typer.Option("--loud")] = False,
        word: Annotated[list[str] | None, typer.Option("--word")] = None,
    ) -> None:
        """Does it."""
        seen.append((count, loud, word))

    file = tmp_path / "octavo.yaml"
    file.write_text("count: 7\nloud: true\nword: [x, y]\nblock_size: 32\n")
    result = invoked(app, "--config", str(file), *arguments, **environment)
    assert result.exit_code == 0, result.output
    assert seen == [expected]

    file.write_text("count: many\n")
    result = invoked(app, "--config", str(file))
    assert result.exit_code == 2
    assert "has 'many' for count" in result.output


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ((), {}, False),
        (("--deterministic",), {}, True),
        ((), {"OCTAVO_DETERMINISTIC": "true"}, True),
        (("--no-deterministic",), {"OCTAVO_DETERMINISTIC": "true"}, False),
    ],
)
def test_a_setting_that_is_a_flag(arguments: tuple[str, ...], environment: dict[str, str], expected: bool) -> None:
    seen: list[Any] = []
    result = invoked(app_with(UpSettings, seen), *arguments, **environment)
    assert result.exit_code == 0, result.output
    assert seen[0][0].deterministic is expected


@pytest.mark.parametrize(("value", "spelled"), [(True, "--deterministic"), (False, "--no-deterministic")])
def test_up_passes_a_flag_on(value: bool, spelled: str) -> None:
    arguments = _arguments(UpSettings(deterministic=value, block_size=32), ModelRunnerSettings)
    assert set(arguments) == {"--block-size=32", "--log-level=warning", spelled}
