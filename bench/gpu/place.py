"""Where a part measures: the device, how large everything is, and how calls are timed there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model_runner.config import ModelConfig

LLAMA_3_8B = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    sliding_window=None,
    eos_token_ids=(128_001,),
    bos_token_id=128_000,
)
"""The public shape of Llama 3 8B."""

TINY = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    sliding_window=None,
    eos_token_ids=(1,),
    bos_token_id=0,
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is that is measured. Tokens, sequences, and bytes where the name says so.

    batches: of decode steps, each sequence with `context` tokens. copy_bytes: of the device copy. matmul: rows and
    columns. prefill: tokens of one prompt. requests: of the comparison with Hugging Face; their prompts and answers
    have up to `longest` tokens each, with kv_bytes of K/V.
    """

    model: ModelConfig
    dtype: torch.dtype
    batches: tuple[int, ...]
    context: int
    copy_bytes: int
    matmul: int
    prefill: int
    split_streams: int
    requests: int
    longest: int
    kv_bytes: int


FULL = Sizes(LLAMA_3_8B, torch.bfloat16, (1, 64, 256), 2048, 1 << 30, 8192, 8192, 64, 256, 512, 8 << 30)
QUICK = Sizes(TINY, torch.float32, (1, 3), 40, 1 << 16, 64, 48, 2, 4, 8, 1 << 18)


@dataclass(frozen=True, slots=True)
class Place:
    """A device and what is measured on it. seconds: for each figure. block_size: of the paged cache."""

    device: torch.device
    sizes: Sizes
    seconds: float
    block_size: int = 16

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def time(self, call: Callable[[], object]) -> float:
        """Seconds of a call: the median, after one that does not count.

        On a GPU several calls are queued at a time, so that the launch of one hides behind the work of another.
        """
        call()
        self.wait()
        once = self._time_of(call, 1)
        # A measurement is long enough for the clock, and short enough to make several.
        count = max(1, min(50, int(0.05 * self.seconds / max(once, 1e-6)))) if self.is_gpu else 1
        took: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(took) < 3 or (time.perf_counter() < end and len(took) < 1000):
            took.append(self._time_of(call, count) / count)
        return statistics.median(took)

    def _time_of(self, call: Callable[[], object], count: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return time.perf_counter() - start
