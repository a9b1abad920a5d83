"""Slots of held blocks are counted as by hand, and workload D has its useful share on the virtual clock."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import typer
from typer.testing import CliRunner

from bench import occupancy
from bench.occupancy import Slots, StepTime, Tokens, floor, play, slots_of
from bench.serve.workloads import Conversation, Turn, Workload, build
from services.session_books import SessionBooks


def test_each_slot_of_each_block_is_for_one_thing() -> None:
    # 20 tokens of which 16 are computed, in 3 blocks of 8; 5 tokens in one; 2 spare ones.
    found = slots_of({"a": [1, 2, 3], "b": [4]}, {"a": Tokens(16, 20), "b": Tokens(5, 5)}, 2, 8)
    assert asdict(found) == {"computed": 21.0, "uncomputed": 4.0, "tails": 7.0, "ahead": 0.0, "spare": 16.0}
    assert found.total == 8 * 6
    assert found.useful == 25 / 48


def test_blocks_that_are_not_needed_yet_and_those_of_nobody() -> None:
    found = slots_of({"a": [1, 2], "gone": [3, 4]}, {"a": Tokens(8, 8)}, 0, 8)
    assert asdict(found) == {"computed": 8.0, "uncomputed": 0.0, "tails": 0.0, "ahead": 24.0, "spare": 0.0}


def test_a_shared_block_counts_once_with_what_is_most_in_it() -> None:
    tokens = {"a": Tokens(12, 12), "b": Tokens(9, 9)}
    found = slots_of({"a": [1, 2], "b": [1, 2]}, tokens, 0, 8)
    assert asdict(found) == {"computed": 12.0, "uncomputed": 0.0, "tails": 4.0, "ahead": 0.0, "spare": 0.0}


def test_one_request_by_hand() -> None:
    """20 tokens in and 15 out: a step of 20 rows, then 14 of one. No step needs the last output's slot."""
    workload = Workload("one", (Conversation((Turn(tuple(range(20)), 15),)),), cache_tokens=1600)
    played = play(workload, StepTime(fixed=1.0, row=0.5), round_trip=0.001, lease_blocks=0)
    assert (played.steps, played.tokens, played.preemptions) == (15, 34, 0)
    # Seconds of the steps, with the tokens that each has at its end.
    steps = [(11.0, 20), *((1.5, tokens) for tokens in range(21, 35))]
    assert played.slots.computed == pytest.approx(sum(seconds * tokens for seconds, tokens in steps))
    assert played.slots.uncomputed == 0
    needed = [seconds * -(-tokens // 16) * 16 for seconds, tokens in steps]
    assert played.slots.tails + played.slots.computed == pytest.approx(sum(needed))
    # The 33rd token's block is there two or three steps before its own.
    assert played.slots.ahead in (pytest.approx(2 * 1.5 * 16), pytest.approx(3 * 1.5 * 16))
    assert floor(workload, 16) == sum(range(20, 35)) / (13 * 32 + 2 * 48)


def test_workload_d_has_96_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tails alone leave 96.75 % of the slots; nothing is computed twice, and nobody who runs waits for room."""
    workload = build("D")
    waits: list[object] = []
    wait_for_room = SessionBooks._wait_for_room

    def spied(books: SessionBooks, session: object, waiting: list) -> list:
        waits.extend(waiting)
        return wait_for_room(books, session, waiting)

    monkeypatch.setattr(SessionBooks, "_wait_for_room", spied)
    played = play(workload)
    assert waits == []
    lengths = [turn.max_tokens for each in workload.conversations for turn in each.turns]
    closed_form = 1 - 7.5 / (7.5 + _mean_length(workload))
    assert floor(workload, 16) == pytest.approx(closed_form, abs=0.002)
    assert 0.96 <= played.slots.useful < floor(workload, 16)
    assert played.preemptions == 0
    assert played.tokens <= sum(len(turn.prompt) - 1 for each in workload.conversations for turn in each.turns) + sum(
        lengths
    )
    # Only for admissions.
    assert played.waits <= len(lengths)


def _mean_length(workload: Workload) -> float:
    turns = [turn for each in workload.conversations for turn in each.turns]
    steps = sum(turn.max_tokens for turn in turns)
    return sum(turn.max_tokens * (len(turn.prompt) + (turn.max_tokens - 1) / 2) for turn in turns) / steps


def test_the_command_prints_what_was_played(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Workload("D", (Conversation((Turn(tuple(range(40)), 4),)),), cache_tokens=640)
    monkeypatch.setattr(occupancy, "build", lambda name: small)
    app = typer.Typer()
    app.command()(occupancy.main)
    result = CliRunner().invoke(app, ["--json", "--lease-blocks", "0", "--round-trip-ms", "1"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["steps"], figures["tokens_computed"], figures["tokens_computed_to_needed"]) == (4, 43, 1.0)
    assert figures["useful_share"] + figures["tails_share"] + figures["ahead_share"] == pytest.approx(1.0)


def test_nothing_is_useful_in_spare_blocks() -> None:
    assert Slots(spare=16.0).useful == 0.0
