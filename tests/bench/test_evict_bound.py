"""What classes could hit, on traces where it can be counted by hand."""

import pytest

from bench.evict_bound import FOLDS, bounds, lives


def test_lives_of_three_turns_and_a_stranger() -> None:
    known = lives([[1, 2], [1, 2, 3], [1, 9], [1, 2, 3, 4]])
    # Stored: 2, 1, 1 and 1 blocks. 1 is used by all, 2 and 3 by the turns, and 2 and 9 end a prompt once.
    assert known.total == 5
    assert known.returned.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert known.waits.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0]
    # Uses, or the turn where that is more: 3 is of the second turn, 4 of the third; 9 follows what was used twice.
    assert known.parts["uses"].tolist() == [0, 0, 1, 1, 1, 2, 0, 3, 2, 2, 2]
    assert known.parts["tail"].tolist() == [0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 1]


def hot_and_once(chains: int, requests: int) -> list[list[int]]:
    """Chains of 2 blocks in turn, and behind each request for one a prompt of 2 blocks that is used once."""
    trace = []
    for number in range(requests):
        chain = number % chains * 2
        trace += [[chain, chain + 1], [10**6 + 2 * number, 10**6 + 2 * number + 1]]
    return trace


@pytest.mark.parametrize(("capacity", "share"), [(16, 0.25), (32, 0.5), (64, 1.0), (500, 1.0)])
def test_what_comes_back_for_sure_hits_as_far_as_there_is_room_for_it(capacity: int, share: float) -> None:
    # 32 chains: room for 64 blocks is enough for all of their hits, of which the first use of each is none.
    requests, chains = 4_000, 32
    (found,) = bounds(lives(hot_and_once(chains, requests)), ("uses",), [capacity])
    possible = share * 2 * (requests - chains)
    assert found.fitted == pytest.approx(possible, rel=0.03)
    assert found.foreseen == pytest.approx(possible, rel=0.03)


def test_what_no_other_conversation_has_shown_is_not_foreseen() -> None:
    requests = 1_000
    (found,) = bounds(lives(hot_and_once(1, requests)), ("uses",), [2])
    assert found.fitted == pytest.approx(2 * (requests - 1), rel=0.01)
    # The other folds hold blocks that are used once: from them nothing can be learned about the one that comes back.
    assert FOLDS > 1
    assert found.foreseen == 0
