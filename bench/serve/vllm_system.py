"""vLLM in process, stepped by its own engine loop. Runs in vLLM's environment: no Octavo packages.

The environment that makes it fast on a CPU (threads bound to cores, tcmalloc, Intel's OpenMP) is set by bench.serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.serve.system import Run, timed_run
from bench.serve.workloads import MAX_MODEL_LEN, Workload, warm_up

BLOCK_SIZE = 128
"""vLLM's default on a CPU."""
SMALL_CACHE_BLOCK_SIZE = 32
"""The smallest that its fast kernels take: of a small cache it wastes less."""
MAX_SEQUENCES = 64


async def create(options: dict[str, Any]) -> VllmSystem:
    """Options: model (a Hugging Face directory), dtype, eager, cache_tokens."""
    cache_tokens = options["cache_tokens"]
    block_size = SMALL_CACHE_BLOCK_SIZE if cache_tokens else BLOCK_SIZE
    few_blocks = {"num_gpu_blocks_override": cache_tokens // block_size + 1} if cache_tokens else {}
    llm = LLM(
        options["model"],
        dtype=options["dtype"],
        enforce_eager=options["eager"],
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_SEQUENCES,
        block_size=block_size,
        **few_blocks,
    )
    system = VllmSystem(llm)
    await system.run(warm_up())
    return system


class VllmSystem:
    """One engine. Streams put their requests in; one task steps while there are any."""

    def __init__(self, llm: LLM) -> None:
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self._llm, self._engine = llm, llm.llm_engine
        self._queues: dict[str, asyncio.Queue[tuple[list[int], bool]]] = {}
        self._ids = count()
        self._pump: asyncio.Task[None] | None = None

    async def run(self, workload: Workload) -> Run:
        self._llm.reset_prefix_cache()
        return await timed_run(workload, self._stream)

    async def close(self) -> None:
        pass

    async def _stream(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[Sequence[int]]:
        request_id = str(next(self._ids))
        queue = self._queues[request_id] = asyncio.Queue()
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._step())
        ended = False
        while not ended:
            token_ids, ended = await queue.get()
            yield token_ids
        del self._queues[request_id]

    async def _step(self) -> None:
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                self._queues[output.request_id].put_nowait((list(output.outputs[0].token_ids), output.finished))
            # The streams take their tokens, and ask for more, between two steps.
            await asyncio.sleep(0)
