"""Sessions of a random runner: over a channel in trouble, broken off and restored elsewhere, with bytes that lie."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import InvalidArgument
from kvmanager.manager import KvManager
from tests.services.session_script import ScriptedRunner, opening
from tests.services.session_talk import Talk, books

STEPS = 60


def mirrored(runner: ScriptedRunner) -> dict[str, tuple[list[int], list[int], int]]:
    """The runner's side of the tables, of those that wait for no answer."""
    return {f"s{handle}": (each.blocks, each.tokens, each.computed) for handle, each in runner.live.items()}


class Channel:
    """Loses, doubles, delays and so reorders messages, each with a chance of its own."""

    def __init__(self, seed: int, trouble: float) -> None:
        self._random = random.Random(seed)
        self._trouble = trouble
        self._due: deque[object] = deque()

    def put(self, message: object) -> None:
        for _ in range(1 if self._random.random() >= self._trouble else self._random.choice([0, 2, 3])):
            place = len(self._due)
            if self._random.random() < self._trouble:
                place = self._random.randrange(place + 1)
            self._due.insert(place, message)

    def __len__(self) -> int:
        return len(self._due)

    def take(self) -> object | None:
        return self._due.popleft() if self._due else None


def run_script(seed: int, trouble: float) -> tuple[Talk, ScriptedRunner]:
    """A runner that is two steps ahead of the answers, over a channel in trouble; it resends what is not answered."""
    talk, runner = Talk(), ScriptedRunner(seed)
    runner.opened(talk.open())
    there, back = Channel(seed + 1, trouble), Channel(seed + 2, trouble)
    unanswered: deque[pb.SessionRequest] = deque()
    while runner.number < STEPS or unanswered:
        if runner.number < STEPS and len(unanswered) < 2:
            unanswered.append(runner.next_step())
            there.put(unanswered[-1])
            continue
        message, answer = there.take(), back.take()
        if (message is None and answer is None) or (answer is not None and answer.HasField("gap") and not len(there)):
            for each in unanswered:
                there.put(each)
        if message is not None and (response := talk.say(message)) is not None:
            back.put(response)
        if answer is not None and answer.HasField("answer") and answer.answer.number == unanswered[0].step.number:
            unanswered.popleft()
            runner.accept(answer.answer)
    return talk, runner


@pytest.mark.parametrize("seed", range(20))
def test_a_channel_that_loses_doubles_delays_and_reorders_changes_nothing(seed):
    quiet, runner = run_script(seed, 0.0)
    noisy, other = run_script(seed, 0.3)
    assert books(noisy.pool) == books(quiet.pool)
    assert mirrored(other) == mirrored(runner)
    assert sorted(other.lease) == sorted(noisy.pool.lease.members())
    assert quiet.counts.resent == quiet.counts.gaps == quiet.counts.dropped == 0
    assert noisy.counts.resent + noisy.counts.gaps + noisy.counts.dropped > 0
    assert noisy.counts.steps == STEPS


@pytest.mark.parametrize("seed", range(20))
def test_a_runner_that_restores_elsewhere_has_the_books_of_its_mirror(seed):
    """The stream breaks with messages on their way; the books of a new process are those that the mirror says."""
    talk, runner = run_script(seed, 0.1)
    for _ in range(seed % 3):
        runner.next_step()
    runner.forget_unanswered()
    talk.core.end()
    assert talk.pool.occupancy().held_blocks == 0

    later = Talk(KvManager("another boot"))
    assert later.say(opening(restores=True)) is None
    before = runner.lease[:]
    answer = later.say(pb.SessionRequest(holdings=runner.holdings()))
    runner.opened(answer.opened)
    tables = {key: (each.blocks, list(each.chain.token_ids), each.computed) for key, each in later.pool.live.items()}
    assert tables == mirrored(runner)
    assert later.pool.lease.members() == runner.lease
    assert runner.lease[: len(before)] == before
    for _ in range(20):
        runner.accept(later.say(runner.next_step()).answer)
    assert later.counts.restores == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_in_columns_never_break_the_books(seed):
    """Each column of a step is now and then any bytes: it is refused with a sentence, or means what it says."""
    chance = random.Random(seed)
    runner = ScriptedRunner(seed)
    talk = Talk()
    runner.opened(talk.open())
    for _ in range(8):
        runner.accept(talk.say(runner.next_step()).answer)
    message = runner.next_step()
    for order in message.step.orders:
        for inner in (order.progress, order.end.progress) if order.WhichOneof("order") in ("progress", "end") else ():
            for field in inner.DESCRIPTOR.fields:
                if chance.random() < 0.3:
                    setattr(inner, field.name, chance.randbytes(chance.choice([0, 3, 4, 8, 16, 4000])))
    with suppress(InvalidArgument):
        talk.say(pb.SessionRequest.FromString(message.SerializeToString()))
    talk.core.end()
    assert talk.pool.check().ok
    assert talk.pool.occupancy().held_blocks == 0
