"""What all settings have in common: where values come from, addresses, numbers, and sentences of refusal."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.addresses import parse_address, parse_tcp_address, parse_unix_address
from services.config_values import parse_bytes, parse_number, parse_optional_bytes
from services.config_yaml import read_config_file
from services.errors import StartupError

ENV_PREFIX = "OCTAVO_"
CONFIG_ENV = f"{ENV_PREFIX}CONFIG"


def runtime_dir() -> Path:
    """Where this user's sockets live: $XDG_RUNTIME_DIR, or a directory of the user's own under the temporary one."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}"


def default_kv_address() -> str:
    """The socket on which the KV manager and its clients meet when nobody says otherwise."""
    return f"unix:{runtime_dir() / 'octavo' / 'kv.sock'}"


def _address(text: str) -> str:
    parse_address(text)
    return text


def _tcp_address(text: str) -> str:
    parse_tcp_address(text)
    return text


def _unix_address(text: str) -> str:
    parse_unix_address(text)
    return text


AnyAddress = Annotated[str, AfterValidator(_address)]
TcpAddressText = Annotated[str, AfterValidator(_tcp_address)]
UnixAddressText = Annotated[str, AfterValidator(_unix_address)]
WholeNumber = Annotated[int, BeforeValidator(parse_number)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
OptionalBytes = Annotated[int | None, BeforeValidator(parse_optional_bytes)]

SETTING_NAMES: set[str] = set()
"""The fields of all settings."""
COMMAND_OPTIONS: set[str] = set()
"""Options that one command alone has; services.options puts them here."""


class OctavoSettings(BaseSettings):
    """What all commands share. Build it with `load_settings`, which makes one sentence of what is wrong."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )

    config: Path | None = Field(None, description="YAML file with settings, named as the environment without OCTAVO_.")

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        SETTING_NAMES.update(cls.model_fields)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, _FileSource(settings_cls, init_settings))


class _FileSource(PydanticBaseSettingsSource):
    """The YAML file that `config` or OCTAVO_CONFIG names. One file may serve all commands: each takes what it knows."""

    def __init__(self, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource) -> None:
        super().__init__(settings_cls)
        self._path = init_settings().get("config")

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        values = file_values(self._path)
        return {key: value for key, value in values.items() if key in self.settings_cls.model_fields}


Settings = TypeVar("Settings", bound=OctavoSettings)


def known_keys() -> frozenset[str]:
    """The keys that a YAML file may have: the fields of all settings, and the options of all commands."""
    return frozenset(SETTING_NAMES | COMMAND_OPTIONS) - {"config"}


def file_values(path: Path | str | None) -> dict[str, Any]:
    """What the YAML file says, by key: the one at `path`, or else the one that OCTAVO_CONFIG names.

    Raises StartupError for a file that cannot be read or has a key that nobody knows.
    """
    chosen = path or os.environ.get(CONFIG_ENV)
    return read_config_file(Path(chosen), known_keys()) if chosen else {}


def load_settings(settings_class: type[Settings], given: dict[str, Any] | None = None) -> Settings:
    """Settings from what the command line gave, the environment, the YAML file and the defaults.

    Raises StartupError with one sentence about the first value that cannot be.
    """
    try:
        return settings_class(**(given or {}))
    except ValidationError as error:
        raise StartupError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
    elif first["type"] == "extra_forbidden":
        return f"There is no setting {name!r}."
    else:
        message = f"{first['input']!r} is refused; {first['msg'][:1].lower()}{first['msg'][1:]}"
    option, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
    return f"{option} (or {variable}): {message.rstrip('.')}."
