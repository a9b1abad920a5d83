"""The alerts: promtool reads them, fires them on series made for it, and each leads to a runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.monitoring.prometheus import INSTALL, RULES
from tests.required import require_program

CASES = sorted(Path(__file__).parent.glob("rules_*test.yaml"))
NAMES = {
    "OctavoTargetDown", "OctavoPoolUnreclaimable", "OctavoEvictionThrash", "OctavoAllocationFailures",
    "OctavoPreemptionStorm", "OctavoHitRateCollapse", "OctavoRpcLatencyHigh", "OctavoRpcErrors",
    "OctavoKvManagerRestarts", "OctavoSessionAway", "OctavoBooksImbalance", "OctavoPoolFillsSoon", "OctavoQueueGrows",
    "OctavoTimeToFirstTokenHigh",
}  # fmt: skip


def alerts() -> dict[str, dict[str, object]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def promtool(*arguments: str | Path) -> str:
    """What promtool says; AssertionError when it is not content."""
    program = require_program("promtool", INSTALL)
    ended = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_promtool_finds_no_fault() -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    assert "SUCCESS" in promtool("test", "rules", *CASES)


def test_each_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases = [case for path in CASES for case in yaml.safe_load(path.read_text())["tests"]]
    asked = [(test["alertname"], bool(test["exp_alerts"])) for case in cases for test in case["alert_rule_test"]]
    assert set(alerts()) == NAMES
    assert set(asked) == {(name, fires) for name in NAMES for fires in (True, False)}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_alert_says_what_and_how_bad_and_where_to_read_on(name: str) -> None:
    alert = alerts()[name]
    assert alert["labels"]["severity"] in {"critical", "warning"}
    annotations = alert["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert annotations["runbook_url"] == f"RUNBOOKS#{name.lower()}"
    assert "$labels.instance" in annotations["summary"]
    assert "$value" in annotations["description"] or name == "OctavoTargetDown"


def test_recording_rules_are_named_as_prometheus_asks() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    records = {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    assert records
    for record in records:
        assert re.fullmatch(r"octavo:[a-z0-9_]+:[a-z0-9_]+", record)
