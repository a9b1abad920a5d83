"""What a draw depends on beside the logits: the sampling parameters, and a number made of seed and position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_runner.request import SamplingParams

NO_TOKEN = -1
"""Stands for a draw from a row where no token is possible."""

_SPLITMIX_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SPLITMIX_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """What sample() needs to know of each of R rows, on the host: arrays of shape [R].

    temperature, top_p, min_p and uniform are float64, top_k is int64; uniform lies in [0, 1), and is 0 where no row has
    a temperature above 0. The neutral values are those of SamplingParams. is_seeded: bool, whether the request has a
    seed of its own, so that its draw must be the one that `uniform` stands for.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    uniform: NDArray[np.float64]
    is_seeded: NDArray[np.bool_]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> SamplingRows:
        """Rows from valid parameters. seeds are 0..2^64-1 and positions >= 0; of `SamplingParams.seed` only
        whether it is there is read.

        Raises ValueError when the three differ in length, and where there is a temperature OverflowError for a seed or
        a position out of range.
        """
        if not len(params) == len(seeds) == len(positions):
            raise ValueError(f"{len(params)} params, {len(seeds)} seeds and {len(positions)} positions do not pair up")
        temperature = [each.temperature for each in params]
        return cls(
            temperature=np.array(temperature, dtype=np.float64),
            top_k=np.array([each.top_k for each in params], dtype=np.int64),
            top_p=np.array([each.top_p for each in params], dtype=np.float64),
            min_p=np.array([each.min_p for each in params], dtype=np.float64),
            uniform=_numbers(seeds, positions) if any(temperature) else np.zeros(len(params)),
            is_seeded=np.array([each.seed is not None for each in params], dtype=np.bool_),
        )

    def take(self, index: NDArray[np.int64]) -> SamplingRows:
        """The rows at `index`, int64 [D], in that order."""
        return SamplingRows(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.uniform[index],
            self.is_seeded[index],
        )


def _numbers(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    return uniforms(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))


def splitmix64(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output number `position` (from 0) of the SplitMix64 generator started with `seed`; uint64 [R] each."""
    state = seeds + (positions + np.uint64(1)) * _SPLITMIX_GAMMA
    state = (state ^ (state >> np.uint64(30))) * _SPLITMIX_MULTIPLIERS[0]
    state = (state ^ (state >> np.uint64(27))) * _SPLITMIX_MULTIPLIERS[1]
    output: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return output


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Multiples of 2^-53 in [0, 1), float64 [R], each a function of its seed and position (uint64 [R]) alone."""
    return (splitmix64(seeds, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53
