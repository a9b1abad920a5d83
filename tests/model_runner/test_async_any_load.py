"""Whatever is asked for at the same time, steps that are planned ahead give the answers of one step after the other.

Hypothesis draws the load, and makes it small when it finds something: every kind of request that must know its draw
before its next step (rules, forms, searches, splits, log-probabilities of the prompt) beside those that need not, by
either policy, in a pool that is too small for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model_runner.logit_edits import mask_of
from model_runner.request import BeamSearch, GenerateRequest, SamplingParams, StopConditions
from model_runner.waiting_line import SchedulingPolicy
from tests.model_runner.step_modes import StepMode
from tests.model_runner.test_async_steps import SMALL, Load, assert_told_alike, play
from tests.model_runner.toy_model import VOCAB_SIZE

STEMS = ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9], [30, 31])
"""What prompts begin with: some share it."""


@dataclass
class Turns:
    """A form: tokens from the lower half and the upper half of the vocabulary by turns, `length` of them."""

    length: int
    taken: int = 0

    def mask(self) -> NDArray[np.uint32]:
        half = VOCAB_SIZE // 2
        first = half * (self.taken % 2)
        return mask_of(range(first, first + half), VOCAB_SIZE)

    def advance(self, token_id: int) -> None:
        assert token_id // (VOCAB_SIZE // 2) == self.taken % 2, "a token that the form does not allow"
        self.taken += 1

    @property
    def is_complete(self) -> bool:
        return self.taken >= self.length

    @property
    def is_over(self) -> bool:
        return self.is_complete

    @property
    def failure(self) -> str:
        return ""

    def copy(self) -> Turns:
        return Turns(self.length, self.taken)


RULES: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.3, "frequency_penalty": -0.2},
    {"logit_bias": ((5, 3.0), (9, -100.0))},
    {"allowed_token_ids": frozenset(range(4, 30))},
    {"bad_words": ((6,), (5, 9))},
]
KINDS = ("plain", "plain", "several", "best_of", "ruled", "form", "search", "prompt_logprobs")


@st.composite
def requests(draw: st.DrawFn, name: str, kind: str) -> GenerateRequest:
    sampling: dict[str, Any] = {"seed": draw(st.integers(0, 9))}
    if kind != "search":
        sampling["temperature"] = draw(st.sampled_from([0.0, 0.9]))
        sampling["top_p"] = draw(st.sampled_from([1.0, 0.8]))
    if kind == "ruled":
        sampling |= draw(st.sampled_from(RULES))
    several = {
        "several": {"num_choices": draw(st.sampled_from([2, 3]))},
        "best_of": {"num_choices": 1, "best_of": 3},
        "search": {"beam_search": BeamSearch(2)},
    }
    return GenerateRequest(
        name,
        (*draw(st.sampled_from(STEMS)), *draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9))),
        SamplingParams(**sampling),
        StopConditions(
            max_tokens=draw(st.sampled_from([1, 2, 8, 19])),
            stop_strings=draw(st.sampled_from([(), ("ab", "C"), ("zz", "Q", "x")])) if kind != "form" else (),
            ignore_eos=draw(st.booleans()),
            min_tokens=draw(st.sampled_from([0, 3])) if kind == "ruled" else 0,
        ),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=1 if kind == "prompt_logprobs" else None,
        queue_priority=draw(st.integers(-1, 1)),
        **several.get(kind, {}),
    )


@st.composite
def loads(draw: st.DrawFn) -> Load:
    load = Load([])
    turn = 0
    for number, kind in enumerate(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))):
        name = f"r{number}"
        load.requests.append((turn, draw(requests(name, kind))))
        turn += draw(st.sampled_from([0, 0, 1, 4]))
        if kind == "form":
            load.forms[name] = Turns(draw(st.integers(1, 12)))
        # After so many chunks; most are left alone.
        fate = draw(st.sampled_from([None, None, None, None, load.aborts, load.pauses]))
        if fate is not None:
            fate[name] = draw(st.integers(0, 4))
    return load


@pytest.mark.usefixtures("no_foresight")
@given(load=loads(), policy=st.sampled_from(SchedulingPolicy))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_any_load(load: Load, policy: SchedulingPolicy) -> None:
    played = [play(load, mode, policy=policy, **SMALL) for mode in (StepMode.SYNC, StepMode.AHEAD)]
    assert_told_alike(load, *played)
