"""What clients are told in the last chunk of each request, summed up, is what a scrape shows."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from model_runner.request import Chunk, Usage
from services.client import OctavoError
from tests.services.toy_server import ToyServer, wait_until

TENANTS = ("", "acme", "zenith")


def plan(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    return {
        "prompt": random.Random(number % 4).choices(range(40), k=rng.randint(3, 24)),
        "max_tokens": rng.choice([None, 1, 8, 30]) if number % 5 else None,
        "n": rng.choice([1, 1, 2, 3]),
        "temperature": 1.0,
        "seed": number,
        "tenant": rng.choice(TENANTS),
        "request_id": f"r{number}",
        "skip_cache_read": rng.random() < 0.2,
        "skip_cache_write": rng.random() < 0.2,
        "stop": ["zz", "A"] if rng.random() < 0.5 else [],
    }


def test_30_mixed_requests(tmp_path: Path) -> None:
    plans = [plan(number) for number in range(30)]
    with ToyServer(tmp_path, num_blocks=33, max_model_tokens=60, scheduling={"max_sequences": 6}) as server:
        with server.client() as client, ThreadPoolExecutor(16) as threads:

            def ask(options: dict[str, Any]) -> Chunk:
                # Every fifth is aborted, in line or after its first chunk, and reads to its end.
                *_, last = client.generate(**options)
                return last

            asked = [threads.submit(ask, options) for options in plans]
            for options in plans[::5]:
                wait_until(lambda name=options["request_id"]: client.abort(name) == (1, 0) or asked_done(asked, name))
            with pytest.raises(OctavoError):
                list(client.generate([], max_tokens=1))
            lasts = [each.result() for each in asked]
        usages = [usage for last in lasts if (usage := last.usage) is not None]
        assert len(usages) == len(plans)
        found = server.samples()

    def counter(name: str, **labels: str) -> float:
        return found[f"octavo_runner_{name}", tuple(sorted(labels.items()))]

    assert counter("prompt_tokens_total") == sum(len(options["prompt"]) for options in plans)
    assert counter("cached_prompt_tokens_total") == total(usages, "cached_tokens") > 0
    assert counter("generation_tokens_total") == total(usages, "output_tokens")
    assert counter("preemptions_total") == total(usages, "preemptions")
    assert counter("pauses_total") == total(usages, "pauses")
    reasons = Counter(last.finish_reason.value for last in lasts if last.finish_reason)
    for reason in ("stop", "length", "abort", "error"):
        assert counter("requests_finished_total", reason=reason) == reasons[reason]
    assert reasons["abort"] > 0
    times = [usage.queue_seconds + usage.prefill_seconds + usage.decode_seconds for usage in usages]
    assert counter("e2e_latency_seconds_sum") == pytest.approx(sum(times), abs=1e-6)
    assert counter("queue_time_seconds_sum") == pytest.approx(total(usages, "queue_seconds"), abs=1e-6)
    for tenant in {options["tenant"] for options in plans}:
        own = [(options, usage) for options, usage in zip(plans, usages, strict=True) if options["tenant"] == tenant]
        assert counter("tenant_requests_total", tenant=tenant) == len(own)
        assert counter("tenant_prompt_tokens_total", tenant=tenant) == sum(len(each["prompt"]) for each, _ in own)
        assert counter("tenant_generation_tokens_total", tenant=tenant) == sum(usage.output_tokens for _, usage in own)


def asked_done(asked: list[Any], name: str) -> bool:
    return bool(asked[int(name[1:])].done())


def total(usages: list[Usage], name: str) -> float:
    return sum(getattr(usage, name) for usage in usages)
