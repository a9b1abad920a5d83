"""What a K/V cache of fewer bits costs in accuracy, with scales and without: python -m bench.kv_scales.

For the demo model, and for the same function with larger keys and smaller values (see bench.rescaled), as other
families have them: perplexity of pages of these docs, which no model was trained on; and beside what float32 K/V give,
how often the likeliest token is the same, and the mean Kullback-Leibler divergence of the next token's distribution.
And how far the keys and values of other tokens go, beside those of the text that scales are measured on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from bench.rescaled import FAR_OUT, RescaledWeights
from model_runner.attention import AttentionShape, create_backend
from model_runner.batch import BatchEntry, pack_batch
from model_runner.calibration import calibrate, calibration_prompts, largest_of
from model_runner.gguf_file import GgufFile
from model_runner.gguf_weights import GgufWeights
from model_runner.loading import demo_model_path, load_model
from model_runner.models.native import EXACT, NativeDecoder
from model_runner.native import need_library

BLOCK_SIZE = 16
WINDOW, STEP = 512, 128
"""Tokens of a text that see each other, and those of one step."""
CPU = torch.device("cpu")
DOCS = Path(__file__).parent.parent / "docs"
TEXTS = (DOCS / "eviction.md", DOCS / "split.md")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a text: float32 [tokens, vocabulary] log-probabilities of what follows each token, and what does, int64."""

    log_probs: Tensor
    following: Tensor

    @property
    def perplexity(self) -> float:
        return functional.nll_loss(self.log_probs, self.following).exp().item()

    def same_top(self, other: Outcome) -> float:
        return (self.log_probs.argmax(-1) == other.log_probs.argmax(-1)).float().mean().item()

    def divergence_from(self, truth: Outcome) -> float:
        """In nats."""
        return (truth.log_probs.exp() * (truth.log_probs - self.log_probs)).sum(-1).mean().item()


@torch.inference_mode()
def outcome(model: NativeDecoder, shape: AttentionShape, token_ids: Sequence[int]) -> Outcome:
    """The text in windows, each computed in steps over a cache of the shape."""
    width = WINDOW // BLOCK_SIZE
    backend = create_backend("cpu_torch", replace(shape, num_blocks=width + 1))
    rows, following = [], []
    for start in range(0, len(token_ids) - 1, WINDOW):
        window = token_ids[start : start + WINDOW]
        for first in range(0, len(window) - 1, STEP):
            tokens = window[first : min(first + STEP, len(window) - 1)]
            batch = pack_batch([BatchEntry(tokens, first, range(1, width + 1), len(tokens))], BLOCK_SIZE, CPU)
            rows.append(model.forward(batch, backend).log_softmax(-1))
            following.append(torch.tensor(window[first + 1 : first + 1 + len(tokens)]))
    return Outcome(torch.cat(rows), torch.cat(following))


def shapes(model: NativeDecoder, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[str, AttentionShape]]:
    c = model.config
    heads = (c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim)
    exact = AttentionShape(*heads, BLOCK_SIZE, 2, torch.float32, CPU, c.sliding_window)
    small = replace(exact, kv_dtype=torch.float8_e4m3fn)
    scales = calibrate(model, prompts, small)
    yield "float32", exact
    yield "bfloat16", replace(exact, kv_dtype=torch.bfloat16)
    yield "fp8_e4m3, no scales", small
    yield f"fp8_e4m3, {scales.describe()}", replace(small, scales=scales)


def print_reach(model: NativeDecoder, shape: AttentionShape, prompts: list[list[int]], texts: list[list[int]]) -> None:
    measured, draw = largest_of(model, prompts, shape), Random(1)
    others = {
        "these pages": [text[:WINDOW] for text in texts],
        "random tokens": [draw.choices(range(model.config.vocab_size), k=WINDOW)],
        "one token again and again": [[0] * WINDOW],
    }
    for title, tokens in others.items():
        (keys, most_keys), (values, most_values) = (
            (row.min().item(), row.max().item()) for row in largest_of(model, tokens, shape) / measured
        )
        print(f"{title}: keys {keys:.2f} to {most_keys:.2f}, values {values:.2f} to {most_values:.2f} of the measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of each text")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    need_library().set_threads(given.threads)
    loaded, reader = load_model(demo_model_path()), GgufFile(demo_model_path())
    config, tokenizer = loaded.config, loaded.tokenizer
    prompts = calibration_prompts(tokenizer, config.max_position_embeddings)
    texts = {path.name: tokenizer.encode(path.read_text())[: given.tokens] for path in TEXTS}
    for title, factors in (("as it is", {}), ("keys x 64, values / 256", FAR_OUT)):
        model = NativeDecoder(config, RescaledWeights(GgufWeights(reader, config), factors), EXACT)
        kinds = dict(shapes(model, prompts))
        if not factors:
            print_reach(model, kinds["float32"], prompts, list(texts.values()))
        for name, token_ids in texts.items():
            print(f"{title}, {len(token_ids)} tokens of {name}")
            truth = outcome(model, kinds["float32"], token_ids)
            for kind, shape in kinds.items():
                found = outcome(model, shape, token_ids)
                print(
                    f"  {kind:>55}: perplexity {found.perplexity:9.3f}, the same likeliest token "
                    f"{found.same_top(truth):6.1%}, divergence {found.divergence_from(truth):.5f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
