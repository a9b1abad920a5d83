"""A session of a test without a wire, whose books are checked after each message."""

from __future__ import annotations

from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.manager import KvManager
from kvmanager.runner_pool import RunnerPool
from services.session_core import SessionCore, SessionCounts
from tests.services.session_script import opening, step


class Talk:
    """A session with a manager of its own, or one given; every change is followed by a check of the books."""

    def __init__(self, manager: KvManager | None = None) -> None:
        self.manager = manager or KvManager("boot")
        self.counts = SessionCounts()
        self.core = SessionCore(self.manager, self.counts, 10.0)

    def say(self, message: pb.SessionRequest) -> pb.SessionResponse | None:
        """The answer, if there is one."""
        answers: list[pb.SessionResponse] = []
        try:
            self.core.receive(message, answers.append)
        finally:
            if self.core.epoch and self.core.pool_id in dict(self.manager.pools()):
                assert self.pool.check().violations == ()
                assert self.pool.imbalance() == 0
        assert len(answers) <= 1
        return answers[0] if answers else None

    def open(self, **options) -> pb.SessionOpened:
        answer = self.say(opening(**options))
        assert answer is not None
        return answer.opened

    def step(self, number: int, *orders: pb.SessionOrder, returned=()) -> pb.SessionAnswer:
        answer = self.say(step(self.core.epoch, number, *orders, returned=returned))
        assert answer is not None
        assert answer.answer.number == number
        return answer.answer

    @property
    def pool(self) -> RunnerPool:
        return self.manager.pool(self.core.pool_id)


def books(pool: RunnerPool) -> object:
    """All that two runs must agree in."""
    return (
        pool.occupancy(),
        pool.totals,
        {
            key: (sequence.blocks, list(sequence.chain.token_ids), sequence.computed)
            for key, sequence in pool.live.items()
        },
        pool.block_pool.counts,
        pool.block_pool.index.names,
        pool.lease.members(),
        pool.block_pool.free,
    )
