"""Proof that the machine finds planted faults of each known kind."""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvmanager.pool
from kvmanager.types import IndexKind
from tests.kvmanager import planted_faults
from tests.kvmanager import test_books_machine as books_machine
from tests.kvmanager import test_partial_match as partial_match
from tests.kvmanager import test_restore as restore
from tests.kvmanager import test_rewind as rewind
from tests.kvmanager import test_skip_cache_write as skip_cache_write
from tests.kvmanager.books_machine import BooksMachine
from tests.kvmanager.planted_faults import (
    FAULTS,
    hit_evicted_in_the_same_call,
    names_lost_in_one_call_counted_once,
    part_of_a_promised_block_copied,
    partial_copy_left_out,
    pin_lost_to_a_rewound_holder,
    quota_not_counted_on_append,
    reader_publishes_what_was_withdrawn,
    restored_cache_in_the_wrong_order,
    restored_sequence_publishes_what_was_to_be_left_out,
    rewound_below_its_hits_publishes_in_their_place,
    rewound_sequence_publishes_what_was_to_be_left_out,
)
from tests.kvmanager.test_books_machine import rewound_into_what_it_found
from tests.kvmanager.test_promises import TestInsideABlock as InsideABlock
from tests.kvmanager.test_promises import TestWithdrawn as Withdrawn
from tests.kvmanager.test_retention import TestQuotas as Quotas

SEARCH = settings(
    max_examples=4000,
    stateful_step_count=40,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
pytestmark = pytest.mark.skipif(
    not str(kvmanager.pool.__file__).endswith(".py"), reason="compiled books can't be patched"
)


def assert_found(caught: pytest.ExceptionInfo[BaseException]) -> None:
    """A plant that breaks by itself shows nothing."""
    assert caught.traceback[-1].path != Path(planted_faults.__file__)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_machine_finds_a_planted_fault(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - a fault shows as whichever check it hits first
        run_state_machine_as_test(BooksMachine, settings=SEARCH)
    assert_found(caught)


@pytest.mark.parametrize(
    ("plant", "history"),
    [
        (
            names_lost_in_one_call_counted_once,
            rewind.test_a_copy_that_becomes_needed_within_one_call_is_counted,
        ),
        (pin_lost_to_a_rewound_holder, rewind.test_a_pinned_block_is_not_rewritten_by_the_last_that_holds_it),
        (quota_not_counted_on_append, Quotas().test_more_than_the_quota_never_fits_and_more_than_is_left_waits),
        (reader_publishes_what_was_withdrawn, Withdrawn().test_who_had_hit_it_goes_on_and_publishes_nothing),
        (
            hit_evicted_in_the_same_call,
            books_machine.test_the_blocks_that_a_prompt_finds_are_not_given_up_for_its_others,
        ),
        (part_of_a_promised_block_copied, InsideABlock().test_a_promised_block_is_no_source),
        (partial_copy_left_out, partial_match.test_the_tokens_inside_a_block_are_copied_to_the_sequences_own),
        (
            rewound_sequence_publishes_what_was_to_be_left_out,
            skip_cache_write.test_a_rewind_into_what_was_found_publishes_nothing_in_its_place,
        ),
        (
            restored_sequence_publishes_what_was_to_be_left_out,
            partial(skip_cache_write.test_restored_books_publish_what_was_found_and_nothing_else, IndexKind.HASH),
        ),
        (
            restored_cache_in_the_wrong_order,
            restore.test_cached_blocks_are_given_up_in_the_order_in_which_they_were_used,
        ),
    ],
)
def test_a_rare_fault_shows_in_a_history_made_for_it(plant, history, monkeypatch):
    history()
    plant(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)) as caught:
        history()
    assert_found(caught)


def test_the_machine_sees_the_old_name_on_a_found_block_that_was_written_over(monkeypatch):
    """The tokens are the same again, so that only the check of names can see it."""
    rewound_below_its_hits_publishes_in_their_place(monkeypatch)
    machine = rewound_into_what_it_found()
    machine.append_to({"s2": [0]}, 0, 0)
    machine.append_to({"s2": []}, 0, 2)
    with pytest.raises(AssertionError, match="a name that was not to be cached"):
        machine.check_all()
