"""JSON that a client sends, read as the standard has it: no NaN, no nesting without end."""

from __future__ import annotations

import json
from typing import Any, NoReturn


class NotJson(ValueError):
    """A text is not the JSON that it should be; half a sentence on why."""


def read_json(text: str) -> Any:
    """The value. Raises NotJson."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise NotJson(f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos}") from None
    except NotJson:
        raise
    except RecursionError:
        raise NotJson("it is nested too deep") from None
    except ValueError:
        raise NotJson("it has a whole number of thousands of digits") from None


def read_json_object(text: str) -> dict[str, Any]:
    """The object. Raises NotJson, also for any other JSON."""
    value = read_json(text)
    if not isinstance(value, dict):
        raise NotJson("it is JSON, but no object")
    return value


def _refuse(constant: str) -> NoReturn:
    raise NotJson(f"{constant} is no JSON")
