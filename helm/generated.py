"""Files that are made from code: written, or compared with what the code makes now."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

CHART = Path(__file__).parent / "octavo"


def write_or_check(path: Path, text: str, command: str) -> int:
    """With --check on the command line 1 when the file is not `text`, and a sentence on stderr; else writes it."""
    parser = argparse.ArgumentParser(description=f"Writes {path.name}.")
    parser.add_argument("--check", action="store_true", help="Say whether the file is up to date, and write nothing.")
    if not parser.parse_args().check:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{path.name} is not what the code makes now: run `{command}`.", file=sys.stderr)
    return 1
