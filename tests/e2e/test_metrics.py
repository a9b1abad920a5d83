"""What a scrape says of both processes, against what was sent; right while idle too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.client import OctavoError
from tests.e2e.stack import Stack, running_stack

POOL = 'pool="default"'


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("metrics"), "--lease-blocks", "0", "--num-blocks", "101") as stack:
        yield stack


def test_counts_are_those_of_the_requests(stack: Stack) -> None:
    with stack.client() as client:
        # 40 tokens in 3 blocks; 8 tokens each for 2 choices.
        list(client.generate([504] * 40, max_tokens=8, n=2, temperature=1.0, seed=1, ignore_eos=True))
        # The same prompt again: 2 whole blocks are cached.
        list(client.generate([504] * 40, max_tokens=1))
        list(client.generate([504] * 5, max_tokens=3, stop_token_ids=range(0, 49152, 193), ignore_eos=True))
        with pytest.raises(OctavoError):
            list(client.generate([], max_tokens=1))
        stream = client.generate([7] * 3, request_id="gone", ignore_eos=True)
        next(stream)
        client.abort("gone")
        aborted = sum(len(chunk.token_ids) for chunk in stream) + 1
    stack.assert_nothing_held()

    runner = stack.runner_samples()
    finished = {reason: runner[f'octavo_runner_requests_finished_total{{reason="{reason}"}}'] for reason in REASONS}
    assert finished["abort"] == 1
    assert finished["error"] == 0
    assert sum(finished.values()) == 4
    assert runner["octavo_runner_prompt_tokens_total"] == 40 + 40 + 5 + 3
    assert runner["octavo_runner_cached_prompt_tokens_total"] == 32
    assert runner["octavo_runner_prefill_tokens_total"] == 40 + 8 + 5 + 3
    third = runner["octavo_runner_generation_tokens_total"] - 16 - 1 - aborted
    assert 1 <= third <= 3
    assert runner["octavo_runner_time_to_first_token_seconds_count"] == 4
    assert runner["octavo_runner_inter_token_latency_seconds_count"] == 14 + (third - 1) + (aborted - 1)
    assert runner["octavo_runner_e2e_latency_seconds_count"] == 4
    assert runner["octavo_runner_queue_time_seconds_count"] == 4
    steps = {phase: runner[f'octavo_runner_step_phase_seconds_count{{phase="{phase}"}}'] for phase in PHASES}
    assert len(set(steps.values())) == 1
    service = 'service="octavo.runner.v1.ModelRunnerService"'
    for code, count in (("OK", 4), ("INVALID_ARGUMENT", 1)):
        assert runner[f'octavo_rpc_duration_seconds_count{{code="{code}",method="Generate",{service}}}'] == count

    kv = stack.kv_samples()
    assert kv[f"octavo_kv_prefix_query_tokens_total{{{POOL}}}"] == 40 + 40 + 5 + 3
    assert kv[f"octavo_kv_prefix_hit_tokens_total{{{POOL}}}"] == 32
    assert kv[f"octavo_kv_forks_total{{{POOL}}}"] == 1
    # Both choices write behind token 40, inside the third block: one of them gets a copy.
    assert kv[f"octavo_kv_copies_total{{{POOL}}}"] == 1
    allocated, reused, freed = (
        kv[f"octavo_kv_{what}_blocks_total{{{POOL}}}"] for what in ("allocated", "reused", "freed")
    )
    # The second request hit two cached blocks; now nothing is held.
    assert reused == 2
    assert freed == allocated + reused


REASONS = ("stop", "length", "abort", "error")
PHASES = ("schedule", "kv", "forward", "sample", "deliver")


def test_gauges_are_right_while_idle(stack: Stack) -> None:
    runner, kv = stack.runner_samples(), stack.kv_samples()
    assert runner['octavo_runner_requests{state="running"}'] == 0
    assert runner['octavo_runner_requests{state="waiting"}'] == 0
    blocks = {state: kv[f'octavo_kv_blocks{{{POOL},state="{state}"}}'] for state in ("free", "cached", "held")}
    assert blocks["held"] == 0
    assert sum(blocks.values()) == kv[f"octavo_kv_usable_blocks{{{POOL}}}"] == 100
    for name in ("shared_blocks", "usage_ratio", "stored_tokens", "reserved_tokens", "sequences", "books_imbalance"):
        assert kv[f"octavo_kv_{name}{{{POOL}}}"] == 0


def test_gauges_while_a_request_runs(stack: Stack) -> None:
    with stack.client() as client:
        stream = client.generate([504] * 30, request_id="running", ignore_eos=True)
        next(stream)
        runner, kv = stack.runner_samples(), stack.kv_samples()
        stream.close()
    assert runner['octavo_runner_requests{state="running"}'] == 1
    assert kv[f"octavo_kv_sequences{{{POOL}}}"] == 1
    held = kv[f'octavo_kv_blocks{{{POOL},state="held"}}']
    assert held >= 2
    assert kv[f"octavo_kv_reserved_tokens{{{POOL}}}"] == held * 16
    assert kv[f"octavo_kv_usage_ratio{{{POOL}}}"] == pytest.approx(held / 100)
    assert 0 < kv[f"octavo_kv_stored_tokens{{{POOL}}}"] <= held * 16
    stack.assert_nothing_held()
