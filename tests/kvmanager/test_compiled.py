"""Which build of the books the tests run on."""

import importlib
import os
import pkgutil
from pathlib import Path

import kvmanager

COMPILED = os.environ.get("OCTAVO_COMPILE") == "1"


def test_every_module_is_of_the_build_that_was_asked_for() -> None:
    names = [module.name for module in pkgutil.iter_modules(kvmanager.__path__, "kvmanager.")]
    suffixes = {name: Path(str(importlib.import_module(name).__file__)).suffix for name in names}
    assert len(names) > 10
    assert set(suffixes.values()) == {".so" if COMPILED else ".py"}, suffixes
