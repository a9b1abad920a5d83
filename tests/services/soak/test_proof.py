"""The proof finds what is planted: a wrong token, a leaked block, a hung stream and others; and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model_runner.request import Chunk, FinishReason
from services.soak.load import Ending, Kind, Request
from services.soak.proof import Answer, Outage, Outcome, PoolEnd, Truth, count_ends, faults_of, pool_faults

TRUTH = Truth([Answer(tuple(range(100, 164)), 64)], [[(200, 201), (210, 211), (220, 221)]])
REQUEST = Request("r0u1-1", 0, 4, 1, "", 0, Ending.COMPLETE, 0, 0.0, 0.0)
DEAD = Outage(runner=0, began=10.0, ended=20.0)
END = PoolEnd("pool-0", usable=119, free=60, cached=52, held=7, leased=7, sequences=0, requests=0, runner_lease=7)


def outcome(*tokens: int, finish: FinishReason | None = FinishReason.LENGTH, **request) -> Outcome:
    """A stream from second 1 to second 2."""
    made = Outcome(replace(REQUEST, **request), runner=0, started=1.0, ended=2.0)
    for place, token in enumerate(tokens):
        last = place == len(tokens) - 1
        made.take(Chunk("r0u1-1", 0, (token,), "", finish_reason=finish if last else None))
    return made


def failed(code: str, reason: str = "", *tokens: int, started: float = 1.0, ended: float = 2.0, **request) -> Outcome:
    made = outcome(*tokens, finish=None, **request)
    made.code, made.reason, made.sentence = code, reason, "The sentence."
    made.started, made.ended = started, ended
    return made


GOOD = outcome(100, 101, 102, 103)


def found(*outcomes: Outcome, outages: tuple[Outage, ...] = ()) -> list[str]:
    return faults_of([GOOD, *outcomes], TRUTH, outages)


def test_a_right_answer():
    assert found() == []


@pytest.mark.parametrize("place", range(4))
def test_a_wrong_token(place: int):
    tokens = [100, 101, 102, 103]
    tokens[place] = 7
    assert found(outcome(*tokens)) == [f"r0u1-1: choice 0 has token 7 at {place}, undisturbed it was {100 + place}"]


def test_a_lost_token_is_a_wrong_one():
    assert found(outcome(100, 102, 103, 104)) == ["r0u1-1: choice 0 has token 102 at 1, undisturbed it was 101"]


def test_a_wrong_token_of_an_interrupted_stream():
    dropped = outcome(100, 7, finish=None, ending=Ending.DROP, after=2)
    assert found(dropped) == ["r0u1-1: choice 0 has token 7 at 1, undisturbed it was 101"]
    dead = failed("UNAVAILABLE", "", 100, 7, started=9, ended=11)
    assert found(dead, outages=(DEAD,)) == ["r0u1-1: choice 0 has token 7 at 1, undisturbed it was 101"]


def test_a_wrong_token_of_another_choice():
    both = outcome(100, 101, 102, 103, choices=2)
    for place, token in enumerate((100, 101, 7, 103)):
        both.take(Chunk("r0u1-1", 1, (token,), "", finish_reason=FinishReason.LENGTH if place == 3 else None))
    assert found(both) == ["r0u1-1: choice 1 has token 7 at 2, undisturbed it was 102"]


def test_behind_a_tie_nothing_is_compared():
    truth = Truth([Answer(TRUTH.answers[0].tokens, sure=2)])
    assert faults_of([outcome(100, 101, 7, 8)], truth, ()) == []
    assert len(faults_of([outcome(100, 7, 7, 8)], truth, ())) == 1


def searched(second: int, **request) -> Outcome:
    """The two best answers of a beam search; the second begins with 210 if it is right."""
    made = Outcome(
        replace(REQUEST, max_tokens=2, choices=2, kind=Kind.BEAMS, **request), runner=0, started=1.0, ended=2.0
    )
    for choice, tokens in enumerate(((200, 201), (second, 211))):
        made.take(Chunk("r0u1-1", choice, tokens, "", finish_reason=FinishReason.LENGTH))
    return made


def test_a_search_has_answers_of_its_own():
    assert found(searched(210)) == []
    assert found(searched(7)) == ["r0u1-1: choice 1 has token 7 at 0, undisturbed it was 210"]


def test_searches_whose_sums_may_differ_are_not_compared():
    assert faults_of([searched(7)], Truth(TRUTH.answers), ()) == []


def test_the_best_of_several_is_the_answer_that_all_are():
    assert found(outcome(100, 101, 102, 103, kind=Kind.BEST_OF, drawn=3)) == []
    assert len(found(outcome(100, 101, 7, 103, kind=Kind.BEST_OF, drawn=3))) == 1


def test_a_short_answer():
    assert found(outcome(100, 101)) == ["r0u1-1: choice 0 ended with 2 tokens of 4"]


def test_a_choice_without_an_end():
    assert found(outcome(100, 101, 102, 103, choices=2)) == ["r0u1-1: choice 1 has no end"]


def test_too_many_tokens():
    assert "r0u1-1: choice 0 has 5 tokens, 4 were asked for" in found(outcome(100, 101, 102, 103, 104))


def test_an_abort_that_nobody_asked_for():
    assert found(outcome(100, 101, finish=FinishReason.ABORT)) == ["r0u1-1: choice 0 ended by abort"]
    assert found(outcome(100, 101, finish=FinishReason.ABORT, ending=Ending.ABORT, after=2)) == []


def test_a_stop_that_nobody_asked_for():
    assert found(outcome(100, 101, finish=FinishReason.STOP)) == ["r0u1-1: choice 0 ended by stop"]


def test_a_hung_stream():
    hung = outcome(100, 101, finish=None)
    hung.ended = None
    assert found(hung) == ["r0u1-1: the stream hangs, with 2 tokens"]


def test_a_dropped_stream_needs_no_end():
    assert found(outcome(100, 101, finish=None, ending=Ending.DROP, after=2)) == []


def test_a_deadline():
    assert found(failed("DEADLINE_EXCEEDED", "", 100, ending=Ending.DEADLINE, seconds=1.0)) == []
    assert found(failed("DEADLINE_EXCEEDED", "", 100)) == [
        "r0u1-1: ended with DEADLINE_EXCEEDED (no reason) after 1 tokens, from 1.0 to 2.0 s: The sentence."
    ]


def test_a_stream_of_a_dead_runner():
    stream = failed("UNAVAILABLE", "", 100, started=9, ended=11)
    assert found(stream, outages=(DEAD,)) == []
    assert len(found(stream)) == 1
    assert len(found(stream, outages=(replace(DEAD, runner=1),))) == 1
    assert len(found(failed("UNAVAILABLE", "", 100, started=21, ended=22), outages=(DEAD,))) == 1
    assert len(found(failed("UNAVAILABLE", "", 100, started=8, ended=9), outages=(DEAD,))) == 1
    assert len(found(failed("INTERNAL", "", 100, started=9, ended=11), outages=(DEAD,))) == 1


def test_a_stopped_runner_may_not_take_a_request_and_loses_none():
    stopped = (replace(DEAD, dead=False),)
    assert found(failed("UNAVAILABLE", started=9, ended=11), outages=stopped) == []
    assert len(found(failed("UNAVAILABLE", "", 100, started=9, ended=11), outages=stopped)) == 1
    assert len(found(failed("UNAVAILABLE", started=21, ended=22), outages=stopped)) == 1


def test_what_a_runner_has_not_taken():
    assert found(failed("UNAVAILABLE", "NOT_READY")) == []
    assert len(found(failed("UNAVAILABLE", "NOT_READY", 100))) == 1
    assert len(found(failed("UNAVAILABLE", "OTHER"))) == 1


def test_nothing_completed_proves_nothing():
    assert faults_of([failed("UNAVAILABLE", "NOT_READY")], TRUTH, ()) == [
        "no request was completed, so nothing is proved"
    ]


def test_ends_are_counted():
    dropped = outcome(100, finish=None, ending=Ending.DROP, after=1)
    assert count_ends([GOOD, GOOD, dropped, failed("UNAVAILABLE")]) == {
        "completed": 2,
        "cut short": 1,
        "UNAVAILABLE": 1,
    }


def test_a_clean_pool():
    assert pool_faults(END) == []


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"held": 8, "cached": 51}, "8 blocks are held, and 7 are leased"),
        ({"free": 59}, "59 free, 52 cached and 7 held blocks are not 119"),
        ({"runner_lease": 6}, "7 blocks are leased, and the runner has 6"),
        ({"sequences": 1}, "1 sequences are still live"),
        ({"requests": 2}, "2 requests are still listed"),
        ({"violations": ("Block 3 has a count of 2.",)}, "Block 3 has a count of 2."),
    ],
)
def test_a_pool_with_a_fault(wrong, sentence: str):
    assert pool_faults(replace(END, **wrong)) == [f"pool pool-0: {sentence}"]
