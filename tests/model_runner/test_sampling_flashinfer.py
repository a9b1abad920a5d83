"""Draws by FlashInfer's kernels, on a double: the closed form's distributions, whose rows they are, and the trial."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_runner import sampling_choice
from model_runner.request import SamplingParams
from model_runner.sampling_choice import choose_sampler, why_wrong
from model_runner.sampling_device import sample_at_once
from model_runner.sampling_flashinfer import SEED_BITS, FlashInferSampler
from model_runner.sampling_rows import NO_TOKEN, SamplingRows
from tests.model_runner import fake_card, gpu_doubles
from tests.model_runner.attention_world import CPU
from tests.model_runner.test_sampling import (
    CHI_SQUARE_0_001,
    DRAWS,
    PROBABILITIES,
    chi_square,
    distribution,
    logits_of,
    rows_of,
)


def sampler(start: int = 0, **others: Callable[..., Tensor]) -> FlashInferSampler:
    """On the double, or with something in place of parts of it; its calls' seeds are start, start + 1 and so on."""
    api = SimpleNamespace(**{**vars(gpu_doubles.flashinfer), **others})
    return FlashInferSampler(api, count(start).__next__)


class TestDistributions:
    @pytest.mark.parametrize(
        ("params", "support"),
        [
            (SamplingParams(temperature=1.0), {0, 1, 2, 3, 4, 5, 6}),
            (SamplingParams(temperature=0.5), {0, 1, 2, 3, 4, 5, 6}),
            (SamplingParams(temperature=2.5), {0, 1, 2, 3, 4, 5, 6}),
            (SamplingParams(temperature=1.0, top_p=0.8), {1, 5, 3, 4}),
            (SamplingParams(temperature=0.5, top_p=0.6), {1, 5}),
            (SamplingParams(temperature=1.0, min_p=0.3), {1, 5, 3, 4}),
            (SamplingParams(temperature=2.0, min_p=0.45), {1, 5, 3, 4, 6}),
            (SamplingParams(temperature=1.0, top_p=0.95, min_p=0.5), {1, 5, 3}),
            (SamplingParams(temperature=1.5, top_p=0.85, min_p=0.2), {1, 5, 3, 4, 6}),
        ],
    )
    def test_draws_follow_the_closed_form(self, params: SamplingParams, support: set[int]) -> None:
        expected = distribution(PROBABILITIES, params)
        assert set(expected) == support
        drawn = sampler(7).draw(logits_of(PROBABILITIES, DRAWS), rows_of(params, DRAWS))
        assert drawn.dtype == torch.int64
        counts = Counter(drawn.tolist())
        assert set(counts) == support
        assert chi_square(counts, expected) < CHI_SQUARE_0_001[len(support) - 1]

    @pytest.mark.parametrize(
        ("probabilities", "top_p", "left"),
        [
            # Of equal tokens the lower ids stay, as many as are needed; FlashInfer keeps all of them.
            ([0.2] * 5, 0.5, {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}),
            ([0.1, 0.3, 0.3, 0.3], 0.5, {1: 1 / 2, 2: 1 / 2}),
            ([0.25, 0.5, 0.25], 0.5, {1: 1.0}),
            ([0.25, 0.5, 0.25], 0.6, {0: 1 / 3, 1: 2 / 3}),
            ([0.25, 0.25, 0.25, 0.25], 0.5, {0: 1 / 2, 1: 1 / 2}),
            # The likeliest stays, however little is wanted.
            ([0.4, 0.2, 0.4], 1e-9, {0: 1.0}),
        ],
    )
    def test_what_a_nucleus_keeps_of_equals(
        self, probabilities: list[float], top_p: float, left: dict[int, float]
    ) -> None:
        params = SamplingParams(temperature=1.0, top_p=top_p)
        (row,) = sampler().left(logits_of(probabilities, 1), rows_of(params, 1))
        expected = torch.zeros(len(row)).index_put_((torch.tensor(list(left)),), torch.tensor(list(left.values())))
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("temperature", [5e-324, 1e-30, 100.0])
    def test_any_temperature(self, temperature: float) -> None:
        (row,) = sampler().left(torch.tensor([[3.0, -torch.inf, 1.0]]), rows_of(SamplingParams(temperature), 1))
        assert row.isfinite().all()
        assert row[1] == 0
        assert (row[0] == 1) == (temperature < 1)

    def test_each_call_has_random_numbers_of_its_own(self) -> None:
        logits, rows = logits_of(PROBABILITIES, 50), rows_of(SamplingParams(temperature=1.0), 50)
        ours = sampler()
        assert not torch.equal(ours.draw(logits, rows), ours.draw(logits, rows))
        seeds = {FlashInferSampler(gpu_doubles.flashinfer)._new_seed() for _ in range(100)}
        assert len(seeds) == 100
        assert max(seeds) < 1 << SEED_BITS


class TestWhoseRows:
    PARAMS = (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_k=50),
        SamplingParams(temperature=0.7, top_k=3, seed=0),
    )
    TAKEN = (1, 3, 5)
    """Of 50 tokens the 50 best are all."""

    def test_those_with_a_seed_are_drawn_as_ever(self) -> None:
        logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
        rows = SamplingRows.of(self.PARAMS, [5] * 7, range(7))
        others = [row for row in range(7) if row not in self.TAKEN]
        plain = sample_at_once(logits, rows)
        drawn = []
        for seed in range(20):
            tokens = sample_at_once(logits, rows, sampler=sampler(seed))
            assert torch.equal(tokens[others], plain[others])
            drawn.append(tokens)
        changing = torch.stack(drawn).ne(drawn[0]).any(dim=0)
        assert changing.nonzero().flatten().tolist() == list(self.TAKEN)

    def test_all_rows_are_its_own(self) -> None:
        logits, params = logits_of(PROBABILITIES, 30), SamplingParams(temperature=1.0)
        rows = rows_of(params, 30)
        assert torch.equal(sample_at_once(logits, rows, sampler=sampler(3)), sampler(3).draw(logits, rows))

    def test_where_nothing_may_be_drawn_there_is_no_token(self) -> None:
        logits = torch.full((4, 9), -torch.inf)
        logits[2, 4] = 1.0
        rows = rows_of(SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1), 4)
        assert sample_at_once(logits, rows, sampler=sampler()).tolist() == [NO_TOKEN, NO_TOKEN, 4, NO_TOKEN]


@pytest.mark.skipif(fake_card.why_not() is not None, reason=str(fake_card.why_not()))
def test_the_host_waits_for_nothing() -> None:
    """On a card that is not there: rows of all kinds, drawn for by both."""
    params = [*TestWhoseRows.PARAMS, SamplingParams(temperature=0.8, top_p=0.9, min_p=0.1)]
    rows = SamplingRows.of(params, [5] * len(params), range(len(params)))
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(1))
    with fake_card.Card() as card:
        on_card = {
            name: card.kernel(getattr(gpu_doubles.flashinfer, name))
            for name in ("sampling_from_probs", "top_p_renorm_probs")
        }
        there = logits.to(fake_card.CARD)
        with card.nobody_waits():
            tokens = sample_at_once(there, rows, may_wait=False, sampler=sampler(4, **on_card))
        drawn = tokens.cpu().tolist()
    assert drawn == sample_at_once(logits, rows, may_wait=False, sampler=sampler(4)).tolist()


def _kept(probs: Tensor, top_p: Tensor) -> Tensor:
    return probs


def _less(probs: Tensor, top_p: Tensor) -> Tensor:
    return gpu_doubles.flashinfer.top_p_renorm_probs(probs, top_p * 0.97)


def _not_a_number(probs: Tensor, top_p: Tensor) -> Tensor:
    return probs * torch.nan


def _again(probs: Tensor, seed: int, offset: int) -> Tensor:
    return gpu_doubles.flashinfer.sampling_from_probs(probs, seed=0, offset=0)


def _colder(probs: Tensor, seed: int, offset: int) -> Tensor:
    power = probs**1.2
    return gpu_doubles.flashinfer.sampling_from_probs(power / power.sum(1, keepdim=True), seed=seed, offset=offset)


def _next(probs: Tensor, seed: int, offset: int) -> Tensor:
    return (gpu_doubles.flashinfer.sampling_from_probs(probs, seed=seed, offset=offset) + 1) % probs.shape[1]


class TestTrial:
    @pytest.mark.parametrize(("vocabulary", "seed"), [(1, 0), (5, 0), (50, 0), (50, 77), (3000, 0)])
    def test_right_kernels(self, vocabulary: int, seed: int) -> None:
        assert why_wrong(sampler(seed), CPU, vocabulary) is None

    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [
            ({"top_p_renorm_probs": _kept}, "its trial gave probabilities of which"),
            ({"top_p_renorm_probs": _less}, "its trial gave probabilities of which"),
            ({"top_p_renorm_probs": _not_a_number}, "its trial gave probabilities of which nan are elsewhere"),
            ({"sampling_from_probs": _again}, "its trial drew the same tokens again"),
            ({"sampling_from_probs": _colder}, "its trial's draws are off: chi-square is"),
            ({"sampling_from_probs": _next}, "its trial drew tokens that cannot be"),
        ],
    )
    def test_wrong_kernels(self, wrong: dict[str, Any], reason: str) -> None:
        assert (why_wrong(sampler(**wrong), CPU, 400) or "").startswith(reason)


class TestChoice:
    @pytest.fixture
    def there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sampling_choice.FlashInferAttention, "why_not_here", lambda device: None)

    def test_a_device_without_it(self) -> None:
        choice = choose_sampler(CPU, 50)
        assert choice.sampler is None
        assert choice.line == "octavo's own (not flashinfer: the device is cpu, and it needs CUDA)"

    @pytest.mark.usefixtures("there")
    def test_one_that_is_right(self) -> None:
        choice = choose_sampler(CPU, 50, sampler)
        assert isinstance(choice.sampler, FlashInferSampler)
        assert choice.line == "flashinfer for requests with neither seed nor top_k; else octavo's own"

    @pytest.mark.usefixtures("there")
    def test_one_that_is_wrong_or_breaks(self) -> None:
        choice = choose_sampler(CPU, 400, lambda: sampler(sampling_from_probs=_again))
        assert (choice.sampler, choice.line) == (
            None,
            "octavo's own (not flashinfer: its trial drew the same tokens again)",
        )

        def broken() -> FlashInferSampler:
            raise OSError("ninja: build stopped\nand more lines")

        choice = choose_sampler(CPU, 400, broken)
        assert choice.sampler is None
        assert choice.line == "octavo's own (not flashinfer: its trial failed: OSError: ninja: build stopped)"


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
def test_a_row_s_place_decides_what_flashinfer_draws() -> None:
    """Why rows with a seed are not its: each of its kernels that draws starts its numbers with the row."""
    (folder,) = importlib.util.find_spec("flashinfer").submodule_search_locations
    source = (Path(folder) / "data" / "include" / "flashinfer" / "sampling.cuh").read_text()
    starts = re.findall(r"curand_init\(philox_seed, (\w+)", source)
    assert set(starts) == {"bx", "subsequence"}
    assert "static_cast<uint64_t>(bx * d" in source


def test_rows_know_whether_they_have_a_seed() -> None:
    rows = SamplingRows.of(TestWhoseRows.PARAMS, [5] * 7, range(7))
    assert rows.is_seeded.tolist() == [False, False, True, False, False, False, True]
    assert rows.take(np.array([2, 3])).is_seeded.tolist() == [True, False]
