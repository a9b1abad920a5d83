"""Messages are numbered once, and answers are taken once and in order."""

from __future__ import annotations

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.session.exchange import AnswersLost, Exchange
from services.session.mirror import Mirror


class Wire(list):
    def numbers(self) -> list[int]:
        return [request.step.number for request in self]


def exchange() -> tuple[Exchange, Wire]:
    wire = Wire()
    return Exchange(9, wire.append), wire


def answered(talk: Exchange, number: int, now: float = 0.0) -> list[int]:
    return [answer.number for answer, _ in talk.take(pb.SessionAnswer(number=number), now)]


def test_numbers_count_from_one_and_carry_the_epoch() -> None:
    talk, wire = exchange()
    assert [talk.step(Mirror(9, 4), 0.0) for _ in range(3)] == [1, 2, 3]
    assert [(request.step.epoch, request.step.number) for request in wire] == [(9, 1), (9, 2), (9, 3)]


def test_answers_come_in_order_however_they_arrive() -> None:
    talk, _ = exchange()
    for _ in range(3):
        talk.step(Mirror(9, 4), 0.0)
    assert answered(talk, 2) == []
    assert answered(talk, 1) == [1, 2]
    assert answered(talk, 2) == [], "once is enough"
    assert answered(talk, 7) == [], "nobody has asked that"
    assert answered(talk, 3) == [3]
    assert talk.waiting == 0


def test_a_gap_is_filled_from_its_first_message_on() -> None:
    talk, wire = exchange()
    for _ in range(4):
        talk.step(Mirror(9, 4), 0.0)
    assert answered(talk, 1) == [1]
    talk.resend(3)
    assert wire.numbers() == [1, 2, 3, 4, 3, 4]
    assert talk.resends == 2
    talk.resend(5)
    assert talk.resends == 2, "the next message fills it"
    with pytest.raises(AnswersLost, match="message 1"):
        talk.resend(1)


def test_signs_of_life_are_for_who_has_said_nothing() -> None:
    talk, wire = exchange()
    talk.step(Mirror(9, 4), 10.0)
    talk.beat(10.9, 1.0)
    assert wire.numbers() == [1]
    talk.beat(11.0, 1.0)
    assert wire.numbers() == [1, 2]
    assert not wire[1].step.orders


def test_the_oldest_message_tells_how_long_an_answer_is_due() -> None:
    talk, _ = exchange()
    assert talk.oldest(5.0) == 0.0
    talk.step(Mirror(9, 4), 1.0)
    talk.step(Mirror(9, 4), 2.0)
    assert talk.oldest(5.0) == 4.0
    ((_, seconds),) = talk.take(pb.SessionAnswer(number=1), 4.5)
    assert seconds == 3.5
    assert talk.oldest(5.0) == 3.0
