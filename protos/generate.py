"""Generates the Python stubs of every .proto file beside it: `python protos/generate.py` (`--check`: only compares)."""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(target: Path) -> None:
    """Writes the stubs of all .proto files under ROOT into `target`. Raises SystemExit when protoc refuses one."""
    well_known = resources.files("grpc_tools") / "_proto"
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *outputs, *sources]) != 0:
        raise SystemExit("protoc refused the .proto files; see above")


def stubs(root: Path) -> dict[str, bytes]:
    """The generated files under `root`, by path relative to it."""
    paths = [path for path in root.rglob("*_pb2*") if path.name.endswith(SUFFIXES)]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def stale() -> list[str]:
    """The stubs that are missing, left over, or other than protoc makes them now."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, kept = stubs(Path(scratch)), stubs(ROOT)
    return sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
    elif names := stale():
        raise SystemExit(f"stale stubs, run `python protos/generate.py`: {', '.join(names)}")


if __name__ == "__main__":
    main()
