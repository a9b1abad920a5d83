"""An answer goes out before all is written down that it does not depend on, and nobody can tell but by the clock."""

from __future__ import annotations

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import InvalidArgument
from kvmanager.runner_pool import RunnerPool
from tests.services.session_script import ScriptedRunner, admit, orders_of, step
from tests.services.session_talk import Talk


def progress_order(computed: int = 3, ask: int = 2) -> pb.SessionOrder:
    """Of sequence 1, whose prompt has three tokens: a fourth is told."""
    return orders_of(handles=[1], token_counts=[1], token_ids=[9], computed_tokens=[computed], asks=[ask])


def talk_of_one_sequence() -> Talk:
    talk = Talk()
    talk.open()
    talk.step(1, admit(1, [5, 6, 7]))
    return talk


class Listener:
    """Notes what the books know at the moment when each answer goes out."""

    def __init__(self, pool: RunnerPool) -> None:
        self._pool = pool
        self.answers: list[pb.SessionAnswer] = []
        self.computed: list[int] = []

    def hear(self, response: pb.SessionResponse) -> None:
        assert self._pool.check().violations == ()
        assert self._pool.imbalance() == 0
        self.answers.append(response.answer)
        self.computed.append(self._pool.sequence("s1").computed)


def test_a_grant_goes_out_before_the_news_are_written_down():
    talk = talk_of_one_sequence()
    listener = Listener(talk.pool)
    talk.core.receive(step(1, 2, progress_order()), listener.hear)
    assert len(listener.answers[0].grants.block_ids) == 4
    assert listener.computed == [0]
    sequence = talk.pool.sequence("s1")
    assert (list(sequence.chain.token_ids), sequence.computed, len(sequence.blocks)) == ([5, 6, 7, 9], 3, 2)


def test_an_order_finds_written_down_what_was_told_before_it():
    """The prompt that is admitted by the same message finds the block that was computed."""
    talk = talk_of_one_sequence()
    answer = talk.step(2, progress_order(), orders_of(handles=[1], computed_tokens=[4]), admit(2, [5, 6, 7, 9, 1]))
    assert [each.cached_tokens for each in answer.admitted] == [4]


def test_news_that_cant_be_true_end_the_session_and_are_not_written_down_though_an_ask_was_granted():
    talk = talk_of_one_sequence()
    listener = Listener(talk.pool)
    with pytest.raises(InvalidArgument, match="5 must be from the first to the least of the others"):
        talk.core.receive(step(1, 2, progress_order(computed=5)), listener.hear)
    assert len(listener.answers) == 1
    assert (talk.pool.sequence("s1").computed, talk.pool.sequence("s1").num_tokens) == (0, 3)
    assert talk.pool.check().violations == ()
    talk.core.end()
    assert talk.pool.occupancy().held_blocks == 0


def test_an_answer_that_cant_be_sent_is_written_down_all_the_same():
    talk = talk_of_one_sequence()

    def fail(response: pb.SessionResponse) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        talk.core.receive(step(1, 2, progress_order()), fail)
    assert talk.pool.sequence("s1").computed == 3
    answer = talk.step(2, progress_order())
    assert len(answer.grants.block_ids) == 4
    assert talk.pool.sequence("s1").num_tokens == 4


def shape(answer: pb.SessionAnswer) -> object:
    """An answer but for the numbers of its blocks, and when it tells which names are forgotten."""
    grants = answer.grants
    return (
        [(each.handle, len(each.block_ids), each.cached_tokens, len(each.copies)) for each in answer.admitted],
        [(each.handle, each.reason) for each in answer.refusals],
        (grants.handles, grants.first_indices, grants.counts, [copy.num_tokens for copy in grants.copies]),
        len(answer.lease_block_ids),
    )


def content(pool: RunnerPool) -> object:
    """What two pools must agree in that may have given out other blocks."""
    sequences = {
        key: (each.chain.token_ids, each.computed, each.cached, len(each.blocks)) for key, each in pool.live.items()
    }
    return pool.occupancy(), pool.totals, sequences, sorted(filter(None, pool.block_pool.index.names))


@pytest.mark.parametrize("seed", range(6))
def test_answers_and_books_are_those_of_a_pool_that_writes_all_down_before_it_answers(seed, monkeypatch):
    """Random orders of all kinds in a pool so small that blocks are given up, and the lease is empty at times."""
    said = []
    for _ in range(2):
        talk, runner = Talk(), ScriptedRunner(seed)
        runner.opened(talk.open())
        said.append([])
        for _ in range(120):
            response = talk.say(runner.next_step())
            assert response is not None
            runner.accept(response.answer)
            said[-1].append((shape(response.answer), content(talk.pool)))
        # The second one.
        monkeypatch.setattr(RunnerPool, "answer", RunnerPool.progress)
    assert said[0] == said[1]
