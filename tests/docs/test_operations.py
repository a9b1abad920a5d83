"""docs/operations.md is true to the programs and the chart: metrics, settings, values, alerts, and its arithmetic."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from model_runner.kv_memory import KvMemory
from services.books_metrics import BooksMetrics
from services.config import UpSettings
from services.runner_metrics import RunnerMetrics
from services.session.session import SessionStatus
from services.token_file import TokenFile
from tests.docs.written import ROOT, anchors, code_lines, read, section
from tests.services.kv_support import kv_settings, running_kv_manager

PAGE = "docs/operations.md"
CHART = ROOT / "helm" / "octavo"
ALERTS = (
    "OctavoTargetDown",
    "OctavoPoolUnreclaimable",
    "OctavoEvictionThrash",
    "OctavoAllocationFailures",
    "OctavoPreemptionStorm",
    "OctavoHitRateCollapse",
    "OctavoRpcLatencyHigh",
    "OctavoRpcErrors",
    "OctavoKvManagerRestarts",
    "OctavoSessionAway",
    "OctavoBooksImbalance",
    "OctavoPoolFillsSoon",
    "OctavoQueueGrows",
    "OctavoTimeToFirstTokenHigh",
)
PARTS = ("Likely", "Look", "Do", "Wake")


def families(text: str) -> set[str]:
    """The names that a scrape may show, with those of a histogram's parts."""
    found = set()
    for name, kind in re.findall(r"(?m)^# TYPE (\S+) (\S+)$", text):
        found |= {name} | ({f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else set())
    return found


def exported(directory: Path) -> set[str]:
    """The metrics of a running KV manager and of a runner's registry."""
    registry = CollectorRegistry()
    RunnerMetrics(registry, running=lambda: 0, waiting=lambda: 0)
    BooksMetrics(registry, status=lambda: SessionStatus("up", 0.0, 0, 0, 0, 0))
    with (
        running_kv_manager(kv_settings(directory)) as running,
        urllib.request.urlopen(f"http://{running.metrics_address}/metrics", timeout=60) as answer,
    ):
        of_kv_manager = answer.read().decode()
    return families(of_kv_manager) | families(generate_latest(registry).decode())


@pytest.mark.parametrize("document", ["README.md", PAGE])
def test_metrics_exist(document: str, tmp_path: Path) -> None:
    named = set(re.findall(r"\boctavo_(?:kv|runner|rpc)_[a-z_]+[a-z]\b", " ".join(code_lines(read(document)))))
    assert len(named) > 3
    known = exported(tmp_path)
    assert named <= known, named - known


def values_of(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from values_of(value, f"{prefix}{key}.")


def inline_code() -> list[str]:
    return [each for each in code_lines(read(PAGE)) if " " not in each]


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_runbook(alert: str) -> None:
    text = section(PAGE, alert)
    assert alert.lower() in anchors(PAGE)
    assert re.findall(r"(?m)^- \*\*(\w+)\*\*: .", text) == list(PARTS)


def test_the_runbooks_are_those_of_the_rules() -> None:
    """An alert without a page leads nowhere at night; a page without an alert is never read."""
    rules = yaml.safe_load((CHART / "rules" / "octavo.yaml").read_text())
    named = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    assert named == set(ALERTS)
    said = dict(re.findall(r"(?m)^\| \[(\w+)\]\(#\w+\) \| (\w+) \|", section(PAGE, "The alerts")))
    rules = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert said == {rule["alert"]: rule["labels"]["severity"] for rule in rules}


def titles(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        yield panel.get("title", "")
        yield from titles(panel.get("panels", []))


def test_panels_exist() -> None:
    """What is set in italics with a capital letter is a dashboard, a row or a panel of one."""
    boards = [json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")]
    known = {title for board in boards for title in titles(board["panels"])}
    known |= {board["title"].removeprefix("Octavo / ") for board in boards}
    named = set(re.findall(r"(?<![*\w])\*([A-Z][^*]+)\*(?!\*)", read(PAGE))) - {"Wake"}
    assert len(named) > 10
    assert named <= known, named - known


def test_values_exist() -> None:
    known = set(values_of(yaml.safe_load((CHART / "values.yaml").read_text())))
    tops = {each.split(".")[0] for each in known}
    named = {each.split("=")[0] for each in inline_code() if re.fullmatch(r"[a-zA-Z]+(\.[a-zA-Z]+)+(=\w+)?", each)}
    named = {each for each in named if each.split(".")[0] in tops}
    settings = {f"{part}.settings.{name}" for part in ("runner", "kvManager") for name in camel_settings()}
    assert len(named) > 10
    assert named <= known | settings, named - known - settings


def camel_settings() -> set[str]:
    return {re.sub("_(.)", lambda match: match[1].upper(), name) for name in UpSettings.model_fields}


def test_settings_exist() -> None:
    """A word in camel case is a setting, a value of the chart, or Kubernetes' own."""
    values = {
        part for each in values_of(yaml.safe_load((CHART / "values.yaml").read_text())) for part in each.split(".")
    }
    of_kubernetes = {"preStop", "subPath", "progressDeadlineSeconds", "maxUnavailable", "maxSurge"}
    named = {each for each in inline_code() if re.fullmatch("[a-z]+[A-Z][A-Za-z]+", each)}
    assert named
    assert named <= camel_settings() | values | of_kubernetes, named - camel_settings() - values


def test_the_size_of_a_pool_is_what_the_runner_says() -> None:
    """Llama 3.1 8B, by its config.json: 32 layers, 8 KV heads for 32 heads, 128 dimensions, bfloat16."""
    text = section(PAGE, "Size a pool")
    memory = KvMemory(num_layers=32, num_kv_heads=8, head_dim=128, element_bytes=2, block_size=16)
    said = memory.describe(memory.blocks_for_budget(20 << 30), num_heads=32)
    for name in ("kv_of_a_token", "kv_of_a_block", "kv_cache"):
        assert f"{name.replace('_', ' ')}: {said[name]}" in text
    # 2 x 8 x 128 x 2 bytes in each of 32 layers are 128 KiB a token: 2 MiB a block, and 512 blocks a GiB.
    assert "40 at a time of 3,000\ntokens are 120,000 tokens, 7,500 blocks, 14.65 GiB" in text
    assert 40 * 3_000 == 120_000 == 7_500 * 16
    assert round(7_500 / 512, 2) == 14.65
    assert "2,739 blocks, 43,824 tokens" in text
    assert (20 * 512 - 1 - 7_500, (20 * 512 - 1 - 7_500) * 16) == (2_739, 43_824)


def test_the_salt_of_a_tenant_is_what_the_page_computes(tmp_path: Path) -> None:
    [line] = [each for each in code_lines(read(PAGE)) if each.startswith("python3 -c")]
    _, *words = shlex.split(line)
    env = {"SALT_SECRET": "a-long-secret-that-all-pods-share"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=True, timeout=60)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        f"salt_secret: {env['SALT_SECRET']}\ntokens:\n  - {{tenant: {words[-1]}, token: sixteen-and-more-letters}}\n"
    )
    caller = TokenFile(tokens).caller("sixteen-and-more-letters")
    assert caller is not None
    assert done.stdout.strip() == caller.cache_salt
