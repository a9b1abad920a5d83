"""Resident memory of a model runner at its peak: weights and K/V once, and 400 MB for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_runner import native
from tests.e2e.stack import running_stack

OTHERS = 400e6
"""Bytes of interpreter, libraries, tokenizer and activations."""
EMBEDDING = 49_152 * 576
PARAMETERS = 134_515_008
NORMS = (2 * 30 + 1) * 576
POOL = 512 * 16 * 30 * 2 * 3 * 64 * 4
"""512 blocks of 16 tokens, 30 layers of keys and values, 3 heads of 64 numbers of 4 bytes."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch with CUDA is larger by itself")
@pytest.mark.skipif(native.library() is None, reason="plain torch holds all weights in float32")
@pytest.mark.parametrize(
    ("form", "weights"),
    [
        pytest.param("float32", 4 * PARAMETERS, id="float32"),
        pytest.param("bfloat16", 2 * (PARAMETERS - NORMS) + 4 * NORMS, id="bfloat16"),
        # A group of 32 is 16 bytes, a scale and an offset of 2 bytes each; of the embedding 32 bytes and a scale.
        pytest.param("int4", (PARAMETERS - EMBEDDING - NORMS) * 20 / 32 + EMBEDDING * 34 / 32 + 4 * NORMS, id="int4"),
    ],
)
def test_the_peak(tmp_path: Path, form: str, weights: float) -> None:
    with running_stack(tmp_path, "--weights-dtype", form, afresh=True) as stack:
        with stack.client() as client:
            list(client.generate([504] * 600, max_tokens=8, n=8, temperature=1.0, ignore_eos=True))
        assert stack.runner is not None
        status = Path(f"/proc/{stack.runner.process.pid}/status").read_text()
        peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
        assert peak > weights + POOL
        assert peak <= weights + POOL + OTHERS, f"{(peak - weights - POOL) / 1e6:.0f} MB beside weights and K/V"
