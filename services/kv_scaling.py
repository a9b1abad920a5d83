"""Which scales the K/V of a model has: those of its checkpoint, measured ones, or none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_runner.attention import AttentionShape
from model_runner.calibration import calibrate, calibration_prompts
from model_runner.kv_scales import KvScales
from model_runner.loading import KV_DTYPES, LoadedModel
from services.config import ModelRunnerSettings
from services.errors import StartupError


@dataclass(frozen=True, slots=True)
class Scaling:
    """source: 'none', 'checkpoint' or 'calibrated'."""

    source: str
    scales: KvScales | None = None
    detail: str = ""

    def describe(self) -> str:
        """For the log: 'calibrated on 900 tokens: K 0.0625 to 0.5, V 0.0156 to 0.25'."""
        return self.source if self.scales is None else f"{self.source}{self.detail}: {self.scales.describe()}"


UNSCALED = Scaling("none")


def wants_checkpoint_scales(settings: ModelRunnerSettings) -> bool:
    """Whether to read those of the checkpoint. Raises StartupError for a choice without a cache of 8 bits."""
    if is_scaled(settings):
        return settings.kv_scales in ("auto", "checkpoint")
    if settings.kv_scales in ("checkpoint", "calibrate"):
        raise StartupError(f"--kv-scales {settings.kv_scales} is for --kv-dtype fp8_e4m3, not {settings.kv_dtype}.")
    return False


def is_scaled(settings: ModelRunnerSettings) -> bool:
    """Whether K/V may have scales: in 8 bits."""
    dtype = KV_DTYPES.get(settings.kv_dtype)
    return dtype is not None and dtype.itemsize == 1


def scaling_for(settings: ModelRunnerSettings, loaded: LoadedModel, shape: AttentionShape) -> Scaling:
    """What --kv-scales says. shape: of the cache, without scales. Raises StartupError with one sentence."""
    if not is_scaled(settings) or settings.kv_scales == "none":
        return UNSCALED
    if loaded.kv_scales is not None:
        return Scaling("checkpoint", loaded.kv_scales)
    if settings.kv_scales == "checkpoint":
        raise StartupError(f"{loaded.name} brings no scales of K/V; --kv-scales calibrate measures them.")
    return _calibrated(loaded, shape)


def _calibrated(loaded: LoadedModel, shape: AttentionShape) -> Scaling:
    prompts = calibration_prompts(loaded.tokenizer, loaded.config.max_position_embeddings)
    try:
        scales = calibrate(loaded.model, prompts, shape)
    except ValueError as error:
        raise StartupError(f"The scales of K/V of {loaded.name} cannot be measured: {error}.") from None
    except torch.OutOfMemoryError:
        longest = max(map(len, prompts))
        raise StartupError(f"No memory beside the weights to measure scales of K/V on {longest} tokens.") from None
    return Scaling("calibrated", scales, f" on {sum(map(len, prompts))} tokens")
