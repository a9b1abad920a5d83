"""By what K and V of each layer are divided before a cache of 8 bits holds them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

_DIGITS = 12


@dataclass(frozen=True, slots=True)
class KvScales:
    """One scale for the keys and one for the values of each layer: stored x scale is the key or value.

    keys, values: [num_layers], finite and above 0. Raises ValueError with the layer where they are not.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values):
            raise ValueError(f"{len(self.keys)} layers have scales of keys, and {len(self.values)} of values")
        for what, scales in (("keys", self.keys), ("values", self.values)):
            for layer, scale in enumerate(scales):
                if not (math.isfinite(scale) and scale > 0):
                    raise ValueError(f"the scale of the {what} of layer {layer} is {scale}, not a number above 0")

    @property
    def name(self) -> str:
        """12 hexadecimal digits: K/V that was stored by scales of another name means something else."""
        numbers = (*self.keys, *self.values)
        return sha256(struct.pack(f"<{len(numbers)}d", *numbers)).hexdigest()[:_DIGITS]

    def describe(self) -> str:
        """'K 0.0625 to 0.5, V 0.0156 to 0.25': the smallest and the largest of all layers."""
        return f"K {_range(self.keys)}, V {_range(self.values)}"


def _range(scales: Sequence[float]) -> str:
    least, most = min(scales), max(scales)
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
