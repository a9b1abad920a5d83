"""Who can't be planned before its draw is known: each alone, and that it comes to the steps as it must."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest

from model_runner.request import BeamSearch, SamplingParams
from tests.model_runner.step_modes import StepMode
from tests.model_runner.test_async_any_load import Turns
from tests.model_runner.test_async_steps import PROMPT, Turned

DRAWN = SamplingParams(temperature=0.9, seed=4)


def most_in_flight(options: dict[str, Any]) -> int:
    """Steps at a time while one request is served."""
    with Turned(StepMode.AHEAD) as turned:
        form, most = options.pop("form", None), options.pop("most", 12)
        with mock.patch.object(turned.engine, "submit", partial(turned.engine.submit, constraint=form)):
            turned.submit("a", PROMPT, most, **options)
        turned.until_idle()
        return turned.watch.most


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 2),
        ({"sampling": DRAWN}, 2),
        ({"logprobs": 2}, 2),
        ({"beam_search": BeamSearch(2), "num_choices": 1}, 1),
        ({"sampling": SamplingParams(presence_penalty=0.5)}, 1),
        ({"form": Turns(8)}, 1),
        ({"prompt_logprobs": 1, "most": 1}, 1),
        # Once the prompt's are known, or it has split, steps run ahead.
        ({"prompt_logprobs": 1}, 2),
        ({"num_choices": 3, "sampling": DRAWN}, 2),
    ],
)
def test_steps_in_flight(options: dict[str, Any], most: int) -> None:
    assert most_in_flight(dict(options)) == most
