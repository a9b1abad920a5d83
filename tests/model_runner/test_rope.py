"""Rotations by position: the table against the closed form, wherever and in whatever order it grows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from model_runner.config_hf import config_from_hf
from model_runner.models.rope import Rope, RopeTable


def test_the_table_has_the_closed_form_at_every_position(tiny_models: Path) -> None:
    config = replace(config_from_hf(tiny_models / "llama"), rope_scaling=None)
    rope = Rope(config, torch.device("cpu"))
    table = RopeTable(rope)
    half = config.head_dim // 2
    for positions in ([0, 5], [1023], [1024, 3], [9000, 2], [20_000, 1023, 1024, 4095]):
        cos, sin = table.at(torch.tensor(positions), max(positions) + 1)
        assert cos.shape == sin.shape == (len(positions), 1, half)
        for row, position in enumerate(positions):
            for pair in range(half):
                angle = position * config.rope_theta ** (-2 * pair / config.head_dim)
                # An angle in float32 is off by up to 2^-23 of itself.
                tolerance = 1e-6 + position * 2.0**-22
                assert math.isclose(cos[row, 0, pair], math.cos(angle), abs_tol=tolerance)
                assert math.isclose(sin[row, 0, pair], math.sin(angle), abs_tol=tolerance)


def test_an_entry_does_not_depend_on_how_the_table_grew(tiny_models: Path) -> None:
    rope = Rope(config_from_hf(tiny_models / "llama"), torch.device("cpu"))
    at_once, by_steps = RopeTable(rope), RopeTable(rope)
    end = 7000
    positions = torch.arange(end)
    for last in (10, 1500, 1501, 5000):
        by_steps.at(torch.tensor([last]), last + 1)
    for one, other in zip(at_once.at(positions, end), by_steps.at(positions, end), strict=True):
        assert torch.equal(one, other)
