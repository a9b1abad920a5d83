"""Proof that the machine finds planted faults of each known kind."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvmanager.pool
from tests.kvmanager import test_rewind as rewind
from tests.kvmanager.books_machine import BooksMachine
from tests.kvmanager.planted_faults import (
    FAULTS,
    names_lost_in_one_call_counted_once,
    pin_lost_to_a_rewound_holder,
    quota_not_counted_on_append,
    reader_publishes_what_was_withdrawn,
    rewound_below_its_hits_publishes_in_their_place,
)
from tests.kvmanager.test_books_machine import rewound_into_what_it_found
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


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_machine_finds_a_planted_fault(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - a fault shows as whichever check it hits first
        run_state_machine_as_test(BooksMachine, settings=SEARCH)


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
    ],
)
def test_a_rare_fault_shows_in_a_history_made_for_it(plant, history, monkeypatch):
    history()
    plant(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        history()


def test_the_machine_sees_the_old_name_on_a_found_block_that_was_written_over(monkeypatch):
    """The tokens are the same again, so that only the check of names can see it."""
    rewound_below_its_hits_publishes_in_their_place(monkeypatch)
    machine = rewound_into_what_it_found()
    machine.append_to({"s2": [0]}, 0, 0)
    machine.append_to({"s2": []}, 0, 2)
    with pytest.raises(AssertionError, match="a name that was not to be cached"):
        machine.check_all()
