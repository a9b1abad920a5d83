"""Random histories against the naive model."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvmanager.types import BASE_SCOPE, NO_RETENTION, EvictionKind, HashAlgorithm, IndexKind
from tests.kvmanager.books_machine import BooksMachine, TwinMachine
from tests.kvmanager.books_prompts import Wish

THOROUGH = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_random_histories():
    run_state_machine_as_test(BooksMachine, settings=THOROUGH)


def test_a_radix_pool_and_a_hash_pool_of_one_history_differ_only_inside_a_block():
    run_state_machine_as_test(TwinMachine, settings=THOROUGH)


def test_a_block_that_is_given_up_for_its_own_prompt_may_be_promised_again():
    machine = TwinMachine()
    machine.open(4, 2, HashAlgorithm.SHA256, EvictionKind.ADAPTIVE)
    machine.compute_side_by_side(Wish(0, 9, 6, 0, BASE_SCOPE, ()), 8, [], False)
    wishes = [Wish(0, 13, 0, 0, BASE_SCOPE, ()), Wish(140, 0, 19, 0, BASE_SCOPE, ())]
    machine.step(wishes, NO_RETENTION, [1 << 20] * 2, [False] * 2, False, "committed")
    machine.check_all()


def test_the_blocks_that_a_prompt_finds_are_not_given_up_for_its_others():
    machine = BooksMachine()
    machine.open(4, 2, IndexKind.HASH, HashAlgorithm.SHA256, EvictionKind.LRU)
    machine.serve([Wish(1, 0, 4, 0b0011, BASE_SCOPE, ()), Wish(1, 0, 2, 0b10, BASE_SCOPE, ())], NO_RETENTION, False)
    # It finds the two blocks that were used the longest ago, and none is free for the fifth token.
    machine.allocate(Wish(2, 4, 1, 0, BASE_SCOPE, ()), NO_RETENTION, 0, 0, False, False, False)
    machine.check_all()
    assert machine.port.totals()["hit_tokens"] == 4


def rewound_into_what_it_found() -> BooksMachine:
    """A sequence that leaves nothing has found the one block that is cached, and keeps the first token of it."""
    machine = BooksMachine()
    machine.open(4, 2, IndexKind.RADIX, HashAlgorithm.SHA256, EvictionKind.ADAPTIVE)
    machine.serve([Wish(0, 0, 2, 0, BASE_SCOPE, ())], NO_RETENTION, False)
    machine.allocate(Wish(1, 2, 1, 0, BASE_SCOPE, ()), NO_RETENTION, 0, 0, False, False, True)
    machine.truncate(0, 2)
    return machine


def test_a_found_block_may_keep_its_name_until_it_is_written():
    machine = rewound_into_what_it_found()
    machine.check_all()
    [(_, name)] = machine.port.views("s2")[1]
    assert name != b""
    machine.append_to({"s2": [0]}, 0, 0)
    machine.append_to({"s2": []}, 0, 2)
    machine.check_all()
    assert [name for _, name in machine.port.views("s2")[1]] == [b""]
