"""What a request must look like, checked before the books are touched."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvmanager.errors import InvalidArgument
from kvmanager.types import (
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_ID_BYTES,
    MAX_PIN_SECONDS,
    MAX_PRIORITY,
    MAX_SALT_BYTES,
    MAX_SPANS,
    CacheScope,
    ContentSpan,
    PoolSpec,
    Retention,
)


def check_spec(spec: PoolSpec) -> None:
    """Refuses a pool that could hold nothing, or that no process should try to keep books of."""
    if not 2 <= spec.num_blocks <= MAX_BLOCKS:
        raise InvalidArgument(
            f"a pool has 2 to {MAX_BLOCKS} blocks (block 0, the null block, holds nothing), not {spec.num_blocks}",
            num_blocks=spec.num_blocks,
            maximum=MAX_BLOCKS,
        )
    size = spec.block_size
    if not 1 <= size <= MAX_BLOCK_SIZE or size & (size - 1):
        raise InvalidArgument(
            f"a block holds a power of two of tokens, 1 to {MAX_BLOCK_SIZE} (16 is usual), not {size}",
            block_size=size,
            maximum=MAX_BLOCK_SIZE,
        )
    if spec.bytes_per_block < 0:
        raise InvalidArgument(
            f"bytes_per_block is {spec.bytes_per_block}; use 0 when unknown", bytes_per_block=spec.bytes_per_block
        )


def check_amounts(**amounts: int) -> None:
    """Refuses a number below 0, by its name."""
    for name, amount in amounts.items():
        if amount < 0:
            raise InvalidArgument(f"{name} is {amount}; use 0 or more", **{name: amount, "field": name})


def check_id(what: str, value: str) -> None:
    """Refuses an id that is empty, longer than MAX_ID_BYTES, or not printable. `what` names it in the sentence."""
    size = len(value.encode())
    if not 1 <= size <= MAX_ID_BYTES:
        raise InvalidArgument(
            f"{what} must have 1 to {MAX_ID_BYTES} bytes, got {size}", bytes=size, maximum=MAX_ID_BYTES
        )
    if not value.isprintable():
        raise InvalidArgument(f"{what} {value!r} has characters that cannot be printed; leave them out")


def check_scope(scope: CacheScope) -> None:
    """Refuses an over-long salt, adapter id or version, and a version without its adapter."""
    size = len(scope.salt.encode())
    if size > MAX_SALT_BYTES:
        raise InvalidArgument(
            f"a cache salt has at most {MAX_SALT_BYTES} bytes, got {size}", bytes=size, maximum=MAX_SALT_BYTES
        )
    for what, value in (("adapter id", scope.adapter_id), ("adapter version", scope.adapter_version)):
        if value and (size := len(value.encode())) > MAX_ID_BYTES:
            raise InvalidArgument(
                f"an {what} has at most {MAX_ID_BYTES} bytes, got {size}", bytes=size, maximum=MAX_ID_BYTES
            )
    if scope.adapter_version and not scope.adapter_id:
        raise InvalidArgument(f"adapter version {scope.adapter_version!r} has no adapter id; give both or neither")


def check_spans(spans: Sequence[ContentSpan], num_tokens: int) -> None:
    """Refuses spans that don't lie in the prompt, that overlap, or that name no content."""
    if len(spans) > MAX_SPANS:
        raise InvalidArgument(
            f"a prompt has at most {MAX_SPANS} spans, got {len(spans)}", spans=len(spans), maximum=MAX_SPANS
        )
    end = 0
    for span in spans:
        check_id("a content id", span.content_id)
        if span.offset < end or span.length < 1 or span.offset + span.length > num_tokens:
            raise InvalidArgument(
                f"span {span.content_id!r} is {span.length} tokens from {span.offset} on; spans have at least 1 token, "
                f"are in order, don't overlap and lie in the prompt's {num_tokens} tokens (free from {end} on)",
                offset=span.offset,
                length=span.length,
                num_tokens=num_tokens,
            )
        end = span.offset + span.length


def check_retention(retention: Retention, skips_cache_write: bool = False) -> None:
    """Refuses a priority or a pin out of range, and either for who caches nothing."""
    if not 0 <= retention.priority <= MAX_PRIORITY:
        raise InvalidArgument(
            f"a priority is 0 to {MAX_PRIORITY}, not {retention.priority}",
            priority=retention.priority,
            maximum=MAX_PRIORITY,
        )
    if not 0 <= retention.pin_seconds <= MAX_PIN_SECONDS:
        raise InvalidArgument(
            f"a pin lasts 0 to {MAX_PIN_SECONDS:.0f} seconds, not {retention.pin_seconds}",
            pin_seconds=retention.pin_seconds,
            maximum=MAX_PIN_SECONDS,
        )
    if skips_cache_write and (retention.priority or retention.pin_seconds):
        raise InvalidArgument(
            f"a sequence that caches nothing has nothing to keep: neither by priority {retention.priority} nor by a "
            f"pin of {retention.pin_seconds} seconds",
            priority=retention.priority,
            pin_seconds=retention.pin_seconds,
        )


def parse_token_ids(token_ids: Sequence[int]) -> array[int]:
    """The ids as 32-bit numbers, a copy. Raises InvalidArgument naming the first that is none."""
    try:
        if isinstance(token_ids, list):
            # Reads a list a third faster than array() does.
            numbers = array("I")
            numbers.fromlist(token_ids)
            return numbers
        return array("I", token_ids)
    except (OverflowError, TypeError):
        for index, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or not 0 <= token_id < 1 << 32:
                raise InvalidArgument(
                    f"token id {token_id!r} at index {index} is not in 0..{(1 << 32) - 1}",
                    index=index,
                    token_id=token_id,
                ) from None
        raise
