"""What a process loads: the KV manager and the tools run without torch, and imports go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What a package may import of the others and of the heavy libraries.
FORBIDDEN = {
    "kvmanager": {"grpc", "torch", "numpy", "services", "model_runner", "octavo"},
    "model_runner": {"grpc", "services", "kvmanager", "octavo"},
}


@pytest.mark.parametrize("module", ["services.cli", "services.kv_process", "services.client", "octavo"])
def test_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(','.join(sorted({{'torch', 'numpy', 'tokenizers'}} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names}
            assert not roots & FORBIDDEN[package], path
