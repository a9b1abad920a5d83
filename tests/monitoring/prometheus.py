"""A real Prometheus that scrapes a stack once a second, and what can be asked of it."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.stack import Stack, free_port, wait_until
from tests.required import require_program

INSTALL = "apt-get install prometheus"
RULES = Path(__file__).parents[2] / "helm" / "octavo" / "rules" / "octavo.yaml"
LABELS = {"namespace": "octavo", "pod": "octavo-0"}
"""What Kubernetes gives each target."""

PATIENCE_SECONDS = 120
Series = dict[str, Any]


class Prometheus:
    """What it knows, by its HTTP API."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=PATIENCE_SECONDS) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def api(self, path: str, **parameters: str) -> Any:
        """The data of an answer; AssertionError with Prometheus' own words when it refuses."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refusal:
            raise AssertionError(f"{parameters}: {refusal.read().decode()}") from None

    def now(self, expression: str) -> list[Series]:
        """The series of an expression now."""
        return list(self.api("query", query=expression)["result"])

    def value(self, expression: str) -> float:
        """The sum of an expression's series now; 0 without any."""
        return sum(float(series["value"][1]) for series in self.now(expression))

    def over(self, expression: str, start: float, end: float, step: float = 1) -> list[Series]:
        """The series of an expression over a time, as a panel shows them."""
        parameters = {"query": expression, "start": str(start), "end": str(end), "step": str(step)}
        return list(self.api("query_range", **parameters)["result"])


def numbers(series: Series) -> list[float]:
    """The values of a series over time; NaN where it has that."""
    return [float(value) for _, value in series["values"]]


@contextmanager
def running_prometheus(directory: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Prometheus on a free port with the chart's rules; `targets` are addresses by the name of the container."""
    program = require_program("prometheus", INSTALL)
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "octavo",
                "static_configs": [
                    {"targets": [address], "labels": {**LABELS, "container": name}} for name, address in targets.items()
                ],
            }
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    prometheus = Prometheus(address)
    try:
        wait_until("Prometheus' start", prometheus.ready)
        yield prometheus
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def targets_of(stack: Stack) -> dict[str, str]:
    return {"kv-manager": stack.kv_metrics, "model-runner": stack.runner_metrics}
