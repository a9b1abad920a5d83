"""What somebody is told who finds the line full, against closed forms."""

import pytest

from model_runner.line_speed import LEAST_SECONDS, MOST_SECONDS, REMEMBERED, UNKNOWN_SECONDS, LineSpeed


def line(*moments: float) -> LineSpeed:
    speed = LineSpeed()
    for moment in moments:
        speed.note(moment)
    return speed


def test_before_two_were_admitted_nothing_is_known() -> None:
    assert line().seconds_per_request(5.0) == UNKNOWN_SECONDS
    assert line(1.0).seconds_per_request(5.0) == UNKNOWN_SECONDS


def test_it_is_the_mean_time_between_admissions() -> None:
    assert line(10.0, 11.0, 12.0, 16.0).seconds_per_request(16.5) == pytest.approx(2.0)


def test_a_line_that_has_come_to_a_stop_is_as_slow_as_it_has_stood() -> None:
    assert line(10.0, 11.0).seconds_per_request(18.0) == pytest.approx(7.0)


def test_only_the_latest_count() -> None:
    speed = line(0.0, 1000.0, *(1000.0 + 2 * number for number in range(1, REMEMBERED)))
    assert speed.seconds_per_request(1000.0 + 2 * REMEMBERED - 2) == pytest.approx(2.0)


def test_it_stays_within_bounds() -> None:
    assert line(0.0, 0.001).seconds_per_request(0.001) == LEAST_SECONDS
    assert line(0.0, 1000.0).seconds_per_request(1000.0) == MOST_SECONDS
