"""Random histories against the naive model."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kvmanager.books_machine import BooksMachine, TwinMachine

THOROUGH = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_random_histories():
    run_state_machine_as_test(BooksMachine, settings=THOROUGH)


def test_a_radix_pool_and_a_hash_pool_of_one_history_differ_only_inside_a_block():
    run_state_machine_as_test(TwinMachine, settings=THOROUGH)
