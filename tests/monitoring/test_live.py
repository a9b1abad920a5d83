"""Dashboards and alerts against the metrics of running services, scraped by a real Prometheus."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.stack import Process, Stack, running_stack, wait_until
from tests.e2e.tiny_chat_model import write_tiny_chat_model
from tests.monitoring.dashboards import FILES, FOLDER, filled, load, panels, targets
from tests.monitoring.load import RUNNER_ARGUMENTS, Load
from tests.monitoring.prometheus import (
    INSTALL,
    RULES,
    Prometheus,
    numbers,
    running_prometheus,
    targets_of,
)
from tests.monitoring.promql import metrics
from tests.required import require_program

MOVED = (
    "octavo_kv_evicted_blocks_total", "octavo_kv_block_return_seconds_count", "octavo_kv_block_lifetime_seconds_count",
    "octavo_kv_block_idle_before_evict_seconds_count", "octavo_kv_block_reuse_gap_seconds_count",
    "octavo_kv_forks_total", "octavo_kv_copies_total", "octavo_kv_prefix_hit_tokens_total",
    "octavo_kv_removed_blocks_total", "octavo_kv_unknown_frees_total",
    'octavo_kv_allocation_failures_total{reason="pool"}', 'octavo_kv_allocation_failures_total{reason="quota"}',
    "octavo_kv_waited_steps_total", "octavo_kv_lease_taken_blocks_total", "octavo_runner_preemptions_total",
    "octavo_runner_accepted_draft_tokens_total", 'octavo_runner_requests_finished_total{reason="abort"}',
    'octavo_runner_tenant_requests_total{tenant="acme"}', 'octavo_runner_tenant_requests_total{tenant="globex"}',
    'octavo_rpc_duration_seconds_count{code="INVALID_ARGUMENT"}', 'octavo_rpc_duration_seconds_count{code="NOT_FOUND"}',
)  # fmt: skip
"""What the load must have moved before anything is looked at."""

RATE, RANGE = "10s", "5m"


def rules() -> list[dict[str, Any]]:
    """All rules of the chart."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def records() -> list[str]:
    """The series that recording rules make."""
    return [rule["record"] for rule in rules() if "record" in rule]


@dataclass(frozen=True, slots=True)
class Scene:
    """A stack under load, and the Prometheus that has watched it."""

    stack: Stack
    prometheus: Prometheus
    load: Load

    def series(self, expression: str) -> list[list[float]]:
        """The values of each series, second by second since the load began."""
        return [numbers(each) for each in self.prometheus.over(expression, self.load.began, time.time())]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    require_program("prometheus", INSTALL)
    directory = tmp_path_factory.mktemp("monitoring")
    model = write_tiny_chat_model(directory / "model")
    try:
        with (
            running_stack(directory, "--model", str(model), *RUNNER_ARGUMENTS) as stack,
            running_prometheus(directory, targets_of(stack)) as prometheus,
        ):
            load = Load(stack)
            try:
                for metric in MOVED:
                    wait_until(metric, lambda metric=metric: load.alive() and prometheus.value(metric) > 0)
                for record in records():
                    wait_until(record, lambda record=record: load.alive() and prometheus.now(record))
                # Enough scrapes for any rate.
                began = time.monotonic()
                wait_until("a few scrapes more", lambda: load.alive() and time.monotonic() - began > 12)
            finally:
                load.stop()
            yield Scene(stack, prometheus, load)
    finally:
        Process.kill_all()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_panel_shows_something_under_load(scene: Scene, path: Path) -> None:
    found = {target: scene.series(filled(target.expr, rate=RATE, time=RANGE)) for target in targets(path)}
    assert [str(target) for target, series in found.items() if not series] == []
    # A gap is drawn as one; NaN and infinity are drawn as nonsense.
    nonsense = [str(target) for target, series in found.items() if not all(map(isfinite, chain.from_iterable(series)))]
    assert nonsense == []
    assert len(found) >= len(list(panels(load(path)))) > 5


def test_every_metric_that_panels_and_alerts_name_is_scraped(scene: Scene) -> None:
    expressions = [filled(target.expr, rate=RATE, time=RANGE) for target in targets()]
    expressions += [rule["expr"] for rule in rules()]
    named = set().union(*map(metrics, expressions))
    scraped = set(scene.prometheus.api("label/__name__/values"))
    assert named - scraped == set()
    assert len(named) > 60


def test_the_layers_of_the_occupancy_add_up_to_the_capacity(scene: Scene) -> None:
    drawn = [target for target in targets(FOLDER / "kv-cache.json") if target.panel == "Blocks by state"]
    *layers, capacity = [filled(target.expr, rate=RATE, time=RANGE) for target in drawn]
    assert len(layers) == 5
    (differences,) = scene.series(f"({' + '.join(f'({layer})' for layer in layers)}) - ({capacity})")
    assert set(differences) == {0.0}


def test_prometheus_takes_the_rules_and_the_books_are_right(scene: Scene) -> None:
    def evaluated() -> bool:
        groups = scene.prometheus.api("rules")["groups"]
        return all(rule["health"] != "unknown" for group in groups for rule in group["rules"])

    wait_until("the first evaluation of all rules", evaluated)
    taken = [rule for group in scene.prometheus.api("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in taken} == {"ok"}
    assert len(taken) == len(rules()) > 20
    firing = {alert["labels"]["alertname"] for alert in scene.prometheus.api("alerts")["alerts"]}
    assert not firing & {"OctavoBooksImbalance", "OctavoTargetDown", "OctavoSessionAway", "OctavoKvManagerRestarts"}


@pytest.mark.parametrize("component", ["kv-manager", "model-runner"])
def test_promtool_finds_no_fault_in_what_is_exported(scene: Scene, component: str) -> None:
    program = require_program("promtool", INSTALL)
    with urllib.request.urlopen(f"http://{targets_of(scene.stack)[component]}/metrics", timeout=60) as answer:
        text = answer.read()
    ended = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    assert len(text) > 10_000


def test_a_target_that_dies_is_seen(scene: Scene) -> None:
    """Last, because nothing is the same afterwards."""
    assert scene.prometheus.value("up") == 2
    runner = scene.stack.runner
    assert runner is not None
    runner.kill()
    expression = "up == 0 and on (job, instance) last_over_time(octavo_build_info[1d])"
    wait_until("the alert's expression", lambda: len(scene.prometheus.now(expression)) == 1)
    (down,) = scene.prometheus.now(expression)
    assert down["metric"]["container"] == "model-runner"
