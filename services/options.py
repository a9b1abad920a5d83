"""Command-line options made from the fields of a settings model, so that each is described once.

    @app.command()
    @with_settings(ClientSettings, only=("kv_address", "pool_id"))
    def pool(settings: ClientSettings, json: bool = False) -> None: ...

`settings` comes from load_settings() and the model's fields become options with description, unit, default and
environment variable in --help. The command's own options get an environment variable each and may stand in the YAML
file too, under the same precedence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer.models import OptionInfo

from services.cli_common import run_or_exit_2
from services.config_base import COMMAND_OPTIONS, ENV_PREFIX, OctavoSettings, file_values, load_settings
from services.errors import StartupError

Settings = TypeVar("Settings", bound=OctavoSettings)

_SETTINGS = "settings"
_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def with_settings(
    settings_class: type[Settings],
    *,
    only: Collection[str] | None = None,
    names: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a typer command whose parameter `settings` is a `settings_class`.

    only: the fields that become options; None for all. --config is always there. names: further option names by
    field, such as {"runner_address": ("--address",)}. A StartupError in the command prints its sentence and exits 2.
    """
    chosen = [name for name in _own_fields_first(settings_class) if only is None or name in only or name == "config"]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = _own_parameters(command)
        own_options = _name_in_environment(own)
        COMMAND_OPTIONS.update(own_options)
        options = [_parameter(name, settings_class.model_fields[name], (names or {}).get(name, ())) for name in chosen]

        @functools.wraps(command)
        def run(context: typer.Context, **arguments: Any) -> None:
            given = {name: value for name in chosen if (value := arguments.pop(name)) is not None}

            def work() -> None:
                from_file = _from_file(context, own_options, given.get("config"))
                command(settings=load_settings(settings_class, given), **(arguments | from_file))

            run_or_exit_2(work)

        # typer reads the signature and the annotations; both must tell of the options and not of `settings`.
        shown = [_CONTEXT, *own, *options]
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in shown}
        del run.__wrapped__  # type: ignore[attr-defined]
        return run

    return decorate


def _own_fields_first(settings_class: type[OctavoSettings]) -> list[str]:
    """The fields as --help shows them: the model's own before those that it shares with others."""
    lineage = settings_class.__mro__

    def depth(name: str) -> int:
        return next(index for index, each in enumerate(lineage) if name in vars(each).get("__annotations__", {}))

    return sorted(settings_class.model_fields, key=depth)


def _own_parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    hints = get_type_hints(command, include_extras=True)
    return [
        each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(command).parameters.values()
        if each.name != _SETTINGS
    ]


def _name_in_environment(parameters: list[inspect.Parameter]) -> dict[str, Any]:
    """Gives each of a command's own options its environment variable; returns the options' types by name."""
    types: dict[str, Any] = {}
    for parameter in parameters:
        kind, *notes = get_args(parameter.annotation) or (parameter.annotation,)
        for note in notes:
            if isinstance(note, OptionInfo):
                note.envvar = note.envvar or f"{ENV_PREFIX}{parameter.name.upper()}"
                types[parameter.name] = kind
    return types


def _from_file(context: typer.Context, types: Mapping[str, Any], path: str | None) -> dict[str, Any]:
    """The YAML file's values for those of the command's options that were given nowhere else."""
    values = file_values(path)
    unset = [name for name in types if name in values and context.get_parameter_source(name).name == "DEFAULT"]
    return {name: _typed(name, types[name], values[name]) for name in unset}


def _typed(name: str, kind: Any, value: object) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise StartupError(f"The settings file has {value!r} for {name}; {message[:1].lower()}{message[1:]}.") from None


def _parameter(name: str, field: FieldInfo, more_names: tuple[str, ...]) -> inspect.Parameter:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    spelled = name.replace("_", "-")
    # A flag that is None until it is given decides by what is there.
    is_flag = field.annotation in (bool, bool | None)
    option = typer.Option(
        f"--{spelled}/--no-{spelled}" if is_flag else f"--{spelled}",
        *extra.get("options", ()),
        *more_names,
        help=_help(field),
        envvar=f"{ENV_PREFIX}{name.upper()}",
        show_default=_shown_default(field, extra),
        metavar=None if is_flag else _metavar(field, extra),
    )
    if is_flag:
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[bool | None, option]
        )
    # The text goes to pydantic as it is, so that the environment and the file are judged by the same rules.
    annotation = Annotated[str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown_default(field: FieldInfo, extra: Mapping[str, Any]) -> str | bool:
    if "shown_default" in extra:
        return str(extra["shown_default"])
    return False if field.default is None else str(field.default)


def _help(field: FieldInfo) -> str:
    choices = _choices(field)
    return f"{field.description} One of: {', '.join(choices)}." if choices else str(field.description)


def _choices(field: FieldInfo) -> tuple[str, ...]:
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def _metavar(field: FieldInfo, extra: Mapping[str, Any]) -> str:
    if "metavar" in extra:
        return str(extra["metavar"])
    kinds = {field.annotation, *get_args(field.annotation)}
    return next((name for kind, name in _METAVARS.items() if kind in kinds), "TEXT")


_METAVARS: dict[type, str] = {Path: "PATH", float: "SECONDS", int: "NUMBER"}
