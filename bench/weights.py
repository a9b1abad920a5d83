"""What each form of the weights costs and gives: python -m bench.weights.

For the demo model, and for the same model in a rotated basis (see bench.rotated), whose weights are in no form of their
own: memory, time of a decode step beside the time that reading takes at least, and perplexity of a text that no model
was trained on, a page of these docs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional

from bench import turns
from bench.kernels import BLOCK_SIZE, CPU, READ_UNIT, Bench, machine
from bench.rotated import RotatedWeights, rotated_config
from bench.turns import LoadMeter, clock_for
from model_runner import native
from model_runner.attention import AttentionBackend, AttentionShape, create_backend
from model_runner.batch import BatchEntry, pack_batch
from model_runner.gguf_file import GgufFile
from model_runner.gguf_weights import GgufWeights
from model_runner.loading import demo_model_path, load_model
from model_runner.models.native import EXACT, NativeDecoder

WINDOW, STEP = 512, 128
"""Tokens of a text that see each other, and those of one step."""
EMBEDDING_BITS = {"float32": 32, "bfloat16": 16, "int8": 8.5, "int4": 8.5, "int8_channel": 8}
"""Of a weight of the embedding, by the model's form: where the head is another matrix, a step reads one row of it."""
TEXT = Path(__file__).parent.parent / "docs" / "eviction.md"


@dataclass(frozen=True, slots=True)
class Way:
    """A model, and what its K/V are: float32 or bfloat16."""

    model: NativeDecoder
    kv_dtype: torch.dtype = torch.float32


def cache_for(way: Way, tokens: int) -> AttentionBackend:
    c, blocks = way.model.config, -(-tokens // BLOCK_SIZE) + 1
    shape = AttentionShape(
        c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, BLOCK_SIZE, blocks, way.kv_dtype, CPU, c.sliding_window
    )
    return create_backend("cpu", shape)


def perplexity(way: Way, token_ids: Sequence[int]) -> float:
    """e to the mean surprise at each token but the first of every window, in nats."""
    total, count = 0.0, 0
    for start in range(0, len(token_ids) - 1, WINDOW):
        window = token_ids[start : start + WINDOW]
        backend = cache_for(way, WINDOW)
        table = list(range(1, WINDOW // BLOCK_SIZE + 1))
        for first in range(0, len(window) - 1, STEP):
            tokens = window[first : min(first + STEP, len(window) - 1)]
            batch = pack_batch([BatchEntry(tokens, first, table, True)], BLOCK_SIZE, CPU)
            logits = way.model.forward(replace(batch, logits_rows=torch.arange(len(tokens))), backend)
            following = torch.tensor(window[first + 1 : first + 1 + len(tokens)])
            total += functional.cross_entropy(logits, following, reduction="sum").item()
            count += len(tokens)
    return float(torch.tensor(total / count).exp())


def decode(way: Way, context: int) -> turns.Way:
    backend, table = cache_for(way, context), list(range(1, context // BLOCK_SIZE + 1))
    batch = pack_batch([BatchEntry([5], context - 1, table, True)], BLOCK_SIZE, CPU)
    return lambda turn: way.model.forward(batch, backend)


def ways_of(forms: Sequence[str]) -> dict[str, Way]:
    reader = GgufFile(demo_model_path())
    config = load_model(demo_model_path()).config
    weights = GgufWeights(reader, config)
    rotated = RotatedWeights(weights, config)
    exact = NativeDecoder(config, weights, EXACT)
    rounding = NativeDecoder(config, weights, EXACT, activations="int8")
    channel = NativeDecoder(config, weights, "int8_channel", activations="int8")
    made = {
        "auto, the file's own": Way(exact),
        "K/V in bfloat16": Way(exact, torch.bfloat16),
        "auto, int8 activations": Way(rounding),
        "the same, K/V bfloat16": Way(rounding, torch.bfloat16),
        "int8_channel, int8 activations": Way(channel),
        "int8_channel, int8, K/V bfloat16": Way(channel, torch.bfloat16),
    }
    return made | {form: Way(NativeDecoder(rotated_config(config), rotated, form)) for form in forms}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0, help="for the comparison of speed")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=512)
    given = parser.parse_args()
    bench = Bench(native.need_library(), given.seconds, clock_for(given.threads))
    torch.set_num_threads(given.threads)
    bench.library.set_threads(given.threads)
    print(machine(bench.library))
    made = ways_of(native.FORMS)
    token_ids = load_model(demo_model_path()).tokenizer.encode(given.text.read_text())[: given.tokens]
    memory = native.zeros((64 * READ_UNIT,), torch.float32)
    meter = LoadMeter()
    ways: dict[str, turns.Way] = {"read": lambda turn: bench.read(memory)}
    took = bench.compare(ways | {name: decode(way, given.context) for name, way in made.items()})
    print(f"one sequence at {given.context} tokens; perplexity of {len(token_ids)} tokens of {given.text.name}")
    print(meter.read())
    for name, way in made.items():
        c = way.model.config
        kv = 2 * way.kv_dtype.itemsize * c.num_layers * c.num_kv_heads * c.head_dim * given.context
        size = sum(way.model.forms().values())
        if not c.tie_word_embeddings:
            size -= int(c.vocab_size * c.hidden_size * EMBEDDING_BITS[name] / 8)
        least = (size + kv) * took["read"] / memory.nbytes
        print(
            f"{name:>32}: {size / 2**20:6.1f} MiB, {took[name] * 1e3:6.2f} ms, at least {least * 1e3:6.2f} to read, "
            f"perplexity {perplexity(way, token_ids):.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
