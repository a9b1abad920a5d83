"""How many bytes and operations something takes at least: closed forms, by which speeds are told."""

from __future__ import annotations

from model_runner.config import ModelConfig


def num_parameters(c: ModelConfig) -> int:
    """Numbers in all weights."""
    heads = c.num_heads + 2 * c.num_kv_heads
    bias = heads * c.head_dim if c.qkv_bias else 0
    norms = 2 * c.hidden_size + (2 * c.head_dim if c.qk_norm else 0)
    attention = (heads + c.num_heads) * c.head_dim * c.hidden_size + bias
    layer = attention + 3 * c.hidden_size * c.intermediate_size + norms
    tables = 1 if c.tie_word_embeddings else 2
    return c.num_layers * layer + tables * c.vocab_size * c.hidden_size + c.hidden_size


def matmul_flops(rows: int, inner: int, columns: int) -> int:
    """A product of [rows, inner] and [inner, columns]: a multiplication and an addition for each pair."""
    return 2 * rows * inner * columns


def causal_attention_flops(num_heads: int, head_dim: int, length: int, first: int = 0) -> int:
    """Scores and weighted sums of the queries first..length-1, each of which sees all keys up to its own."""
    pairs = (length * (length + 1) - first * (first + 1)) // 2
    return 2 * matmul_flops(1, head_dim, 1) * num_heads * pairs


def linear_flops(c: ModelConfig, tokens: int, rows: int) -> int:
    """All products with weights, for so many tokens of which `rows` get logits."""
    heads = c.num_heads + 2 * c.num_kv_heads
    layer = (
        matmul_flops(tokens, c.hidden_size, heads * c.head_dim)
        + matmul_flops(tokens, c.num_heads * c.head_dim, c.hidden_size)
        + matmul_flops(tokens, c.hidden_size, 3 * c.intermediate_size)
    )
    return c.num_layers * layer + matmul_flops(rows, c.hidden_size, c.vocab_size)


def kv_bytes_per_token(c: ModelConfig, element_bytes: int, layers: int | None = None) -> int:
    """K and V of one token in so many layers, all by default."""
    count = c.num_layers if layers is None else layers
    return 2 * count * c.num_kv_heads * c.head_dim * element_bytes


def decode_bytes(c: ModelConfig, lengths: list[int], element_bytes: int) -> int:
    """What one layer's attention of a decode step must read and write.

    K and V of all tokens; queries and results, and K and V of the new tokens, one for each sequence.
    """
    rows = 2 * c.num_heads * c.head_dim * element_bytes
    new = kv_bytes_per_token(c, element_bytes, layers=1)
    return sum(lengths) * new + len(lengths) * (rows + new)
