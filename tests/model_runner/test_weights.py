"""Tensors from safetensors and GGUF files: the same ones from both, and one sentence for every damaged file."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Encoding
from safetensors.numpy import load_file, save_file

from model_runner.config import RopeScaling
from model_runner.config_gguf import config_from_gguf
from model_runner.config_hf import config_from_hf
from model_runner.errors import ModelLoadError
from model_runner.gguf_file import GgufFile
from model_runner.gguf_weights import GgufWeights
from model_runner.loading import load_model
from model_runner.models.decoder import Decoder
from model_runner.weights import SafetensorsWeights
from tests.model_runner.gguf_maker import tiny_metadata, tiny_tensors, write_gguf

CPU = torch.device("cpu")


def open_gguf(path: Path) -> GgufWeights:
    reader = GgufFile(path)
    return GgufWeights(reader, config_from_gguf(reader))


@pytest.fixture
def llama_gguf(tiny_models: Path, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "llama.gguf", tiny_metadata(), tiny_tensors(tiny_models / "llama"))


@pytest.fixture
def sharded(tiny_models: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_models / "sharded", tmp_path / "sharded"))


@pytest.fixture
def single(tiny_models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models / "llama", tmp_path / "single"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "sharded"])
def test_safetensors_are_what_is_in_the_files(tiny_models: Path, name: str) -> None:
    stored = {}
    for file in (tiny_models / name).glob("*.safetensors"):
        stored |= load_file(file)
    weights = SafetensorsWeights(tiny_models / name)
    assert set(weights.names()) == stored.keys()
    assert weights.total_bytes == sum(array.nbytes for array in stored.values())
    for key, array in stored.items():
        assert weights.shape_of(key) == array.shape
        assert weights.bytes_of(key) == array.nbytes
        np.testing.assert_array_equal(weights.load(key).numpy(), array)
    assert weights.rope_freq_factors() is None


def test_gguf_of_llama_gives_the_same_tensors(tiny_models: Path, llama_gguf: Path) -> None:
    theirs, ours = SafetensorsWeights(tiny_models / "llama"), open_gguf(llama_gguf)
    assert set(ours.names()) == set(theirs.names())
    assert ours.total_bytes == theirs.total_bytes
    for name in theirs.names():
        assert ours.shape_of(name) == theirs.shape_of(name)
        torch.testing.assert_close(ours.load(name), theirs.load(name), atol=0, rtol=0)


@pytest.mark.parametrize(("name", "hidden_size", "head_dim"), [("qwen2", 32, 8), ("qwen3", 48, 16)])
def test_gguf_of_qwen_keeps_its_row_order(
    tiny_models: Path, tmp_path: Path, name: str, hidden_size: int, head_dim: int
) -> None:
    metadata = tiny_metadata(name) | {
        f"{name}.embedding_length": hidden_size,
        f"{name}.attention.key_length": head_dim,
        f"{name}.rope.dimension_count": head_dim,
        f"{name}.rope.freq_base": 10000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    file = write_gguf(tmp_path / "qwen.gguf", metadata, tiny_tensors(tiny_models / name, interleaved=False), name)
    theirs, ours = SafetensorsWeights(tiny_models / name), open_gguf(file)
    for each in theirs.names():
        torch.testing.assert_close(ours.load(each), theirs.load(each), atol=0, rtol=0)
    expected, read = config_from_hf(tiny_models / name), config_from_gguf(GgufFile(file))
    assert read.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert [getattr(read, key) for key in read.__slots__ if key != "rms_norm_eps"] == [
        getattr(expected, key) for key in expected.__slots__ if key != "rms_norm_eps"
    ]


@pytest.mark.parametrize("encoding", [Encoding.F16, Encoding.BF16, Encoding.Q8_0, Encoding.Q4_0, Encoding.Q4_1])
def test_encodings_are_dequantised(tiny_models: Path, tmp_path: Path, encoding: Encoding) -> None:
    tensors = {key: array for key, array in tiny_tensors(tiny_models / "llama").items() if array.shape[-1] == 32}
    file = write_gguf(tmp_path / "model.gguf", tiny_metadata(), tensors, encoding=encoding)
    name = "model.layers.1.self_attn.o_proj.weight"
    original = SafetensorsWeights(tiny_models / "llama").load(name)
    loaded = open_gguf(file).load(name)
    assert loaded.dtype == torch.float32
    # The error of one rounding: relative for floats, a share of a block's largest number for the others.
    step = {Encoding.F16: 2**-11, Encoding.BF16: 2**-8, Encoding.Q8_0: 1 / 250}.get(encoding, 1 / 7)
    assert (loaded - original).abs().max() <= step * original.abs().max()
    assert not torch.equal(loaded, original)


@pytest.mark.parametrize("encoding", [Encoding.Q4_K, Encoding.Q6_K, Encoding.IQ4_XS, Encoding.Q2_K, Encoding.Q5_1])
def test_other_encodings_go_through_the_gguf_package(tmp_path: Path, encoding: Encoding) -> None:
    block, size = gguf.GGML_QUANT_SIZES[encoding]
    raw = np.random.default_rng(3).integers(0, 60, (64, 256 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in {"block_count": 1, "embedding_length": 256, "feed_forward_length": 64}.items():
        writer.add_uint32(f"llama.{key}", value)
    for key, value in {"context_length": 64, "attention.head_count": 4, "attention.head_count_kv": 1}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(256, dtype=np.float32))
    for name in ("token_embd.weight", "blk.0.attn_v.weight"):
        writer.add_tensor(name, raw, raw_dtype=encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = open_gguf(tmp_path / "model.gguf").load("model.layers.0.self_attn.v_proj.weight")
    np.testing.assert_array_equal(loaded.numpy(), gguf.dequantize(raw, encoding))


def test_header_says_what_the_gguf_package_reads(llama_gguf: Path) -> None:
    theirs, ours = gguf.GGUFReader(llama_gguf), GgufFile(llama_gguf)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (found.offset, found.num_bytes, found.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert found.shape == tuple(reversed(tensor.shape.tolist()))


def test_rope_factors_of_llama_3(tiny_models: Path, tmp_path: Path) -> None:
    factors = np.array([1, 2, 4, 8], dtype=np.float32)
    tensors = tiny_tensors(tiny_models / "llama") | {"rope_freqs.weight": factors}
    weights = open_gguf(write_gguf(tmp_path / "model.gguf", tiny_metadata(), tensors))
    assert weights.rope_freq_factors().tolist() == [1, 2, 4, 8]
    assert not any("rope" in name for name in weights.names())


@pytest.mark.parametrize("factors", [[1, 2, 4], [1, 2, 0, 8]])
def test_rope_factors_that_cannot_be(tiny_models: Path, tmp_path: Path, factors: list[float]) -> None:
    tensors = tiny_tensors(tiny_models / "llama") | {"rope_freqs.weight": np.array(factors, dtype=np.float32)}
    weights = open_gguf(write_gguf(tmp_path / "model.gguf", tiny_metadata(), tensors))
    with pytest.raises(ModelLoadError, match="should have 4 numbers above 0"):
        weights.rope_freq_factors()


def test_gguf_config(tiny_models: Path, tmp_path: Path) -> None:
    changes = {
        "llama__rope__scaling__type": "linear",
        "llama__rope__scaling__factor": 2.0,
        "llama__attention__sliding_window": 16,
        "tokenizer__ggml__eot_token_id": 2,
        "tokenizer__ggml__eom_token_id": 1,
    }
    tensors = tiny_tensors(tiny_models / "llama")
    del tensors["output.weight"]
    config = config_from_gguf(GgufFile(write_gguf(tmp_path / "model.gguf", tiny_metadata(**changes), tensors)))
    assert config.rope_scaling == RopeScaling("linear", 2.0)
    assert config.sliding_window == 16
    assert config.eos_token_ids == (1, 2)
    assert config.tie_word_embeddings is True
    assert (config.vocab_size, config.head_dim, config.max_position_embeddings) == (128, 8, 256)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": 2**32 - 1}, "no tensors of layer 4294967294"),
        ({"llama__attention__head_count_kv": 3}, "4 attention heads cannot be divided among 3"),
        ({"llama__attention__head_count": [4, 4]}, "head_count is [4, 4]"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn' is not supported"),
        ({"llama__rope__dimension_count": 4}, "dimension_count is 4"),
        ({"llama__expert_count": 8}, "mixtures of experts"),
        ({"split__count": 2}, "one part of a split model"),
    ],
)
def test_gguf_config_refused(tiny_models: Path, tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_metadata(**changes), tiny_tensors(tiny_models / "llama"))
    with pytest.raises(ModelLoadError) as refusal:
        config_from_gguf(GgufFile(file))
    assert sentence in str(refusal.value)
    assert str(file) in str(refusal.value)


def test_gguf_of_another_architecture(tiny_models: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_metadata("gemma"), tiny_tensors(tiny_models / "llama"), "gemma")
    with pytest.raises(ModelLoadError, match="architecture 'gemma' is not supported"):
        config_from_gguf(GgufFile(file))


def test_missing_tensors(tiny_models: Path, single: Path, tmp_path: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, single / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        Decoder(config_from_hf(single), SafetensorsWeights(single), torch.float32, CPU)
    named = tiny_tensors(tiny_models / "llama")
    del named["blk.1.ffn_up.weight"]
    file = write_gguf(tmp_path / "model.gguf", tiny_metadata(), named)
    reader = GgufFile(file)
    with pytest.raises(ModelLoadError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        Decoder(config_from_gguf(reader), open_gguf(file), torch.float32, CPU)


def test_wrong_shapes(tiny_models: Path, single: Path, tmp_path: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    save_file(tensors, single / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[31\]"):
        Decoder(config_from_hf(single), SafetensorsWeights(single), torch.float32, CPU)
    named = tiny_tensors(tiny_models / "llama")
    named["blk.0.attn_q.weight"] = named["blk.0.attn_q.weight"][:-1]
    file = write_gguf(tmp_path / "model.gguf", tiny_metadata(), named)
    with pytest.raises(ModelLoadError, match=r"31 rows of .*q_proj\.weight"):
        Decoder(config_from_gguf(GgufFile(file)), open_gguf(file), torch.float32, CPU)


def test_tensors_of_whole_numbers_are_refused(single: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, single / "model.safetensors")
    with pytest.raises(ModelLoadError, match="of type I8"):
        SafetensorsWeights(single)


def cut(file: Path, keep: float) -> None:
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])


def replace_start(file: Path, start: bytes) -> None:
    file.write_bytes(start + file.read_bytes()[len(start) :])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "one byte": lambda file: file.write_bytes(b"G"),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
    "cut in the header": lambda file: cut(file, 0.01),
    "cut in half": lambda file: cut(file, 0.5),
    "last byte cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "wrong magic": lambda file: replace_start(file, b"\x93NUMPY\x01\x00"),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "ones": lambda file: file.write_bytes(b"\xff" * file.stat().st_size),
    "text": lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 100\n"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["gguf", "single", "sharded"])
def test_damaged_files(request: pytest.FixtureRequest, kind: str, damage: str) -> None:
    source: Path = request.getfixturevalue({"gguf": "llama_gguf"}.get(kind, kind))
    name = "model-00003-of-00006.safetensors" if kind == "sharded" else "model.safetensors"
    file = source if kind == "gguf" else source / name
    DAMAGES[damage](file)
    with pytest.raises(ModelLoadError) as refusal:
        open_gguf(source) if kind == "gguf" else SafetensorsWeights(source)
    sentence = str(refusal.value)
    assert file.name in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("", "is not valid JSON"),
        ("{}", "weight_map should say"),
        ('{"weight_map": {}}', "weight_map should say"),
        ('{"weight_map": {"a": 1}}', "weight_map should say"),
        ('{"weight_map": {"a": "model-00009.safetensors"}}', "lists the shard model-00009.safetensors"),
        ('{"weight_map": {"a": "../llama/model.safetensors"}}', "is not in the directory"),
        ('{"weight_map": {"a": "model-00001-of-00006.safetensors"}}', "has no tensor a"),
    ],
)
def test_damaged_index(sharded: Path, index: str, sentence: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=sentence):
        SafetensorsWeights(sharded)


def test_no_safetensors_at_all(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsWeights(tmp_path)


def test_gguf_with_flipped_header_bytes_loads_or_is_refused(llama_gguf: Path, tmp_path: Path) -> None:
    """Whatever one byte says: never a foreign exception, and no loop up to a damaged number."""
    original, dice = llama_gguf.read_bytes(), random.Random(5)
    header_end = min(tensor.offset for tensor in GgufFile(llama_gguf).tensors.values())
    refused = 0
    for _ in range(400):
        position, value = dice.randrange(header_end), dice.randrange(256)
        file = tmp_path / "flipped.gguf"
        file.write_bytes(original[:position] + bytes([value]) + original[position + 1 :])
        try:
            load_model(file)
        except ModelLoadError:
            refused += 1
    assert refused > 40


@pytest.mark.parametrize("position", [8, 16])
def test_gguf_with_huge_counts(llama_gguf: Path, position: int) -> None:
    content = bytearray(llama_gguf.read_bytes())
    content[position : position + 8] = struct.pack("<Q", 2**62)
    llama_gguf.write_bytes(content)
    with pytest.raises(ModelLoadError, match="goes on after the file's end"):
        GgufFile(llama_gguf)


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_gguf_of_another_version(llama_gguf: Path, version: int) -> None:
    replace_start(llama_gguf, b"GGUF" + struct.pack("<I", version))
    with pytest.raises(ModelLoadError, match=f"GGUF version {version}"):
        GgufFile(llama_gguf)


def test_safetensors_with_flipped_header_bytes(single: Path) -> None:
    file, dice = single / "model.safetensors", random.Random(6)
    original = file.read_bytes()
    (header_length,) = struct.unpack("<Q", original[:8])
    assert json.loads(original[8 : 8 + header_length])
    refused = 0
    for _ in range(200):
        position = dice.randrange(8 + header_length)
        file.unlink()
        file.write_bytes(original[:position] + bytes([dice.randrange(256)]) + original[position + 1 :])
        try:
            weights = SafetensorsWeights(single)
            for name in weights.names():
                weights.load(name)
        except ModelLoadError:
            refused += 1
    assert refused > 100
