"""Builds the CPU kernels where there is a compiler, and compiles the books with mypyc when OCTAVO_COMPILE=1 is set.

Everything else is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.errors import CompileError
except ImportError:
    from distutils.errors import CompileError

BOOKS = sorted(str(path) for path in Path("kvmanager").glob("*.py"))
KERNELS = Path("model_runner/native/src")
# A plain library for ctypes: nothing in it depends on the version of Python.
LIBRARY = "model_runner.native.liboctavo"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-g0"]
FLAGS += ["-ffp-contract=off", "-fno-trapping-math"]
"""The same bits in every instruction set; and no floating-point exceptions, so that choices can be vectorised."""
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
OWN_FLAGS = {
    "x86_64": {
        "kernels_avx2.cpp": AVX2,
        "kernels_avx2vnni.cpp": [*AVX2, "-mavxvnni"],
        "kernels_avx512.cpp": AVX512,
        "kernels_avx512vnni.cpp": [*AVX512, "-mavx512vnni"],
        "kernels_avx512bf16.cpp": [*AVX512, "-mavx512bf16"],
    },
    "aarch64": {"kernels_neondot.cpp": ["-march=armv8.2-a+dotprod"]},
}
"""The flags of one file only, by the machine: what is in the others runs on any of its kind."""
SAME_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


class BuildKernels(build_ext):
    """Compiles each source of the library with its own flags; the other extensions as ever."""

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.split(".")[-1] != LIBRARY.split(".")[-1]:
            return super().get_ext_filename(fullname)
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        if ext.name != LIBRARY:
            super().build_extension(ext)
            return
        # Compilers are processes of their own: one for each core.
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiled = list(threads.map(lambda source: self._compile(source, ext.depends), ext.sources))
        objects = [each for some in compiled for each in some]
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(target))
        self.compiler.link_shared_object(objects, target, target_lang="c++", extra_postargs=["-pthread"])

    def _compile(self, source: str, depends: list[str]) -> list[str]:
        machine = platform.machine().lower()
        own = OWN_FLAGS.get(SAME_MACHINES.get(machine, machine), {}).get(Path(source).name, [])
        compiled = {"output_dir": self.build_temp, "depends": depends}
        try:
            return self.compiler.compile([source], extra_postargs=[*FLAGS, *own], **compiled)
        except CompileError:
            if not own:
                raise
            # A compiler too old for this instruction set: the file is empty without its flags.
            return self.compiler.compile([source], extra_postargs=FLAGS, **compiled)


def extensions() -> list:
    # optional: without a compiler the installation goes on, and the model runs in plain torch.
    sources, headers = (sorted(str(path) for path in KERNELS.glob(pattern)) for pattern in ("*.cpp", "*.h"))
    kernels = Extension(LIBRARY, sources, depends=headers, language="c++", optional=True)
    if os.environ.get("OCTAVO_COMPILE") != "1":
        return [kernels]
    from mypyc.build import mypycify

    return [kernels, *mypycify(["--strict", *BOOKS], opt_level="3", debug_level="0")]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
