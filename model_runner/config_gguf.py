"""The config of a model in a GGUF file: from the metadata under its architecture's name, and from its tensors."""

from __future__ import annotations

from model_runner.config import Architecture, ModelConfig, RopeScaling, checked, head_dim_of, window_in_use
from model_runner.errors import ModelLoadError
from model_runner.fields import Fields
from model_runner.gguf_file import GgufFile

# Mistral models are written as 'llama', which they are but for a sliding window.
_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_END_TOKENS = ("eos", "eot", "eom")


def config_from_gguf(reader: GgufFile) -> ModelConfig:
    """Reads the config of an open GGUF file. Raises ModelLoadError."""
    path = reader.path
    fields = Fields(path, reader.metadata)
    name = fields.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelLoadError(f"{path}: the architecture {name!r} is not supported; {', '.join(_ARCHITECTURES)} are.")
    _refuse_unsupported(reader, fields, name)
    hidden_size = fields.count(f"{name}.embedding_length")
    num_heads = fields.count(f"{name}.attention.head_count")
    max_positions = fields.count(f"{name}.context_length")
    config = ModelConfig(
        architecture=_ARCHITECTURES[name],
        vocab_size=_vocab_size(reader),
        hidden_size=hidden_size,
        intermediate_size=fields.count(f"{name}.feed_forward_length"),
        num_layers=_num_layers(reader, fields, f"{name}.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.count(f"{name}.attention.head_count_kv", default=num_heads),
        head_dim=_head_dim(fields, name, hidden_size, num_heads),
        rms_norm_eps=fields.positive(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.positive(f"{name}.rope.freq_base", default=10000.0),
        rope_scaling=_rope_scaling(fields, name),
        max_position_embeddings=max_positions,
        tie_word_embeddings="output.weight" not in reader.tensors,
        qkv_bias="blk.0.attn_q.bias" in reader.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in reader.tensors,
        sliding_window=window_in_use(_sliding_window(fields, name), max_positions),
        eos_token_ids=end_token_ids(fields),
        bos_token_id=fields.token_id("tokenizer.ggml.bos_token_id"),
    )
    return checked(path, config)


def end_token_ids(fields: Fields) -> tuple[int, ...]:
    """The tokens that end a text, a turn or a message: each once, in that order."""
    ids = [fields.token_id(f"tokenizer.ggml.{kind}_token_id") for kind in _END_TOKENS]
    return tuple(dict.fromkeys(each for each in ids if each is not None))


def _refuse_unsupported(reader: GgufFile, fields: Fields, name: str) -> None:
    """Refuses variants that would load, and compute something else."""
    path = reader.path
    if fields.get(f"{name}.expert_count"):
        raise ModelLoadError(f"{path}: mixtures of experts are not supported.")
    if (fields.get("split.count") or 1) != 1:
        raise ModelLoadError(f"{path} is one part of a split model; join the parts to one file first.")
    for tensor in ("blk.0.attn_output.bias", "blk.0.ffn_down.bias"):
        if tensor in reader.tensors:
            raise ModelLoadError(f"{path}: the tensor {tensor} is not supported.")


def _num_layers(reader: GgufFile, fields: Fields, key: str) -> int:
    count = fields.count(key)
    # Checked here, since names are made for as many layers as this says.
    if f"blk.{count - 1}.attn_norm.weight" not in reader.tensors:
        raise ModelLoadError(f"{reader.path}: {key} is {count}, and there are no tensors of layer {count - 1}.")
    # The decoder cannot see this: tensors of layers beyond have no names there.
    if f"blk.{count}.attn_norm.weight" in reader.tensors:
        raise ModelLoadError(f"{reader.path}: {key} is {count}, and there are tensors of layer {count}.")
    return count


def _vocab_size(reader: GgufFile) -> int:
    # The embedding may have more rows than there are tokens: it is padded.
    embedding = reader.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{reader.path}: the tensor token_embd.weight is missing, or no matrix.")
    return embedding.shape[0]


def _head_dim(fields: Fields, name: str, hidden_size: int, num_heads: int) -> int:
    length = f"{name}.attention.key_length"
    known = fields.get(length) is not None
    head_dim = fields.count(length) if known else head_dim_of(fields.path, hidden_size, num_heads)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if fields.count(key, default=head_dim) != head_dim:
            raise ModelLoadError(f"{fields.path}: {key} is {fields.get(key)}, and keys have {head_dim} dimensions.")
    return head_dim


def _rope_scaling(fields: Fields, name: str) -> RopeScaling | None:
    """Linear scaling, in either spelling. Llama 3's comes as a tensor of factors and is no setting."""
    kind = fields.text(f"{name}.rope.scaling.type", default="none")
    if kind == "linear":
        return RopeScaling("linear", fields.positive(f"{name}.rope.scaling.factor"))
    if kind != "none":
        raise ModelLoadError(f"{fields.path}: the rope scaling {kind!r} is not supported; 'linear' is.")
    factor = fields.positive(f"{name}.rope.scale_linear", default=1.0)
    return None if factor == 1.0 else RopeScaling("linear", factor)


def _sliding_window(fields: Fields, name: str) -> int | None:
    # 0 is how a file says that there is none.
    key = f"{name}.attention.sliding_window"
    return fields.count(key) if fields.get(key) else None
