"""Edited logits beside the definition in plain Python, and draws from them beside their closed forms, in all ways."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner import native
from model_runner.logit_edits import LogitEdits, apply_edits, mask_of
from model_runner.native import sampling as kernels
from model_runner.request import SamplingParams
from model_runner.sampling import sample
from model_runner.sampling_cpu import sample_by_rows
from model_runner.sampling_device import sample_at_once
from model_runner.sampling_rows import NO_TOKEN, SamplingRows
from tests.model_runner.native_support import INSTRUCTION_SETS, using

VOCABULARY = 70
DRAWS = 100_000
CHI_SQUARE_0_001 = {4: 18.467, 5: 20.515, 6: 22.458}
"""Upper critical values at 0.001 by degrees of freedom: NIST/SEMATECH e-Handbook, table 1.3.6.7.4."""


def ids(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, dtype=np.int32)


def numbers(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def by_definition(logits: Sequence[float], edits: LogitEdits | None) -> list[float]:
    """Token by token, as Hugging Face's repetition penalty and OpenAI's two others are defined."""
    if edits is None:
        return list(logits)
    counts = dict(zip(edits.seen.tolist(), edits.counts.tolist(), strict=True))
    biases = dict(zip(edits.biased.tolist(), edits.biases.tolist(), strict=True))
    edited = []
    for token, logit in enumerate(logits):
        if token in counts:
            logit = logit / edits.repetition if logit > 0 else logit * edits.repetition
            logit -= edits.frequency * counts[token] + edits.presence * (counts[token] > 0)
        logit += biases.get(token, 0.0)
        allowed = edits.mask is None or edits.mask[token // 32] >> (token % 32) & 1
        edited.append(logit if allowed and token not in edits.banned else -math.inf)
    return edited


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), unique=True, max_size=12)


@st.composite
def edits_of_a_row(draw: st.DrawFn) -> LogitEdits | None:
    if draw(st.booleans()):
        return None
    seen, biased = draw(TOKENS), draw(TOKENS)
    allowed = draw(st.none() | st.sets(st.integers(0, VOCABULARY - 1)))
    return LogitEdits(
        repetition=draw(st.sampled_from([0.5, 1.0, 1.3])),
        frequency=draw(st.sampled_from([0.0, 0.75, -0.5])),
        presence=draw(st.sampled_from([0.0, 1.5, -2.0])),
        seen=ids(*seen),
        counts=ids(*(draw(st.integers(0, 3)) for _ in seen)),
        biased=ids(*biased),
        biases=numbers(*(draw(st.sampled_from([-100.0, -0.5, 3.0])) for _ in biased)),
        banned=ids(*draw(TOKENS)),
        mask=None if allowed is None else mask_of(sorted(allowed), VOCABULARY),
    )


@given(st.lists(edits_of_a_row(), min_size=1, max_size=5), st.integers(0, 2**20))
def test_edits_are_those_of_the_definition_row_by_row(edits: list[LogitEdits | None], seed: int) -> None:
    logits = torch.randn(len(edits), VOCABULARY, generator=torch.Generator().manual_seed(seed)).mul(2)
    before = logits.clone()
    edited = apply_edits(logits, edits)
    for row, each in enumerate(edits):
        assert edited[row].tolist() == pytest.approx(by_definition(logits[row].tolist(), each), rel=1e-5, abs=1e-5)
    assert torch.equal(logits, before)


@given(st.lists(edits_of_a_row(), min_size=1, max_size=5), st.integers(0, 2**20))
@pytest.mark.skipif(not INSTRUCTION_SETS, reason="the CPU kernels are not built")
def test_the_kernels_edit_as_torch_does(edits: list[LogitEdits | None], seed: int) -> None:
    """Bit by bit: at a temperature so high that all tokens are about as likely, a hair would show in some draw."""
    count = len(edits)
    logits = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)).mul(2)
    before = logits.clone()
    edited = apply_edits(logits, edits)
    for params in (
        SamplingParams(),
        SamplingParams(1.0),
        SamplingParams(50.0),
        SamplingParams(2.0, top_k=9, top_p=0.9),
    ):
        rows = SamplingRows.of([params] * count, range(seed, seed + count), range(count))
        expected = sample_by_rows(edited, rows).tolist()
        assert sample_at_once(edited, rows).tolist() == expected
        for instruction_set in INSTRUCTION_SETS:
            with using(instruction_set):
                assert kernels.draw(logits, rows, edits, None).tolist() == expected
    assert torch.equal(logits, before)


PROBABILITIES = [0.05, 0.3, 0.02, 0.2, 0.1, 0.25, 0.08]


@pytest.mark.parametrize(
    "edits",
    [
        # Logits are below 0 here, so they are multiplied: probabilities to the power of the penalty.
        LogitEdits(repetition=1.7, seen=ids(1, 5), counts=ids(0, 2)),
        LogitEdits(frequency=0.4, seen=ids(0, 3, 6), counts=ids(1, 3, 0)),
        LogitEdits(presence=1.2, frequency=-0.2, seen=ids(1, 2), counts=ids(2, 1)),
        LogitEdits(biased=ids(2, 4), biases=numbers(2.0, -1.0)),
        LogitEdits(banned=ids(1)),
        LogitEdits(mask=mask_of([0, 1, 3, 5, 6], 7)),
        LogitEdits(repetition=1.2, seen=ids(1), counts=ids(1), presence=0.3, biased=ids(0), biases=numbers(1.0)),
    ],
    ids=["repetition", "frequency", "presence", "bias", "ban", "mask", "all"],
)
def test_draws_follow_the_closed_form(edits: LogitEdits) -> None:
    logits = torch.tensor([PROBABILITIES], dtype=torch.float64).log().float()
    powers = [math.exp(logit) for logit in by_definition(logits[0].tolist(), edits)]
    expected = {token: power / sum(powers) for token, power in enumerate(powers) if power}
    rows = SamplingRows.of([SamplingParams(1.0)] * DRAWS, [77] * DRAWS, range(DRAWS))
    drawn = sample_at_once(apply_edits(logits, [edits]).expand(DRAWS, -1), rows)
    counts = Counter(drawn.tolist())
    assert set(counts) == set(expected)
    chi_square = sum((counts[token] - DRAWS * p) ** 2 / (DRAWS * p) for token, p in expected.items())
    assert chi_square < CHI_SQUARE_0_001[len(expected) - 1]
    if INSTRUCTION_SETS:
        few = rows.take(np.arange(1000))
        assert kernels.draw(logits, few, [edits] * 1000, [0] * 1000).tolist() == drawn[:1000].tolist()


def test_only_what_the_mask_has_is_drawn_up_to_the_last_word() -> None:
    mask = mask_of([0, 31, 32, 63, 64, 69], VOCABULARY)
    assert mask.tolist() == [1 << 31 | 1, 1 << 31 | 1, 1 << 5 | 1]
    rows = SamplingRows.of([SamplingParams(1.0)] * 500, [3] * 500, range(500))
    drawn = sample(torch.zeros(1, VOCABULARY), rows, [LogitEdits(mask=mask)] * 500, [0] * 500)
    assert set(drawn.tolist()) == {0, 31, 32, 63, 64, 69}


def test_a_row_without_any_token_left_and_its_neighbours() -> None:
    everything = LogitEdits(banned=ids(*range(VOCABULARY)))
    nothing_allowed = LogitEdits(mask=mask_of([], VOCABULARY))
    rows = SamplingRows.of(
        [SamplingParams(), SamplingParams(1.0), SamplingParams(), SamplingParams(1.0)], [1] * 4, [1] * 4
    )
    logits = torch.zeros(4, VOCABULARY)
    drawn = sample(logits, rows, [everything, nothing_allowed, None, None])
    assert drawn.tolist()[:3] == [NO_TOKEN, NO_TOKEN, 0]
    assert drawn[3] == sample(logits[3:], rows.take(np.array([3])))[0]


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="the CPU kernels are not built")
@pytest.mark.parametrize(
    ("edits", "sentence"),
    [
        (LogitEdits(seen=ids(VOCABULARY), counts=ids(1)), "not in the vocabulary"),
        (LogitEdits(biased=ids(-1), biases=numbers(1.0)), "not in the vocabulary"),
        (LogitEdits(banned=ids(5000)), "not in the vocabulary"),
        (LogitEdits(mask=mask_of([1], 64)), "2 words does not fit a vocabulary of 70"),
    ],
)
def test_the_kernels_refuse_edits_of_another_vocabulary(edits: LogitEdits, sentence: str) -> None:
    rows = SamplingRows.of([SamplingParams()], [0], [0])
    with pytest.raises(native.NativeError, match=sentence):
        kernels.draw(torch.zeros(1, VOCABULARY), rows, [edits], None)
