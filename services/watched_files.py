"""Files that may be swapped while a process runs, as mounted Secrets are: whether they have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

CHECK_SECONDS = 1.0
"""How often files are looked at, at most."""


class FileWatch:
    """Tells of each change once. Belongs to one thread at a time."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        """Read the files after this, so that a change in between is seen too."""
        self._paths = tuple(paths)
        self._clock = clock
        self._looked = clock()
        self._versions = self._look()

    def changed(self) -> bool:
        """Whether a file is another one than when this was last asked, or has gone; false within CHECK_SECONDS."""
        now = self._clock()
        if now - self._looked < CHECK_SECONDS:
            return False
        self._looked = now
        versions = self._look()
        changed = versions != self._versions
        self._versions = versions
        return changed

    def _look(self) -> tuple[object, ...]:
        return tuple(map(_version, self._paths))


def _version(path: Path) -> object:
    """What changes with a file, also when a symbolic link on the way to it is swapped; None when it cannot be seen."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size
