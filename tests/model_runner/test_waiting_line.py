"""Who goes first: by arrival, by priority that waiting makes up for, or for the sake of a shared prefix.

Numbers called published are those of vLLM's scheduler tests for the same situation. Blocks have 16 tokens.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.request import GenerateRequest
from model_runner.sequence import LiveRequest, Sequence
from model_runner.waiting_line import MAX_OVERTAKEN, SchedulingPolicy, WaitingLine
from tests.model_runner.scheduler_driver import Call, Driver, names, work_of

PRIORITY = SchedulingPolicy.PRIORITY
TEMPLATE = list(range(16))
MANUAL = list(range(64))


def sequence(name: str, queue_priority: int = 0, arrived_at: float = 0.0) -> Sequence:
    live = LiveRequest(GenerateRequest(name, (1,), queue_priority=queue_priority), arrived_at)
    return Sequence(live, 0, name, [1], 0, detokenizer=None)


def line_of(policy: SchedulingPolicy, *sequences: Sequence) -> list[str]:
    line = WaitingLine(policy, 16)
    for each in sequences:
        line.add(each)
    assert line.violations() == []
    return names(list(line))


class TestOrder:
    def test_by_arrival_whatever_the_priority(self) -> None:
        assert line_of(SchedulingPolicy.FCFS, sequence("a", 5), sequence("b", -5), sequence("c")) == ["a", "b", "c"]

    def test_by_priority_and_then_by_arrival(self) -> None:
        line = [sequence("a", 3), sequence("b", 2), sequence("c", 0, 0.2), sequence("d", 0, 0.1), sequence("e", -1)]
        assert line_of(PRIORITY, *line) == ["e", "d", "c", "b", "a"]

    @pytest.mark.parametrize(("later", "order"), [(9.9, ["new", "old"]), (10.1, ["old", "new"])])
    def test_ten_seconds_make_up_for_a_level(self, later: float, order: list[str]) -> None:
        assert line_of(PRIORITY, sequence("old", 1), sequence("new", 0, later)) == order

    @pytest.mark.parametrize("policy", SchedulingPolicy)
    def test_who_was_admitted_before_goes_first_whatever_its_number(self, policy: SchedulingPolicy) -> None:
        """Choices and second admissions count as admissions, so that their numbers outrun those of arrivals."""
        line = WaitingLine(policy, 16)
        for name in ("new", "newer"):
            line.add(sequence(name))
        for name, number in (("twelfth", 12), ("ninth", 9)):
            preempted = sequence(name)
            preempted.admitted_before, preempted.number = True, number
            line.put_back(preempted)
        assert names(list(line)) == ["ninth", "twelfth", "new", "newer"]

    @given(st.lists(st.tuples(st.integers(-100, 100), st.integers(0, 3000)), max_size=20))
    def test_against_sorting(self, requests: list[tuple[int, int]]) -> None:
        line = [sequence(str(number), *request) for number, request in enumerate(requests)]
        expected = sorted(range(len(requests)), key=lambda number: requests[number][1] + 10 * requests[number][0])
        assert line_of(PRIORITY, *line) == [str(number) for number in expected]


class TestMembership:
    def test_nobody_is_in_line_twice(self) -> None:
        line = WaitingLine(SchedulingPolicy.FCFS, 16)
        a = sequence("a")
        line.add(a)
        with pytest.raises(ValueError, match="'a' is in line already"):
            line.put_back(a)
        line.take(a)
        line.put_back(a)
        assert (names(list(line)), line.violations()) == (["a"], [])

    def test_what_violations_tell(self) -> None:
        line = WaitingLine(SchedulingPolicy.FCFS, 16)
        first, second = sequence("a"), sequence("b")
        line.add(first)
        line.add(second)
        first.block_table = [1]
        assert line.violations() == ["'a' is in line and holds blocks"]
        first.block_table, first.number = [], 3
        assert line.violations() == ["the line is out of order"]
        first.number = 1
        line._line.remove(second)
        assert line.violations() == ["1 sequences are in line, but 2 are counted as members"]


class TestPriority:
    def test_the_least_of_two_is_preempted(self) -> None:
        """Published (36): 5 usable blocks. The low one has 3, the high one takes the other 2, and then a third."""
        driver = Driver(usable_blocks=5, policy=PRIORITY)
        driver.add("low", 32, queue_priority=5)
        driver.step()
        driver.add("high", 32)
        assert work_of(driver.step()) == {"low/0": 1, "high/0": 32}
        assert driver.held_blocks == 5
        plan = driver.step()
        assert (work_of(plan), plan.preemptions) == ({"high/0": 1}, 1)
        assert (driver.running, driver.waiting) == (["high/0"], ["low/0"])

    def test_who_asks_may_be_the_one(self) -> None:
        """5 usable blocks: low has 3 and high 2. low is the first that wants another, with 49 tokens in step 10."""
        driver = Driver(usable_blocks=5, policy=PRIORITY)
        driver.add("low", 40, queue_priority=1)
        driver.step()
        driver.add("high", 17)
        assert [driver.step().preemptions for _ in range(2, 10)] == [0] * 8
        plan = driver.step()
        assert (work_of(plan), plan.preemptions) == ({"high/0": 1}, 1)
        assert (driver.running, driver.waiting) == (["high/0"], ["low/0"])

    def test_under_fcfs_the_latest_is_preempted_whatever_its_priority(self) -> None:
        driver = Driver(usable_blocks=5)
        driver.add("low", 32, queue_priority=5)
        driver.add("high", 32)
        driver.steps(2)
        assert (driver.running, driver.waiting) == (["low/0"], ["high/0"])

    def test_one_seat(self) -> None:
        """Published (38): of the priorities 3, 2 and 0 the last runs; of equal ones whoever arrived first."""
        driver = Driver(max_sequences=1, policy=PRIORITY)
        for name, level in (("0", 3), ("1", 2), ("2", 0)):
            driver.add(name, 10, queue_priority=level)
        driver.step()
        assert (driver.running, driver.waiting) == (["2/0"], ["1/0", "0/0"])

        driver = Driver(max_sequences=1, policy=PRIORITY)
        for name, arrived_at in (("0", 3), ("1", 1), ("2", 2)):
            driver.add(name, 10, arrived_at=arrived_at)
        driver.step()
        assert (driver.running, driver.waiting) == (["1/0"], ["2/0", "0/0"])

    def test_a_low_one_waits_ten_seconds_a_level(self) -> None:
        """One seat, a request of priority 0 in each second: one of priority 3 gets its turn after those of 30 s."""
        driver = Driver(max_sequences=1, policy=PRIORITY)
        driver.add("low", 1, queue_priority=3, arrived_at=0.5)
        served = []
        for second in range(40):
            driver.add(str(second), 1, arrived_at=second)
            driver.step()
            served += driver.running
            driver.end_after(1)
        assert served.index("low/0") == 31
        assert served[:31] == [f"{second}/0" for second in range(31)]

    def test_room_is_left_for_those_that_count_more_or_as_much(self) -> None:
        """5 usable blocks; the running one has 3 and will need 2 more. Its equal must wait, a better one need not."""
        driver = Driver(usable_blocks=5, policy=PRIORITY)
        driver.add("running", 33, max_tokens=48)
        driver.step()
        driver.add("equal", 20)
        driver.step()
        assert driver.waiting == ["equal/0"]
        driver.add("better", 20, queue_priority=-1)
        driver.step()
        assert (driver.running, driver.waiting) == (["running/0", "better/0"], ["equal/0"])

    def test_who_went_first_for_its_prefix_is_not_displaced_by_its_equals(self) -> None:
        """7 usable blocks. c overtakes b, and both would need 4: b, which came before c, must not make it lose them."""
        driver = Driver(usable_blocks=7, max_sequences=2, policy=PRIORITY)
        a = driver.add("a", 0, prompt=[*TEMPLATE, 1], max_tokens=2)
        driver.step()
        driver.add("b", 32, arrived_at=1, max_tokens=33)
        driver.add("c", 0, prompt=[*TEMPLATE, *[2] * 16], arrived_at=2, max_tokens=33)
        driver.step()
        assert driver.running == ["a/0", "c/0"]
        driver.scheduler.finish([a])
        driver.step()
        assert (driver.running, driver.waiting) == (["c/0"], ["b/0"])


class TestSharedPrefix:
    def test_who_shares_goes_first(self) -> None:
        """Two seats; one runs. Of those that wait the third begins like it."""
        driver = Driver(max_sequences=2)
        driver.add("running", 0, prompt=[*TEMPLATE, 1])
        driver.step()
        for name in "ab":
            driver.add(name, 20)
        driver.add("like it", 0, prompt=[*TEMPLATE, 2])
        driver.step()
        assert driver.running == ["running/0", "like it/0"]
        assert [each.overtaken for each in driver.scheduler.waiting] == [1, 1]

    def test_who_shares_more_goes_first(self) -> None:
        """By 1, 4 or 16 blocks."""
        driver = Driver(max_sequences=2)
        driver.add("running", 0, prompt=[*MANUAL, 1])
        driver.step()
        driver.add("a block", 0, prompt=[*TEMPLATE, 2])
        driver.add("four", 0, prompt=[*MANUAL, 3])
        driver.add("four too", 0, prompt=[*MANUAL, 4])
        driver.step()
        assert driver.running == ["running/0", "four/0"]

    def test_groups_form_by_themselves(self) -> None:
        """Two kinds of prompts in turns, seats for two: the first brings its like in, then the others have theirs."""
        driver = Driver(max_sequences=2)
        for number in range(4):
            driver.add(str(number), 0, prompt=[*([7] * 16 if number % 2 else TEMPLATE), number])
        served = []
        for _ in range(2):
            driver.step()
            served.append(driver.running)
            driver.end_after(1)
        assert served == [["0/0", "2/0"], ["1/0", "3/0"]]

    def test_nobody_is_overtaken_more_than_a_few_times(self) -> None:
        driver = Driver(max_sequences=2)
        driver.add("running", 0, prompt=[*TEMPLATE, 1])
        driver.step()
        stranger = driver.add("stranger", 20)
        for number in range(20):
            driver.add(str(number), 0, prompt=[*TEMPLATE, 2, number])
        served = []
        while stranger.sequence_id not in driver.running:
            driver.step()
            served.append(driver.running[-1])
            driver.scheduler.finish(driver.scheduler.running[1:] if stranger.sequence_id not in driver.running else [])
        assert served == [*[f"{number}/0" for number in range(MAX_OVERTAKEN)], "stranger/0"]

    def test_another_salt_is_another_prefix(self) -> None:
        driver = Driver(max_sequences=2)
        driver.add("running", 0, prompt=[*TEMPLATE, 1], cache_salt="s")
        driver.step()
        driver.add("a", 20)
        driver.add("like it", 0, prompt=[*TEMPLATE, 2])
        driver.step()
        assert driver.running == ["running/0", "a/0"]

    def test_no_one_overtakes_a_better_priority(self) -> None:
        driver = Driver(max_sequences=2, policy=PRIORITY)
        driver.add("running", 0, prompt=[*TEMPLATE, 1])
        driver.step()
        driver.add("better", 20)
        driver.add("like it", 0, prompt=[*TEMPLATE, 2], queue_priority=1)
        driver.step()
        assert driver.running == ["running/0", "better/0"]

    def test_no_one_overtakes_who_was_preempted(self) -> None:
        """5 usable blocks: with 33 tokens each the second gives way, and stands before one like the first."""
        driver = Driver(usable_blocks=5)
        first = driver.add("first", 0, prompt=[*range(32)])
        driver.add("second", 32)
        driver.steps(2)
        driver.add("like it", 0, prompt=[*range(32), 5])
        assert driver.waiting == ["second/0", "like it/0"]
        driver.step()
        assert driver.running == ["first/0"]
        driver.scheduler.finish([first])
        driver.step()
        assert driver.running[0] == "second/0"

    def test_one_that_does_not_fit_holds_nobody_up(self) -> None:
        """6 usable blocks, 2 held: the like of the running one would take 5 more, the one before it takes 2."""
        driver = Driver(usable_blocks=6)
        driver.add("running", 0, prompt=[*TEMPLATE, 1])
        driver.steps(2)
        driver.asked()
        driver.add("a", 20)
        driver.add("like it", 0, prompt=[*TEMPLATE, *[2] * 70])
        driver.step()
        assert driver.running == ["running/0", "a/0"]
        # Nobody is looked up: prefixes are compared here.
        assert driver.asked() == [
            Call("allocate", ("like it/0",), granted=False),
            Call("allocate", ("a/0",)),
            Call("allocate", ("like it/0",), granted=False),
        ]
