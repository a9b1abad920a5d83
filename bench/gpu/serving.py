"""The engine on the random model: what the split costs it, and how much it serves beside Hugging Face's generate."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator, Sequence
from random import Random

import torch

from bench.gpu.paged import blocks_of as blocks_for
from bench.gpu.paged import make, shape_of
from bench.gpu.place import Place
from bench.gpu.random_model import random_model
from bench.split import BLOCK_SIZE, QUICK, Case, Plan, blocks_of, measure_with
from kvmanager.manager import KvManager
from model_runner.attention import AttentionBackend
from model_runner.books import PoolFacts
from model_runner.decode_graphs import DecodeGraphs
from model_runner.engine import Engine
from model_runner.engine_types import EngineOptions, Failure
from model_runner.executor import TorchExecutor
from model_runner.kv_memory import KvMemory
from model_runner.loading import LoadedModel
from model_runner.models.decoder import Decoder
from model_runner.request import Chunk, GenerateRequest, StopConditions
from model_runner.scheduler_limits import SchedulerLimits
from model_runner.validation import Limits
from services.books_inprocess import InProcessBooks
from services.model_setup import Setup

MAX_SEQUENCES = 256
BATCHED_TOKENS = 2048

Request = tuple[int, int]
"""Tokens of a prompt and of its answer."""


def split(place: Place, backend: str) -> Iterator[dict[str, object]]:
    """Decode throughput with the books in a process of their own over that with the same books inside."""
    streams = place.sizes.split_streams
    case, plan = Case(str(streams), streams), Plan() if place.is_gpu else QUICK
    loaded = random_model(place.sizes.model, place.sizes.dtype, place.device)
    figures = measure_with(setup_of(place, loaded, backend, blocks_of(case, plan), streams), case, plan)
    yield {"streams": streams, **{name.replace(f"_{case.name}", ""): value for name, value in figures.items()}}


def setup_of(place: Place, loaded: LoadedModel, name: str, num_blocks: int, max_sequences: int) -> Setup:
    """The model with a cache of its own."""
    assert place.block_size == BLOCK_SIZE, "the split is measured in blocks of one size"
    c = loaded.config
    backend = make(name, shape_of(place, num_blocks))
    memory = KvMemory(c.num_layers, c.num_kv_heads, c.head_dim, place.sizes.dtype.itemsize, place.block_size)
    longest = (num_blocks - 1) * place.block_size
    options = EngineOptions(
        facts=PoolFacts(num_blocks, place.block_size, memory.bytes_per_block, "random"),
        limits=SchedulerLimits(
            block_size=place.block_size, max_sequences=max_sequences, max_batched_tokens=BATCHED_TOKENS
        ),
        max_sequence_tokens=longest,
        eos_token_ids=frozenset(c.eos_token_ids),
        async_steps=place.device.type == "cuda",
    )
    graphs = _graphs_of(place, loaded, backend, max_sequences, min(longest, c.max_position_embeddings))
    executor = TorchExecutor(loaded.model, backend, place.block_size, place.device, graphs)
    executor.capture_graphs()
    return Setup(loaded, backend, executor, memory, options, Limits(c.vocab_size, longest, max_sequences))


def _graphs_of(
    place: Place, loaded: LoadedModel, backend: AttentionBackend, max_sequences: int, longest: int
) -> DecodeGraphs | None:
    """As a start has them, on a GPU whose backend can."""
    if not (place.is_gpu and backend.is_capturable and isinstance(loaded.model, Decoder)):
        return None
    return DecodeGraphs(loaded.model, backend, max_sequences, blocks_for(place, longest))


def requests_of(place: Place) -> list[Request]:
    """Prompts and answers of all lengths up to the longest: what padding wastes on, and paging does not."""
    rng, sizes = Random(3), place.sizes
    return [(rng.randint(1, sizes.longest), rng.randint(1, sizes.longest)) for _ in range(sizes.requests)]


def huggingface(place: Place, backend: str) -> Iterator[dict[str, object]]:
    """Tokens of answers per second of both, with the same weights' shape and the same bytes of K/V.

    generate() gets batches as large as its K/V lets them be when every sequence may become as long as the longest; a
    batch runs until its longest answer is whole. A token counts when somebody has asked for it.
    """
    if importlib.util.find_spec("transformers") is None:
        yield {"skipped": "transformers is not installed"}
        return
    requests = requests_of(place)
    loaded = random_model(place.sizes.model, place.sizes.dtype, place.device)
    ours = sum(answer for _, answer in requests) / _engine_seconds(place, loaded, backend, requests)
    del loaded
    if place.is_gpu:
        torch.cuda.empty_cache()
    batch = batch_of(place)
    theirs = _generate_speed(place, requests, batch)
    yield {
        "kv_bytes": place.sizes.kv_bytes,
        "octavo_tokens_s": ours,
        "generate_batch": batch,
        "generate_tokens_s": theirs,
        "times": ours / theirs,
    }


def batch_of(place: Place) -> int:
    """Sequences of the greatest length whose K/V fits in kv_bytes."""
    c = place.sizes.model
    token = KvMemory(c.num_layers, c.num_kv_heads, c.head_dim, place.sizes.dtype.itemsize, 1).bytes_per_token
    return max(1, place.sizes.kv_bytes // (2 * place.sizes.longest * token))


def _engine_seconds(place: Place, loaded: LoadedModel, backend: str, requests: Sequence[Request]) -> float:
    c = loaded.config
    memory = KvMemory(c.num_layers, c.num_kv_heads, c.head_dim, place.sizes.dtype.itemsize, place.block_size)
    setup = setup_of(place, loaded, backend, memory.blocks_for_budget(place.sizes.kv_bytes), MAX_SEQUENCES)
    ends = threading.Semaphore(0)
    failures: list[str] = []

    def take(items: Sequence[Chunk | Failure]) -> None:
        for item in items:
            if isinstance(item, Failure):
                failures.append(item.sentence)
            if isinstance(item, Failure) or item.usage is not None:
                ends.release()

    books = InProcessBooks(KvManager("bench"))
    engine = Engine(setup.executor, books, setup.tokenizer, setup.options, take, steps=setup.steps())
    rng = Random(4)
    engine.start()
    try:
        # One that does not count: it compiles what is compiled when it is first needed.
        for timed in ([(1, 2)], requests):
            began = time.perf_counter()
            for number, (prompt, answer) in enumerate(timed):
                tokens = tuple(rng.choices(range(c.vocab_size), k=prompt))
                stop = StopConditions(max_tokens=answer, ignore_eos=True)
                engine.submit(GenerateRequest(f"{len(timed)}-{number}", tokens, stop=stop))
            for _ in timed:
                ends.acquire()
            if failures:
                raise RuntimeError(failures[0])
        return time.perf_counter() - began
    finally:
        engine.stop()


def _generate_speed(place: Place, requests: Sequence[Request], batch: int) -> float:
    """Useful tokens per second of generate(), over as many batches as there is time for, in the order of requests."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = place.sizes.model
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        eos_token_id=None,
        pad_token_id=0,
        dtype=place.sizes.dtype,
    )
    with torch.device(place.device):
        model = LlamaForCausalLM(config).to(place.sizes.dtype).eval()

    def generate(part: Sequence[Request]) -> None:
        width, most = max(prompt for prompt, _ in part), max(answer for _, answer in part)
        mask = torch.zeros(len(part), width, dtype=torch.int64, device=place.device)
        for row, (prompt, _) in enumerate(part):
            mask[row, width - prompt :] = 1
        model.generate(
            torch.ones_like(mask), attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False
        )

    # One that does not count, as for the engine.
    generate([(1, 2)])
    place.wait()
    useful, began = 0, time.perf_counter()
    for first in range(0, len(requests), batch):
        part = requests[first : first + batch]
        generate(part)
        useful += sum(answer for _, answer in part)
        if time.perf_counter() - began > 60 * place.seconds:
            break
    place.wait()
    return useful / (time.perf_counter() - began)
