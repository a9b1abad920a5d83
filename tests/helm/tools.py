"""Real helm and kubectl for the tests of the chart."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

from tests.required import TOOLS, require

CHART = Path(__file__).parents[2] / "helm" / "octavo"
HelmVersion = Literal["3", "4"]
HELM_VERSIONS: tuple[HelmVersion, ...] = ("3", "4")
KUBERNETES_VERSIONS = ("1.29", "1.33", "1.37")
"""The oldest that the chart takes, one in the middle, and the newest that there are schemas of."""
PATIENCE_SECONDS = 300

_HELM = {"3": "helm-3.17.2", "4": "helm-4.3.1"}
_INSTALL = "`make test` brings it on Linux x86_64"


def helm_path(version: HelmVersion = "4") -> Path:
    """The helm binary of a major version."""
    return _tool(_HELM[version])


def kubectl_path() -> Path:
    return _tool("kubectl")


def helm(
    *arguments: str | Path, version: HelmVersion = "4", home: Path, kubeconfig: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs helm to its end, with caches and settings in `home` and none of the user's. Never raises on a bad exit."""
    return _run(helm_path(version), arguments, home, kubeconfig)


def kubectl(*arguments: str | Path, home: Path, kubeconfig: Path) -> subprocess.CompletedProcess[str]:
    """Runs kubectl to its end."""
    return _run(kubectl_path(), arguments, home, kubeconfig)


def _tool(name: str) -> Path:
    path = TOOLS / name
    require(path.exists(), f"{name} is not installed: {_INSTALL}.")
    return path


def _run(
    program: Path, arguments: tuple[str | Path, ...], home: Path, kubeconfig: Path | None
) -> subprocess.CompletedProcess[str]:
    kept = {key: os.environ[key] for key in ("PATH", "TMPDIR") if key in os.environ}
    env = kept | {"HOME": str(home), "HELM_CACHE_HOME": str(home / "cache"), "HELM_CONFIG_HOME": str(home / "config")}
    env |= {"HELM_DATA_HOME": str(home / "data"), "KUBECONFIG": str(kubeconfig or home / "no-kubeconfig")}
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=env, check=False
    )
