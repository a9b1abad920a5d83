"""Scales of K and V by what a model makes of real text: for caches of 8 bits whose checkpoint brings none.

Text, because steps that only warm up measure too little: see docs/gpu.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionShape
from model_runner.attention.reference import ReferenceAttention
from model_runner.batch import BatchEntry
from model_runner.calibration_text import CHAT, TEXTS
from model_runner.chat_template import ChatTemplateError
from model_runner.executor import TorchExecutor
from model_runner.kv_scales import KvScales
from model_runner.models.decoder import Decoder
from model_runner.models.native import NativeDecoder
from model_runner.tokenizer import Tokenizer

MOST_TOKENS = 512
"""Of one prompt."""
ROOM = 2.0
"""By how much other texts may go beyond what was measured, at least; what goes further becomes the largest number."""


def calibration_prompts(tokenizer: Tokenizer, most_tokens: int) -> list[list[int]]:
    """Token ids of the texts, and of a chat where the model has a template for it; each of most_tokens at most."""
    prompts = [tokenizer.encode(text) for text in TEXTS]
    # There may be no template, or one for chats of another kind.
    with suppress(ChatTemplateError):
        prompts.append(tokenizer.encode(tokenizer.render_chat(CHAT), add_special_tokens=False))
    least = min(most_tokens, MOST_TOKENS)
    return [prompt[:least] for prompt in prompts if prompt]


def calibrate(model: Decoder | NativeDecoder, prompts: Sequence[Sequence[int]], shape: AttentionShape) -> KvScales:
    """Scales by the largest key and value of each layer in the prompts.

    shape: of the cache that will have them. Raises ValueError where a layer's keys or values are no numbers.
    """
    limit = torch.finfo(shape.kv_dtype).max / ROOM
    keys, values = ([scale_for(each, limit) for each in row] for row in largest_of(model, prompts, shape).tolist())
    return KvScales(tuple(keys), tuple(values))


def largest_of(model: Decoder | NativeDecoder, prompts: Sequence[Sequence[int]], shape: AttentionShape) -> Tensor:
    """The largest absolute key and value of each layer, float32 [2, num_layers].

    The prompts are computed one by one in a small cache of the queries' type.
    """
    width = max(-(-len(prompt) // shape.block_size) for prompt in prompts)
    backend = _Watching(replace(shape, kv_dtype=shape.query_dtype, num_blocks=width + 1, scales=None))
    executor = TorchExecutor(model, backend, shape.block_size, shape.device)
    for prompt in prompts:
        executor.execute([BatchEntry(prompt, 0, range(1, width + 1), num_logits=1)], [])
    return backend.largest


def scale_for(measured: float, limit: float) -> float:
    """The smallest power of two by which `measured` is divided to `limit` or less; 1 for 0.

    A power of two costs nothing in a number with an exponent, it divides and multiplies without rounding, and the last
    bits of a measurement don't change it. NaN and infinity stay what they are.
    """
    if measured == 0 or not math.isfinite(measured):
        return measured or 1.0
    fraction, exponent = math.frexp(measured / limit)
    return math.ldexp(1.0, exponent - (fraction == 0.5))


class _Watching(ReferenceAttention):
    """Keeps the largest absolute key and value of each layer: float32 [2, num_layers]."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.largest = torch.zeros(2, shape.num_layers, device=shape.device)

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for row, new in enumerate((keys, values)):
            self.largest[row, layer] = torch.maximum(self.largest[row, layer], new.abs().max().float())
        return super().run(layer, queries, keys, values)
