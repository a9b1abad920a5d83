"""Refusing several answers that can't be had: more than may run at once, or a beam search that is asked to draw."""

from __future__ import annotations

from model_runner.invalid import InvalidRequest, check_range
from model_runner.request import MAX_CHOICES, MAX_LENGTH_PENALTY, BeamSearch, GenerateRequest, SamplingParams

_DRAWN_AND_SEARCHED = "{} is for answers that are drawn, and a beam search draws none; leave one or the other out."
_NOTHING_ASKED = SamplingParams()
_SEARCHED = ("logit_bias", "allowed_token_ids")
"""What a beam search heeds of SamplingParams."""


def check_several(request: GenerateRequest, max_sequences: int) -> None:
    """Of a request whose sequences run at once, `max_sequences` at most. Raises InvalidRequest."""
    most = min(MAX_CHOICES, max_sequences)
    check_range("num_choices", request.num_choices, 1, most)
    if request.beam_search is not None:
        _check_beam_search(request, request.beam_search, most)
    elif request.best_of:
        check_range("best_of", request.best_of, request.num_choices, most, hint=" (from num_choices on)")


def _check_beam_search(request: GenerateRequest, search: BeamSearch, most: int) -> None:
    check_range("width", search.width, 1, most)
    check_range("length_penalty", search.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if request.num_choices > search.width:
        raise InvalidRequest(
            "num_choices",
            f"num_choices is {request.num_choices}, and the beam search keeps {search.width} answers; ask for at most "
            "so many, or for a greater width.",
        )
    if request.best_of:
        raise InvalidRequest("best_of", _DRAWN_AND_SEARCHED.format("best_of"))
    for field in SamplingParams.__slots__:
        if field not in _SEARCHED and getattr(request.sampling, field) != getattr(_NOTHING_ASKED, field):
            raise InvalidRequest(field, _DRAWN_AND_SEARCHED.format(field))
