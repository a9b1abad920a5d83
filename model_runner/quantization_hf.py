"""What of a Hugging Face checkpoint is quantised, by quantization_config in its config.json: K and V may be."""

from __future__ import annotations

from model_runner.errors import ModelLoadError
from model_runner.fields import Fields


def refuse_quantised(fields: Fields) -> None:
    """Raises ModelLoadError for quantised weights, and for scales of K/V that are not those of 8-bit floats."""
    quantization = fields.object("quantization_config")
    if quantization is None:
        return
    if not _has_plain_weights(quantization):
        raise ModelLoadError(f"{fields.path}: quantised safetensors are not supported; a GGUF file may be quantised.")
    scheme = quantization.object("kv_cache_scheme")
    if scheme is not None and not _is_static_fp8(scheme):
        raise ModelLoadError(
            f"{fields.path}: kv_cache_scheme is {quantization.get('kv_cache_scheme')!r:.200}, and of its kinds static, "
            "symmetric floats of 8 bits are supported."
        )


def _has_plain_weights(quantization: Fields) -> bool:
    """Whether compressed-tensors or ModelOpt say that nothing but K/V was quantised."""
    if quantization.get("quant_method") not in ("compressed-tensors", "modelopt"):
        return False
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise quantization.wrong("config_groups", "an object of objects")
    touched = any(group.get(part) for group in groups.values() for part in ("weights", "input_activations"))
    return not touched and quantization.get("quant_algo") is None


def _is_static_fp8(scheme: Fields) -> bool:
    return (
        scheme.get("num_bits") == 8
        and scheme.get("type") == "float"
        and not scheme.flag("dynamic", default=False)
        and scheme.flag("symmetric", default=True)
    )
