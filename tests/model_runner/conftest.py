"""What the tests of the model runner share: the demo model, loaded once, and the models in tests/data/."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from model_runner.loading import LoadedModel, demo_model_path, load_model

# GPU kernels run in Triton's interpreter here, which must be said before anything loads them.
os.environ["TRITON_INTERPRET"] = "1"
DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session", autouse=True)
def torch_threads() -> None:
    """One thread for each CPU that is this process's beside its neighbours: more would wait for each other."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


@pytest.fixture(scope="session")
def smollm2(torch_threads: None) -> LoadedModel:
    """SmolLM2-135M-Instruct in float32 on the CPU."""
    return load_model(demo_model_path())


@pytest.fixture(scope="session")
def smollm2_channel(torch_threads: None) -> LoadedModel:
    """The same with weights in 8 bits, a scale for each output, and activations in 8 bits."""
    return load_model(demo_model_path(), weights_dtype="int8_channel", activations_dtype="int8")


@pytest.fixture(scope="session")
def smollm2_in_torch(torch_threads: None) -> LoadedModel:
    """The same in plain torch, as where there are no CPU kernels."""
    with mock.patch("model_runner.loading.library", return_value=None):
        return load_model(demo_model_path())


@pytest.fixture(scope="session")
def golden_smollm2() -> list[dict[str, Any]]:
    """20 prompts with what an independent implementation makes of them."""
    return json.loads((DATA / "golden_smollm2.json").read_text())["items"]


@pytest.fixture(scope="session")
def tiny_models() -> Path:
    """The folder with small random models of each family, made by make_tiny_models.py."""
    return DATA / "tiny"


@pytest.fixture
def no_foresight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admissions leave one block for each running sequence and no more, as when nothing is known of their lengths."""
    monkeypatch.setattr("model_runner.entrance.headroom", lambda running, *rest: len(list(running)))
