"""A session without a wire: what is said once, twice, too early or wrongly, and what the books say then."""

from __future__ import annotations

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import InvalidArgument, PoolDiffers, SessionTaken, StaleEpoch, UnknownPool
from kvmanager.manager import KvManager
from services.columns import from_column, to_column
from tests.services.session_script import LEASE, admit, opening, orders_of, progress, step
from tests.services.session_talk import Talk, books


def test_an_opening_leases_blocks_and_says_how_long_silence_may_last():
    talk = Talk()
    opened = talk.open()
    assert (opened.boot_id, opened.epoch, opened.silence_seconds) == ("boot", 1, 10.0)
    assert list(from_column(opened.lease_block_ids, "lease")) == [1, 2, 3, 4]
    assert talk.pool.occupancy().leased_blocks == LEASE


def test_each_opening_is_a_new_epoch_and_fences_the_one_before():
    manager = KvManager("boot")
    one, two = Talk(manager), Talk(manager)
    one.open()
    one.step(1, admit(1, [1] * 4))
    assert two.open().epoch == 2
    with pytest.raises(SessionTaken, match="in epoch 2, and this session speaks for epoch 1"):
        one.say(step(1, 2, admit(2, [1])))
    one.core.end()
    assert two.pool.occupancy().leased_blocks == LEASE
    assert two.pool.occupancy().sequences == 0


def test_another_epoch_in_a_step_is_refused():
    talk = Talk()
    talk.open()
    for epoch in (0, 2):
        with pytest.raises(SessionTaken, match=f"speaks for epoch {epoch}"):
            talk.say(step(epoch, 1))


def test_a_restore_does_not_take_the_pool_from_another_runner():
    manager = KvManager("boot")
    Talk(manager).open(runner_id="one")
    two = Talk(manager)
    two.open(runner_id="two")
    two.step(1, admit(1, [1] * 4))
    with pytest.raises(SessionTaken, match="another runner"):
        Talk(manager).say(opening(runner_id="one", restores=True))
    assert two.pool.occupancy().sequences == 1


def test_after_the_end_the_epoch_is_over_and_the_cache_stays():
    talk = Talk()
    talk.open()
    talk.step(1, admit(1, [1] * 5))
    talk.step(2, orders_of(handles=[1], computed_tokens=[5]))
    talk.core.end()
    talk.core.end()
    now = talk.pool.occupancy()
    assert (now.sequences, now.held_blocks, now.leased_blocks, now.cached_blocks) == (0, 0, 0, 1)
    with pytest.raises(StaleEpoch):
        talk.manager.pool("default", 1)
    with pytest.raises(SessionTaken):
        talk.say(step(1, 3))
    assert talk.core.closed_sequences == 1


def test_a_pool_that_is_closed_is_gone_for_its_session():
    talk = Talk()
    talk.open()
    talk.manager.close_pool("default")
    with pytest.raises(UnknownPool):
        talk.say(step(1, 1))


def test_unary_verbs_of_the_same_epoch_work_beside_a_session():
    talk = Talk()
    opened = talk.open(runner_id="one")
    opening_again = talk.manager.open_pool("default", talk.pool.spec, "one")
    assert (opening_again.epoch, opening_again.created) == (opened.epoch, False)
    talk.manager.pool("default", opened.epoch).allocate("tool", [1], caller=opened.epoch)
    talk.core.end()
    assert talk.pool.occupancy().sequences == 0


def test_other_facts_are_refused():
    manager = KvManager("boot")
    Talk(manager).open()
    other = pb.PoolSpec(num_blocks=9, block_size=4)
    with pytest.raises(PoolDiffers):
        Talk(manager).say(opening(spec=other))


def test_a_number_that_was_answered_is_answered_again_and_not_carried_out():
    talk = Talk()
    talk.open()
    first = talk.step(1, admit(1, [1] * 4))
    sequences = talk.pool.totals.allocated_blocks
    assert talk.step(1, admit(1, [1] * 4)) == first
    assert talk.pool.totals.allocated_blocks == sequences
    talk.step(2)
    gap = talk.say(step(1, 4, admit(9, [1])))
    assert gap.gap.expected_number == 3
    for number in range(3, 9):
        talk.step(number)
    assert talk.step(1, admit(1, [1] * 4)) == first
    talk.step(9)
    assert talk.say(step(1, 1, admit(1, [1] * 4))) is None
    assert talk.say(step(1, 0)) is None
    assert (talk.counts.resent, talk.counts.dropped, talk.counts.gaps) == (2, 2, 1)


def test_blocks_that_are_given_back_serve_an_admission_and_the_lease_waits():
    spec = pb.PoolSpec(num_blocks=9, block_size=4)
    talk = Talk()
    lease = from_column(talk.open(spec=spec).lease_block_ids, "lease")
    assert len(lease) == 4
    refused = talk.step(1, admit(1, range(32)))
    assert [(each.handle, each.reason) for each in refused.refusals] == [(1, "POOL_SHORT")]
    assert refused.lease_block_ids == b""
    again = talk.step(2, admit(1, range(32)), returned=lease)
    assert [each.handle for each in again.admitted] == [1]
    assert talk.pool.occupancy().leased_blocks == 0


def test_a_step_says_how_large_the_lease_is_to_be():
    talk = Talk()
    talk.open(lease=1)
    assert talk.pool.occupancy().leased_blocks == 1

    def lease_after(number: int, blocks: int | None) -> int:
        answer = talk.say(pb.SessionRequest(step=pb.SessionStep(epoch=1, number=number, lease_blocks=blocks)))
        assert answer is not None
        return talk.pool.occupancy().leased_blocks

    # What there is comes back by the runner's word alone; a step that says nothing leaves it at that.
    assert [lease_after(1, 3), lease_after(2, 0), lease_after(3, None), lease_after(4, 5)] == [3, 3, 3, 5]
    with pytest.raises(InvalidArgument, match="lease_blocks is -1; use 0 or more"):
        lease_after(5, -1)
    assert talk.pool.occupancy().leased_blocks == 5


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (admit(5, [1] * 400), "NEVER_FITS"),
        (admit(5, [1] * 156), "POOL_SHORT"),
        (admit(5, []), "INVALID_ARGUMENT"),
        (admit(5, [1], scope=pb.CacheScope(salt="x" * 129)), "INVALID_ARGUMENT"),
        (admit(5, [1] * 84, retention=pb.Retention(pin_seconds=1)), "PINS_EXHAUSTED"),
        (pb.SessionOrder(admit=pb.AdmitOrder(sequence_id="s1", handle=5, token_ids=to_column([1]))), "SEQUENCE_EXISTS"),
    ],
    ids=["never fits", "pool short", "no tokens", "bad scope", "pins", "name taken"],
)
def test_an_admission_that_is_refused_leaves_the_session_as_it_was(order, reason):
    talk = Talk()
    talk.open()
    talk.step(1, admit(1, [1] * 4))
    answer = talk.step(2, order)
    assert [(each.handle, each.reason, bool(each.sentence)) for each in answer.refusals] == [(5, reason, True)]
    assert talk.step(3, admit(5, [1])).admitted[0].handle == 5


def test_an_ask_is_refused_for_one_sequence_and_granted_to_another():
    talk = Talk()
    talk.open(spec=pb.PoolSpec(num_blocks=4, block_size=4), lease=0)
    talk.step(1, admit(1, [1] * 4), admit(2, [2] * 4))
    answer = talk.step(
        2, orders_of(handles=[1, 2], token_counts=[1, 1], computed_tokens=[4, 4], asks=[1, 1], token_ids=[5, 6])
    )
    assert list(from_column(answer.grants.handles, "handles")) == [1]
    assert list(from_column(answer.grants.first_indices, "first")) == [1]
    assert list(from_column(answer.grants.block_ids, "blocks")) == [3]
    assert [(each.handle, each.reason) for each in answer.refusals] == [(2, "POOL_SHORT")]
    assert talk.pool.sequence("s2").num_tokens == 5


def test_evicted_blocks_are_told_as_forgotten():
    talk = Talk()
    talk.open(spec=pb.PoolSpec(num_blocks=5, block_size=4), lease=0)
    talk.step(1, admit(1, [1] * 8))
    blocks = talk.pool.sequence("s1").blocks[:]
    talk.step(2, pb.SessionOrder(end=pb.EndOrder(progress=progress(handles=[1], computed_tokens=[8]))))
    answer = talk.step(3, admit(2, [2] * 16))
    assert set(from_column(answer.forgotten_block_ids, "forgotten")) == set(blocks)
    assert talk.step(4).forgotten_block_ids == b""


def test_a_sequence_may_ask_and_end_in_one_step():
    talk = Talk()
    talk.open()
    talk.step(1, admit(1, [1] * 4))
    end = pb.SessionOrder(end=pb.EndOrder(progress=progress(handles=[1, 77])))
    answer = talk.step(2, orders_of(handles=[1], computed_tokens=[4], asks=[2]), end)
    assert list(from_column(answer.grants.handles, "handles")) == [1]
    assert talk.pool.occupancy().sequences == 0


def test_the_last_news_of_unknown_sequences_are_left_out_of_the_columns():
    talk = Talk()
    lease = list(from_column(talk.open().lease_block_ids, "lease"))
    talk.step(1, admit(1, [1] * 4), admit(2, [2] * 4))
    last = progress(
        handles=[77, 1, 78, 2],
        token_counts=[1, 4, 0, 4],
        computed_tokens=[9, 8, 0, 8],
        table_counts=[5, 1, 0, 1],
        taken_counts=[1, 1, 0, 1],
        token_ids=[70, 10, 11, 12, 13, 20, 21, 22, 23],
        taken_block_ids=[9999, lease[0], lease[1]],
    )
    talk.step(2, pb.SessionOrder(end=pb.EndOrder(progress=last)))
    assert talk.pool.occupancy().sequences == 0
    # The full blocks of both are cached, under the names of what each computed.
    assert talk.pool.lookup([1, 1, 1, 1, 10, 11, 12, 13, 9]).block_ids[1] == lease[0]
    assert talk.pool.lookup([2, 2, 2, 2, 20, 21, 22, 23, 9]).block_ids[1] == lease[1]


FORK = pb.SessionOrder(fork=pb.ForkOrder(parent_handle=1, child_ids=["c"], child_handles=to_column([3])))
BAD_STEPS = {
    "an unknown handle": [orders_of(handles=[9])],
    "a handle twice": [orders_of(handles=[1, 1])],
    "a column of odd bytes": [pb.SessionOrder(progress=pb.Progress(handles=b"\1\0\0\0\0"))],
    "columns of two lengths": [orders_of(handles=[1], computed_tokens=[4, 4])],
    "more tokens than counted": [orders_of(handles=[1], token_counts=[1], token_ids=[1, 2])],
    "fewer taken than counted": [orders_of(handles=[1], taken_counts=[1])],
    "a block that is not leased": [orders_of(handles=[1], table_counts=[1], taken_counts=[1], taken_block_ids=[30])],
    "an ask of one that ends": [pb.SessionOrder(end=pb.EndOrder(progress=progress(handles=[1], asks=[1])))],
    "a handle in use": [admit(1, [1])],
    "an unknown parent": [
        pb.SessionOrder(fork=pb.ForkOrder(parent_handle=8, child_ids=["c"], child_handles=b"\3\0\0\0"))
    ],
    "a child without a handle": [pb.SessionOrder(fork=pb.ForkOrder(parent_handle=1, child_ids=["c"]))],
    "a child whose name is taken": [
        FORK,
        pb.SessionOrder(fork=pb.ForkOrder(parent_handle=1, child_ids=["c"], child_handles=to_column([4]))),
    ],
    "a rewind to nothing": [pb.SessionOrder(truncate=pb.TruncateOrder(handle=1))],
    "an order of nothing": [pb.SessionOrder()],
    "an order behind an admission": [admit(2, [1]), FORK],
}


@pytest.mark.parametrize("orders", BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_that_makes_no_sense_ends_the_session_and_leaves_the_books_whole(orders):
    talk = Talk()
    talk.open()
    talk.step(1, admit(1, [1] * 4))
    with pytest.raises(InvalidArgument):
        talk.say(step(1, 2, *orders))
    talk.core.end()
    assert talk.pool.check().ok
    assert talk.pool.occupancy().held_blocks == 0


def test_columns_that_cannot_be_read_stop_the_orders_before_them_too():
    talk = Talk()
    talk.open()
    talk.step(1, admit(1, [1] * 4))
    before = books(talk.pool)
    with pytest.raises(InvalidArgument, match="column token_ids has 3 bytes"):
        talk.say(step(1, 2, FORK, pb.SessionOrder(admit=pb.AdmitOrder(sequence_id="x", handle=7, token_ids=b"abc"))))
    assert books(talk.pool) == before


def test_blocks_given_back_that_are_not_leased_stop_the_step():
    talk = Talk()
    talk.open()
    with pytest.raises(InvalidArgument, match="not in the lease"):
        talk.say(step(1, 1, admit(1, [1]), returned=[20]))
    assert talk.pool.occupancy().sequences == 0


@pytest.mark.parametrize(
    "messages",
    [
        [step(1, 1)],
        [pb.SessionRequest(holdings=pb.Holdings(last=True))],
        [pb.SessionRequest()],
        [opening(), opening()],
        [opening(), pb.SessionRequest(holdings=pb.Holdings(last=True))],
        [opening(restores=True), step(1, 1)],
        [opening(lease=-1)],
        [opening(runner_id="")],
        [opening(spec=pb.PoolSpec(num_blocks=1, block_size=4))],
    ],
)
def test_a_session_begins_with_an_opening_and_then_holdings_if_it_restores(messages):
    talk = Talk()
    for message in messages[:-1]:
        talk.say(message)
    with pytest.raises(InvalidArgument):
        talk.say(messages[-1])


def test_holdings_come_in_parts_and_wrong_ones_leave_an_empty_pool():
    talk = Talk()
    talk.say(opening(restores=True))
    held = pb.HeldSequence(
        sequence_id="a", handle=1, token_ids=to_column([1] * 4), block_ids=to_column([7]), computed_tokens=4
    )
    assert talk.say(pb.SessionRequest(holdings=pb.Holdings(sequences=[held]))) is None
    with pytest.raises(InvalidArgument, match="block 7 is said to be in the lease and in a block table"):
        talk.say(pb.SessionRequest(holdings=pb.Holdings(lease_block_ids=to_column([7]), last=True)))
    assert talk.pool.occupancy().free_blocks == 40


def test_a_handle_of_the_holdings_speaks_for_its_sequence():
    talk = Talk()
    talk.say(opening(restores=True))
    held = pb.HeldSequence(
        sequence_id="a", handle=9, token_ids=to_column([1] * 4), block_ids=to_column([7]), computed_tokens=4
    )
    talk.say(pb.SessionRequest(holdings=pb.Holdings(sequences=[held], last=True)))
    talk.step(1, orders_of(handles=[9], token_counts=[1], token_ids=[3], asks=[1]))
    assert talk.pool.sequence("a").num_tokens == 5
