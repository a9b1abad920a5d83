"""Scales of K and V that a checkpoint brings along, by the names that quantisers give them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from model_runner.errors import ModelLoadError
from model_runner.kv_scales import KvScales
from model_runner.weights import WeightSource

# llm-compressor's, vLLM's own, ModelOpt's, those of stacked projections, and Quark's and older compressed-tensors'.
_OF_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale")
_OF_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale")
_OF_BOTH = ("kv_scale", "attn.kv_scale")
"""As older files have it: one for keys and values together."""


def checkpoint_scales(weights: WeightSource, num_layers: int) -> KvScales | None:
    """One scale for the keys and one for the values of each layer; None where there are none at all.

    Raises ModelLoadError for scales that are not in all layers, of one head each, or no numbers above 0.
    """
    layers = [f"model.layers.{layer}.self_attn" for layer in range(num_layers)]
    keys = [_find(weights, layer, (*_OF_KEYS, *_OF_BOTH)) for layer in layers]
    values = [_find(weights, layer, (*_OF_VALUES, *_OF_BOTH)) for layer in layers]
    found = [name for name in (*keys, *values) if name is not None]
    if not found:
        return None
    file = weights.file_of(found[0])
    for what, names in (("k_scale", keys), ("v_scale", values)):
        if None in names:
            raise ModelLoadError(f"{file} has {found[0]}, and layer {names.index(None)} has no {what}.")
    try:
        return KvScales(*(tuple(_number(weights, name) for name in names if name) for names in (keys, values)))
    except ValueError as error:
        raise ModelLoadError(f"{file}: {error}.") from None


def _find(weights: WeightSource, layer: str, names: Sequence[str]) -> str | None:
    return next((f"{layer}.{name}" for name in names if f"{layer}.{name}" in weights.names()), None)


def _number(weights: WeightSource, name: str) -> float:
    shape = weights.shape_of(name)
    if prod(shape) != 1:
        raise ModelLoadError(
            f"{weights.file_of(name)}: {name} has {prod(shape)} scales, and one for all heads of a layer is supported."
        )
    return float(weights.load(name).item())
