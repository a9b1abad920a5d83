"""A short name for a model's weights: K/V computed by models of the same name may be mixed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from model_runner.config import ModelConfig
from model_runner.errors import ModelLoadError
from model_runner.weights import WeightSource

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_HEX_DIGITS = 16


def fingerprint_of(config: ModelConfig, weights: WeightSource, weights_form: str, activations: str) -> str:
    """16 hexadecimal digits, from the config, the tensors' names and shapes, and samples of the files' bytes.

    Not from where the files are. Raises ModelLoadError when they cannot be read any more.
    """
    shapes = {name: weights.shape_of(name) for name in sorted(weights.names())}
    facts = {"config": asdict(config), "tensors": shapes, "dtype": weights_form, "activations": activations}
    digest = sha256(json.dumps(facts, sort_keys=True).encode())
    for file in sorted(weights.files()):
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()[:_HEX_DIGITS]


def _samples(file: Path) -> Iterator[bytes]:
    """The file's size, then bytes from all over it, its first and last ones included."""
    try:
        size = file.stat().st_size
        yield size.to_bytes(8, "little")
        with file.open("rb") as opened:
            for index in range(_SAMPLES):
                opened.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                yield opened.read(_SAMPLE_BYTES)
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}.") from None
