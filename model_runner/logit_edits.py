"""What becomes of a row's logits before a token is drawn: penalties, biases, and tokens that may not come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.device_copies import to_device

_WORD_BITS = 32


def no_ids() -> NDArray[np.int32]:
    return np.empty(0, dtype=np.int32)


def no_numbers() -> NDArray[np.float32]:
    return np.empty(0, dtype=np.float32)


def mask_of(token_ids: Sequence[int], vocabulary: int) -> NDArray[np.uint32]:
    """The mask that allows these tokens and no others: bit i % 32 of word i // 32 is token i's."""
    bits = np.zeros(-(-vocabulary // _WORD_BITS) * _WORD_BITS, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.dtype("<u4")).astype(np.uint32, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """The changes of one row, in the order of their fields; arithmetic is float32. No array has a token id twice.

    A positive logit of a token in `seen` is divided by `repetition`, another one multiplied; then `frequency` times its
    count in the answer (`counts`) is taken from it, and `presence` if that is not 0. `biases` are added to the logits
    of `biased`. Logits become -inf for tokens in `banned`, and for those whose bit in `mask` is 0 (bit i % 32 of word
    i // 32, [ceil(V / 32)]; None: all may come).
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    seen: NDArray[np.int32] = field(default_factory=no_ids)
    counts: NDArray[np.int32] = field(default_factory=no_ids)
    biased: NDArray[np.int32] = field(default_factory=no_ids)
    biases: NDArray[np.float32] = field(default_factory=no_numbers)
    banned: NDArray[np.int32] = field(default_factory=no_ids)
    mask: NDArray[np.uint32] | None = None


def apply_edits(logits: Tensor, edits: Sequence[LogitEdits | None]) -> Tensor:
    """The logits after the edits of each row: float32 [R, V] on the device of `logits`, which stay as they are.

    A few operations for all rows together. When nothing changes, the result is `logits` themselves.
    """
    given = [(row, each) for row, each in enumerate(edits) if each is not None]
    if not given:
        return logits
    edited = logits.clone()
    flat = edited.view(-1)
    vocabulary = logits.shape[1]
    _penalise(flat, vocabulary, given)
    places = _places([(row, each.biased) for row, each in given], vocabulary, logits)
    flat[places] += _joined([each.biases for _, each in given], logits)
    flat[_places([(row, each.banned) for row, each in given], vocabulary, logits)] = -torch.inf
    masked = [(row, each.mask) for row, each in given if each.mask is not None]
    if masked:
        rows = to_device(torch.tensor([row for row, _ in masked]), logits.device)
        words = to_device(torch.from_numpy(np.stack([mask for _, mask in masked]).view(np.int32)), logits.device)
        edited[rows] = edited[rows].masked_fill_(~_bits(words, vocabulary), -torch.inf)
    return edited


def _penalise(flat: Tensor, vocabulary: int, given: Sequence[tuple[int, LogitEdits]]) -> None:
    """Applies the penalties, in place, to all rows' logits one after the other."""
    sizes = [len(each.seen) for _, each in given]
    if not any(sizes):
        return
    places = _places([(row, each.seen) for row, each in given], vocabulary, flat)
    counts = _joined([each.counts.astype(np.float32) for _, each in given], flat)
    repetition, frequency, presence = (
        _joined([np.repeat(np.array(penalties, dtype=np.float32), sizes)], flat)
        for penalties in zip(*((each.repetition, each.frequency, each.presence) for _, each in given), strict=True)
    )
    values = flat[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    flat[places] = torch.where(counts > 0, values - presence, values)


def _places(ids: Sequence[tuple[int, NDArray[np.int32]]], vocabulary: int, like: Tensor) -> Tensor:
    """Where tokens of rows lie in the rows one after the other, int64, on the device of `like`."""
    return _joined([row * vocabulary + each.astype(np.int64) for row, each in ids], like)


def _joined(arrays: Sequence[NDArray[np.int64]] | Sequence[NDArray[np.float32]], like: Tensor) -> Tensor:
    return to_device(torch.from_numpy(np.concatenate(arrays)), like.device)


def _bits(words: Tensor, vocabulary: int) -> Tensor:
    """Which tokens have their bit set: bool [M, V], from words int32 [M, ceil(V / 32)]."""
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :vocabulary].bool()
