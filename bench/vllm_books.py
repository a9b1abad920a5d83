"""vLLM's side of bench.books: its own BlockPool and KVCacheManager, in its own environment.

Started by bench.books with the interpreter of that environment. Each line of the input names a case; the answer is one
JSON object, the figures of its next round. The first line out says which vLLM this is.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tracemalloc
from collections.abc import Iterator
from functools import partial
from itertools import count, repeat

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from bench.rounds import BLOCK_SIZE, Case, Figures, LocalSide, Sizes, prompt, timed

SAMPLING = SamplingParams(max_tokens=1 << 16)
IDS = count()
SHA256_CBOR = get_hash_fn_by_name("sha256_cbor")
init_none_hash(SHA256_CBOR)
HASHERS = {
    "": get_request_block_hasher(BLOCK_SIZE, SHA256_CBOR),
    " sha256": get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name("sha256")),
}
"""By the ending of a line's name: the algorithm that names blocks as Octavo does, and vLLM's default."""


def request(token_ids: list[int], hashing: str | None = "") -> Request:
    hasher = None if hashing is None else HASHERS[hashing]
    return Request(f"request-{next(IDS)}", token_ids, SAMPLING, None, block_hasher=hasher)


def manager(usable_blocks: int, *, caching: bool = True) -> KVCacheManager:
    """The manager of a model with one group of full-attention layers."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=usable_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config,
        max_model_len=1 << 20,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=caching,
    )


def admit(
    books: KVCacheManager, token_ids: list[int], hashing: str | None = "", cached_tokens: int = 0
) -> tuple[Request, Figures]:
    """A request from its tokens to its allocated slots, as the scheduler does it; and what the parts took.

    With caching on, allocate_slots publishes the full blocks too. cached_tokens: how many must be hit.
    """
    request_us, new = timed(request, token_ids, hashing)
    lookup_us, (blocks, hit_tokens, _) = timed(books.get_computed_blocks, new)
    slots_us, slots = timed(books.allocate_slots, new, len(token_ids) - hit_tokens, hit_tokens, blocks)
    assert slots is not None
    assert hit_tokens == cached_tokens
    new.num_computed_tokens = len(token_ids)
    return new, {"": request_us + lookup_us + slots_us, "request": request_us, "lookup": lookup_us, "slots": slots_us}


def forget(books: KVCacheManager, ended: Request) -> float:
    """Ends a request; microseconds of that alone. What the scheduler collects at each step is dropped."""
    free_us, _ = timed(books.free, ended)
    books.take_new_block_ids()
    return free_us


def named(line: str, parts: Figures, hashing: str = "") -> Figures:
    return {f"{line} {part}".strip() + hashing: figure for part, figure in parts.items()}


def blocks(sizes: Sizes) -> Iterator[Figures]:
    pool = BlockPool(sizes.pool + 1, True, BLOCK_SIZE)
    while True:
        take_us, taken = timed(pool.get_new_blocks, sizes.blocks)
        release_us, _ = timed(pool.free_blocks, reversed(taken))
        yield {"take": take_us, "release": release_us}


def verbs(sizes: Sizes) -> Iterator[Figures]:
    """Without caching: nothing is hashed, looked up or published."""
    books = manager(sizes.pool, caching=False)
    token_ids = prompt(0, sizes.blocks * BLOCK_SIZE)
    while True:
        new, parts = admit(books, token_ids, None)
        yield {**named("allocate", parts), "free": forget(books, new)}


def long_prompt(sizes: Sizes) -> Iterator[Figures]:
    books = manager(sizes.pool)
    token_ids = prompt(0, sizes.prompt_tokens)
    while True:
        figures: Figures = {}
        for hashing in HASHERS:
            new, cold = admit(books, token_ids, hashing)
            forget(books, new)
            new, warm = admit(books, token_ids, hashing, (sizes.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)
            figures |= named("cold", cold, hashing) | named("warm", warm, hashing)
            figures |= {f"cold allocate{hashing}": cold[""], f"free prompt{hashing}": forget(books, new)}
            assert books.reset_prefix_cache()
        yield figures


def step(books: KVCacheManager, running: list[Request]) -> None:
    for one in running:
        one.append_output_token_ids(1)
        books.allocate_slots(one, 1)
        one.num_computed_tokens += 1


def decode(sizes: Sizes) -> Iterator[Figures]:
    spread = range(sizes.sequences)
    books = {hashing: manager(sizes.warm_pool) for hashing in HASHERS}
    running = {
        hashing: [
            admit(books[hashing], prompt(seed, sizes.sequence_tokens + seed % BLOCK_SIZE), hashing)[0]
            for seed in spread
        ]
        for hashing in HASHERS
    }
    while True:
        figures: Figures = {}
        for hashing, requests in running.items():
            took = sum(timed(step, books[hashing], requests)[0] for _ in range(sizes.steps))
            figures[f"decode{hashing}"] = took / sizes.steps
            books[hashing].take_new_block_ids()
        yield figures


def fill(books: KVCacheManager, sizes: Sizes) -> KVCacheManager:
    """Leaves every block cached and held by nobody."""
    for seed in range((books.block_pool.num_gpu_blocks - 1) // sizes.blocks):
        forget(books, admit(books, prompt(seed, sizes.blocks * BLOCK_SIZE))[0])
    return books


def evict(sizes: Sizes) -> Iterator[Figures]:
    pools = {"": fill(manager(sizes.warm_pool), sizes), " small": fill(manager(sizes.blocks), sizes)}
    for seed in count(1 << 20, 2):
        figures: Figures = {}
        for name, books in pools.items():
            figures[f"evict{name}"], taken = timed(books.block_pool.get_new_blocks, sizes.blocks)
            books.block_pool.free_blocks(reversed(taken))
            forget(books, admit(books, prompt(seed, sizes.blocks * BLOCK_SIZE))[0])
            new, parts = admit(books, prompt(seed + 1, sizes.blocks * BLOCK_SIZE))
            forget(books, new)
            figures[f"evict prompt{name}"] = parts[""]
        yield figures


def memory(sizes: Sizes) -> Iterator[Figures]:
    tracemalloc.start()
    books = manager(sizes.warm_pool)
    opened, _ = tracemalloc.get_traced_memory()
    fill(books, sizes)
    full, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    yield from repeat({"bytes opened": opened / sizes.warm_pool, "bytes warm": full / sizes.warm_pool})


CASES: dict[str, Case] = {
    "blocks": blocks,
    "verbs": verbs,
    "prompt": long_prompt,
    "decode": decode,
    "evict": evict,
    "memory": memory,
}


def main() -> None:
    """Answers until the input ends. The sizes are the one argument, as JSON."""
    answer = partial(print, file=sys.stdout, flush=True)
    sys.stdout = sys.stderr
    side = LocalSide(CASES, Sizes(**json.loads(sys.argv[1])))
    answer(json.dumps({"vllm": vllm.__version__, "python": platform.python_version()}))
    for line in sys.stdin:
        answer(json.dumps(side.round(line.strip())))
    # At once: what torch has loaded reports leaks of all that is frozen.
    os._exit(0)


if __name__ == "__main__":
    main()
