"""Reports of section 2 that are about the pool, each by the number of its issue or pull request."""

from __future__ import annotations

from collections.abc import Callable

from octavo.kv.v1 import kv_manager_pb2 as pb

from tests.conformance.client import COMMON, Client, Scope, refusal

NewPool = Callable[..., Client]


def test_4761_no_hash_is_left_behind_on_reuse(pool: Client) -> None:
    """PR 4761, kvcached 362."""
    pool.cache("p", COMMON)
    for number in range(5):
        pool.cache(f"filler{number}", [100 + number] * 160)
        assert pool.index_size <= 10
        assert pool.lookup([*COMMON, 9]).cached_tokens == 0
        assert pool.allocate("p again", [*COMMON, 9]).cached_tokens == 0
        pool.free("p again")


def test_9744_reset_with_a_live_request_reports_failure(pool: Client) -> None:
    """9744, PR 12284, NeMo-RL 4018."""
    pool.prefill("a", COMMON)
    assert refusal(pool.reset).code == "FAILED_PRECONDITION"
    assert pool.lookup([*COMMON, 9]).cached_tokens == 48
    pool.free("a")
    assert pool.reset() == 3
    assert pool.allocate("b", [*COMMON, 9]).cached_tokens == 0


def test_12284_new_weights_find_nothing(pool: Client) -> None:
    """PR 12284, lmdeploy 4917: other weights can't take a pool over, and another runner starts empty."""
    facts = {"num_blocks": 11, "block_size": 16}
    pool.cache("a", COMMON)
    other = pb.PoolSpec(**facts, model_fingerprint="new weights")
    request = pb.OpenPoolRequest(pool_id=pool.pool_id, spec=other, runner_id="reloaded")
    assert refusal(lambda: pool.stub.OpenPool(request)).reason == "POOL_DIFFERS"
    assert pool.lookup([*COMMON, 9]).cached_tokens == 48
    pool.stub.OpenPool(pb.OpenPoolRequest(pool_id=pool.pool_id, spec=pb.PoolSpec(**facts), runner_id="reloaded"))
    assert pool.lookup([*COMMON, 9]).cached_tokens == 0


def test_51786_one_owner_of_one_id(pool: Client) -> None:
    pool.prefill("a", COMMON)
    refused = refusal(lambda: pool.allocate("a", COMMON))
    assert (refused.code, refused.reason) == ("ALREADY_EXISTS", "SEQUENCE_EXISTS")
    assert pool.counts("a") == [1, 1, 1]


def test_42656_partial_blocks_never_push_cached_ones_out(pool: Client) -> None:
    """PR 42656: 100 short requests in a pool where a block is spare."""
    pool.cache("p", COMMON)
    pool.allocate("holder", [5] * 16 * 6)
    for number in range(100):
        assert pool.allocate(f"short{number}", [number] * 5).occupancy.free_blocks == 0
        pool.append(f"short{number}", computed=5)
        pool.free(f"short{number}")
    assert pool.lookup([*COMMON, 9]).cached_tokens == 48
    assert pool.get().totals.evicted_blocks == 0


def test_42656_the_head_rule_when_nothing_is_free(new_pool: NewPool) -> None:
    """A partial tail that comes back is handed out before any cached block, however old."""
    pool = new_pool(4, 4)
    pool.cache("old", [1] * 4)
    pool.prefill("partial", [2] * 6)
    pool.free("partial")
    occupancy = pool.get().occupancy
    assert (occupancy.free_blocks, occupancy.cached_blocks) == (1, 2)
    assert list(pool.allocate("next", [3]).block_ids) == [3]
    assert (pool.lookup([1] * 5).cached_tokens, pool.lookup([2] * 6).cached_tokens) == (4, 4)


def test_18485_freeing_what_never_was(pool: Client) -> None:
    """PR 18485: an abort before any allocation."""
    answer = pool.free("queued", "unknown")
    assert (answer.freed_sequences, answer.unknown_sequences, answer.occupancy.free_blocks) == (0, 2, 10)


def test_47272_the_null_block_is_deducted(new_pool: NewPool) -> None:
    """PR 47272, PR 48724: of a pool of N blocks, N·bs tokens are refused at once and (N-1)·bs run."""
    pool = new_pool(6)
    refused = refusal(lambda: pool.allocate("a", [1] * 6 * 16))
    assert (refused.code, refused.metadata["maximum_tokens"]) == ("INVALID_ARGUMENT", "80")
    assert len(pool.allocate("a", [1] * 5 * 16).block_ids) == 5


def test_35541_what_never_fits_is_refused_at_once(new_pool: NewPool) -> None:
    """35541: 49 usable blocks, 1002 tokens need 63; a short prompt is not held up."""
    pool = new_pool(50)
    for number in range(5):
        refused = refusal(lambda name=f"long{number}": pool.allocate(name, [1] * 1002))  # type: ignore[misc]
        assert (refused.code, refused.metadata["needed_blocks"]) == ("INVALID_ARGUMENT", "63")
    assert len(pool.allocate("short", [1] * 10).block_ids) == 1


def test_42571_a_sequence_named_twice_in_one_free(pool: Client) -> None:
    """42571, PR 42612: one block listed twice in a free."""
    pool.prefill("a", COMMON)
    pool.prefill("b", [*COMMON, 9])
    answer = pool.free("a", "a")
    assert (answer.freed_sequences, answer.unknown_sequences) == (1, 0)
    assert pool.counts("b") == [1, 1, 1, 1]


def test_2248_pools_that_could_hold_nothing(pool: Client) -> None:
    """2248, 10439, 42510: pools of 0 and 1 blocks, and block sizes that no kernel has, are refused with the number."""
    client = Client(pool.stub, "never opened")
    for blocks, size in [(0, 16), (1, 16), (-5, 16), (10, 0), (10, -1), (10, 3), (10, 17), (10, 1 << 31)]:
        refused = refusal(lambda blocks=blocks, size=size: client.open(blocks, size))  # type: ignore[misc]
        assert refused.code == "INVALID_ARGUMENT"
        assert str(blocks if blocks < 2 else size) in refused.sentence
    assert refusal(client.get).code == "NOT_FOUND"


def test_53347_who_sets_the_salt_is_not_the_books_affair(pool: Client) -> None:
    """PR 53347: whoever names a salt reads under it; a gateway must set it. The books only say that it parts."""
    pool.cache("a", COMMON, scope=Scope(salt="a's"))
    assert pool.lookup([*COMMON, 9], scope=Scope(salt="a's")).cached_tokens == 48
    assert pool.lookup([*COMMON, 9], scope=Scope(salt="b's")).cached_tokens == 0
